"""Masters in 24 bits: the lower part in 8 bits. Trusted: the reference in torch; nothing is faked."""

import pytest
import torch

from infinity import kernels
from infinity.reference.moments import MASTER_BITS, in_24_bits


def halves(master):
    hi, lo = (torch.empty(len(master), dtype=torch.int16) for _ in range(2))
    kernels.split(len(master), master.data_ptr(), hi.data_ptr(), lo.data_ptr())
    return hi, lo


def stored(master, *more):
    """Store masters in 24 bits; return what comes back."""
    n, (hi, lo) = len(master), halves(master)
    narrow, wide, joined = (torch.empty(n, dtype=one) for one in (torch.int8, torch.int16, torch.float32))
    kernels.round_lo(n, lo.data_ptr(), narrow.data_ptr(), *more)
    kernels.widen_lo(n, narrow.data_ptr(), wide.data_ptr())
    kernels.join(n, hi.data_ptr(), wide.data_ptr(), joined.data_ptr())
    return joined


@pytest.mark.parametrize("n", [1, 3, 257, 70_001])
def test_both_roundings_are_the_references(n):
    master = torch.randn(n, generator=torch.Generator().manual_seed(0))
    assert torch.equal(stored(master), in_24_bits(master))
    assert torch.equal(stored(master, 77 ^ MASTER_BITS), in_24_bits(master, 77))


def test_a_range_cut_in_two_is_rounded_alike():
    master = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parts = stored(master[:333], 5), stored(master[333:].clone(), 5, 333)
    assert torch.equal(torch.cat(parts), stored(master, 5))


def test_what_has_24_bits_stays_and_all_else_is_off_by_less_than_one_of_256_parts_of_a_bf16():
    master = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    nearest = stored(master)
    assert torch.equal(stored(nearest), nearest)
    assert torch.equal(stored(nearest, 3), nearest)
    for more in ((), (3,)):
        assert ((stored(master, *more) - master).abs() <= master.abs() * 2.0**-15).all()


def test_rounding_at_random_keeps_the_mean():
    master = torch.full((200_000,), 1 + 3 * 2.0**-20)
    assert stored(master, 9).mean(dtype=torch.float64) == pytest.approx(float(master[0]), abs=1e-7)
    assert len(stored(master, 9).unique()) == 2
