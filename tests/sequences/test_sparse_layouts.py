"""Layouts of sparse attention. Trusted: the pictures here, drawn by what DeepSpeed's documentation says."""

import pytest
import torch

from infinity import ConfigError
from infinity.sequences.sparse_layouts import DEFAULTS, SparseLayout

PICTURES = [
    (
        {"mode": "fixed", "num_local_blocks": 2},
        """
        x x . x . x
        x x . x . x
        . x x x . x
        . x x x . x
        . x . x x x
        . x . x x x
        """,
    ),
    (
        {"mode": "fixed", "num_local_blocks": 2, "attention": "unidirectional"},
        """
        x . . . .
        x x . . .
        . x x . .
        . x x x .
        . x . x x
        """,
    ),
    (
        {"mode": "fixed", "num_local_blocks": 2, "horizontal_global_attention": True},
        """
        x x . x
        x x x x
        . x x x
        x x x x
        """,
    ),
    (  # a last window that is short
        {"mode": "fixed", "num_local_blocks": 4, "num_global_blocks": 2},
        """
        x x x x x x
        x x x x x x
        x x x x x x
        x x x x x x
        . . x x x x
        . . x x x x
        """,
    ),
    (
        {"mode": "variable", "local_window_blocks": [1, 2], "global_block_indices": [4]},
        """
        x . . . x .
        . x x . x .
        . x x . x .
        . . . x x .
        . . . x x .
        . . . . x x
        """,
    ),
    (
        {
            "mode": "variable",
            "local_window_blocks": [2],
            "global_block_indices": [0, 9],
            "global_block_end_indices": [2, 10],
            "attention": "unidirectional",
        },
        """
        x x . .
        x x . .
        x x x .
        x x x x
        """,
    ),
    (
        {"mode": "bigbird", "num_random_blocks": 0},
        """
        x x x x x
        x x x . .
        x x x x .
        x . x x x
        x . . x x
        """,
    ),
    (
        {"mode": "bslongformer", "num_sliding_window_blocks": 1, "global_block_indices": [2]},
        """
        x . x . .
        . x x . .
        x x x x x
        . . x x .
        . . x . x
        """,
    ),
    (
        {"mode": "bslongformer", "attention": "unidirectional"},
        """
        x . . . .
        x x . . .
        x x x . .
        x . x x .
        x . . x x
        """,
    ),
    (
        {"mode": "sliding", "num_sliding_window_blocks": 5},
        """
        x . . . .
        x x . . .
        x x x . .
        . x x x .
        . . x x x
        """,
    ),
    (
        {"mode": "sliding", "attention": "bidirectional"},
        """
        x x . .
        x x x .
        . x x x
        . . x x
        """,
    ),
    ({"mode": "dense"}, "x x \n x x"),
]


@pytest.mark.parametrize(("options", "picture"), PICTURES)
def test_each_mode_has_the_blocks_of_its_picture(options, picture):
    rows = [[one == "x" for one in line.split()] for line in picture.strip().splitlines()]
    assert SparseLayout(**options).blocks(len(rows), 4).tolist() == [rows]


def test_heads_may_have_global_blocks_of_their_own_from_the_last_of_a_window_on():
    layout = SparseLayout(
        num_local_blocks=4, different_layout_per_head=True, num_different_global_patterns=3
    ).blocks(8, 4)
    rest = layout[:, 4:, :4].all(dim=1)  # what the second window sees of the first
    assert rest.int().argmax(dim=1).tolist() == [3, 2, 1, 3]
    assert rest.sum(dim=1).tolist() == [1] * 4


@pytest.mark.parametrize("mode", ["variable", "bigbird"])
def test_random_blocks_depend_on_seed_head_and_row_alone(mode):
    def drawn(**changes):
        options = {"mode": mode, "num_random_blocks": 2, "different_layout_per_head": True, **changes}
        return SparseLayout(**options).blocks(12, 3)

    assert torch.equal(drawn(), drawn())
    assert not torch.equal(drawn(), drawn(seed=1))
    assert not torch.equal(drawn()[0], drawn()[1])
    assert bool((drawn() >= drawn(num_random_blocks=0)).all())
    if mode == "bigbird":
        shorter = SparseLayout(
            mode=mode, num_random_blocks=2, different_layout_per_head=True, attention="unidirectional"
        )
        assert torch.equal(shorter.blocks(12, 3)[:, :7, :7], shorter.blocks(7, 3))
        assert not shorter.blocks(12, 3).triu(1).any()


@pytest.mark.parametrize("mode", DEFAULTS)
def test_every_block_attends_to_itself_at_every_length(mode):
    for blocks in (1, 2, 3, 7):
        assert SparseLayout(mode=mode).blocks(blocks, 2)[0].diagonal().all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "bigbrid"}, "did you mean 'bigbird'"),
        ({"block": 0}, "block=0: expected whole numbers from 1 on"),
        ({"num_local_blocks": 2.5}, "num_local_blocks=2.5"),
        ({"mode": "variable", "local_window_blocks": []}, "expected a number of blocks"),
        ({"mode": "variable", "local_window_blocks": [2, "3"]}, "local_window_blocks=(2, '3')"),
        ({"num_sliding_window_blocks": 3}, "mode='fixed' takes num_local_blocks"),
        ({"attention": "causal"}, "expected 'unidirectional' or 'bidirectional'"),
        ({"attention": "unidirectional", "horizontal_global_attention": True}, "needs attention="),
        ({"num_local_blocks": 3, "num_global_blocks": 2}, "no multiple of num_global_blocks=2"),
        ({"num_different_global_patterns": 2}, "different_layout_per_head=True alone"),
        ({"num_different_global_patterns": 5, "different_layout_per_head": True}, "at most"),
        ({"mode": "bslongformer", "global_block_end_indices": [1, 2]}, "as many ends as beginnings"),
        ({"mode": "variable", "global_block_end_indices": [0]}, "expected whole numbers from 1 on"),
        ({"horizontal_global_attention": "no"}, "expected True or False"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options, says):
    with pytest.raises(ConfigError) as error:
        SparseLayout(**options)
    assert says in str(error.value)
