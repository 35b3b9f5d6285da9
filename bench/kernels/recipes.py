"""The operations of `infinity bench adam`: kernels with their streams of memory, and torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from infinity import kernels
from infinity.storage.memory import Arena, view

READ, UPDATE, WRITE = 0, 1, 2  # kinds of a stream: as in kernels.h
BLOCK = kernels.STATE_BLOCK
BESIDE = "torch, bf16 weight beside an fp32 master"
SPLIT = "adamw, fp32 moments"


@dataclass(frozen=True, slots=True)
class FieldStream:
    """One field of an operation: its bytes per BLOCK elements, and whether they are read or written."""

    nbytes: int
    kind: int
    address: int


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation to time: one of our kernels, or torch's or xxhash's code."""

    name: str
    streams: tuple[FieldStream, ...]
    call: Callable[[], object]
    gradient: str = ""
    isas: tuple[str, ...] = ()
    """The instruction sets to time it with; empty: it is not one of our kernels."""
    on: Callable[[int], bool] = lambda threads: threads > 0
    """Whether it is timed on this number of threads."""
    is_step: bool = False
    """Whether it is an optimizer step, which has a target."""

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes read and written."""
        return sum(one.nbytes * (2 if one.kind == UPDATE else 1) for one in self.streams) / BLOCK


@dataclass(frozen=True, slots=True)
class Memory:
    """Records of every kind with their gradients, and memory for casts and copies."""

    hi: torch.Tensor
    lo: torch.Tensor
    moments: Mapping[str, tuple[torch.Tensor, ...]]  # by state dtype: m, v, and the scales of int8
    grad16: torch.Tensor
    grad32: torch.Tensor
    out: torch.Tensor
    other: torch.Tensor

    @classmethod
    def of(cls, numel: int) -> Memory:
        """Allocate and fill all of it with ordinary values, since denormals are slower."""
        grad32 = _normal(numel, 1e-2)
        hi, lo = _filled(torch.int16, numel, numel)
        masters = _normal(numel, 2e-2)  # a variable, so that it lives while the kernel reads it
        kernels.split(numel, masters.data_ptr(), hi.data_ptr(), lo.data_ptr())
        grad16 = _held(torch.bfloat16, numel).copy_(grad32)
        scales = -(-numel // BLOCK) * 2
        moments = {
            "fp32": _filled(torch.float32, numel, numel),
            "bf16": _filled(torch.bfloat16, numel, numel),
            "int8": (*_filled(torch.uint8, numel, numel), *_filled(torch.float32, scales)),
        }
        out, other = _filled(torch.float32, numel, numel)
        return cls(hi, lo, moments, grad16, grad32, out, other)


def _held(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return a tensor in the kind of memory that training uses for records, with huge pages if possible."""
    return torch.frombuffer(Arena(numel * dtype.itemsize).map, dtype=dtype)


def _filled(dtype: torch.dtype, *sizes: int) -> tuple[torch.Tensor, ...]:
    """Return tensors of zeros in memory of their own: untouched pages would all be the same zero page."""
    return tuple(_held(dtype, size).fill_(0) for size in sizes)


def _normal(numel: int, deviation: float) -> torch.Tensor:
    return _held(torch.float32, numel).normal_(std=deviation, generator=torch.Generator().manual_seed(0))


_SCALARS = kernels.AdamWScalars(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=10)


_Fields = Sequence[torch.Tensor]


def _streams(numel: int, *, update: _Fields = (), read: _Fields = (), write: _Fields = ()) -> Any:
    """Describe the fields of an operation on `numel` parameters."""
    kinds = ((UPDATE, update), (READ, read), (WRITE, write))
    return tuple(
        FieldStream(one.nbytes * BLOCK // numel, kind, one.data_ptr())
        for kind, fields in kinds
        for one in fields
    )


def steps(memory: Memory, isas: tuple[str, ...]) -> list[Operation]:
    """List the AdamW steps for every dtype of moments and of gradients."""
    found = []
    n = memory.out.numel()
    for state, moments in memory.moments.items():
        record = (memory.hi, memory.lo, *moments)
        places = [tensor.data_ptr() for tensor in record]
        for gradient, kind, grad in (("bf16", "bf16", memory.grad16), ("fp32", "f32", memory.grad32)):
            arguments: tuple[Any, ...] = (n, *places, grad.data_ptr(), kind, _SCALARS)
            call: Callable[[], None] = partial(kernels.adamw, *arguments)
            if state != "fp32":
                at = dict(zip(("hi", "lo", "m", "v", "scale"), places, strict=False))
                arguments = (state, n, at, *arguments[-3:], kernels.state_key(0, 0, 10), 0)
                call = partial(kernels.small_step, "adamw", "bf16", *arguments)
            streams = _streams(n, update=record, read=(grad,))
            name = f"adamw, {state} moments"
            found.append(Operation(name, streams, call, gradient, isas, is_step=True))
    return found


def other_steps(memory: Memory, best: str) -> list[Operation]:
    """List the steps of other records and other optimizers, with the best instruction set only."""
    n = memory.out.numel()
    weight16 = _halves(memory.other)[0]
    fields = (memory.hi, memory.lo, *memory.moments["fp32"], memory.grad16, memory.grad32, memory.out)
    hi, lo, m, v, g16, g32, out, w16 = (one.data_ptr() for one in (*fields, weight16))
    split = (memory.hi, memory.lo)
    m_only, v_only = (_streams(n, update=(*split, one), read=(memory.grad16,)) for one in fields[2:4])
    sgd = kernels.SGDScalars(lr=1e-4, momentum=0.9, weight_decay=0.1, step=10)
    adagrad = kernels.AdagradScalars(lr=1e-4, eps=1e-10, weight_decay=0.1, step=10)
    lion = kernels.LionScalars(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1)
    # The bits of bf16 gradients are ordinary numbers also as fp16.
    whole = (memory.out, *memory.moments["fp32"])
    half = _streams(n, update=whole, read=(memory.grad16,), write=(weight16,))
    ours = [
        (
            ("adamw, fp16 weights", "fp16", half),
            lambda: kernels.adamw_fp16(n, w16, out, m, v, g16, "f16", _SCALARS),
        ),
        (
            ("adamw, fp32 weights", "fp32", _streams(n, update=whole, read=(memory.grad32,))),
            lambda: kernels.adamw_fp32(n, out, m, v, g32, "f32", _SCALARS),
        ),
        (
            ("adam", "bf16", _streams(n, update=(*split, *fields[2:4]), read=(memory.grad16,))),
            lambda: kernels.adam(n, hi, lo, m, v, g16, "bf16", _SCALARS),
        ),
        (("sgd with momentum", "bf16", m_only), lambda: kernels.sgd(n, hi, lo, m, g16, "bf16", sgd)),
        (("adagrad", "bf16", v_only), lambda: kernels.adagrad(n, hi, lo, v, g16, "bf16", adagrad)),
        (("lion", "bf16", m_only), lambda: kernels.lion(n, hi, lo, m, g16, "bf16", lion)),
    ]
    return [
        Operation(name, streams, call, gradient, (best,), is_step=True)
        for (name, gradient, streams), call in ours
    ]


def _halves(fp32: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return two halves of an fp32 tensor's memory, each with as many elements, of 16 bits."""
    return fp32.view(torch.int16).chunk(2)


def others(memory: Memory, best: str) -> list[Operation]:
    """List the other kernels, with the best instruction set only, and the hash of records."""
    n = memory.out.numel()
    split, halves, state = (memory.hi, memory.lo), _halves(memory.other), memory.moments["int8"]
    hi, lo, g16, g32, out = (
        tensor.data_ptr() for tensor in (*split, memory.grad16, memory.grad32, memory.out)
    )
    m, v, scale, other, other_lo = (tensor.data_ptr() for tensor in (*state, *halves))
    m32, v32 = (tensor.data_ptr() for tensor in memory.moments["fp32"])
    hashed = view(hi, 2 * n)
    grads16, grads32 = (memory.grad16,), (memory.grad32,)
    ours = {
        "copy": ((grads32, (memory.out,)), lambda: kernels.copy(4 * n, out, g32)),
        "sum_squares, bf16": ((grads16, ()), lambda: kernels.sum_squares(n, g16, "bf16")),
        "sum_squares, fp32": ((grads32, ()), lambda: kernels.sum_squares(n, g32, "f32")),
        "split": ((grads32, halves), lambda: kernels.split(n, g32, other, other_lo)),
        "join": ((split, (memory.out,)), lambda: kernels.join(n, hi, lo, out)),
        "widen": ((grads16, (memory.out,)), lambda: kernels.widen(n, g16, out)),
        "narrow": ((grads32, halves[:1]), lambda: kernels.narrow(n, g32, other)),
        "quantize": (
            (memory.moments["fp32"], state),
            lambda: kernels.quantize(n, m32, v32, m, v, scale),
        ),
        "dequantize": (
            (state, (memory.out, memory.other)),
            lambda: kernels.dequantize(n, m, v, scale, out, other),
        ),
    }
    accumulated = _streams(n, update=(memory.out,), read=grads16)
    digest = Operation(
        "xxh3 of hi",
        _streams(n, read=(memory.hi,)),
        lambda: xxhash.xxh3_64_intdigest(hashed),
        on=lambda n: n == 1,
    )
    return [
        Operation("accumulate", accumulated, lambda: kernels.accumulate(n, out, g16), isas=(best,)),
        *(
            Operation(name, _streams(n, read=read, write=write), call, isas=(best,))
            for name, ((read, write), call) in ours.items()
        ),
        digest,
    ]


def torchs(numel: int) -> list[Operation]:
    """List torch's fused AdamW on fp32 weights, and with bf16 weights and gradients beside fp32 masters."""
    master = torch.nn.Parameter(_normal(numel, 2e-2))
    master.grad = grad32 = _normal(numel, 1e-2)
    weight, grad16 = (_held(torch.bfloat16, numel).copy_(one.detach()) for one in (master, grad32))
    optimizer = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.1, fused=True)
    m, v = _filled(torch.float32, numel, numel)
    optimizer.state[master] = {"step": torch.zeros(()), "exp_avg": m, "exp_avg_sq": v}

    def beside() -> None:
        grad32.copy_(grad16)
        optimizer.step()
        weight.copy_(master.detach())

    record = (master, m, v)
    plain = _streams(numel, update=record, read=(grad32,))
    more = _streams(numel, update=record, read=(grad16, grad32, master), write=(grad32, weight))
    return [
        Operation("torch fused AdamW, all fp32", plain, optimizer.step, "fp32"),
        Operation(BESIDE, more, beside, "bf16"),
    ]
