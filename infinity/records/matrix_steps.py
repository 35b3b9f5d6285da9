"""Steps that need a whole matrix at once: Muon's.

[Note: the muon step]
For each matrix of a parameter (a parameter of more dimensions is a stack of matrices, its last two), with the
operations of torch.optim.Muon in their order, so that its bits are torch's on the same number of threads:
    g = f32(grad) * clip
    m = lerp(m, g, 1 - momentum)            stored as the record stores moments, behind the next line
    u = lerp(g, m, momentum) with Nesterov, else m
    o = Newton-Schulz of bf16(u), see `orthogonalized`
    p = p * (1 - lr * weight_decay)
    p = p + (-lr * ratio of the shape) * o, an FMA
The first three and the last two lines treat each element by itself, so that tiles and ranks' shares of a
matrix give the bits of the whole. Between them lies what needs all of the matrix: two bytes an element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infinity import kernels
from infinity.planning.layout import RecordSchema
from infinity.records.weights import KERNEL_DTYPE, WIDEN, Weights
from infinity.storage.memory import view

CHUNK_NUMEL = 1 << 15
"""Elements that are stepped at a time, so that their values stay in the caches, and torch uses one thread."""

ADJUSTMENTS = (None, "original", "match_rms_adamw")
"""How the learning rate may depend on a matrix's shape: torch's `adjust_lr_fn`."""

_MOST_ITERATIONS = 100
_DTYPES = {name: dtype for dtype, name in KERNEL_DTYPE.items()}


@dataclass(frozen=True, slots=True)
class MuonScalars:
    """The hyperparameters of one step of Muon, with torch's names; see [Note: the muon step].

    adjust_lr_fn: how the learning rate depends on the matrix's shape, `shape`, which is known where the step
    is made. clip: fp32 factor on the gradient.
    """

    lr: float
    momentum: float
    weight_decay: float  # decoupled
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None = None
    clip: float = 1.0
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check them as torch does.

        Raises: ValueError naming the one out of range.
        """
        for name in ("lr", "momentum", "weight_decay", "eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value}: expected a finite number of at least 0")
        if not 0 <= self.ns_steps < _MOST_ITERATIONS:
            raise ValueError(f"ns_steps={self.ns_steps}: expected at least 0 and below {_MOST_ITERATIONS}")
        if len(self.ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients={self.ns_coefficients}: expected three numbers")
        if self.adjust_lr_fn not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn={self.adjust_lr_fn!r}: expected one of {ADJUSTMENTS}")

    @property
    def adjusted_lr(self) -> float:
        """The learning rate of a matrix of this shape."""
        rows, columns = self.shape[-2:]
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, columns)))
        return self.lr * math.sqrt(max(1, rows / columns))


def muon_scalars(group: Mapping[str, Any], _step: int, clip: float) -> MuonScalars:
    """Return the scalars of a param group."""
    return MuonScalars(
        float(group["lr"]),
        group["momentum"],
        group["weight_decay"],
        bool(group["nesterov"]),
        tuple(group["ns_coefficients"]),
        group["eps"],
        group["ns_steps"],
        group["adjust_lr_fn"],
        clip,
    )


def of_shape(scalars: MuonScalars, shape: Sequence[int]) -> MuonScalars:
    """Return the scalars for matrices of this shape."""
    return replace(scalars, shape=tuple(shape))


@torch.no_grad()
def gather(span: Any, schema: RecordSchema, scalars: MuonScalars, into: Tensor) -> None:
    """Update the momentum of the elements of `span`, an UpdateSpan of update_rules, and put what is to be
    orthogonalized into `into`, in bf16. A momentum that is not fp32 is widened, and rounded at random when it
    is stored.
    """
    n, dtype = span.n, _DTYPES[span.dtype]
    gradients, momenta = torch.empty((2, min(n, CHUNK_NUMEL)), dtype=torch.float32, device="cpu")
    state: Any = schema.state_dtype
    for start in range(0, n, CHUNK_NUMEL):
        count = min(CHUNK_NUMEL, n - start)
        at = {name: address + schema.nbytes(name, start) for name, address in span.at.items()}
        g, moved = gradients[:count], momenta[:count]
        WIDEN[dtype](count, span.grad + dtype.itemsize * start, g.data_ptr())
        if scalars.clip != 1:
            g.mul_(scalars.clip)
        if state == "fp32":
            moved = torch.frombuffer(view(at["m"], 4 * count), dtype=torch.float32)
        else:
            kernels.widen_moment(state, count, at, moved.data_ptr())
        moved.lerp_(g, 1 - scalars.momentum)
        into[start : start + count].copy_(g.lerp_(moved, scalars.momentum) if scalars.nesterov else moved)
        if state != "fp32":
            kernels.round_moment(state, count, at, moved.data_ptr(), span.key, span.first + start)


@torch.no_grad()
def orthogonalize(stack: Tensor, scalars: MuonScalars) -> None:
    """Replace each matrix of a stack, [..., rows, columns] in bf16, by its `orthogonalized`, in place."""
    with torch.autocast(stack.device.type, enabled=False):
        for matrix in stack.view(-1, *stack.shape[-2:]):
            matrix.copy_(orthogonalized(matrix, scalars))


def orthogonalized(matrix: Tensor, scalars: MuonScalars) -> Tensor:
    """Return U V^T, roughly, of a matrix in bf16 whose singular value decomposition is U S V^T, by a quintic
    Newton-Schulz iteration (Jordan et al., "Muon", 2024), in the operations of torch.optim.Muon. It
    overwrites the matrix.
    """
    a, b, c = scalars.ns_coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=scalars.eps))
    for _ in range(scalars.ns_steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


@torch.no_grad()
def _move(weights: Weights, n: int, at: Mapping[str, int], direction: int, scalars: MuonScalars) -> None:
    values = torch.empty(min(n, CHUNK_NUMEL), dtype=torch.float32, device="cpu")
    decay, rate = 1 - scalars.lr * scalars.weight_decay, -scalars.adjusted_lr
    widths = {"hi": weights.dtype.itemsize, "lo": 2, "master": 4}
    for start in range(0, n, CHUNK_NUMEL):
        count = min(CHUNK_NUMEL, n - start)
        part = {name: at[name] + width * start for name, width in widths.items() if name in at}
        p = values[:count]
        weights.read_master(count, part, p.data_ptr())
        o = torch.frombuffer(view(direction + 2 * start, 2 * count), dtype=torch.bfloat16)
        p.mul_(decay).add_(o, alpha=rate)
        weights.write_master(count, p.data_ptr(), part)


def moves(weights: Weights) -> Callable[[Any, MuonScalars], None]:
    """Return the kernel (see update_rules) that moves a record's weights along orthogonalized directions,
    which lie in the place of gradients, in bf16.
    """

    def step(span: Any, scalars: MuonScalars) -> None:
        _move(weights, span.n, span.at, span.grad, scalars)

    return step


@dataclass(frozen=True, slots=True)
class MatrixRule:
    """What a recipe does with whole matrices between the two elementwise parts of its step: `gather` before,
    the recipe's kernels after. The latter get the scalars that `of_shape` returns.
    """

    gather: Callable[[Any, RecordSchema, Any, Tensor], None]
    orthogonalize: Callable[[Tensor, Any], None]
    of_shape: Callable[[Any, Sequence[int]], Any]


MUON_RULE = MatrixRule(gather, orthogonalize, of_shape)
