"""A weight that is kept in blocks of rows, in one piece of memory for as long as it is edited.

[Note: one piece of memory]
Code that edits a weight takes slices and views of it: `w.data[3:5].fill_(0)`, `nn.init.zeros_(w[-1:])`. Of
blocks that were put together for one call, such a view would be a copy, and what is written to it lost. So,
inside `gathered`, the first use of the whole weight gives it memory, and the blocks become parts of that
memory: what changes one has changed the other. When the `with` ends, the blocks get their own memory back,
with the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_DATA: Any = torch.Tensor.data
"""The attribute `data` of torch, past what a class of parameters makes of it."""


class OnePiece:
    """The memory of a whole weight, of which its blocks are parts."""

    def __init__(self, values: torch.Tensor, blocks: Sequence[nn.Parameter]) -> None:
        """Let `blocks`, along dimension 0, become parts of `values`, whose content is overwritten."""
        self._values = values
        self._alone = _shares(values)
        self._blocks = list(blocks)
        self._own = [_DATA.__get__(one) for one in blocks]
        self._parts = list(values.split([len(one) for one in blocks]))
        for block, own, part in zip(self._blocks, self._own, self._parts, strict=True):
            part.copy_(own)
            _DATA.__set__(block, part)

    def values(self) -> torch.Tensor:
        """Return the whole weight; without a graph."""
        return self._values.detach()

    def in_graph(self) -> torch.Tensor:
        """Return the same memory as a function of the blocks, whose gradients are parts of its own."""
        whole: torch.Tensor = _Whole.apply(self._values, *self._blocks)  # type: ignore[no-untyped-call]
        return whole

    def settle(self) -> None:
        """Write the values to the memory of the blocks' own, too."""
        for block, own, part in zip(self._blocks, self._own, self._parts, strict=True):
            if block.is_set_to(part) and not torch.equal(_bits(own), _bits(part)):
                own.copy_(part)

    def close(self) -> bool:
        """Give the blocks their own memory back, with the values. Return whether other tensors share the
        whole's yet.
        """
        self.settle()
        for block in self._blocks:
            own, part = self._own.pop(0), self._parts.pop(0)
            if block.is_set_to(part):  # else it was given other values: `block.data = values`
                _DATA.__set__(block, own)
            del part  # it shares the memory
        return _shares(self._values) > self._alone


class _Whole(torch.autograd.Function):
    """A whole weight of its blocks: nothing is copied."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, *blocks: torch.Tensor) -> torch.Tensor:
        ctx.rows = [len(one) for one in blocks]
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *grads[0].split(ctx.rows)


class Opening:
    """One `with` in which whole weights may get memory."""

    def __init__(self, make: Callable[[torch.Size, torch.dtype], torch.Tensor]) -> None:
        """make: returns uninitialised memory of a shape and type, or raises where there is none."""
        self._make = make
        self._opened: dict[int, OnePiece] = {}
        self.outlived = 0
        """The number of weights, once this is closed, whose memory other tensors share yet."""

    def piece(self, shape: torch.Size, dtype: torch.dtype, blocks: Sequence[nn.Parameter]) -> OnePiece:
        """Return the memory of a weight, made at its first use."""
        key = id(blocks[0])
        if key not in self._opened:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._opened[key] = OnePiece(self._make(shape, dtype), blocks)
        return self._opened[key]

    def settle(self, key: int) -> None:
        """Write the values of the weight whose first block has this id() to its blocks' own memory, too."""
        if key in self._opened:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._opened[key].settle()

    def close(self) -> None:
        """Give all blocks their own memory back."""
        with torch.inference_mode(mode=False), torch.no_grad():
            while self._opened:
                self.outlived += self._opened.popitem()[1].close()


_openings: dict[int, list[Opening]] = {}
"""By the id() of a weight's first block, the `with`s in which it may get memory, the innermost last."""


@contextmanager
def in_one_piece(
    weights: Sequence[Sequence[nn.Parameter]], make: Callable[[torch.Size, torch.dtype], torch.Tensor]
) -> Iterator[Opening]:
    """Let each of `weights`, given as its blocks, be used in one piece of memory inside the `with`. It is
    that of the outermost such `with`; the blocks have its values in their own memory when any of them ends.
    """
    opening = Opening(make)
    keys = [id(blocks[0]) for blocks in weights]
    for key in keys:
        _openings.setdefault(key, []).append(opening)
    try:
        yield opening
    finally:
        for key in keys:
            _openings[key].remove(opening)
            for outer in _openings[key]:
                outer.settle(key)
            if not _openings[key]:
                del _openings[key]
        opening.close()


def opening_of(blocks: Sequence[nn.Parameter]) -> Opening | None:
    """Return the outermost `with` in which the weight of `blocks` may get memory; None without any."""
    found = _openings.get(id(blocks[0]))
    return found[0] if found else None


def _shares(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
