"""Checksums of fields, alone and on a kernel's way. Trusted: xxhash's own xxh3, and adamw without sums."""

import pytest
import torch
import xxhash

from infinity import kernels
from infinity.kernels import STRETCH_NUMEL, Checksums, Field

WORD = (1 << 64) - 1
SCALARS = kernels.AdamWScalars(0.01, 0.9, 0.99, 1e-8, 0.1, 3, 0.5)
WIDTHS = {"hi": 2, "lo": 2, "m": 4, "v": 4}


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def _isa(request):
    before = kernels.isa()
    try:
        kernels.set_isa(request.param)
    except kernels.UnsupportedIsaError as error:
        pytest.skip(str(error))
    yield
    kernels.set_isa(before)


def expected(content, stretch):
    """[Note: checksums] of kernels.h, in Python."""
    total = 0
    for number, start in enumerate(range(0, len(content), stretch)):
        mixed = xxhash.xxh3_64_intdigest(content[start : start + stretch])
        mixed ^= (number + 1) * 0x9E3779B185EBCA87 & WORD
        mixed = (mixed ^ mixed >> 37) * 0x165667919E3779F9 & WORD
        total += mixed ^ mixed >> 32
    return total & WORD


def checksum(content, stretch):
    sums = Checksums([Field(content.data_ptr(), content.numel(), stretch, True, False)])
    sums.take_before()
    return sums.before(0)


@pytest.mark.usefixtures("_isa")
@pytest.mark.parametrize("threads", [1, 3])
def test_it_is_made_of_the_xxh3_of_each_stretch(seed, threads):
    before = kernels.threads()
    kernels.set_threads(threads)
    content = torch.randint(0, 256, (1 << 21,), dtype=torch.uint8)
    sizes = [(256, 256), (300, 1024), (1024, 1024), (1025, 4096), (1088, 1089), (4096, 32 << 10)]
    sizes += [(4096 + 300, 4096), (1 << 21, 32 << 10), ((1 << 20) + 4096, 16 << 10)]
    for nbytes, stretch in sizes:
        part = content[:nbytes]
        assert expected(part.numpy().tobytes(), stretch) == checksum(part, stretch), (nbytes, stretch)
    kernels.set_threads(before)


def test_every_bit_counts_and_so_does_the_order_of_stretches(seed):
    content = torch.randint(0, 256, (1536,), dtype=torch.uint8)
    whole = checksum(content, 512)
    for bit in range(0, 8 * content.numel(), 5):
        content[bit // 8] ^= 1 << bit % 8
        assert checksum(content, 512) != whole, bit
        content[bit // 8] ^= 1 << bit % 8
    assert checksum(torch.cat([content[512:1024], content[:512], content[1024:]]), 512) != whole


@pytest.mark.usefixtures("_isa")
@pytest.mark.parametrize("numel", [1, 4000, STRETCH_NUMEL, 5 * STRETCH_NUMEL - 77, 13 * STRETCH_NUMEL])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_adamw_takes_them_on_its_way_and_steps_as_without(seed, numel, dtype):
    padded = -(-numel // 2048) * 2048  # behind the step's elements, as in a record
    plain = {
        name: torch.randint(0, 127, (padded * width,), dtype=torch.uint8) for name, width in WIDTHS.items()
    }
    gradient = torch.randn(numel, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    summed = {name: one.clone() for name, one in plain.items()}
    fields = [
        Field(one.data_ptr(), one.numel(), STRETCH_NUMEL * WIDTHS[name], name != "hi", name != "v")
        for name, one in summed.items()
    ]
    sums = Checksums(fields)
    first = {
        name: expected(one.numpy().tobytes(), STRETCH_NUMEL * WIDTHS[name]) for name, one in plain.items()
    }
    for fields_at, more in ((plain, ()), (summed, (sums,))):
        addresses = (one.data_ptr() for one in fields_at.values())
        kernels.adamw(numel, *addresses, gradient.data_ptr(), dtype, SCALARS, *more)
    assert all(torch.equal(plain[name], summed[name]) for name in WIDTHS)
    last = {
        name: expected(one.numpy().tobytes(), STRETCH_NUMEL * WIDTHS[name]) for name, one in plain.items()
    }
    assert [0, first["lo"], first["m"], first["v"]] == [sums.before(index) for index in range(4)]
    assert [last["hi"], last["lo"], last["m"], 0] == [sums.after(index) for index in range(4)]
    assert first != last


@pytest.mark.parametrize(("nbytes", "stretch"), [(255, 256), (512, 128), (1024 + 255, 1024), (0, 1024)])
def test_stretches_that_xxh3_would_take_another_way_are_refused(nbytes, stretch):
    with pytest.raises(ValueError, match=f"{nbytes} B in stretches of {stretch}: expected 256 B"):
        Checksums([Field(1, nbytes, stretch, True, False)])
