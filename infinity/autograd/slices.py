"""Which slices of parameters a model's forwards touch: rows of an nn.Embedding, experts of a 3-D parameter.

A parameter is fetched whole. What is counted here says what fetching touched slices alone would save.

[Note: what is sure]
A row counts where nn.Embedding's own forward gets its index. An expert counts where a module that owns 3-D
parameters of E slices gets one integer tensor, of one or two dimensions, of numbers in [0, E): so
transformers' MixtralExperts and its kin are called. A forward that does not fit ends the claim for good, and
so does another module that has the parameter too (a tied output layer uses every row): then nothing is said
of it. Nor is it on any device but the CPU: to look at indices there would make computing wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from infinity.autograd.hooks import graph_task
from infinity.planning.frequency import SliceCounts

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Watch:
    """Counts the slices that the forwards of one module touch; see [Note: what is sure]."""

    def __init__(self, slices: int, most_dimensions: int | None) -> None:
        """slices: how many there are. most_dimensions: of their indices; None for any number."""
        self.slices = slices
        self.counts: SliceCounts | None = None
        """None before the first forward, and where it is not sure which slices are touched."""
        self._most_dimensions = most_dimensions
        self._sure = True

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the forward that begins with these arguments, unless a backward repeats it."""
        if not self._sure or graph_task() != -1:
            return
        indices = self._indices([*args, *kwargs.values()])
        if indices is None:
            self.give_up()
            return
        if self.counts is None:
            self.counts = SliceCounts(self.slices)
        self.counts.observe(indices)

    def _indices(self, arguments: list[Any]) -> NDArray[np.integer] | None:
        tensors = [one for one in arguments if isinstance(one, torch.Tensor) and one.dtype in _INTEGERS]
        if len(tensors) != 1 or not _readable(tensors[0]):
            return None
        indices: NDArray[np.integer] = tensors[0].numpy()
        if self._most_dimensions is not None and not 1 <= indices.ndim <= self._most_dimensions:
            return None
        if indices.size and not 0 <= indices.min() <= indices.max() < self.slices:
            return None
        return indices

    def give_up(self) -> None:
        """Say nothing of these slices from now on."""
        self._sure, self.counts = False, None

    def close_step(self) -> None:
        """Fold what this step touched into what is expected."""
        if self.counts is not None:
            self.counts.close_step()


class SlicedParameters:
    """The parameters of one engine whose slices are counted."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._watches: dict[int, Watch | None] = {}

    def watch(self, module: nn.Module, keeps: Callable[[nn.Parameter], bool]) -> Watch | None:
        """Return what is to be called as each forward of `module` begins, None where it has no slices.

        To be asked once for each module. keeps: whether the engine keeps a parameter.
        """
        own = {id(one): one for one in module._parameters.values() if one is not None and keeps(one)}
        watch, sliced = _watch(module, list(own.values()))
        for key in own:
            if key in self._watches:
                for one in (self._watches[key], watch if key in sliced else None):
                    if one is not None:
                        one.give_up()
            self._watches.setdefault(key, watch if key in sliced else None)
        return watch

    def counted(self, parameter: nn.Parameter) -> SliceCounts | None:
        """Return the counts of a parameter's slices, None where nothing is known of them."""
        watch = self._watches.get(id(parameter))
        return watch.counts if watch is not None else None

    def close_step(self) -> None:
        """Fold what this step touched into what is expected."""
        for watch in self._distinct():
            watch.close_step()

    def _distinct(self) -> Iterator[Watch]:
        """Yield each watch once: the 3-D parameters of a module share theirs."""
        yield from {id(watch): watch for watch in self._watches.values() if watch is not None}.values()


def _watch(module: nn.Module, own: list[nn.Parameter]) -> tuple[Watch | None, set[int]]:
    """Return what counts for a module, and the parameters that it counts for, by id()."""
    if type(module).forward is nn.Embedding.forward and own:
        return Watch(own[0].shape[0], None), {id(own[0])}
    stacks = [one for one in own if one.dim() == 3]
    numbers = {one.shape[0] for one in stacks}
    if len(numbers) != 1 or numbers == {1}:
        return None, set()
    return Watch(numbers.pop(), 2), {id(one) for one in stacks}


def _readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie in this memory, as they are."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not wrapped
