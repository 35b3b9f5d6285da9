"""4-bit codes, packed scales, int8 rows. Trusted: torch's look-ups and products in fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity import kernels
from infinity.kernels import Strided, transpose, widen_4bit, widen_e8m0, widen_i8, widen_scales


@pytest.fixture(params=["scalar", "avx2", "avx512"], scope="module")
def isa(request):
    before = kernels.isa()
    try:
        kernels.set_isa(request.param)
    except kernels.UnsupportedIsaError:
        pytest.skip(f"no {request.param} here")
    yield request.param
    kernels.set_isa(before)


def same(found, expected):
    assert torch.equal(found.isnan(), expected.isnan())
    bits = found.view(torch.int32)
    assert set(bits[found.isnan()].tolist()) <= {0x7FC00000}
    assert torch.equal(bits[~found.isnan()], expected.view(torch.int32)[~found.isnan()])


@given(
    st.integers(0, 300),
    st.integers(0, 900),
    st.sampled_from([2, 6, 16, 32, 64, 200]),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_run_of_4_bit_codes_is_what_torch_computes(isa, first, n, block, high_first, seed):
    random = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (700,), dtype=torch.uint8, generator=random)
    table = torch.randn(16, generator=random)
    table[3], table[9] = math.inf, -0.0
    scales = torch.randn(700, generator=random) * 10.0 ** torch.randint(-42, 30, (700,), generator=random)
    scales[1:3] = torch.tensor([math.nan, 0.0])
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    codes = torch.stack(halves, 1).flatten()[first : first + n].long()
    expected = table[codes] * scales[torch.arange(first, first + n) // block]
    found, part, begun = torch.empty(n), packed[first // 2 :], scales[first // block :]
    at = table.data_ptr(), part.data_ptr(), begun.data_ptr(), found.data_ptr() or 1
    widen_4bit(first, n, block, *at, high_first=high_first)
    same(found, expected)


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 40), st.integers(0, 99))
def test_int8_codes_and_scales_in_8_bits_are_what_torch_computes(isa, first, n, block, seed):
    random = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (250,), dtype=torch.uint8, generator=random)
    scales, table = torch.randn(251, generator=random), torch.randn(256, generator=random)
    spread = scales[torch.arange(first, first + n) // block]
    found, part, begun = torch.empty(n), packed[first:], scales[first // block :]
    at = part.data_ptr(), begun.data_ptr(), found.data_ptr() or 1
    widen_scales(first, n, block, table.data_ptr(), *at, offset=-0.25)
    same(found, table[part[:n].long()] * spread - 0.25)
    widen_i8(first, n, block, 7.874015718698502e-3, *at)
    same(found, part[:n].view(torch.int8) * spread * 7.874015718698502e-3)


def test_many_threads_give_the_same_bits(isa):
    packed, scales, table = (
        torch.randint(0, 256, (100_000,), dtype=torch.uint8),
        torch.rand(7000),
        torch.rand(16),
    )
    found = []
    for threads in (1, 3):
        kernels.set_threads(threads)
        found.append(torch.empty(200_000))
        at = table.data_ptr(), packed.data_ptr(), scales.data_ptr(), found[-1].data_ptr()
        widen_4bit(0, 200_000, 32, *at, high_first=True)
    assert torch.equal(*(one.view(torch.int32) for one in found))


def test_an_exponent_is_half_of_its_power_of_two():
    codes, found = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    widen_e8m0(256, codes.data_ptr(), found.data_ptr())
    assert found.double().tolist() == [2.0 ** (code - 128) for code in range(256)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
def test_rows_become_columns(dtype):
    source, target = torch.arange(70 * 600).view(70, 600).to(dtype), torch.zeros(600, 90, dtype=dtype)
    width = source.itemsize
    to = Strided(target.data_ptr() + 5 * width, 90 * width)
    transpose(60, 500, width, Strided(source.data_ptr(), 600 * width), to)
    expected = torch.zeros(600, 90, dtype=dtype)
    expected[:500, 5:65] = source[:60, :500].T
    assert torch.equal(target, expected)


def test_counts_and_addresses_are_checked():
    with pytest.raises(ValueError, match="scales=0"):
        widen_4bit(0, 1, 2, 1, 1, 0, 1, high_first=True)
    with pytest.raises(ValueError, match="first=0: expected an element"):
        widen_4bit(0, 1, 3, 1, 1, 1, 1, high_first=True)
    with pytest.raises(ValueError, match="first=-1"):
        widen_i8(-1, 1, 1, 1.0, 1, 1, 1)
    with pytest.raises(ValueError, match="n=-1"):
        widen_e8m0(-1, 1, 1)
    with pytest.raises(ValueError, match="width=3"):
        transpose(1, 1, 3, Strided(1, 1), Strided(1, 1))
    with pytest.raises(ValueError, match="codes=0"):
        widen_scales(0, 1, 1, 1, 0, 1, 1, offset=0.0)
