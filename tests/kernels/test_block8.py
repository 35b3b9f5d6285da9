"""8-bit floats with block scales. Trusted: torch's float8_e4m3fn, and its product in fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity import kernels
from infinity.kernels import ScaleBlocks, widen_e4m3


def test_every_code_has_the_value_that_torch_gives_it(isa):
    codes = torch.arange(256, dtype=torch.uint8).repeat(3)
    for scale in (1.0, -0.37, 1e-38, 1e38, 2.0**-149, math.inf, math.nan):
        scales, found = torch.tensor([scale]), torch.empty(768)
        at = codes.data_ptr(), scales.data_ptr(), found.data_ptr()
        widen_e4m3(0, 768, ScaleBlocks(768, 1, 768), *at)
        expected = codes.view(torch.float8_e4m3fn).float() * scales
        assert torch.equal(found.isnan(), expected.isnan())
        bits = found.view(torch.int32)
        assert set(bits[found.isnan()].tolist()) <= {0x7FC00000}
        assert torch.equal(bits[~found.isnan()], expected.view(torch.int32)[~found.isnan()])


@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 16),
    st.data(),
    st.integers(0, 99),
)
def test_any_part_of_a_matrix_of_any_blocks_is_what_torch_computes(rows, cols, high, wide, data, seed):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=random)
    grid = -(-rows // high), -(-cols // wide)
    scales = torch.randn(grid, generator=random) * 10.0 ** torch.randint(-40, 30, grid, generator=random)
    spread = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :cols]
    expected = (codes.view(torch.float8_e4m3fn).float() * spread).flatten()
    first = data.draw(st.integers(0, rows * cols - 1))
    n = data.draw(st.integers(0, rows * cols - first))
    found = torch.empty(n)
    part, begun = codes.flatten()[first:], scales[first // cols // high :]
    at = part.data_ptr(), begun.data_ptr(), found.data_ptr()
    widen_e4m3(first, n, ScaleBlocks(cols, high, wide), *at)
    assert torch.equal(found.isnan(), expected[first : first + n].isnan())
    assert torch.equal(found.nan_to_num(), expected[first : first + n].nan_to_num())


def test_many_threads_give_the_same_bits(isa):
    codes, scales = torch.randint(0, 256, (1024, 1000), dtype=torch.uint8), torch.randn(8, 8)
    found = []
    for threads in (1, 3):
        kernels.set_threads(threads)
        found.append(torch.empty(codes.numel()))
        at = codes.data_ptr(), scales.data_ptr(), found[-1].data_ptr()
        widen_e4m3(0, codes.numel(), ScaleBlocks(1000, 128, 128), *at)
    assert torch.equal(*(one.view(torch.int32) for one in found))


def test_counts_and_addresses_are_checked():
    with pytest.raises(ValueError, match="n=-1"):
        widen_e4m3(0, -1, ScaleBlocks(1, 1, 1), 1, 1, 1)
    with pytest.raises(ValueError, match="scales=0"):
        widen_e4m3(0, 1, ScaleBlocks(1, 1, 1), 1, 0, 1)
    with pytest.raises(ValueError, match="first=0, ScaleBlocks"):
        widen_e4m3(0, 1, ScaleBlocks(0, 1, 1), 1, 1, 1)
