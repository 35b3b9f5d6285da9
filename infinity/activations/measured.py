"""What a forward keeps, and what its backward makes beside, measured while the forward runs.

[Note: what is measured]
The measuring forward recomputes every block. Of what a block's own forward saves for the backward, the
storages are counted and held until that forward is over: as much memory as its recomputation takes later. No
operation is run twice, and none is changed, so that a measuring step has the bits of any other.

What the backward makes beside is found by walking over autograd's graph in the order in which the engine
does: each node has the gradients of its outputs, and makes those of its inputs, whose shapes the graph knows.
Nodes that only view or hand on a gradient make none. Gradients of weights are not activations: they are
counted by host_memory or device_memory. What an operation allocates and frees within itself is not seen; two
tensors of the largest shape in the block stand for what its forward makes and does not save.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from infinity.planning.recomputation import BlockMemory, StepMemory

_HANDED_ON = (
    "Add",
    "Alias",
    "AsStrided",
    "Expand",
    "Permute",
    "ReshapeAlias",
    "Squeeze",
    "T",
    "Transpose",
    "Unsqueeze",
    "UnsafeView",
    "View",
)
"""Names of nodes, before "Backward", that return the gradient that they are given, or a view of it."""
_TEMPORARIES = 2
"""Tensors of a block's largest shape that its forward makes and does not save."""
_LOSS_NBYTES = 20
"""For each element that a model without a loss returns: five tensors in fp32, as a mean of squares makes. A
cross entropy makes three: see [Note: logits] in planning/activations.py.
"""


class Storages:
    """Storages that were seen, each counted once while it is alive."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor's storage where it was not seen before, else 0."""
        storage = storage_of(tensor)
        if storage is None or self._knows(storage):
            return 0
        # The weak reference keeps its number from being given to another.
        self._seen[storage._cdata] = StorageWeakRef(storage)
        return int(storage.nbytes())

    def _knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._seen


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage; None for one that has none (sparse, or of a class of its own)."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class MeasuredForward:
    """Collects what one forward needs, block by block."""

    def __init__(
        self,
        is_weight: Callable[[torch.Tensor], bool],
        stalled_s: Callable[[], float],
        synchronize: Callable[[], None],
        can_leave: Callable[[torch.Tensor], bool],
    ) -> None:
        """is_weight: of a tensor that autograd saves. stalled_s: seconds that computing has waited so far for
        weights. synchronize: waits for the device. can_leave: of a block's input.
        """
        self._is_weight, self._stalled_s = is_weight, stalled_s
        self._synchronize, self._can_leave = synchronize, can_leave
        self._known = Storages()
        """What was counted."""
        self._blocks: list[BlockMemory] = []
        self._ends: set[Any] = set()
        """Nodes of the graph that made what blocks returned."""
        self._shared_nbytes = self._head_nbytes = 0
        self._inside: _MeasuredBlock | None = None

    def saved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that autograd saves outside of the blocks."""
        self._head_nbytes += self._known.add(tensor)

    def block(self, given: Any) -> _MeasuredBlock:
        """Begin a block's forward, with these arguments."""
        tensors = tensors_in(given)
        fresh = [(one, self._known.add(one)) for one in tensors]
        with_gradient = [(one, nbytes) for one, nbytes in fresh if one.requires_grad]
        # What needs no gradient, masks and tables, is made outside, and given to all.
        self._shared_nbytes += sum(nbytes for one, nbytes in fresh if not one.requires_grad)
        own = sum(nbytes for _, nbytes in with_gradient)
        leaving = sum(one.nbytes for one, nbytes in with_gradient if nbytes and self._can_leave(one))
        self._inside = _MeasuredBlock(self, tensors, own, min(own, leaving))
        return self._inside

    def ended_block(self, block: _MeasuredBlock, output: Any) -> None:
        """Note what a block needed."""
        self._blocks.append(block.memory(output))
        self._ends |= {one.grad_fn for one in tensors_in(output) if one.grad_fn is not None}

    def seconds(self) -> float:
        """Return the time at which the device is done, less what it waited for weights."""
        self._synchronize()
        return time.perf_counter() - self._stalled_s()

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that autograd saves is a weight."""
        return self._is_weight(tensor)

    def step(self, output: Any) -> StepMemory:
        """Return all of it, at the end of the forward; output: of the whole model."""
        returned = [one for one in tensors_in(output) if one.requires_grad]
        working = backward_nbytes(returned, self._ends)
        extra = 0
        if not any(one.numel() == 1 for one in returned):  # the loss is made of these by others
            extra = _LOSS_NBYTES * sum(one.numel() for one in returned)
        shared = self._shared_nbytes + sum(self._known.add(one) for one in tensors_in(output))
        self._ends.clear()  # nodes that refer to this would keep the graph
        return StepMemory(tuple(self._blocks), shared, self._head_nbytes, working + extra)


class _MeasuredBlock:
    """One call of a block."""

    def __init__(
        self, forward: MeasuredForward, given: list[torch.Tensor], own_nbytes: int, leaving_nbytes: int
    ) -> None:
        self._forward, self._own, self._leaving = forward, own_nbytes, leaving_nbytes
        self._given = {storage._cdata for one in given if (storage := storage_of(one)) is not None}
        self._nodes = {one.grad_fn for one in given if one.grad_fn is not None}
        self._held: dict[int, torch.UntypedStorage] = {}
        self._began_s = forward.seconds()

    def saved(self, tensor: torch.Tensor) -> None:
        """Hold what autograd saves: see [Note: what is measured]."""
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._given or self._forward.is_weight(tensor):
            return
        self._held[storage._cdata] = storage

    def memory(self, output: Any) -> BlockMemory:
        """Return what it needed."""
        seconds = self._forward.seconds() - self._began_s
        returned = tensors_in(output)
        # The next block's input, or of the head; it is counted there.
        outputs = {storage._cdata for one in returned if (storage := storage_of(one)) is not None}
        kept = sum(one.nbytes() for key, one in self._held.items() if key not in outputs)
        nodes, self._nodes = self._nodes, set()
        self._held.clear()
        differentiable = [one for one in returned if one.requires_grad]
        gradients = backward_nbytes(differentiable, nodes)
        beside = sum(one.nbytes for one in returned)
        forward = beside + _TEMPORARIES * largest_nbytes(differentiable, nodes)
        return BlockMemory(self._own, self._leaving, kept, max(gradients, forward), max(seconds, 0.0))


def _numel_nbytes(metadata: Any) -> int:
    numel: int = math.prod(metadata.shape)
    return numel * int(metadata.dtype.itemsize)


def _nodes_above(outputs: Iterable[torch.Tensor], ends: Collection[Any]) -> set[Any]:
    """Return the nodes that lead to `outputs`, without those in `ends` and what is behind them."""
    found: set[Any] = set()
    waiting = [one.grad_fn for one in outputs if one.grad_fn is not None and one.grad_fn not in ends]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        waiting += [one for one, _ in node.next_functions if one is not None and one not in ends]
    return found


def largest_nbytes(outputs: Iterable[torch.Tensor], ends: Collection[Any]) -> int:
    """Return the bytes of the largest result of the operations between `ends` and `outputs`."""
    nodes = [one for one in _nodes_above(outputs, ends) if not _accumulates(one)]
    return max((_numel_nbytes(one) for node in nodes for one in node._input_metadata), default=0)


def _accumulates(node: Any) -> bool:
    """Whether a node adds to a leaf's gradient."""
    return not node.next_functions


def _operation(node: Any) -> str:
    """Return "View" of ViewBackward0."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


class _Gradient:
    """One tensor of the backward, that several nodes may hold."""

    __slots__ = ("holders", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.holders = nbytes, 0


class _Backward:
    """A backward that runs over the graph without computing."""

    def __init__(self, inside: set[Any]) -> None:
        """inside: the nodes that run."""
        self._inside = inside
        self._given: dict[Any, list[_Gradient]] = {}
        self._order: list[tuple[int, int, Any]] = []
        self._live = 0
        self.most = 0
        """Bytes that were there at one time."""

    def give(self, node: Any, gradient: _Gradient) -> None:
        """Let a node have a gradient, before it runs."""
        if node not in self._given:
            self._given[node] = []
            if node in self._inside:
                heapq.heappush(self._order, (-node._sequence_nr(), len(self._given), node))
        self._live += 0 if gradient.holders else gradient.nbytes
        gradient.holders += 1
        self._given[node].append(gradient)

    def run(self) -> None:
        """Run all nodes, as autograd does: the one that was made last first."""
        while self._order:
            node = heapq.heappop(self._order)[2]
            taken = self._given[node]
            handed = taken[0] if _operation(node) in _HANDED_ON else None
            for after, place in node.next_functions:
                if after is None or _accumulates(after):
                    continue  # a weight's gradient, or none
                nbytes = _numel_nbytes(after._input_metadata[place])
                self.give(after, handed if handed and handed.nbytes >= nbytes else _Gradient(nbytes))
            self.most = max(self.most, self._live)
            for gradient in taken:
                gradient.holders -= 1
                self._live -= 0 if gradient.holders else gradient.nbytes
        self.most = max(self.most, self._live)


def backward_nbytes(outputs: Collection[torch.Tensor], ends: Collection[Any]) -> int:
    """Return the bytes of gradients that are there at one time in a backward from `outputs` to `ends`: nodes
    of autograd's graph, whose gradients are made and kept, and which do not run. See the note above.
    """
    backward = _Backward(_nodes_above(outputs, ends))
    for one in outputs:
        if one.grad_fn is not None:
            backward.give(one.grad_fn, _Gradient(one.nbytes))
    backward.run()
    return backward.most
