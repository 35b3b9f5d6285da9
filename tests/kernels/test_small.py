"""Steps on small moments, of each optimizer on weights of each type. Trusted: reference. Faked: nothing."""

import itertools
from functools import partial

import pytest
import torch

from infinity import kernels, reference
from infinity.reference import moments as reference_state
from infinity.reference import steps as reference_steps
from kernel_cases import (
    GRADIENTS,
    addresses,
    bits,
    join,
    random_bits,
    same_on_any_threads,
    same_under_every_isa,
    scalars_of,
    shifted,
    split,
)

KEY = kernels.state_key(seed=1, parameter=2, step=3)
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
GROUPS = {
    "adamw": ADAM,
    "adam": ADAM,
    "sgd": {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True},
    "adagrad": {"lr": 1e-2, "lr_decay": 0.01, "eps": 1e-10, "weight_decay": 0.1},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
}
STATES = [(recipe, state) for recipe in GROUPS for state in ("bf16", "int8", "int4")]


PER_BYTE = {"m4": 2, "v4": 2}
"""Elements to a byte."""


def settings(recipe, step, clip):
    return scalars_of(recipe, GROUPS[recipe], step, clip)


def weights_of(weights, master):
    """Return the fields of a record's weights."""
    if weights == "bf16":
        return dict(zip(("hi", "lo"), split(master), strict=True))
    return {"hi": master.half(), "master": master.clone()} if weights == "fp16" else {"hi": master.clone()}


def master_of(weights, fields):
    if weights == "bf16":
        return join(fields["hi"], fields["lo"])
    return fields["master" if weights == "fp16" else "hi"]


def moments_of(recipe, state, n):
    """Return fields of moments of zeros."""
    width = {"bf16": torch.bfloat16, "int8": torch.uint8, "int4": torch.uint8}[state]
    scales = 2 * -(-n // kernels.STATE_BLOCK)
    return {
        name: torch.zeros(scales)
        if name == "scale"
        else torch.zeros(-(-n // PER_BYTE.get(name, 1)), dtype=width)
        for name in kernels.fields_of_moments(recipe, state)
    }


def run(recipe, weights, state, fields, grad, scalars, key=KEY, first=0):
    dtype = next(name for name, kind in GRADIENTS.items() if kind == grad.dtype)
    at = {name: field.data_ptr() for name, field in fields.items()}
    kernels.small_step(recipe, weights, state, len(grad), at, grad.data_ptr(), dtype, scalars, key, first)


def reference_step(recipe, p, grad, clip, step, m, v):
    group = GROUPS[recipe]
    if recipe == "lion":
        reference_steps.lion_step(p, m, grad, clip, group)
    elif recipe in ("sgd", "adagrad"):
        moment, make = (m, reference_steps.sgd_step) if recipe == "sgd" else (v, reference_steps.adagrad_step)
        make(p, moment, grad, clip, step, group)
    else:
        make = reference_steps.adam_step if recipe == "adam" else reference.adamw_small_step
        make(p, m, v, grad, clip, step, group)


def as_in_records(state, stored):
    """Return the reference's stored moments by the names of records' fields."""
    m, v = stored["exp_avg"], stored["exp_avg_sq"]
    if state == "int4":
        m4, v4 = (torch.nn.functional.pad(one, (0, len(one) % 2)).view(-1, 2) for one in (m, v))
        alone = {"m4": m4[:, 0] | m4[:, 1] << 4, "v4": v4[:, 0] | v4[:, 1] << 4}
        return {"mv": m | v << 4, **alone, "scale": stored["scale"]}
    return {"m": m, "v": v, **({"scale": stored["scale"]} if state == "int8" else {})}


@pytest.mark.parametrize(
    ("weights", "dtype"), [("bf16", "bf16"), ("bf16", "f32"), ("fp16", "f16"), ("fp32", "f32")]
)
@pytest.mark.parametrize(("recipe", "state"), STATES)
def test_each_step_equals_its_reference_bit_for_bit(isa, recipe, state, weights, dtype):
    n, generator = 1_301, torch.Generator().manual_seed(1)
    master = torch.randn(n, generator=generator)
    stored = reference_state.zero_moments(master, state)
    fields = {**weights_of(weights, master), **moments_of(recipe, state, n)}
    clip = torch.tensor(0.37)
    for step in range(1, 6):
        size = 10.0 ** torch.randint(-25, 3, (n,), generator=generator)
        if step % 2:
            size = size[:1].repeat(n)
        grad = (torch.randn(n, generator=generator) * size).to(GRADIENTS[dtype])
        if step == 4:
            grad[::301] = torch.inf
            grad[3::301] = torch.nan
        key = reference_state.state_key(5, 6, step)
        make = partial(reference_step, recipe, master, grad, clip, step)
        reference_state.step_stored(stored, key, state, make)
        run(recipe, weights, state, fields, grad, settings(recipe, step, clip.item()), key)
        assert torch.equal(bits(master), bits(master_of(weights, fields)))
        if weights == "fp16":
            assert torch.equal(bits(reference.rounded(master, torch.float16)), bits(fields["hi"]))
        for name, expected in as_in_records(state, stored).items():
            if name in fields:
                assert torch.equal(bits(expected), bits(fields[name])), (step, name)


def round_moments(state, m, v, fields, key=KEY, first=0):
    at = {name: field.data_ptr() for name, field in fields.items()}
    kernels.round_moments(len(m), state, *addresses(m, v), at, key, first)


@pytest.mark.parametrize("state", ["bf16", "int8", "int4"])
def test_moments_that_others_have_made_are_rounded_as_those_of_a_step(isa, state):
    n, generator = 1_301, torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.randint(-20, 3, (2, n), generator=generator)
    m, v = torch.randn((2, n), generator=generator) * sizes
    v = v.abs()
    m[::301], v[7::301] = torch.inf, torch.nan
    stored, fields = reference_state.zero_moments(m, state), moments_of("adam", state, n)
    reference_state.store(stored, m, v, KEY, state)
    round_moments(state, m, v, fields)
    expected = as_in_records(state, stored)
    assert all(torch.equal(bits(expected[name]), bits(field)) for name, field in fields.items())
    cut, parts = 768, moments_of("adam", state, n)
    for start, end in ((0, cut), (cut, n)):
        part = {
            name: one[start // kernels.STATE_BLOCK * 2 :] if name == "scale" else one[start:end]
            for name, one in parts.items()
        }
        round_moments(state, m[start:end], v[start:end], part, first=start)
    assert all(torch.equal(bits(one), bits(parts[name])) for name, one in fields.items())


def every_operation(n, offset, seed):
    """Run each step on slices that start `offset` elements into their storage; return what each gave."""
    slice_of = partial(shifted, offset=offset)
    master, wild = random_bits(n, seed), random_bits(n, seed + 1)
    calm = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    results = {}
    for recipe, state in STATES:
        for weights, grads in (
            ("bf16", (wild, calm.bfloat16())),
            ("fp16", (calm.half(),)),
            ("fp32", (calm,)),
        ):
            fields = {**weights_of(weights, master), **moments_of(recipe, state, n)}
            fields = {name: slice_of(field) for name, field in fields.items()}
            for step, grad in enumerate((*grads, *grads), 1):
                run(recipe, weights, state, fields, slice_of(grad), settings(recipe, step, 0.3), first=offset)
            results |= {f"{recipe} {state} {weights} {name}": field for name, field in fields.items()}
    for state in ("bf16", "int8", "int4"):
        fields = {name: slice_of(field) for name, field in moments_of("adam", state, n).items()}
        round_moments(state, slice_of(wild), slice_of(calm.square()), fields, first=offset)
        results |= {f"rounded {state} {name}": field for name, field in fields.items()}
    codes = {name: slice_of(one) for name, one in moments_of("adam", "int4", n).items()}
    squares = calm.square()
    kernels.quantize4(n, *addresses(wild, squares, *codes.values()))
    back = [torch.empty(n) for _ in range(2)]
    kernels.dequantize4(n, *addresses(*codes.values(), *back))
    return {**results, **codes, "m": back[0], "v": back[1]}


@pytest.mark.parametrize(
    ("n", "offset"), [*list(itertools.product((0, 1, 7, 9, 17, 33, 255, 257), (0, 1))), (16385, 1)]
)
def test_every_isa_gives_the_scalar_bits_at_any_size_and_alignment(n, offset):
    same_under_every_isa(every_operation, n, offset)


def test_any_number_of_threads_gives_the_same_bits():
    same_on_any_threads(every_operation)


@pytest.mark.parametrize(
    ("recipe", "state"), [("adamw", "int4"), ("lion", "int8"), ("adagrad", "bf16"), ("sgd", "int4")]
)
def test_a_range_cut_in_pieces_gives_the_same_bits(recipe, state):
    n, cut = 5_021, 1_280
    grad, results = torch.randn(n, generator=torch.Generator().manual_seed(1)), []
    for cuts in ((0, n), (0, cut, n)):
        fields = {**weights_of("fp32", torch.ones(n)), **moments_of(recipe, state, n)}
        for step in (1, 2, 3):
            for start, end in itertools.pairwise(cuts):
                part = {
                    name: one[start // kernels.STATE_BLOCK * 2 :]
                    if name == "scale"
                    else one[start // PER_BYTE.get(name, 1) :]
                    for name, one in fields.items()
                }
                run(
                    recipe,
                    "fp32",
                    state,
                    part,
                    grad[start:end],
                    settings(recipe, step, 1.0),
                    KEY + step,
                    start,
                )
        results.append(fields)
    assert all(torch.equal(bits(one), bits(results[1][name])) for name, one in results[0].items())


ALONE = {"bf16": ("m", "v"), "int8": ("m", "v"), "int4": ("m4", "v4")}


@pytest.mark.parametrize("n", [1, 7, 256, 5_021])
@pytest.mark.parametrize("state", ALONE)
@pytest.mark.parametrize("moment", [0, 1])
def test_one_moment_is_rounded_as_by_a_step_and_comes_back_as_the_reference_has_it(isa, state, moment, n):
    values, key = random_bits(n, 5).nan_to_num(1.0).abs(), reference_state.state_key(1, 2, 3)
    both = [values if number == moment else torch.zeros(n) for number in (0, 1)]
    stored = reference_state.zero_moments(values, state)
    reference_state.store(stored, *both, key, state)
    name = ALONE[state][moment]
    codes = torch.zeros(
        -(-n // PER_BYTE.get(name, 1)), dtype=torch.bfloat16 if state == "bf16" else torch.uint8
    )
    fields = {name: codes, "scale": torch.zeros(2 * -(-n // kernels.STATE_BLOCK))}
    at = {one: field.data_ptr() for one, field in fields.items() if one != "scale" or state != "bf16"}
    kernels.round_moment(state, n, at, values.data_ptr(), key)
    for one, expected in as_in_records(state, stored).items():
        if one in at:
            assert torch.equal(bits(expected), bits(fields[one])), one
    back, again = torch.empty(n), codes.clone()
    kernels.widen_moment(state, n, at, back.data_ptr())
    assert torch.equal(back, reference_state.widened(stored, state)[moment])
    kernels.round_moment(state, n, at, back.data_ptr())
    assert torch.equal(bits(codes), bits(again)), "to the nearest: what is on the grid stays"


def test_a_4_bit_moment_is_right_on_average():
    n = 1 << 16
    for value in (0.93, -0.3, 0.07):
        grad = torch.full((n,), value)
        grad[::256] = 1.0
        fields = {**weights_of("fp32", torch.zeros(n)), **moments_of("adamw", "int4", n)}
        scalars = kernels.AdamWScalars(1e-3, 0.0, 0.0, 1e-8, 0.0, 1)
        run("adamw", "fp32", "int4", fields, grad, scalars)
        m, v = torch.empty(n), torch.empty(n)
        kernels.dequantize4(n, *addresses(fields["mv"], fields["scale"], m, v))
        others = torch.arange(n) % 256 != 0
        for found, exact in ((m, value), (v, value * value)):
            assert len(found[others].unique()) <= 2
            assert abs(found[others].mean().item() / exact - 1) < 0.02


def test_what_cannot_be_meant_is_refused_at_the_border():
    at = {"hi": 8, "m": 8, "v": 8}
    with pytest.raises(ValueError, match="key=-1"):
        kernels.small_step("adam", "fp32", "bf16", 1, at, 8, "f32", settings("adam", 1, 1.0), -1, 0)
    with pytest.raises(ValueError, match="dtype='f64'"):
        kernels.small_step("adam", "fp32", "bf16", 1, at, 8, "f64", settings("adam", 1, 1.0), 0, 0)
    with pytest.raises(ValueError, match="first=-1"):
        kernels.round_moments(1, "bf16", 8, 8, at, 0, -1)
    with pytest.raises(ValueError, match="v=0"):
        kernels.small_step(
            "adam", "fp32", "bf16", 1, {**at, "v": 0}, 8, "f32", settings("adam", 1, 1.0), 0, 0
        )
