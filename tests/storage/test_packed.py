"""Packed weights. Trusted: torch's own types, products in fp32 and rounding; that these are what transformers
and bitsandbytes compute is shown by tests/engine/test_quantized.py.
"""

from array import array

import pytest
import torch

from infinity import HostMemoryError
from infinity.kernels import ScaleBlocks
from infinity.sizes import BLOCK
from infinity.storage.packed import Block8, Blocks4, FileRange, NestedScales, Rows8, Stack4

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8)


def in_files(*tensors):
    """Return ranges of files, as the bytes of tensors are, and what has these bytes."""
    ranges = [FileRange(str(number), 100 * number, one.nbytes) for number, one in enumerate(tensors)]
    files = {str(number): one.contiguous().flatten().view(torch.uint8) for number, one in enumerate(tensors)}
    return ranges, files


def block8():
    codes = random(384, 512, high=127)
    codes[:, ::2] += 128
    scales = torch.rand(3, 4) / 100
    ranges, files = in_files(codes, scales)
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = codes.view(torch.float8_e4m3fn).float() * spread
    return Block8(*ranges, ScaleBlocks(512, 128, 128)), files, expected


def rows8():
    codes, scales = random(300, 700).view(torch.int8), torch.rand(300) * 3
    ranges, files = in_files(codes, scales)
    return Rows8(*ranges, 700), files, codes * scales.view(-1, 1) * 7.874015718698502e-3


def blocks4(nested, block=64, numel=100_000):
    table, packed = torch.rand(16), random(numel // 2)
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten().long()
    count = -(-numel // block)
    if nested:
        eight, outer, names = random(count), torch.rand(-(-count // 256)), torch.rand(256)
        ranges, files = in_files(packed, eight, outer)
        values = names[eight.long()] * outer.repeat_interleave(256)[:count] + torch.tensor(0.37)
        offset = torch.tensor(0.37).item()
        scales = NestedScales(ranges[1], ranges[2], 256, array("f", names.tolist()), offset)
    else:
        values = torch.rand(count)
        ranges, files = in_files(packed, values)
        scales = ranges[1]
    expected = table[codes] * values.repeat_interleave(block)[:numel]
    weight = Blocks4(numel, ranges[0], scales, block, array("f", table.tolist()))
    return weight, files, expected


def stack4(matrices=3, rows=70, cols=96):
    packed, scales = random(matrices, rows, cols // 2), random(matrices, rows, cols // 32, high=256)
    ranges, files = in_files(packed, scales)
    codes = torch.stack([packed & 15, packed >> 4], -1).view(matrices, rows, cols)
    spread = scales.repeat_interleave(32, 2).int() - 127
    exact = E2M1[codes.long()].double() * 2.0 ** spread.double()
    return Stack4(*ranges, rows, cols), files, exact.float().transpose(1, 2)


LAYOUTS = {
    "e4m3": block8,
    "int8": rows8,
    "4 bits": lambda: blocks4(nested=False),
    "4 bits, nested scales": lambda: blocks4(nested=True),
    "4 bits, few": lambda: blocks4(nested=True, block=32, numel=34),
    "mxfp4": stack4,
    "mxfp4, one": lambda: stack4(1, 3, 32),
    "mxfp4, wide": lambda: stack4(1, 5, 3 << 15),
}


def widened(weight, files, dtype, first, numel, room_nbytes):
    found = torch.full((numel,), float("nan"), dtype=DTYPES[dtype])
    for cut in weight.cuts(first, numel, room_nbytes):
        assert sum(one.nbytes for one in cut.sources) < room_nbytes
        parts = []
        for one in cut.sources:
            begin = one.offset - 100 * int(one.path)
            parts.append(files[one.path][begin : begin + one.nbytes].clone())
            assert len(parts[-1]) == one.nbytes
        at = [one.data_ptr() for one in parts]
        weight.widen(dtype, cut, at, first, numel, found.data_ptr())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_elements_are_widened_as_torch_does_it(layout):
    torch.manual_seed(5)
    weight, files, expected = LAYOUTS[layout]()
    expected = expected.flatten()
    numel = weight.numel
    assert numel == expected.numel()
    for dtype, kind in DTYPES.items():
        for room in (1 << 30, 7 * BLOCK):
            if room < 1 << 20 and layout == "mxfp4, wide":
                continue
            for first, n in ((0, numel), (5, 10), (numel // 3, numel // 2), (numel - 1, 1)):
                found = widened(weight, files, dtype, first, n, room)
                assert torch.equal(found, expected[first : first + n].to(kind)), (dtype, room, first)


def test_a_window_that_holds_no_row_is_refused_with_the_numbers():
    weight, _, _ = stack4(1, 5, 3 << 15)
    with pytest.raises(
        HostMemoryError, match=r"0: reading a packed weight takes 67\.\d KiB .* has 28\.0 KiB"
    ):
        list(weight.cuts(0, 1, 7 * BLOCK))


def test_a_part_of_a_stack_is_a_stack():
    weight, files, expected = stack4()
    part = weight.matrices(1, 2)
    assert torch.equal(widened(part, files, "fp32", 0, part.numel, 1 << 30), expected[1:].flatten())


def test_scales_are_those_of_the_rows_of_blocks_that_elements_lie_in():
    codes, scales = FileRange("codes", 0, 10 * 7), FileRange("scales", 100, 36)
    weight = Block8(codes, scales, ScaleBlocks(7, 4, 3))
    for first, numel, offset, nbytes in (
        (0, 1, 100, 12),
        (27, 1, 100, 12),
        (27, 2, 100, 24),
        (28, 42, 112, 24),
        (0, 70, 100, 36),
    ):
        assert weight.sources(first, numel)[1] == ("scales", offset, nbytes)
