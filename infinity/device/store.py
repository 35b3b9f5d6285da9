"""Extents in an accelerator's memory, for whole records that live there.

[Note: work and copies on one extent]
Torch's kernels use an extent in place, on the streams of the threads that compute; passes of the lane copy
its bytes from and to the host, on the streams of the copies. A copy waits, on its stream, for the event of
the last `used`. Work that follows `arrived` waits for the last copy to the extent, and for the last `used` of
another stream. Memory that is freed, or replaced while a commit copies it, is others' behind those copies.
That no pass walks over a record while its update is queued is the caller's to see; see
units/device_updates.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.device.room import DeviceRoom
from infinity.device.streams import Copy, Event, HostMemory, Streams
from infinity.sizes import BLOCK, round_up
from infinity.storage.memory import view
from infinity.storage.store import DONE, Extent, Request, TensorStore, Transfer


@dataclass(slots=True)
class _Memory:
    """An extent's memory, and the events that order what is done with it."""

    tensor: torch.Tensor
    owner: Any
    """The stream that allocated it."""
    stream: Any
    """That of the last work that `used` was told of."""
    used: Event
    """The end of that work."""
    filled: Event | None = None
    """The end of the last copy to it."""
    taken: Event | None = None
    """The end of the last copy from it."""
    others: list[Any] = field(default_factory=list)
    """Further streams that have used it."""


class DeviceStore(TensorStore):
    """Extents on one accelerator, counted in its room; see [Note: work and copies on one extent].

    `allocate`, `replace`, `arrived` and `used` are called from the thread that computes, the rest from any.
    """

    def __init__(
        self,
        place: torch.device,
        streams: Streams,
        memory: HostMemory,
        room: DeviceRoom,
        count: Callable[[int, int], None],
    ) -> None:
        """Begin without extents. count: is told the bytes of every copy, to the device and from it."""
        self._place, self._streams, self._room, self._count = place, streams, room, count
        self._up, self._down = memory.up, memory.down
        self._memories: dict[int, _Memory] = {}
        self._numbers = itertools.count()
        self._counting = threading.Lock()
        """Held while `held_nbytes` changes: passes of the lane free extents."""
        self._replacing = threading.Lock()
        """Held while memory is replaced, and while a copy from it is queued."""

    def allocate(self, nbytes: int, what: str) -> Extent:
        """See TensorStore."""
        nbytes = round_up(max(nbytes, 1), BLOCK)
        taken = self._room.take(nbytes, what)
        try:
            return self._extent(nbytes)
        except BaseException:
            self._room.give_back(taken)
            raise

    def _extent(self, nbytes: int) -> Extent:
        number = next(self._numbers)
        self._memories[number] = self._new(nbytes)
        with self._counting:
            self.held_nbytes += nbytes
        return Extent(self, number, nbytes)

    def _new(self, nbytes: int) -> _Memory:
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._place)
        stream = self._streams.current()
        return _Memory(tensor, stream, stream, self._streams.record(stream))

    def free(self, extent: Extent) -> None:
        """See TensorStore."""
        with self._counting:
            self.held_nbytes -= extent.nbytes
        memory = self._memories.pop(extent.offset)
        self._await_copies(memory)
        for stream in memory.others:
            self._streams.wait(memory.owner, self._streams.record(stream))
        del memory
        self._room.give_back(self._room.nbytes(extent.nbytes))

    def _await_copies(self, memory: _Memory) -> None:
        """Have what gets this memory next wait for the copies from and to it: torch gives it to its owner."""
        for event in (memory.taken, memory.filled):
            if event is not None:
                self._streams.wait(memory.owner, event)

    def read(self, request: Request) -> Transfer:
        """See TensorStore: a copy to the host."""
        if not request.nbytes:
            return DONE
        with self._replacing:
            memory, device, host = self._both(request)
            self._streams.wait(self._down, memory.used)
            if memory.filled is not None:
                self._streams.wait(self._down, memory.filled)
            self._streams.copy(self._down, host, device)
            taken = memory.taken = self._streams.record(self._down)
        self._count(0, request.nbytes)
        return Copy(taken)

    def write(self, request: Request) -> Transfer:
        """See TensorStore: a copy from the host."""
        if not request.nbytes:
            return DONE
        memory, device, host = self._both(request)
        self._streams.wait(self._up, memory.used)
        self._streams.copy(self._up, device, host)
        self._count(request.nbytes, 0)
        memory.filled = self._streams.record(self._up)
        return Copy(memory.filled)

    def _both(self, request: Request) -> tuple[_Memory, torch.Tensor, torch.Tensor]:
        memory = self._memories[request.extent.offset]
        device = memory.tensor[request.start : request.start + request.nbytes]
        return memory, device, torch.frombuffer(view(request.address, request.nbytes), dtype=torch.uint8)

    def where(self, extent: Extent, start: int) -> str:
        """See DiskStore."""
        return f"byte {start} of {extent.nbytes} in the memory of {self._place}"

    def tensor(self, extent: Extent) -> torch.Tensor:
        """See TensorStore."""
        return self._memories[extent.offset].tensor

    def arrived(self, extent: Extent) -> None:
        """See TensorStore."""
        memory, stream = self._memories[extent.offset], self._streams.current()
        if memory.filled is not None:
            self._streams.wait(stream, memory.filled)
        if stream != memory.stream:
            self._streams.wait(stream, memory.used)
        if stream != memory.owner and stream not in memory.others:
            memory.others.append(stream)

    def used(self, extent: Extent) -> None:
        """See TensorStore."""
        memory, stream = self._memories[extent.offset], self._streams.current()
        memory.stream, memory.used = stream, self._streams.record(stream)

    def replace(self, extent: Extent) -> Extent:
        """See TensorStore."""
        new = self._new(extent.nbytes)
        self.arrived(extent)
        old = self._memories[extent.offset]  # whose memory is others' from now on
        new.tensor.copy_(old.tensor)
        new.used = self._streams.record(new.stream)
        with self._replacing:
            self._await_copies(old)
            self._memories[extent.offset] = new
        for stream in old.others:
            self._streams.keep(stream, old.tensor)
        return extent
