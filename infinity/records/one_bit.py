"""1-bit Adam's part of a record, and its steps once the variance is frozen: [Note: 1-bit Adam] in
reference/one_bit.py.

[Note: fields of workers]
A record of a rank has, beside `m` and `v` of its share of the unit, the momenta and the errors of what this
rank, or its machine, has of the unit's gradients: fields `wJ` and `eJ` of the part that goes to worker J,
each as long as the share. They lie where the record lies, are committed with it, and hashed.

Signs are packed eight in a byte, the first in the lowest bit, 1 for a negative one; of a share first the fp32
scales of all its blocks, then the signs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from infinity.planning.coded import coded_nbytes, scales_nbytes
from infinity.planning.layout import RecordSchema
from infinity.records.stored_moments import read_moments, round_moments
from infinity.records.update_rules import ADAM_STATE, ADAMW, CHUNK_NUMEL, Kernel, Recipe, UpdateSpan
from infinity.records.weights import WEIGHTS, WIDEN
from infinity.reference.one_bit import BLOCK, frozen_step, scales_of
from infinity.reference.recipe import canonical_, f32
from infinity.storage.memory import view


def worker_fields(worker: int) -> tuple[str, str]:
    """Return the names of the fields of the part that goes to a worker: its momentum, its error."""
    return f"w{worker}", f"e{worker}"


def all_worker_fields(workers: int) -> tuple[str, ...]:
    """Return the names of all of them."""
    return tuple(name for worker in range(workers) for name in worker_fields(worker))


# The codec, at one bit


def row_nbytes(numels: Iterable[int]) -> int:
    """Return the bytes of shares of so many elements, one behind the other."""
    return sum(coded_nbytes(one, 1) for one in numels)


def send(
    memory: np.ndarray[Any, Any],
    numel: int,
    start: int,
    state: tuple[torch.Tensor, torch.Tensor],
    g: torch.Tensor,
    beta1: float,
) -> None:
    """Update the momentum and the error of consecutive elements of a parameter, `state`, by its gradient `g`,
    all fp32, and put what is sent of it into the `memory` of a share of `numel`, from element `start` on,
    where a block begins.
    """
    w, e = state
    w.mul_(f32(beta1)).add_(g * f32(1 - beta1))
    u, count = w + e, len(w)
    blocks = torch.zeros(-(-count // BLOCK), BLOCK, dtype=torch.float32, device="cpu")
    blocks.view(-1)[:count] = u
    counts = torch.full((len(blocks),), float(BLOCK), device="cpu")
    counts[-1] = float(count - BLOCK * (len(blocks) - 1))
    scales = scales_of(blocks, counts)
    negative = (u < 0).numpy()
    at, place = scales_nbytes(numel) + start // 8, scales_nbytes(start)
    memory[place : place + 4 * len(scales)].view(np.float32)[:] = scales.numpy()
    packed = np.packbits(negative, bitorder="little")
    memory[at : at + len(packed)] = packed
    e.copy_(u - _signed(torch.from_numpy(negative), scales))


def decode(memory: np.ndarray[Any, Any], numel: int, start: int, count: int) -> torch.Tensor:
    """Return `count` elements of a share of `numel`, from `start` on, where a block begins, in fp32."""
    at, place = scales_nbytes(numel) + start // 8, scales_nbytes(start)
    scales = memory[place : place + scales_nbytes(count)].view(np.float32)
    bits = np.unpackbits(memory[at : at - (-count // 8)], count=count, bitorder="little")
    return _signed(torch.from_numpy(bits.view(np.bool_)), torch.from_numpy(scales.copy()))


def _signed(negative: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    each = scales.repeat_interleave(BLOCK)[: len(negative)]
    return torch.where(negative, -each, each)


# Steps


@dataclass(frozen=True, slots=True)
class FrozenScalars:
    """Those of a step whose variance is frozen. given: the gradient's place has the momentum, of all ranks;
    else it has the gradient, of the only one.
    """

    group: dict[str, Any]
    step: int
    given: bool


def _frozen(schema: RecordSchema) -> Kernel:
    """Return the kernel of a step whose variance keeps its bits."""
    weights, names = WEIGHTS[schema.dtype], (*schema.weights, *schema.moments_of(("m", "v")))

    def step(span: UpdateSpan, scalars: FrozenScalars) -> None:
        wide = torch.empty((4, min(span.n, CHUNK_NUMEL)), dtype=torch.float32, device="cpu")
        dtype = torch.float32 if span.dtype == "f32" else torch.bfloat16
        for start in range(0, span.n, CHUNK_NUMEL):
            n = min(CHUNK_NUMEL, span.n - start)
            p, m, v, given = (one[:n] for one in wide)
            at = {name: span.at[name] + schema.nbytes(name, start) for name in names}
            weights.read_master(n, at, p.data_ptr())
            read_moments(schema, n, at, {"m": m.data_ptr(), "v": v.data_ptr()})
            WIDEN[dtype](n, span.grad + dtype.itemsize * start, given.data_ptr())
            if scalars.given:
                m.copy_(given)
            else:
                beta1 = scalars.group["betas"][0]
                m.mul_(f32(beta1)).add_(given * f32(1 - beta1))
            frozen_step(p, m, v, scalars.step, scalars.group)
            for one in (p, m):
                canonical_(one)
            round_moments(schema, n, at, {"m": m.data_ptr()}, (span.key, span.first + start))
            weights.write_master(n, p.data_ptr(), at)

    return step


def floats(address: int, numel: int) -> torch.Tensor:
    """Return fp32 elements at an address, which the caller keeps alive."""
    return torch.frombuffer(view(address, 4 * numel), dtype=torch.float32)


def _either(warm: Kernel, frozen: Kernel) -> Kernel:
    def step(span: UpdateSpan, scalars: Any) -> None:
        (frozen if isinstance(scalars, FrozenScalars) else warm)(span, scalars)

    return step


def recipe_of(scalars: Any) -> Recipe:
    """Return the update rule: of masters that are fp32, or split, and of moments in any bits."""
    made = {
        (dtype, state): _either(ADAMW.kernels[dtype, state], _frozen(RecordSchema(state, dtype)))
        for dtype in ("bf16", "fp32")
        for state in ("fp32", "bf16", "int8", "int4")
    }
    return Recipe("OneBitAdam", ADAM_STATE, scalars, made)
