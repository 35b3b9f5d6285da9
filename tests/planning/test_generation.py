"""How many sequences a layer computes at a time. Trusted: arithmetic."""

import pytest

from infinity.planning.generation import LayerWidths

WIDTHS = LayerWidths(products=100, keys=10, itemsize=2)


def test_a_sequence_takes_its_tokens_products_and_its_keys_and_values_twice():
    assert WIDTHS.sequence_nbytes(prompt=8, tokens=24) == 2 * 2 * (100 * 8 + 10 * 24)


@pytest.mark.parametrize(("limit", "sequences"), [(0, 1), (4159, 1), (8320, 2), (1 << 30, 64)])
def test_as_many_sequences_as_fit_compute_together_and_one_always(limit, sequences):
    assert WIDTHS.sequences(64, 8, 24, limit) == sequences


@pytest.mark.parametrize(("limit", "chunk"), [(0, 1), (960 + 3 * 400, 3), (4159, 7), (4160, None)])
def test_a_prompt_too_long_for_the_limit_comes_in_chunks_that_fit(limit, chunk):
    assert WIDTHS.chunk(8, 24, limit) == chunk
    if chunk is not None and chunk > 1:
        assert WIDTHS.sequence_nbytes(chunk, 24) <= limit
