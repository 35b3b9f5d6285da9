"""What `infinity bench adam` times: kernels with the streams of memory that they go through, and torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from infinity import kernels
from infinity.memory import Arena, view

READ, UPDATE, WRITE = 0, 1, 2  # kinds of a stream: as in kernels.h
BLOCK = kernels.STATE_BLOCK
MOST_STREAMS = 8
"""What an operation has at most."""
BESIDE = "torch, bf16 weight beside an fp32 master"
SPLIT = "adamw, fp32 moments"


@dataclass(frozen=True, slots=True)
class Stream:
    """One field that an operation goes through: bytes of each BLOCK elements, and what is done to them."""

    nbytes: int
    kind: int


@dataclass(frozen=True, slots=True)
class Operation:
    """What is timed: a kernel (under every instruction set, or the best alone) or somebody else's code."""

    name: str
    streams: tuple[Stream, ...]
    call: Callable[[], object]
    gradient: str = ""
    isas: tuple[str, ...] = ()
    """The instruction sets to time it with; none: it is not ours."""
    on: Callable[[int], bool] = lambda threads: threads > 0
    """Whether it is timed on so many threads."""
    is_step: bool = False
    """Whether it is an optimizer's step, which has a target."""

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes read and written."""
        return sum(one.nbytes * (2 if one.kind == UPDATE else 1) for one in self.streams) / BLOCK


@dataclass(frozen=True, slots=True)
class Memory:
    """Records of every kind with their gradients, room for casts, and room for the limit to scribble on."""

    hi: torch.Tensor
    lo: torch.Tensor
    moments: Mapping[str, tuple[torch.Tensor, ...]]  # by state dtype: m, v, and the scales of int8
    grad16: torch.Tensor
    grad32: torch.Tensor
    out: torch.Tensor
    spare: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, numel: int) -> Memory:
        """Take and touch all of it; ordinary values, since denormals would measure something else."""
        grad32 = _normal(numel, 1e-2)
        hi, lo = _filled(torch.int16, numel, numel)
        masters = _normal(numel, 2e-2)  # named: it has to live while the kernel reads it
        kernels.split(numel, masters.data_ptr(), hi.data_ptr(), lo.data_ptr())
        grad16 = _held(torch.bfloat16, numel).copy_(grad32)
        scales = -(-numel // BLOCK) * 2
        moments = {
            "fp32": _filled(torch.float32, numel, numel),
            "bf16": _filled(torch.bfloat16, numel, numel),
            "int8": (*_filled(torch.uint8, numel, numel), *_filled(torch.float32, scales)),
        }
        spare = _filled(torch.float32, *[numel] * MOST_STREAMS)
        (out,) = _filled(torch.float32, numel)
        return cls(hi, lo, moments, grad16, grad32, out, spare)


def _held(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return a tensor in memory as training holds records in, of huge pages where the machine has them."""
    return torch.frombuffer(Arena(numel * dtype.itemsize).map, dtype=dtype)


def _filled(dtype: torch.dtype, *sizes: int) -> tuple[torch.Tensor, ...]:
    """Return tensors of zeros whose pages exist: untouched, they are all the same one."""
    return tuple(_held(dtype, size).fill_(0) for size in sizes)


def _normal(numel: int, deviation: float) -> torch.Tensor:
    return _held(torch.float32, numel).normal_(std=deviation, generator=torch.Generator().manual_seed(0))


_SCALARS = kernels.AdamWScalars(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=10)
_WIDTHS = {"fp32": (4, 4), "bf16": (2, 2), "int8": (1, 1)}
_STEPS: dict[str, Callable[..., None]] = {
    "fp32": kernels.adamw,
    "bf16": kernels.adamw_bf16,
    "int8": kernels.adamw_int8,
}


def _streams(update: Sequence[float] = (), read: Sequence[float] = (), write: Sequence[float] = ()) -> Any:
    """Describe fields by their bytes per parameter."""
    kinds = ((UPDATE, update), (READ, read), (WRITE, write))
    return tuple(Stream(round(width * BLOCK), kind) for kind, widths in kinds for width in widths)


def steps(memory: Memory, isas: tuple[str, ...]) -> list[Operation]:
    """List the recipes: a step for every type of moments and of gradients."""
    found = []
    for state, widths in _WIDTHS.items():
        scale = (8 / BLOCK,) if state == "int8" else ()
        for gradient, grad, width in (("bf16", memory.grad16, 2), ("fp32", memory.grad32, 4)):
            fields = (memory.hi, memory.lo, *memory.moments[state], grad)
            places = [tensor.data_ptr() for tensor in fields]
            kind = "f32" if gradient == "fp32" else "bf16"
            noise = () if state == "fp32" else (kernels.state_key(0, 0, 10), 0)
            arguments = (grad.numel(), *places, kind, _SCALARS, *noise)

            def call(run: Callable[..., None] = _STEPS[state], arguments: Any = arguments) -> None:
                run(*arguments)

            streams = _streams(update=(2, 2, *widths, *scale), read=(width,))
            name = f"adamw, {state} moments"
            found.append(Operation(name, streams, call, gradient, isas, is_step=True))
    return found


def other_steps(memory: Memory, best: str) -> list[Operation]:
    """List the steps of other records, and of other optimizers, with the best instruction set alone."""
    n = memory.out.numel()
    hi, lo, g16, g32, out, other = (
        one.data_ptr()
        for one in (memory.hi, memory.lo, memory.grad16, memory.grad32, memory.out, memory.spare[0])
    )
    m, v = (one.data_ptr() for one in memory.moments["fp32"])
    sgd = kernels.SGDScalars(lr=1e-4, momentum=0.9, weight_decay=0.1, step=10)
    adagrad = kernels.AdagradScalars(lr=1e-4, eps=1e-10, weight_decay=0.1, step=10)
    lion = kernels.LionScalars(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1)
    # The bits of bf16 gradients are ordinary numbers as fp16, too.
    ours = [
        (
            ("adamw, fp16 weights", "fp16", _streams(update=(4, 4, 4), read=(2,), write=(2,))),
            lambda: kernels.adamw_fp16(n, other, out, m, v, g16, "f16", _SCALARS),
        ),
        (
            ("adamw, fp32 weights", "fp32", _streams(update=(4, 4, 4), read=(4,))),
            lambda: kernels.adamw_fp32(n, out, m, v, g32, "f32", _SCALARS),
        ),
        (
            ("adam", "bf16", _streams(update=(2, 2, 4, 4), read=(2,))),
            lambda: kernels.adam(n, hi, lo, m, v, g16, "bf16", _SCALARS),
        ),
        (
            ("sgd with momentum", "bf16", _streams(update=(2, 2, 4), read=(2,))),
            lambda: kernels.sgd(n, hi, lo, m, g16, "bf16", sgd),
        ),
        (
            ("adagrad", "bf16", _streams(update=(2, 2, 4), read=(2,))),
            lambda: kernels.adagrad(n, hi, lo, v, g16, "bf16", adagrad),
        ),
        (
            ("lion", "bf16", _streams(update=(2, 2, 4), read=(2,))),
            lambda: kernels.lion(n, hi, lo, m, g16, "bf16", lion),
        ),
    ]
    return [
        Operation(name, streams, call, gradient, (best,), is_step=True)
        for (name, gradient, streams), call in ours
    ]


def others(memory: Memory, best: str) -> list[Operation]:
    """List the other kernels and the hash of records, with the best instruction set alone."""
    n = memory.out.numel()
    hi, lo, g16, g32, out = (
        tensor.data_ptr() for tensor in (memory.hi, memory.lo, memory.grad16, memory.grad32, memory.out)
    )
    m, v, scale, other = (tensor.data_ptr() for tensor in (*memory.moments["int8"], memory.spare[0]))
    m32, v32 = (tensor.data_ptr() for tensor in memory.moments["fp32"])
    hashed = view(hi, 2 * n)
    ours = {
        "copy": (_streams(read=(4,), write=(4,)), lambda: kernels.copy(4 * n, out, g32)),
        "accumulate": (_streams(update=(4,), read=(2,)), lambda: kernels.accumulate(n, out, g16)),
        "sum_squares, bf16": (_streams(read=(2,)), lambda: kernels.sum_squares(n, g16, "bf16")),
        "sum_squares, fp32": (_streams(read=(4,)), lambda: kernels.sum_squares(n, g32, "f32")),
        "split": (_streams(read=(4,), write=(2, 2)), lambda: kernels.split(n, g32, other, other + 2 * n)),
        "join": (_streams(read=(2, 2), write=(4,)), lambda: kernels.join(n, hi, lo, out)),
        "widen": (_streams(read=(2,), write=(4,)), lambda: kernels.widen(n, g16, out)),
        "narrow": (_streams(read=(4,), write=(2,)), lambda: kernels.narrow(n, g32, out)),
        "quantize": (
            _streams(read=(4, 4), write=(1, 1, 8 / BLOCK)),
            lambda: kernels.quantize(n, m32, v32, m, v, scale),
        ),
        "dequantize": (
            _streams(read=(1, 1, 8 / BLOCK), write=(4, 4)),
            lambda: kernels.dequantize(n, m, v, scale, out, other),
        ),
    }
    found = [Operation(name, streams, call, isas=(best,)) for name, (streams, call) in ours.items()]
    digest = Operation(
        "xxh3 of hi", _streams(read=(2,)), lambda: xxhash.xxh3_64_intdigest(hashed), on=lambda n: n == 1
    )
    return [*found, digest]


def torchs(numel: int) -> list[Operation]:
    """List torch's fused AdamW on fp32 weights, and with bf16 weights and gradients beside fp32 masters."""
    master = torch.nn.Parameter(_normal(numel, 2e-2))
    master.grad = grad32 = _normal(numel, 1e-2)
    weight, grad16 = (_held(torch.bfloat16, numel).copy_(one.detach()) for one in (master, grad32))
    optimizer = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.1, fused=True)

    def beside() -> None:
        grad32.copy_(grad16)
        optimizer.step()
        weight.copy_(master.detach())

    plain = _streams(update=(4, 4, 4), read=(4,))
    return [
        Operation("torch fused AdamW, all fp32", plain, optimizer.step, "fp32"),
        Operation(BESIDE, (*plain, *_streams(read=(2, 4), write=(4, 2))), beside, "bf16"),
    ]
