"""Checksums of fields, alone and on a kernel's way. Trusted: xxhash's own xxh3, and steps without sums."""

import pytest
import torch
import xxhash

from infinity import kernels
from infinity.kernels import STRETCH_NUMEL, Checksums, Field
from kernel_cases import small_adamw

WORD = (1 << 64) - 1
ADAMW = kernels.AdamWScalars(0.01, 0.9, 0.99, 1e-8, 0.1, 3, 0.5)
SPLIT, MOMENTS = {"hi": 2, "lo": 2}, {"m": 4, "v": 4}
STEPS = {
    "adamw": (kernels.adamw, {**SPLIT, **MOMENTS}, ADAMW, ()),
    "bf16 moments": (small_adamw("bf16"), {**SPLIT, "m": 2, "v": 2}, ADAMW, (7, 4)),
    "int8 moments": (small_adamw("int8"), {**SPLIT, "m": 1, "v": 1, "scale": 1 / 32}, ADAMW, (7, 4)),
    "fp16 weights": (kernels.adamw_fp16, {"weight": 2, "master": 4, **MOMENTS}, ADAMW, ()),
    "fp32 weights": (kernels.adamw_fp32, {"weight": 4, **MOMENTS}, ADAMW, ()),
    "adam": (kernels.adam, {**SPLIT, **MOMENTS}, ADAMW, ()),
    "sgd": (kernels.sgd, {**SPLIT, "m": 4}, kernels.SGDScalars(0.01, 0.9, 0.1, 3), ()),
    "adagrad": (kernels.adagrad, {**SPLIT, "v": 4}, kernels.AdagradScalars(0.01, 1e-8, 0.1, 3), ()),
    "lion": (kernels.lion, {**SPLIT, "m": 4}, kernels.LionScalars(0.01, 0.9, 0.99, 0.1), ()),
}
"""The kernel, its fields' bytes per element, its scalars, and what decides its random bits."""


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
@pytest.mark.parametrize("step", list(STEPS))
def test_a_step_takes_them_on_its_way_and_is_the_same_as_without(seed, numel, dtype, step):
    kernel, widths, scalars, noise = STEPS[step]
    stretches = {name: int(STRETCH_NUMEL * width) for name, width in widths.items()}
    padded = -(-numel // STRETCH_NUMEL) * STRETCH_NUMEL  # behind the step's elements, as in a record
    plain = {
        name: torch.randint(0, 127, (int(padded * width),), dtype=torch.uint8)
        for name, width in widths.items()
    }
    if "scale" in plain:
        plain["scale"].view(torch.float32).fill_(0.5)
    gradient = torch.randn(numel, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    summed = {name: one.clone() for name, one in plain.items()}
    unread, *_, unwritten = widths
    fields = [
        Field(one.data_ptr(), one.numel(), stretches[name], name != unread, name != unwritten)
        for name, one in summed.items()
    ]
    sums = Checksums(fields)
    first = {name: expected(one.numpy().tobytes(), stretches[name]) for name, one in plain.items()}
    for fields_at, more in ((plain, ()), (summed, (sums,))):
        addresses = (one.data_ptr() for one in fields_at.values())
        kernel(numel, *addresses, gradient.data_ptr(), dtype, scalars, *noise, *more)
    assert all(torch.equal(plain[name], summed[name]) for name in widths)
    last = {name: expected(one.numpy().tobytes(), stretches[name]) for name, one in plain.items()}
    for index, name in enumerate(widths):
        assert sums.before(index) == (first[name] if name != unread else 0)
        assert sums.after(index) == (last[name] if name != unwritten else 0)
    assert first != last


def test_no_kernel_runs_where_no_checksum_is_asked_for(monkeypatch):
    content = torch.zeros(4096, dtype=torch.uint8)
    sums = [Checksums([Field(content.data_ptr(), 4096, 4096, one, not one)]) for one in (True, False)]
    monkeypatch.setattr("infinity.kernels.checksums.library", None)
    sums[0].take_after()
    sums[1].take_before()


@pytest.mark.parametrize(("nbytes", "stretch"), [(255, 256), (512, 128), (1024 + 255, 1024), (0, 1024)])
def test_stretches_that_xxh3_would_take_another_way_are_refused(nbytes, stretch):
    with pytest.raises(ValueError, match=f"{nbytes} B in stretches of {stretch}: expected 256 B"):
        Checksums([Field(1, nbytes, stretch, True, False)])


@pytest.mark.usefixtures("_isa")
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_copied_to_fields_that_lie_one_behind_the_other_is_summed_on_the_way(seed, threads):
    before = kernels.threads()
    kernels.set_threads(threads)
    source = torch.randint(0, 256, ((1 << 20) + 3,), dtype=torch.uint8)
    for sizes in [(300,), (4096, 4096, 300), (1 << 18, 1 << 18, 5 * 4096 + 256)]:
        nbytes, target, at, fields = sum(sizes), torch.zeros(1 << 20, dtype=torch.uint8), 0, []
        for number, size in enumerate(sizes):
            fields.append(Field(target.data_ptr() + at, size, 4096, number != 1, False))
            at += size
        sums = Checksums(fields)
        assert sums.copy_from(source.data_ptr() + 3, target.data_ptr(), nbytes)
        assert torch.equal(target[:nbytes], source[3 : 3 + nbytes])
        assert not target[nbytes:].any()
        sums.take_before()  # which has been done
        at = 0
        for number, size in enumerate(sizes):
            content = source[3 + at : 3 + at + size].numpy().tobytes()
            assert sums.before(number) == (expected(content, 4096) if number != 1 else 0)
            at += size
    kernels.set_threads(before)


def test_bytes_that_are_not_those_of_the_fields_are_not_copied(seed):
    source, target = torch.ones(8192, dtype=torch.uint8), torch.zeros(8192, dtype=torch.uint8)
    at = target.data_ptr()
    for address, nbytes, places in [
        (at, 8192, [at]),
        (at + 4096, 4096, [at]),
        (at, 8192, [at, at + 4000]),
        (at, 8192, []),
    ]:
        sums = Checksums([Field(one, 4096, 4096, True, False) for one in places])
        assert not sums.copy_from(source.data_ptr(), address, nbytes)
        assert not target.any()
        if places:
            sums.take_before()
            assert sums.before(0) == expected(bytes(4096), 4096)
