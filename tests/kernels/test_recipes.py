"""Other records and other optimizers. Trusted: torch.optim, torch's casts, the AdamW step. Faked: nothing."""

import itertools
from functools import partial

import pytest
import torch

from infinity import kernels, reference
from infinity.reference import steps as reference_steps
from kernel_cases import (
    GRADIENTS,
    addresses,
    bits,
    join,
    random_bits,
    same_on_any_threads,
    same_under_every_isa,
    scalars,
    scalars_of,
    shifted,
    split,
)

SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 33, 100, 16385)
KERNELS = {
    "adamw_fp16": kernels.adamw_fp16,
    "adamw_fp32": kernels.adamw_fp32,
    "adam": kernels.adam,
    "sgd": kernels.sgd,
    "adagrad": kernels.adagrad,
    "lion": kernels.lion,
}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False}
ADAGRAD = {"lr": 1e-2, "lr_decay": 0.01, "eps": 1e-10, "weight_decay": 0.1}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
CASES = [
    ("adamw_fp16", ADAM),
    ("adamw_fp32", ADAM),
    ("adamw_fp32", {**ADAM, "betas": (0.3, 0.9), "weight_decay": 0.0}),
    ("adam", ADAM),
    ("adam", {**ADAM, "weight_decay": 0.0, "betas": (0.3, 0.9)}),
    ("sgd", SGD),
    ("sgd", {**SGD, "dampening": 0.3, "weight_decay": 0.0}),
    ("sgd", {**SGD, "nesterov": True}),
    ("sgd", {**SGD, "momentum": 0.0}),
    ("adagrad", ADAGRAD),
    ("adagrad", {**ADAGRAD, "lr_decay": 0.0, "weight_decay": 0.0}),
    ("lion", LION),
]


def moments_of(recipe):
    return 1 if recipe in ("sgd", "adagrad", "lion") else 2


def fields_of(recipe, master, moments):
    """Return copies of what the kernel of a recipe works on."""
    moments = [moment.clone() for moment in moments[: moments_of(recipe)]]
    if recipe == "adamw_fp16":
        return [master.half(), master.clone(), *moments]
    return [master.clone(), *moments] if recipe == "adamw_fp32" else [*split(master), *moments]


def master_of(recipe, fields):
    if recipe == "adamw_fp16":
        return fields[1]
    return fields[0] if recipe == "adamw_fp32" else join(*fields[:2])


def run(recipe, fields, grad, scalars_):
    dtype = next(name for name, kind in GRADIENTS.items() if kind == grad.dtype)
    KERNELS[recipe](len(grad), *addresses(*fields, grad), dtype, scalars_)


def reference_step(recipe, p, moments, grad, clip, step, group):
    if recipe == "lion":
        reference_steps.lion_step(p, *moments, grad, clip, group)
        return
    steps = {
        "adam": reference_steps.adam_step,
        "sgd": reference_steps.sgd_step,
        "adagrad": reference_steps.adagrad_step,
    }
    steps.get(recipe, reference.adamw_step)(p, *moments, grad, clip, step, group)


def every_operation(n, offset, seed):
    """Run each recipe on slices that start `offset` elements into their storage; return what each gave."""
    slice_of = partial(shifted, offset=offset)
    master, m, v = (random_bits(n, seed + i) for i in range(3))
    gradients = [random_bits(n, seed + 3), random_bits(n, seed + 4, torch.bfloat16)]
    gradients.append(gradients[1].view(torch.float16))
    results = {}
    for (number, (recipe, group)), grad, step in itertools.product(enumerate(CASES), gradients, (1, 2)):
        fields = [slice_of(field) for field in fields_of(recipe, master, (m, v))]
        run(recipe, fields, slice_of(grad), scalars_of(recipe, group, step, clip=0.3))
        label = f"{number} {recipe} {grad.dtype} step {step}"
        results |= {f"{label} {i}": field for i, field in enumerate(fields)}
    return results


@pytest.mark.parametrize(("n", "offset"), list(itertools.product(SIZES, (0, 1))))
def test_every_isa_gives_the_scalar_bits_at_any_size_and_alignment(n, offset):
    same_under_every_isa(every_operation, n, offset)


def test_any_number_of_threads_gives_the_same_bits():
    same_on_any_threads(every_operation)


@pytest.mark.parametrize("dtype", GRADIENTS)
@pytest.mark.parametrize(("recipe", "group"), CASES)
def test_each_recipe_equals_its_reference_bit_for_bit(isa, recipe, group, dtype):
    n, generator = 5_021, torch.Generator().manual_seed(1)
    master = torch.randn(n, generator=generator)
    moments = [torch.zeros(n) for _ in range(moments_of(recipe))]
    fields = fields_of(recipe, master, moments)
    clip = torch.tensor(0.37)
    for step in range(1, 6):
        size = 10.0 ** torch.randint(-30, 3, (n,), generator=generator)
        grad = (torch.randn(n, generator=generator) * size).to(GRADIENTS[dtype])
        if step == 4:
            grad[::7] = torch.inf
            grad[3::7] = torch.nan
        reference_step(recipe, master, moments, grad, clip, step, group)
        run(recipe, fields, grad, scalars_of(recipe, group, step, clip.item()))
        assert torch.equal(bits(master), bits(master_of(recipe, fields)))
        for expected, found in zip(reversed(moments), reversed(fields), strict=False):
            assert torch.equal(bits(expected), bits(found))
        if recipe == "adamw_fp16":
            assert torch.equal(bits(reference.rounded(master, torch.float16)), bits(fields[0]))


@pytest.mark.parametrize(
    ("recipe", "group", "theirs"),
    [
        ("adamw_fp16", ADAM, torch.optim.AdamW),
        ("adamw_fp32", ADAM, torch.optim.AdamW),
        ("adam", ADAM, torch.optim.Adam),
        ("sgd", SGD, torch.optim.SGD),
        ("sgd", {**SGD, "nesterov": True}, torch.optim.SGD),
        ("sgd", {**SGD, "dampening": 0.3}, torch.optim.SGD),
        ("sgd", {**SGD, "momentum": 0.0}, torch.optim.SGD),
        ("adagrad", ADAGRAD, torch.optim.Adagrad),
    ],
)
def test_masters_stay_within_a_few_ulps_of_torchs(recipe, group, theirs):
    """As in test_kernels_parity.py: ULPs of 0.02, the weights' standard deviation. Measured: 4 to 12."""
    n, std, ulp = 20_000, 0.02, 2.0**-29
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(n, generator=generator) * std
    parameter = torch.nn.Parameter(start.clone())
    optimizer = theirs([parameter], **group, foreach=False)
    fields = fields_of(recipe, start, (torch.zeros(n), torch.zeros(n)))
    for step in range(1, 31):
        grad = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-6, 0, (n,), generator=generator)
        parameter.grad = grad
        optimizer.step()
        run(recipe, fields, grad, scalars_of(recipe, group, step))
    moved = (parameter.detach() - start).abs().max()
    difference = (parameter.detach() - master_of(recipe, fields)).abs().max()
    assert moved > 1000 * ulp
    assert difference <= 16 * ulp


def test_lion_moves_each_weight_by_lr_whichever_way_its_momentum_points(isa):
    """Against the paper's own lines, in fp64."""
    n, generator = 10_000, torch.Generator().manual_seed(2)
    start = torch.randn(n, generator=generator)
    fields = fields_of("lion", start, (torch.zeros(n),))
    p, m = start.double(), torch.zeros(n, dtype=torch.float64)
    for step in range(1, 21):
        grad = torch.randn(n, generator=generator)
        run("lion", fields, grad, scalars_of("lion", LION, step))
        update = 0.9 * m + 0.1 * grad.double()
        p = p - 1e-3 * (update.sign() + 0.1 * p)
        m = 0.99 * m + 0.01 * grad.double()
    close = (p - master_of("lion", fields).double()).abs() < 1e-5
    assert close.double().mean() > 0.999  # a momentum of next to 0 may point either way


def test_fp16_weights_are_torchs_half_of_their_masters(isa):
    n = 100_000
    edges = [65504.0, 65519.99, 65520.0, -65520.0, 1e6, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0001]
    edges += [-0.0, 2.0**-14 - 2.0**-26, 1 + 2.0**-11, 1 + 3 * 2.0**-11, torch.inf, torch.nan]
    master = torch.cat([random_bits(n, 3), random_bits(n, 4).sigmoid() * 2.0**-14, torch.tensor(edges)])
    still = scalars_of("adamw_fp16", {**ADAM, "lr": 0.0}, 1)
    fields = fields_of("adamw_fp16", master, (torch.zeros(len(master)), torch.ones(len(master))))
    fields[0].zero_()
    run("adamw_fp16", fields, torch.zeros(len(master)), still)
    expected = reference.canonical_(master.clone())
    assert torch.equal(bits(expected), bits(fields[1]))
    assert torch.equal(bits(expected.half()), bits(fields[0]))
    assert fields[0][2 * n :][:5].isinf().tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("odd_nbytes", [0, 2, 16, 32])
def test_fp16_weights_larger_than_the_caches_are_halves_too_and_nothing_beside_them(isa, odd_nbytes):
    n, beside = (8 << 20) + 7, 64  # a field of 16 MiB is stored around the caches
    master = random_bits((1 << 20) + 1, 6).repeat(9)[:n]
    fields = fields_of("adamw_fp16", master, (torch.zeros(n), torch.ones(n)))
    room = torch.full((n + 3 * beside,), 7.0, dtype=torch.float16)
    start = beside + (-room.data_ptr() % 64 + odd_nbytes) // 2
    fields[0] = room[start : start + n]
    run("adamw_fp16", fields, torch.zeros(n), scalars_of("adamw_fp16", {**ADAM, "lr": 0.0}, 1))
    expected = reference.canonical_(master.clone())
    assert torch.equal(bits(expected), bits(fields[1]))
    assert torch.equal(bits(expected.half()), bits(fields[0]))
    assert (room[:start] == 7).all()
    assert (room[start + n :] == 7).all()


def test_every_fp16_gradient_is_read_exactly(isa):
    grad = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    fields = fields_of("sgd", torch.zeros(2**16), (torch.zeros(2**16),))
    run("sgd", fields, grad, scalars_of("sgd", {**SGD, "weight_decay": 0.0}, 1))
    assert torch.equal(bits(reference.canonical_(grad.float())), bits(fields[2]))


def test_the_inverse_of_a_loss_scale_as_the_factor_undoes_it(isa):
    n, generator = 10_000, torch.Generator().manual_seed(4)
    grad = torch.randn(n, generator=generator)
    plain = fields_of("adamw_fp16", torch.randn(n, generator=generator), (torch.zeros(n),) * 2)
    scaled = [field.clone() for field in plain]
    run("adamw_fp16", plain, grad.half().float(), scalars_of("adamw_fp16", ADAM, 1))
    run("adamw_fp16", scaled, grad.half() * 1024, scalars_of("adamw_fp16", ADAM, 1, clip=1 / 1024))
    for expected, found in zip(plain, scaled, strict=True):
        assert torch.equal(bits(expected), bits(found))


def test_what_cannot_be_meant_is_refused_at_the_border():
    with pytest.raises(ValueError, match="dtype='f64'"):
        kernels.adamw_fp32(1, 8, 8, 8, 8, "f64", scalars())
    with pytest.raises(ValueError, match="master=0"):
        kernels.adamw_fp16(1, 8, 0, 8, 8, 8, "f16", scalars())
    with pytest.raises(ValueError, match="n=-1"):
        kernels.lion(-1, 8, 8, 8, 8, "f32", scalars_of("lion", LION, 1))
    with pytest.raises(ValueError, match=r"dampening=0\.1.*Nesterov"):
        scalars_of("sgd", {**SGD, "dampening": 0.1, "nesterov": True}, 1)
    with pytest.raises(ValueError, match=r"dampening=0\.1, momentum=0\.0"):
        scalars_of("sgd", {**SGD, "dampening": 0.1, "momentum": 0.0}, 1)
    with pytest.raises(ValueError, match="momentum=1"):
        scalars_of("sgd", {**SGD, "momentum": 1.0}, 1)
    with pytest.raises(ValueError, match="lr_decay=-1"):
        scalars_of("adagrad", {**ADAGRAD, "lr_decay": -1.0}, 1)
    with pytest.raises(ValueError, match="step=0"):
        scalars_of("adagrad", ADAGRAD, 0)
    with pytest.raises(ValueError, match="beta2=1"):
        scalars_of("lion", {**LION, "betas": (0.9, 1.0)}, 1)


def halves(n, offset, seed):
    """Run the casts of fp16 on slices that start `offset` elements into their storage."""
    source = torch.empty(n + offset, dtype=torch.float16)
    source[offset:] = random_bits(n, seed, torch.bfloat16).view(torch.float16)
    acc = random_bits(n, seed + 1)
    half, wide, narrow, added = (
        source[offset:],
        torch.empty(n),
        torch.empty(n, dtype=torch.float16),
        acc.clone(),
    )
    kernels.widen_f16(n, *addresses(half, wide))
    kernels.narrow_f16(n, *addresses(acc, narrow))
    kernels.accumulate_f16(n, *addresses(added, half))
    calm = torch.nan_to_num(half, 0.0, 3.0, -3.0)
    square_sum, _ = kernels.sum_squares(n, calm.data_ptr(), "f16")
    total = torch.tensor([square_sum], dtype=torch.float64).view(torch.int32)
    return {
        "half": half,
        "acc": acc,
        "wide": wide,
        "narrow": narrow,
        "added": added,
        "calm": calm,
        "sum": total,
    }


@pytest.mark.parametrize(("n", "offset"), list(itertools.product(SIZES, (0, 1))))
def test_casts_of_fp16_are_torchs_and_the_same_under_every_isa(n, offset):
    same_under_every_isa(halves, n, offset)
    found = halves(n, offset, seed=n)
    expected = {
        "wide": found["half"].float(),
        "narrow": found["acc"].half(),
        "added": found["acc"] + found["half"].float(),
    }
    for name, value in expected.items():
        finite = ~value.isnan()
        assert torch.equal(bits(value)[finite], bits(found[name])[finite]), name
        assert torch.equal(value.isnan(), found[name].isnan())
    wide = found["calm"].float()
    assert kernels.sum_squares(n, wide.data_ptr(), "f32")[0] == found["sum"].view(torch.float64).item()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_fp16_value_that_is_not_finite_is_found(isa, bad):
    grad = torch.full((70_001,), 60_000.0, dtype=torch.float16)
    assert kernels.sum_squares(len(grad), grad.data_ptr(), "f16")[1]
    grad[69_999] = bad
    assert not kernels.sum_squares(len(grad), grad.data_ptr(), "f16")[1]
