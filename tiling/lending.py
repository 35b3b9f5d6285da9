"""Memory for what others' operations make inside a slice.

[Note: results of pointwise operations]
Between its linear layers an MLP makes tensors as large as their results, forward and backward: an activation,
a product, the gradients of both. malloc would leave holes where they were (see [Note: mapped tensors]), and
giving those back took a sixth of a slice's time in page faults. So inside slices on the CPU, pointwise
operations of torch's write large results where earlier ones were: by their own `out` variants, which compute
the same bits. What shape and dtype a result has, the same operation says on the meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.tiling.mapped import LARGE_NBYTES, BufferPool


class Lending(TorchDispatchMode):
    """Inside the `with`, large results of pointwise operations on the CPU lie in `pool`."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of torch's."""
        kwargs = kwargs or {}
        into = _into(func)
        like = _like(func, args, kwargs) if into else None
        if into is None or like is None:
            return func(*args, **kwargs)
        overload, name = into
        out = self._pool.empty(like.shape, like.dtype, torch.device("cpu"))
        return overload(*args, **kwargs, **{name: out})


@functools.cache
def _into(func: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, str] | None:
    """Return the same operation for a result that lies somewhere, and its name for that, if it is a pointwise
    one; not where torch would compute it elsewhere and copy.
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


def _like(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the result on the meta device, if it is large and a plain one of the CPU's."""
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
    """Whether it is an ordinary one on the CPU, and gives results on the meta device the dtype they have:
    numbers, which torch makes tensors, would not if others were integers.
    """
    ordinary = type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu"
    return ordinary and (one.is_floating_point() or not one.dim())
