"""Gradients from the moments around an AdamW step. Trusted: kernels.adamw, whose bits the step has."""

import math

import pytest
import torch

from infinity import kernels
from infinity.kernels import ToldGradient
from kernel_cases import (
    addresses,
    bits,
    random_bits,
    same_on_any_threads,
    same_under_every_isa,
    scalars,
    shifted,
    split,
)

SIZES = (0, 1, 15, 17, 33, 2047, 2049, 16384 + 5, 65536 + 29)


def bf16(*patterns):
    return torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def step(m, grad, limit=1 << 20, first=0, v=None, **changes):
    """Make a step; return what tells the gradient, and the moments before and behind."""
    n, before = len(m), m.clone()
    fields = [*split(torch.linspace(-1, 1, n)), m.clone(), torch.zeros(n) if v is None else v.clone()]
    plain = [field.clone() for field in fields]
    told = ToldGradient(scalars(**changes), limit)
    told.adamw(n, tuple(addresses(*fields)), grad.data_ptr(), scalars(**changes), first)
    kernels.adamw(n, *addresses(*plain), grad.data_ptr(), "bf16", scalars(**changes))
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(fields, plain, strict=True))
    told.end()
    return told, before, fields[2]


def recovered(told, before, behind, first=0):
    found = torch.full((len(before),), 7.0, dtype=torch.bfloat16)
    told.recover(len(before), *addresses(before, behind), first, found.data_ptr())
    return found


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "changes", [{}, {"clip": 2.0**-16}, {"clip": 0.3}, {"beta1": 0.3}, {"beta1": 0.0}], ids=str
)
def test_every_gradient_comes_back_with_its_bits_and_few_as_exceptions(isa, n, changes):
    generator = torch.Generator().manual_seed(n)
    m = torch.randn(n, generator=generator) * changes.get("clip", 1.0)
    grad = torch.randn(n, generator=generator).bfloat16()
    told, before, behind = step(m, grad, **changes)
    assert torch.equal(bits(recovered(told, before, behind)), bits(grad))
    assert told.count <= 2 + n // 100
    assert told.nbytes == told.count * kernels.EXCEPTION_NBYTES


@pytest.mark.parametrize(
    "changes", [{}, {"clip": 0.3, "beta1": 0.0}, {"clip": math.nan}, {"clip": 0.0}], ids=str
)
def test_bits_of_any_kind_come_back(isa, changes):
    n = 20_011
    m, grad = random_bits(n, 1), random_bits(n, 2, torch.bfloat16)
    told, before, behind = step(m, grad, v=random_bits(n, 3), **changes)
    assert told.count > n // 100
    assert torch.equal(bits(recovered(told, before, behind)), bits(grad))


NAN, INF, MINUS_INF, PAYLOAD = 0x7FC0, 0x7F80, 0xFF80, 0xFFA1
"""PAYLOAD: a NaN of another kind than what is computed."""


@pytest.mark.parametrize(
    ("m", "gradient", "is_exception"),
    [
        (1.0, 0x3F80, False),
        (1.0, 0xBF80, False),  # the other sign
        (1.0, 0x0000, False),  # a zero beside a large moment
        (-3.3e7, 0x0000, False),
        (0.0, 0x0000, False),
        (0.0, 0x3F81, False),
        (0.0, 0x8000, True),  # -0
        (1.0, 0x8000, True),
        (1.0, 0x3380, True),  # 2^-24, tiny beside the moment
        (1.0, 0xB380, True),
        (0.0, 0x0001, False),  # a denormal
        (0.0, 0x8035, False),
        (0.0, 0x0080, False),  # the smallest normal one
        (1.0, 0x0001, True),
        (1.0, INF, False),
        (1.0, MINUS_INF, False),
        (1.0, NAN, False),
        (1.0, PAYLOAD, True),
        (math.inf, 0x3F80, True),
        (math.nan, 0x3F80, True),
    ],
)
def test_what_moments_do_not_tell_is_an_exception(isa, m, gradient, is_exception):
    grad = bf16(*[gradient] * 17)
    told, before, behind = step(torch.full((17,), m), grad)
    assert told.count == 17 * is_exception
    assert torch.equal(bits(recovered(told, before, behind)), bits(grad))


def test_zeros_beside_moments_of_any_size_are_told(isa):
    sizes = 10.0 ** torch.arange(-20, 30).repeat(1000)
    m = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * sizes
    for beta1 in (0.9, 0.95, 0.99, 0.999, 0.5, 0.2):
        told, before, behind = step(m, torch.zeros(len(m), dtype=torch.bfloat16), beta1=beta1)
        assert told.count == 0, beta1
        assert not recovered(told, before, behind).any()


def test_parts_have_the_numbers_that_they_are_given_and_are_recovered_in_other_parts():
    n, limit = 5000, 4000
    grad = torch.randn(n, generator=torch.Generator().manual_seed(1)).bfloat16()
    grad[::7] = -0.0
    before = torch.randn(n, generator=torch.Generator().manual_seed(2))
    fields = [*split(torch.zeros(n)), before.clone(), torch.zeros(n)]
    told = ToldGradient(scalars(), limit)
    for start, stop in ((0, 1000), (1000, 5000)):
        at = tuple(addresses(*(field[start:stop] for field in fields)))
        told.adamw(stop - start, at, grad[start:stop].data_ptr(), scalars(), 100 + start)
    told.end()
    assert n // 7 <= told.count < n // 6
    found = torch.empty_like(grad)
    for start, stop in ((0, 1), (1, 2500), (2500, 5000)):
        parts = addresses(before[start:stop], fields[2][start:stop])
        told.recover(stop - start, *parts, 100 + start, found[start:stop].data_ptr())
    assert torch.equal(bits(found), bits(grad))


def test_more_exceptions_than_are_kept_are_counted_and_tell_nothing():
    grad = torch.full((100,), -0.0, dtype=torch.bfloat16)
    told, before, behind = step(torch.zeros(100), grad, limit=99)
    assert (told.count, told.is_told) == (100, False)
    with pytest.raises(ValueError, match="100 exceptions, of which 99 were kept"):
        recovered(told, before, behind)
    told, before, behind = step(torch.zeros(100), grad, limit=100)
    assert told.is_told
    assert torch.equal(bits(recovered(told, before, behind)), bits(grad))


def test_every_instruction_set_recovers_the_same_at_any_offset_and_on_any_threads():
    def every_operation(n, offset, seed):
        m, behind = (shifted(random_bits(n, seed + one), offset) for one in (0, 1))
        found = shifted(torch.zeros(n, dtype=torch.bfloat16), offset)
        told = ToldGradient(scalars(clip=0.7), 0)
        told.recover(n, *addresses(m, behind), 0, found.data_ptr())
        return {"recover": found.clone()}

    results = []
    for name in ("scalar", "avx2", "avx512"):
        try:
            kernels.set_isa(name)
        except kernels.UnsupportedIsaError:
            continue
        results += [every_operation(20_003, offset, 5)["recover"] for offset in (0, 1)]
    assert all(torch.equal(bits(one), bits(results[0])) for one in results)
    same_on_any_threads(every_operation)


def exceptions(n, offset, seed):
    """Make steps with gradients of any bits, and of any size beside the moment; return what these tell."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-30, 10, (n,), generator=generator)
    small = (torch.randn(n, generator=generator) * sizes).bfloat16()
    results = {}
    for kind, m, grad in (
        ("any", random_bits(n, seed), random_bits(n, seed + 1, torch.bfloat16)),
        ("small", torch.randn(n, generator=generator), small),
    ):
        told, before, behind = step(m, shifted(grad, offset))
        assert torch.equal(bits(recovered(told, before, behind)), bits(grad))
        results[kind] = torch.tensor([told.count], dtype=torch.int32)
    return results


def test_every_instruction_set_finds_the_same_exceptions_at_any_offset_and_on_any_threads():
    for offset in (0, 1):
        same_under_every_isa(exceptions, 20_003, offset)
    same_on_any_threads(exceptions)


def test_a_number_that_is_too_large_and_other_scalars_are_refused():
    told = ToldGradient(scalars(), 1)
    with pytest.raises(ValueError, match="expected numbers below 4294967296"):
        told.adamw(2, (64, 64, 64, 64), 64, scalars(), (1 << 32) - 1)
    with pytest.raises(ValueError, match="expected the scalars"):
        told.adamw(2, (64, 64, 64, 64), 64, scalars(step=4), 0)
