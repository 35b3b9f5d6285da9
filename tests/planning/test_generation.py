"""How many sequences a layer computes at a time. Trusted: arithmetic."""

import pytest

from infinity.planning.generation import LayerWidths

WIDTHS = LayerWidths(products=100, keys=10, itemsize=2)


def test_a_sequence_takes_its_tokens_products_and_its_keys_and_values_twice():
    assert WIDTHS.sequence_nbytes(prompt=8, tokens=24) == 2 * 2 * (100 * 8 + 10 * 24)


@pytest.mark.parametrize(("limit", "sequences"), [(0, 1), (4159, 1), (8320, 2), (1 << 30, 64)])
def test_as_many_sequences_as_fit_compute_together_and_one_always(limit, sequences):
    assert WIDTHS.sequences(64, 8, 24, limit) == sequences


@pytest.mark.parametrize(
    ("limit", "chunk"),
    [(0, 256), (300 * 400, 300), (1000 * 400 - 1, 999), (1000 * 400, None), (1 << 30, None)],
)
def test_a_prompt_too_long_for_the_limit_comes_in_chunks_that_are_worth_a_pass(limit, chunk):
    assert WIDTHS.chunk(1000, limit) == chunk


def test_a_prompt_that_one_pass_is_worth_comes_whole():
    assert WIDTHS.chunk(256, 0) is None
