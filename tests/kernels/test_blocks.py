"""Codes of 8 and 4 bits with a scale for each block of 256, which ranks send. Trusted: the reference in plain
torch, bit for bit.
"""

import math

import pytest
import torch

import infinity.reference.codes as reference
from infinity import kernels
from kernel_cases import bits, random_bits, same_on_any_threads

TYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}


def encode(values, width, offset=0):
    """Return codes as they are packed, and scales; `offset`: bytes that both lie behind an aligned one."""
    numel = values.numel()
    blocks = -(-numel // kernels.CODE_BLOCK)
    codes, scales = (
        torch.zeros(size + offset, dtype=torch.uint8)[offset:]
        for size in (-(-numel * width // 8), 4 * blocks)
    )
    at = codes.data_ptr(), scales.data_ptr()
    kernels.encode(numel, values.data_ptr(), TYPES[values.dtype], width, *at)
    return codes, scales


def decode(codes, scales, numel, width):
    found = torch.empty(numel)
    kernels.decode(numel, width, codes.data_ptr(), scales.data_ptr(), found.data_ptr())
    return found


def unpacked(codes, numel, width):
    if width == 8:
        return codes.view(torch.int8)
    pairs = torch.stack((codes & 0xF, codes >> 4), dim=1).flatten()[:numel].to(torch.int8)
    return torch.where(pairs > 7, pairs - 16, pairs)


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 255, 256, 257, 1000, 16384 * 2 + 301])
def test_codes_and_scales_are_those_of_plain_torch_for_any_size_and_alignment(isa, numel, dtype, width):
    values = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3).to(dtype)
    expected, of_blocks = reference.encode(values, width)
    for offset in (0, 3):
        codes, scales = encode(values, width, offset)
        assert torch.equal(unpacked(codes, numel, width), expected)
        assert torch.equal(scales.clone().view(torch.int32), of_blocks.view(torch.int32))
        found = decode(codes, scales, numel, width)
        assert torch.equal(bits(found), bits(reference.decode(expected, of_blocks)))
        if numel % 2 and width == 4:
            assert codes[-1] >> 4 == 0


@pytest.mark.parametrize("width", [8, 4])
def test_denormals_infinities_and_nans_of_any_bits_are_coded_as_plain_torch_does(isa, width):
    small = torch.randn(2048) * 2.0 ** torch.arange(-149.0, -85.0).repeat_interleave(32)
    values = torch.cat([random_bits(4096, seed=1), small])
    codes, scales = encode(values, width)
    expected, of_blocks = reference.encode(values, width)
    assert torch.equal(unpacked(codes, len(values), width), expected)
    scales = scales.clone().view(torch.float32)
    assert torch.equal(scales.isnan(), of_blocks.isnan())
    assert torch.equal(scales.nan_to_num(), of_blocks.nan_to_num())


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", TYPES)
def test_one_infinity_or_nan_leaves_nothing_finite_in_its_block_and_harms_no_other(isa, width, value, dtype):
    values = torch.ones(700, dtype=dtype)
    values[300] = value
    found = decode(*encode(values, width), 700, width)
    assert not found[256:512].isfinite().any()
    assert found[256:512].isnan().all() == math.isnan(value)
    assert (found[:256] - 1).abs().max() < 1e-6
    assert (found[512:] - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_was_coded_and_rounded_to_16_bits_is_coded_again_without_a_change(isa, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(3))
    alike = torch.randn(2**16, generator=torch.Generator().manual_seed(4)).to(dtype)
    for values in (patterns[patterns.isfinite()], patterns[order], alike, alike * 1e-4):
        once = decode(*encode(values, 8), len(values), 8).to(dtype)
        again = decode(*encode(once, 8), len(values), 8).to(dtype)
        assert torch.equal(once.nan_to_num(), again.nan_to_num())


@pytest.mark.parametrize(("width", "error"), [(8, 1 / 254), (4, 1 / 14)])
def test_an_error_is_at_most_half_a_code_of_the_largest_of_its_block(width, error):
    values = torch.randn(4096) * torch.logspace(-9, 9, 16).repeat_interleave(256)
    found = decode(*encode(values, width), 4096, width)
    off = (found - values).abs().view(-1, 256) / values.abs().view(-1, 256).amax(1, keepdim=True)
    assert off.max() <= error * (1 + 1e-6)


def test_many_threads_give_the_same_bits(isa):
    def coded(numel, _offset, seed):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        found = {width: encode(values, width) for width in (8, 4)}
        return {(width, name): one for width, pair in found.items() for name, one in enumerate(pair)}

    same_on_any_threads(coded)


def test_counts_addresses_and_bits_are_checked():
    with pytest.raises(ValueError, match="n=-1"):
        kernels.encode(-1, 1, "bf16", 8, 1, 1)
    with pytest.raises(ValueError, match="scales=0"):
        kernels.decode(1, 8, 1, 0, 1)
    with pytest.raises(ValueError, match="bits=5: expected 4 or 8"):
        kernels.encode(1, 1, "bf16", 5, 1, 1)
    with pytest.raises(ValueError, match="dtype='int8'"):
        kernels.encode(1, 1, "int8", 8, 1, 1)
