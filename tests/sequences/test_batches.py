"""Batches split along the sequence, without any communication."""

import pytest
import torch

import infinity
from infinity.sequences.batches import split


def test_parts_have_the_positions_and_the_next_labels_of_the_whole():
    batch = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.arange(12).reshape(2, 6), "rows": 2}
    parts = [split(batch, rank, 3) for rank in range(3)]
    for name in ("input_ids", "labels"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), batch[name])
    assert torch.cat([part["position_ids"] for part in parts], dim=1).tolist() == [list(range(6))] * 2
    assert torch.cat([part["shift_labels"] for part in parts], dim=1).tolist() == [
        [1, 2, 3, 4, 5, -100],
        [7, 8, 9, 10, 11, -100],
    ]
    assert [part["rows"] for part in parts] == [2, 2, 2]


def test_shifted_labels_and_positions_that_are_there_are_kept():
    given = {"position_ids": torch.tensor([[0, 1, 0, 1]]), "shift_labels": torch.tensor([[7, -100, 8, -100]])}
    part = split({"input_ids": torch.ones(1, 4), **given, "labels": torch.ones(1, 4)}, 1, 2)
    assert (part["position_ids"].tolist(), part["shift_labels"].tolist()) == ([[0, 1]], [[8, -100]])


def test_a_length_that_the_ranks_do_not_divide_is_refused_with_the_next_that_they_do():
    with pytest.raises(infinity.UnsupportedError) as error:
        split({"input_ids": torch.ones(1, 30)}, 0, 4)
    assert "30 tokens cannot be divided among 4 ranks: pad them to 32, with pad_to_multiple_of=4" in str(
        error.value
    )
