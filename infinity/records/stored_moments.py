"""Moments as a record stores them, in fp32, 16, 8 or 4 bits, from and to fp32."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from infinity import kernels
from infinity.planning.layout import RecordSchema


def read_moments(
    schema: RecordSchema, numel: int, stored: Mapping[str, int], values: Mapping[str, int]
) -> None:
    """Widen `numel` elements of those of `m` and `v` that `values` has addresses for, in fp32.

    stored: addresses by field; what is not there, since no step has written it or no optimizer keeps it,
    counts as zero.
    """
    if not schema.in_blocks:
        for name, to in values.items():
            if name not in stored:
                ctypes.memset(to, 0, 4 * numel)
            elif schema.state_dtype == "bf16":
                kernels.widen(numel, stored[name], to)
            else:
                kernels.copy(4 * numel, to, stored[name])
        return
    if not values:
        return
    if "scale" not in stored or ("mv" in schema.moments and not {"m4", "v4", "mv"} & stored.keys()):
        for to in values.values():
            ctypes.memset(to, 0, 4 * numel)
        return
    unasked = torch.empty(numel, dtype=torch.float32, device="cpu")
    m, v = (values.get(name, unasked.data_ptr()) for name in ("m", "v"))
    if "mv" in stored:
        kernels.dequantize4(numel, stored["mv"], stored["scale"], m, v)
    elif "mv" in schema.moments:
        kernels.widen_moment("int4", numel, _alone(stored), m if "m4" in stored else v)
    else:
        none = torch.zeros(numel, dtype=torch.uint8, device="cpu")
        of_m, of_v = (stored.get(name, none.data_ptr()) for name in ("m", "v"))
        kernels.dequantize(numel, of_m, of_v, stored["scale"], m, v)


def round_moments(
    schema: RecordSchema,
    numel: int,
    stored: Mapping[str, int],
    values: Mapping[str, int],
    noise: tuple[int, int],
) -> None:
    """Store what a step has made of those of `m` and `v` that `values` has, in fp32, rounded at random.

    noise: the key of the step, and the parameter's element at which these begin. A moment that is not given
    keeps its bits: what is on the grid of codes stays where it is, whatever else its block does.
    """
    if schema.state_dtype == "fp32":
        write_moments(schema, numel, stored, values)
        return
    if "mv" in schema.moments and "mv" not in stored:
        for source in values.values():
            kernels.round_moment("int4", numel, _alone(stored), source, *noise)
        return
    wide, narrow = torch.zeros((2, 2, numel), dtype=torch.float32, device="cpu")
    others = {name: one.data_ptr() for name, one in zip(("m", "v"), wide, strict=True) if name not in values}
    read_moments(schema, numel, stored, others)
    m, v = ({**values, **others}[name] for name in ("m", "v"))
    unkept = {name: one.data_ptr() for name, one in zip(("m", "v"), narrow, strict=True)}
    state: Any = schema.state_dtype
    kernels.round_moments(numel, state, m, v, {**unkept, **stored}, *noise)


def write_moments(
    schema: RecordSchema, numel: int, stored: Mapping[str, int], values: Mapping[str, int]
) -> None:
    """Store `numel` elements of those of `m` and `v` that `values` has, in fp32, each rounded to the nearest.
    Codes of both moments share blocks: one that is not given keeps its own, to the bit. stored: addresses of
    the fields in which the parameter's moments are kept.
    """
    if not schema.in_blocks:
        for name, source in values.items():
            if schema.state_dtype == "bf16":
                kernels.narrow(numel, source, stored[name])
            else:
                kernels.copy(4 * numel, stored[name], source)
        return
    if not values:
        return
    if "mv" in schema.moments and "mv" not in stored:
        for source in values.values():
            kernels.round_moment("int4", numel, _alone(stored), source)
        return
    kept = torch.empty(numel, dtype=torch.float32, device="cpu")
    others = {name: kept.data_ptr() for name in ("m", "v") if name not in values}
    read_moments(schema, numel, stored, others)
    m, v = (values.get(name, kept.data_ptr()) for name in ("m", "v"))
    if "mv" in stored:
        kernels.quantize4(numel, m, v, stored["mv"], stored["scale"])
    else:
        none = torch.empty(numel, dtype=torch.uint8, device="cpu")
        of_m, of_v = (stored.get(name, none.data_ptr()) for name in ("m", "v"))
        kernels.quantize(numel, m, v, of_m, of_v, stored["scale"])


def _alone(stored: Mapping[str, int]) -> dict[str, int]:
    """Return the addresses of a moment that is kept alone, in 4 bits."""
    return {name: stored[name] for name in ("m4", "v4", "scale") if name in stored}
