"""Gradients of one call in slices, added up.

[Note: room for sums]
A slice's gradients are added up one parameter at a time, as they come, and each is let go of at once. The
fp32 sums of one call lie in one piece of memory, which the calls of a backward use one after another, and
which goes with its end; the rounded sums lie in another, of exactly their size. On the CPU both are mapped:
taken from malloc for every parameter and call, they left holes between what stays (measured: twice their
size). The sums' pages go as they are rounded. So a backward in slices holds, beyond one slice, the fp32 sums
of one call. One slice needs none.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from infinity.tiling.products import add_product, wide


class Cuts(NamedTuple):
    """How the inputs of a call are cut."""

    sliced: Sequence[bool]  # for each, whether it is
    dims: Sequence[int]  # and where
    slices: int


class Sums:
    """Gradients of one sliced call, as its slices add to them; see [Note: room for sums]."""

    def __init__(
        self,
        cuts: Cuts,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._cuts, self._inputs, self._wanted, self._parameters = cuts, inputs, wanted, parameters
        self._of_inputs: list[torch.Tensor | None] = [None] * len(inputs)
        self._of_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        self._numbers = {id(one): number for number, one in enumerate(parameters)}
        self._alone = cuts.slices == 1
        self._rooms: dict[torch.device, Room] = {}
        self._places: list[torch.Tensor | None] = [None] * len(parameters)
        if not self._alone:
            self._make_room()

    def _make_room(self) -> None:
        """Give every 16-bit parameter a place for its sum."""
        narrow = [number for number, one in enumerate(self._parameters) if wide(one.dtype) != one.dtype]
        for device in dict.fromkeys(self._parameters[number].device for number in narrow):
            here = [number for number in narrow if self._parameters[number].device == device]
            numels = [self._parameters[number].numel() for number in here]
            room = self._rooms[device] = _borrow(sum(numels), device)
            for number, place in zip(here, room.values[: sum(numels)].split(numels), strict=True):
                self._places[number] = place.view(self._parameters[number].shape)

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Take the parameters' gradients as they come, inside the `with`, and leave none of them."""
        taken: list[Any] = []
        if not self._alone:
            for number, one in enumerate(self._parameters):
                taken.append(one.register_hook(functools.partial(self._take, number)))
        try:
            yield
        finally:
            for one in taken:
                one.remove()

    def _take(self, number: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # it went straight into the sums
            return None
        total, place = self._of_parameters[number], self._places[number]
        if total is not None:
            _add(total, grad)
        elif place is not None:
            self._of_parameters[number] = place.copy_(grad)
        else:
            # Copied: autograd may hand the same tensor to somebody else.
            self._of_parameters[number] = grad.to(wide(grad.dtype), copy=True)
        return grad.new_zeros(()).expand(grad.shape)

    def add_product(self, parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Add left @ right to the gradient of a parameter; says whether that is one of several slices'."""
        number = None if self._alone else self._numbers.get(id(parameter))
        if number is None:
            return False
        total = self._of_parameters[number]
        if total is None:
            place = self._places[number]
            total = parameter.new_empty(parameter.shape) if place is None else place
            self._of_parameters[number] = total.zero_()
        add_product(total, left, right)
        return True

    def add(self, found: Sequence[torch.Tensor | None], start: int, size: int) -> None:
        """Take the gradients of one slice: of the wanted inputs, and, where there is but one slice, of the
        parameters, which come after them.
        """
        rest = iter(found)
        for number, one in enumerate(self._inputs):
            grad = next(rest) if self._wanted[number] else None
            if grad is None or self._alone:
                self._of_inputs[number] = grad if self._alone else self._of_inputs[number]
            elif self._cuts.sliced[number]:
                if self._of_inputs[number] is None:
                    self._of_inputs[number] = torch.zeros_like(one)
                self._of_inputs[number].narrow(self._cuts.dims[number], start, size).copy_(grad)  # type: ignore[union-attr]
            elif (total := self._of_inputs[number]) is None:
                self._of_inputs[number] = grad.to(wide(grad.dtype), copy=True)
            else:
                _add(total, grad)
        if self._alone:
            self._of_parameters = list(rest)

    def finished(self) -> list[torch.Tensor | None]:
        """Return the sums, each in the dtype of what it is a gradient of."""
        rounded = self._rounded()
        _free_rooms.extend(self._rooms.values())
        of_inputs = zip(self._of_inputs, self._inputs, strict=True)
        return [*(None if total is None else total.to(one.dtype) for total, one in of_inputs), *rounded]

    def _rounded(self) -> list[torch.Tensor | None]:
        done = list(self._of_parameters)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, (place, one) in enumerate(zip(self._places, self._parameters, strict=True)):
            if place is not None and done[number] is not None:
                kinds.setdefault((one.device, one.dtype), []).append(number)
        for (device, dtype), numbers in kinds.items():
            numels = [self._parameters[number].numel() for number in numbers]
            mapped = _mapped(sum(numels) * dtype.itemsize, device)
            pieces = _tensor(mapped, sum(numels), dtype, device).split(numels)
            for number, piece in zip(numbers, pieces, strict=True):
                place = self._places[number]
                if place is not None:
                    done[number] = piece.view(place.shape).copy_(place)
                    self._rooms[device].emptied(place)
        return done


_AT_ONCE = 1 << 15
"""Elements that are widened and added in a core's cache: as many as torch gives to one thread."""


def _add(total: torch.Tensor, grad: torch.Tensor) -> None:
    """Add to a sum. torch's own addition of two dtypes takes twice as long on the CPU."""
    if grad.dtype == total.dtype or grad.device.type != "cpu" or not grad.is_contiguous():
        total.add_(grad)
        return
    for piece, more in zip(total.view(-1).split(_AT_ONCE), grad.view(-1).split(_AT_ONCE), strict=True):
        piece.add_(more.to(piece.dtype))


_MAPPED_NBYTES = 1 << 20


class Room:
    """fp32 memory for sums; see [Note: room for sums]."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._mapped = _mapped(4 * numel, device)
        self.values = _tensor(self._mapped, numel, torch.float32, device)

    def emptied(self, place: torch.Tensor) -> None:
        """Give the pages of a part of `values` back; they come again, as zeros, when they are written."""
        if self._mapped is None:
            return
        first = place.data_ptr() - self.values.data_ptr()
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (first + place.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if nbytes > 0:
            self._mapped.madvise(mmap.MADV_DONTNEED, start, nbytes)


_free_rooms: list[Room] = []
"""Of the backward that is under way; see [Note: room for sums]."""


def _borrow(numel: int, device: torch.device) -> Room:
    """Return a room of at least so many elements, which nobody uses."""
    torch.autograd.Variable._execution_engine.queue_callback(_free_rooms.clear)
    while _free_rooms:
        room = _free_rooms.pop()
        if room.values.device == device and room.values.numel() >= numel:
            return room
    return Room(numel, device)


def _mapped(nbytes: int, device: torch.device) -> mmap.mmap | None:
    """Return memory of its own for a large tensor of the CPU's."""
    if device.type != "cpu" or nbytes < _MAPPED_NBYTES:
        return None
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _tensor(mapped: mmap.mmap | None, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if mapped is None:
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.frombuffer(mapped, dtype=dtype, count=numel)
