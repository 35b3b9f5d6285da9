"""Reuses memory for the results of torch's pointwise operations inside a slice.

[Note: results of pointwise operations]
Between its linear layers an MLP makes tensors as large as those layers' results, in forward and backward: an
activation, a product, the gradients of both. Under malloc they would fragment the heap (see [Note: mapped
tensors]), and returning that memory to the kernel cost a sixth of a slice's time in page faults. Inside
slices on the CPU, torch's pointwise operations therefore write large results into the memory of earlier ones,
through their `out` variants, which compute the same bits. Running the same operation on the meta device tells
the result's shape and dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.tiling.mapped import LARGE_NBYTES, BufferPool


class Lending(TorchDispatchMode):
    """Context in which large results of pointwise operations on the CPU are allocated from `pool`."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, with memory of the pool for its result if that is large."""
        kwargs = kwargs or {}
        variant = _out_variant(func)
        like = _large_result(func, args, kwargs) if variant else None
        if variant is None or like is None:
            return func(*args, **kwargs)
        overload, name = variant
        out = self._pool.empty(like.shape, like.dtype, torch.device("cpu"))
        return overload(*args, **kwargs, **{name: out})


@functools.cache
def _out_variant(func: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, str] | None:
    """Return the `out` variant of a pointwise operation and the name of its out argument; None without one.

    Generated variants do not count: torch computes their result elsewhere and copies it.
    """
    inputs = [one.name for one in func._schema.arguments]
    if torch.Tag.pointwise not in func.tags or len(func._schema.returns) != 1:
        return None
    packet = func.overloadpacket
    for other in (getattr(packet, name) for name in packet.overloads()):
        arguments = other._schema.arguments
        outs = [one.name for one in arguments if one.is_out]
        same = [one.name for one in arguments if not one.is_out] == inputs
        if same and len(outs) == 1 and torch.Tag.generated not in other.tags:
            return other, outs[0]
    return None


def _large_result(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return an operation's result on the meta device, if it is a large, plain, contiguous CPU tensor."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    if max((one.nbytes for one in tensors), default=0) < LARGE_NBYTES // 4:
        return None
    if not all(map(_is_plain, tensors)):
        return None

    def meta(one: Any) -> Any:
        return one.to("meta") if isinstance(one, torch.Tensor) else one

    like: torch.Tensor = func(*map(meta, args), **{name: meta(one) for name, one in kwargs.items()})
    return like if like.is_contiguous() and like.nbytes >= LARGE_NBYTES else None


def _is_plain(one: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary CPU tensor for which the meta device predicts the result's dtype.

    It does not for integer tensors: torch wraps plain numbers as tensors, and type promotion then differs.
    """
    ordinary = type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu"
    return ordinary and (one.is_floating_point() or not one.dim())
