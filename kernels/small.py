"""Steps on moments of 16, 8 and 4 bits, for every optimizer and form of weights: [Note: small moments]."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from infinity.kernels.checksums import Checksums
from infinity.kernels.library import ffi, library
from infinity.kernels.operations import (
    AnyGradientDtype,
    as_f32,
    as_u8,
    check,
    rounded,
    summed,
)
from infinity.kernels.recipes import rounded_adagrad, rounded_lion, rounded_sgd, type_of
from infinity.kernels.scalars import AdamWScalars

SmallRecipe: TypeAlias = Literal["adamw", "adam", "sgd", "adagrad", "lion"]
Weights: TypeAlias = Literal["bf16", "fp16", "fp32"]

WORD = 1 << 64  # a key, and what a counter stays below
_BITS = {"bf16": 16, "int8": 8, "int4": 4}
_WEIGHTS = {"bf16": (0, ("hi", "lo")), "fp16": (1, ("hi", "master")), "fp32": (2, ("hi",))}
"""As in kernels.h, and the names of their fields."""


def _check_noise(key: int, first: int) -> None:
    for name, value in (("key", key), ("first", first)):
        if not 0 <= value < WORD:
            message = f"{name}={value}: expected an unsigned 64-bit integer"
            raise ValueError(message)


@lru_cache(maxsize=64)
def rounded_small(scalars: AdamWScalars) -> Any:
    """Return the C struct of [Note: the small step], each scalar as in `rounded`."""
    struct = ffi.new("struct infinity_adamw_small *")
    correction = (1 - scalars.beta2**scalars.step) ** 0.5
    struct.decay = 1 - scalars.lr * scalars.weight_decay
    struct.beta1 = scalars.beta1
    struct.beta2 = scalars.beta2
    struct.grad_weight = scalars.clip * (1 - scalars.beta1)
    struct.root_weight = scalars.clip * (1 - scalars.beta2) ** 0.5
    struct.eps = scalars.eps * correction
    struct.step_factor = -(scalars.lr / (1 - scalars.beta1**scalars.step) * correction)
    return struct


_RECIPES: dict[str, tuple[int, tuple[str, ...], Any]] = {
    "adamw": (0, ("m", "v"), rounded_small),
    "adam": (1, ("m", "v"), rounded),
    "sgd": (2, ("m",), rounded_sgd),
    "adagrad": (3, ("v",), rounded_adagrad),
    "lion": (4, ("m",), rounded_lion),
}
"""As in kernels.h, their moments, and how their scalars become C's."""


def fields_of_moments(recipe: SmallRecipe, state: str) -> tuple[str, ...]:
    """Return the names of the fields in which an optimizer's moments are kept."""
    moments = _RECIPES[recipe][1]
    if state == "int4":
        moments = ("mv",) if len(moments) == 2 else (f"{moments[0]}4",)
    return moments if state == "bf16" else (*moments, "scale")


def small_step(
    recipe: SmallRecipe,
    weights: Weights,
    state: Literal["bf16", "int8", "int4"],
    n: int,
    at: Mapping[str, int],
    grad: int,
    dtype: AnyGradientDtype,
    scalars: Any,
    key: int,
    first: int,
    sums: Checksums | None = None,
) -> None:
    """Apply an optimizer's step to n elements whose moments are small, rounded stochastically after it.

    at: addresses by field: `hi` beside `lo` (bf16) or `master` (fp16), or alone (fp32); the moments `m` and
    `v`, of int4 `mv`, both in a byte, or `m4` or `v4`, two elements in a byte; and `scale` of int8 and int4:
    two fp32 for each STATE_BLOCK elements, counted from the range's first (8 bytes also for a shorter last
    one), m's, then v's. Memory of zeros means moments of zero. `key` is `state_key` of this parameter's step,
    `first` the first element's index in its parameter. They alone determine the random bits: a range cut in
    two, of int8 and int4 at a multiple of STATE_BLOCK, each part with its own `first`, gives the same result.
    `sums` as in `adamw`.
    """
    number, _, c_struct = _RECIPES[recipe]
    form, names = _WEIGHTS[weights]
    names = (*names, *fields_of_moments(recipe, state))
    check(n, **{name: at[name] for name in names}, grad=grad)
    _check_noise(key, first)
    held = c_struct(scalars)
    struct = _struct(state, {name: at[name] for name in names}, weights=form, recipe=number, scalars=held)
    library.infinity_small_step(
        n, struct, ffi.cast("void *", grad), type_of(dtype), key, first, *summed(sums)
    )


_MEMBERS = {"hi": "weight", "lo": "master", "m4": "m", "v4": "v"}
"""Of the C struct, for these fields."""


def _struct(state: str, at: Mapping[str, int], **members: Any) -> Any:
    for name, address in at.items():
        place = as_f32(address) if name == "scale" else ffi.cast("void *", address)
        members[_MEMBERS.get(name, name)] = place
    return ffi.new("struct infinity_small *", {"bits": _BITS[state], **members})


def widen_moment(state: Literal["bf16", "int8", "int4"], n: int, at: Mapping[str, int], f32: int) -> None:
    """Convert n elements of the one moment that an optimizer keeps to fp32, exactly. at: addresses of its
    fields, as in `small_step`.
    """
    check(n, **at, f32=f32)
    library.infinity_widen_moment(n, _struct(state, at), as_f32(f32))


def round_moment(
    state: Literal["bf16", "int8", "int4"],
    n: int,
    at: Mapping[str, int],
    f32: int,
    key: int | None = None,
    first: int = 0,
) -> None:
    """Round n elements of such a moment from fp32, and store them: at random, as `small_step` does, by the
    `key` of a step; without one to the nearest, ties away from zero.
    """
    check(n, **at, f32=f32)
    _check_noise(key or 0, first)
    moments = (f32, 0) if {"m", "m4"} & at.keys() else (0, f32)
    library.infinity_round_moments(n, _struct(state, at), *map(as_f32, moments), key or 0, first, key is None)


def quantize(n: int, m_f32: int, v_f32: int, m: int, v: int, scale: int) -> None:
    """Convert n fp32 moments to the 8-bit codes and scales of [Note: 8-bit moments], each to the nearest.

    The error of an m is at most 1/16 of itself, or half its block's smallest code, which is about 2^-15.75 of
    the scale. The error of a v is at most 1/16 of itself; but below its block's smallest code, about 2^-31.75
    of the scale, a v becomes that code, never 0. The sign of v is dropped.
    """
    check(n, m_f32=m_f32, v_f32=v_f32, m=m, v=v, scale=scale)
    library.infinity_quantize(n, as_f32(m_f32), as_f32(v_f32), as_u8(m), as_u8(v), as_f32(scale))


def dequantize(n: int, m: int, v: int, scale: int, m_f32: int, v_f32: int) -> None:
    """Convert n pairs of 8-bit codes, and their blocks' scales, to fp32 moments, exactly."""
    check(n, m=m, v=v, scale=scale, m_f32=m_f32, v_f32=v_f32)
    library.infinity_dequantize(n, as_u8(m), as_u8(v), as_f32(scale), as_f32(m_f32), as_f32(v_f32))


def quantize4(n: int, m_f32: int, v_f32: int, mv: int, scale: int) -> None:
    """Convert n fp32 moments to the 4-bit codes and scales of [Note: 4-bit moments], each to the nearest."""
    check(n, m_f32=m_f32, v_f32=v_f32, mv=mv, scale=scale)
    library.infinity_quantize4(n, as_f32(m_f32), as_f32(v_f32), as_u8(mv), as_f32(scale))


def dequantize4(n: int, mv: int, scale: int, m_f32: int, v_f32: int) -> None:
    """Convert n pairs of 4-bit codes, and their blocks' scales, to fp32 moments, exactly."""
    check(n, mv=mv, scale=scale, m_f32=m_f32, v_f32=v_f32)
    library.infinity_dequantize4(n, as_u8(mv), as_f32(scale), as_f32(m_f32), as_f32(v_f32))


def round_moments(
    n: int,
    state: Literal["bf16", "int8", "int4"],
    m_f32: int,
    v_f32: int,
    at: Mapping[str, int],
    key: int,
    first: int,
) -> None:
    """Convert n fp32 moments to small ones, rounded stochastically, as `small_step` rounds those of its step.

    at: addresses of `m` and `v`, or `mv` of int4, and of `scale` of int8 and int4; key, first: as there.
    """
    at = {name: at[name] for name in fields_of_moments("adamw", state)}
    check(n, m_f32=m_f32, v_f32=v_f32, **at)
    _check_noise(key, first)
    library.infinity_round_moments(n, _struct(state, at), as_f32(m_f32), as_f32(v_f32), key, first, False)
