"""Trusted: torch's single fp32 operations round correctly, numpy-free views of bits. Faked: nothing."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covers import examples
from infinity import kernels, reference
from kernel_cases import (
    bits,
    f32_of_bits,
    join,
    random_bits,
    same_on_any_threads,
    same_under_every_isa,
    scalars,
    shifted,
    split,
)

# Either side of every vector width, of a block (16384), of what goes to the pool (65536), and odd ones.
SIZES = (0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 16383, 16385, 65536 + 29, 200_003)


def test_join_gives_back_what_was_split_for_every_hi_and_the_lows_around_a_tie(isa):
    lows = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234, 0xABCD])
    patterns = (torch.arange(2**16).unsqueeze(1) << 16) + lows
    masters = patterns.flatten().to(torch.int32).view(torch.float32)
    hi, lo = split(masters)
    expected = torch.where(masters.isnan(), torch.tensor(0x7FC00000, dtype=torch.int32), bits(masters))
    assert torch.equal(expected, bits(join(hi, lo)))
    assert torch.equal(bits(reference.rounded(masters)), hi)
    assert bool((lo[masters.isnan()] == 0).all())


@settings(max_examples=examples(60, 200), deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_any_master_survives_the_split_and_hi_is_the_nearest_bf16(patterns):
    masters = f32_of_bits(patterns)
    hi, lo = split(masters)
    rebuilt = join(hi, lo)
    assert torch.equal(bits(reference.canonical_(masters.clone())), bits(rebuilt))
    finite = masters.isfinite() & hi.view(torch.bfloat16).isfinite()
    weights = hi.view(torch.bfloat16).double()
    either_side = [(hi + change).view(torch.bfloat16).double() for change in (-1, 1)]
    for other in either_side:
        nearer = (other - masters.double()).abs() < (weights - masters.double()).abs()
        assert not bool((nearer & finite & other.isfinite()).any())


def test_a_finite_master_that_rounds_to_infinity_is_kept(isa):
    masters = f32_of_bits([0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F8000, 0xFF7FFFFF])
    hi, lo = split(masters)
    assert hi.view(torch.bfloat16).isinf().tolist() == [False, True, True, True, True]
    assert torch.equal(masters, join(hi, lo))


def every_operation(n, offset, seed):
    """Run each kernel on slices that start `offset` elements into their storage; return what each gave."""
    slice_of = partial(shifted, offset=offset)
    master, m, v, grad_f32 = (slice_of(random_bits(n, seed + i)) for i in range(4))
    v = bits(v).bitwise_and(0x7FFFFFFF).view(torch.float32) if seed % 2 else v
    grad_bf16 = slice_of(random_bits(n, seed + 4, torch.bfloat16))
    hi, lo = (slice_of(field) for field in split(master))
    results = {"split hi": hi.clone(), "split lo": lo.clone(), "join": join(hi, lo)}
    for dtype, grad in (("bf16", grad_bf16), ("f32", grad_f32)):
        for label, changes in (("", {}), (" clipped, beta1 0", {"clip": 0.3, "beta1": 0.0})):
            fields = [slice_of(field) for field in (hi, lo, m, v)]
            kernels.adamw(n, *(f.data_ptr() for f in fields), grad.data_ptr(), dtype, scalars(**changes))
            results |= {f"adamw {dtype}{label} {i}": field for i, field in enumerate(fields)}
        squares, finite = kernels.sum_squares(n, grad.data_ptr(), dtype)
        results[f"sum {dtype}"] = torch.tensor([squares], dtype=torch.float64).view(torch.int32)
        assert bool(grad.isfinite().all()) == finite
        calm = torch.nan_to_num(grad, 0.0, 3.0, -3.0)
        squares, _ = kernels.sum_squares(n, calm.data_ptr(), dtype)
        results[f"calm sum {dtype}"] = torch.tensor([squares], dtype=torch.float64).view(torch.int32)
        results[f"acc {dtype}"] = m.clone()
        add = kernels.accumulate if dtype == "bf16" else kernels.accumulate_f32
        add(n, results[f"acc {dtype}"].data_ptr(), grad.data_ptr())
    results["widen"] = torch.empty(n)
    kernels.widen(n, grad_bf16.data_ptr(), results["widen"].data_ptr())
    new_hi = torch.where(
        random_bits(n, seed + 5).view(torch.int32) % 64 == 0, grad_bf16.view(torch.int16), hi
    )
    fields = [hi.clone(), lo.clone()]
    kernels.rewrite(n, new_hi.data_ptr(), fields[0].data_ptr(), fields[1].data_ptr())
    results |= {"rewrite hi": fields[0], "rewrite lo": fields[1]}
    return results


@pytest.mark.parametrize(("n", "offset"), list(itertools.product(SIZES, (0, 1))))
def test_every_isa_gives_the_scalar_bits_at_any_size_and_alignment(n, offset):
    same_under_every_isa(every_operation, n, offset)


def test_any_number_of_threads_gives_the_same_bits():
    same_on_any_threads(every_operation)


def test_denormals_survive_a_caller_that_flushes_them(isa):
    masters = f32_of_bits([1, 2, 0x007FFFFF] * 30_000)
    n = len(masters)
    hi, lo = split(masters)
    m, v, grad, acc = (torch.zeros(n) for _ in range(4))
    bits(acc).fill_(3)
    expected = acc + masters
    torch.set_flush_denormal(True)
    try:
        kernels.accumulate_f32(n, acc.data_ptr(), masters.data_ptr())
        fields = (hi, lo, m, v, grad)
        kernels.adamw(n, *(field.data_ptr() for field in fields), "f32", scalars(lr=0.0))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(expected), bits(acc))
    assert torch.equal(bits(masters), bits(join(hi, lo)))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("changes", [{}, {"beta1": 0.3, "eps": 1e-15}, {"beta1": 0.5, "weight_decay": 0.0}])
@pytest.mark.parametrize("clip", [1.0, 0.37])
def test_adamw_equals_the_reference_recipe_bit_for_bit(isa, dtype, changes, clip):
    n, generator = 50_021, torch.Generator().manual_seed(1)
    master = torch.randn(n, generator=generator)
    m, v = torch.zeros(n), torch.zeros(n)
    hi, lo = split(master)
    m_kernel, v_kernel = m.clone(), v.clone()
    clip_f32 = torch.tensor(clip)
    for step in range(1, 6):
        scale = 10.0 ** torch.randint(-30, 3, (n,), generator=generator)
        grad = (torch.randn(n, generator=generator) * scale).to(
            torch.bfloat16 if dtype == "bf16" else torch.float32
        )
        if step == 4:
            grad[::7] = torch.inf
            grad[3::7] = torch.nan
        step_scalars = scalars(step=step, clip=clip_f32.item(), **changes)
        group = {
            "lr": step_scalars.lr,
            "betas": (step_scalars.beta1, step_scalars.beta2),
            "eps": step_scalars.eps,
            "weight_decay": step_scalars.weight_decay,
        }
        reference.adamw_step(master, m, v, grad, clip_f32, step, group)
        fields = (hi, lo, m_kernel, v_kernel)
        kernels.adamw(n, *(field.data_ptr() for field in fields), grad.data_ptr(), dtype, step_scalars)
        assert torch.equal(bits(m), bits(m_kernel))
        assert torch.equal(bits(v), bits(v_kernel))
        assert torch.equal(bits(master), bits(join(hi, lo)))
        assert torch.equal(bits(reference.rounded(master)), hi)


def test_the_bias_corrections_division_is_rounded_as_a_division(isa):
    """m = 0 and p = 0 hide it; eps = 0 and beta1 = 0 make the step lr * g / (sqrt(v) / divisor)."""
    n, generator = 40_000, torch.Generator().manual_seed(6)
    grad = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-18, 18, (n,), generator=generator)
    for beta2, step in itertools.product((0.0, 0.9, 0.95, 0.999, 0.999999), (1, 2, 7, 1000)):
        changes = {"beta1": 0.0, "beta2": beta2, "step": step, "eps": 0.0, "lr": 1.0, "weight_decay": 0.0}
        fields = [*split(torch.zeros(n)), torch.zeros(n), torch.zeros(n)]
        kernels.adamw(n, *(f.data_ptr() for f in (*fields, grad)), "f32", scalars(**changes))
        divisor = torch.tensor((1 - beta2**step) ** 0.5, dtype=torch.float64).float().double()
        root = fields[3].double().sqrt().float().double()
        denom = (root / divisor).float().double()
        expected = -(fields[2].double() / denom).float()
        usual = (denom > 2.0**-100) & (denom < 2.0**100)
        assert torch.equal(bits(expected[usual]), bits(join(*fields[:2])[usual]))


def test_sum_squares_is_the_fp64_sum(isa):
    grad = torch.randn(123_457, generator=torch.Generator().manual_seed(2)) * 1e30
    for dtype, values in (("f32", grad), ("bf16", grad.bfloat16())):
        squares, finite = kernels.sum_squares(len(values), values.data_ptr(), dtype)
        assert values.double().square().sum().item() == pytest.approx(squares, rel=1e-13)
        assert finite


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_sum_squares_finds_one_value_that_is_not_finite(isa, bad):
    grad = torch.ones(70_001)
    grad[69_999] = bad
    squares, finite = kernels.sum_squares(len(grad), grad.data_ptr(), "f32")
    assert not finite
    assert str(abs(bad)) == str(squares)


def test_rewrite_makes_an_edited_weight_its_own_master(isa):
    master = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    hi, lo = split(master)
    new_hi = hi.clone()
    new_hi.view(torch.bfloat16)[10:20] = 3.0
    kernels.rewrite(1000, new_hi.data_ptr(), hi.data_ptr(), lo.data_ptr())
    master[10:20] = 3.0
    assert torch.equal(bits(master), bits(join(hi, lo)))


@pytest.mark.parametrize("n_bytes", [0, 1, 4097, (5 << 20) + 3, (16 << 20) + 77])
def test_copy_moves_every_byte_and_no_other(isa, n_bytes):
    source = torch.randint(0, 256, (n_bytes + 2,), dtype=torch.uint8)
    target = torch.zeros(n_bytes + 2, dtype=torch.uint8)
    kernels.copy(n_bytes, target.data_ptr() + 1, source.data_ptr() + 1)
    assert torch.equal(source[1:-1], target[1:-1])
    assert target[[0, -1]].tolist() == [0, 0]


def test_what_cannot_be_meant_is_refused_at_the_border():
    with pytest.raises(ValueError, match="n=-1"):
        kernels.widen(-1, 8, 8)
    with pytest.raises(ValueError, match="f32=0"):
        kernels.widen(1, 8, 0)
    with pytest.raises(ValueError, match="bf16"):
        kernels.sum_squares(1, 8, "f64")
    with pytest.raises(ValueError, match="overlap"):
        kernels.copy(10, 1000, 1005)
    with pytest.raises(ValueError, match="0 threads"):
        kernels.set_threads(0)
    for field, value in (("lr", -1.0), ("lr", float("nan")), ("beta2", 1.0), ("step", 0), ("clip", -0.5)):
        with pytest.raises(ValueError, match=field):
            scalars(**{field: value})


def test_nothing_is_touched_for_no_elements():
    kernels.split(0, 0, 0, 0)
    kernels.adamw(0, 0, 0, 0, 0, 0, "bf16", scalars())
    assert kernels.sum_squares(0, 0, "f32") == (0.0, True)
