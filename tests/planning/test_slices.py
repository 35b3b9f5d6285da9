"""In how many slices MLPs run, and which losses make logits. Pure; nothing is faked."""

import pytest

from infinity.planning.slices import loss_without_logits, mlp_nbytes, slices_within

MIB = 1 << 20


def test_what_takes_an_eighth_of_the_budget_stays_whole():
    assert slices_within(MIB, 4096, 8 * MIB) == 1
    assert not loss_without_logits(1024, 8, 8 * 12 * 8 * 1024)


@pytest.mark.parametrize(("nbytes", "slices"), [(MIB + 1, 2), (2 * MIB, 2), (2 * MIB + 1, 4), (7 * MIB, 8)])
def test_slices_are_as_few_as_fit_each_into_an_eighth(nbytes, slices):
    assert slices_within(nbytes, 1 << 20, 8 * MIB) == slices


def test_a_slice_has_128_tokens_at_least():
    assert [slices_within(1 << 40, tokens, MIB) for tokens in (1, 255, 256, 1023, 1024)] == [1, 1, 2, 4, 8]


def test_logits_of_a_token_more_than_fits_are_not_made():
    assert not loss_without_logits(1000, 100, 8 * 12 * 100 * 1000)
    assert loss_without_logits(1001, 100, 8 * 12 * 100 * 1000)


def test_an_mlp_counts_three_times_what_its_inner_layers_make():
    assert mlp_nbytes(10, 2 * 64, 2) == 10 * 6 * 64 * 2
