"""Packed weights. Trusted: torch's float8_e4m3fn, its fp32 product, and its rounding."""

import pytest
import torch

from infinity.kernels import ScaleBlocks
from infinity.storage.packed import Block8

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_any_elements_are_widened_as_torch_does_it(dtype):
    rows, cols, cut = 384, 512, ScaleBlocks(512, 128, 128)
    codes = torch.randint(0, 127, (rows, cols), dtype=torch.uint8)
    codes[:, ::2] += 128
    codes[codes % 128 == 127] = 0
    scales = torch.rand(3, 4) / 100
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (codes.view(torch.float8_e4m3fn).float() * spread).to(DTYPES[dtype]).flatten()
    weight = Block8("codes", 1000, rows * cols, "scales", 8, cut)
    for first, numel in ((0, rows * cols), (5, 10), (511, 2), (100_000, 70_000), (rows * cols - 1, 1)):
        offset, nbytes = weight.codes(first, numel)
        assert (offset, nbytes) == (1000 + first, numel)
        at, size = weight.scales(first, numel)
        assert size % 16 == 0
        begun = scales.flatten()[(at - 8) // 4 : (at - 8 + size) // 4].clone()
        found = torch.empty(numel, dtype=DTYPES[dtype])
        part = codes.flatten()[first : first + numel].clone()
        weight.widen(dtype, first, numel, part.data_ptr(), begun.data_ptr(), found.data_ptr())
        assert torch.equal(found, expected[first : first + numel])


def test_scales_are_those_of_the_rows_of_blocks_that_elements_lie_in():
    weight = Block8("codes", 0, 10 * 7, "scales", 100, ScaleBlocks(7, 4, 3))
    assert weight.scales(0, 1) == (100, 12)
    assert weight.scales(27, 1) == (100, 12)
    assert weight.scales(27, 2) == (100, 24)
    assert weight.scales(28, 42) == (112, 24)
    assert weight.scales(0, 70) == (100, 36)
