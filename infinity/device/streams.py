"""The streams of an accelerator, and the host memory of its copies.

`Streams` is small, so that tests can replace it and record every access in order. `AcceleratorStreams` runs
in tests on a simulated device (tests/simdevice).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from infinity.device.buffers import Buffers
from infinity.sizes import format_size
from infinity.storage.memory import Arena

logger = logging.getLogger("infinity")

_POLL_S = 0.0002
NO_LOCK = "torch locks no memory that is there already for devices of this type"
"""The reason of a `lock` that never works."""


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the stream is past it."""

    def synchronize(self) -> None:
        """Make the host wait until the stream is past it."""


class Streams(Protocol):
    """The interface to streams. A stream is an opaque object that `open` or `current` returned."""

    def open(self) -> Any:
        """Return a new stream."""

    def current(self) -> Any:
        """Return the stream on which the calling thread computes."""

    def enter(self, stream: Any) -> None:
        """Make the calling thread compute on `stream` from now on."""

    def record(self, stream: Any) -> Event:
        """Return an event after all work queued on `stream`."""

    def wait(self, stream: Any, event: Event) -> None:
        """Make later work on `stream` wait for `event`. The host does not wait."""

    def copy(self, stream: Any, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device; both contiguous, of one dtype."""

    def keep(self, stream: Any, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor`, once dropped, until the work queued on `stream` by then has run."""

    def free_nbytes(self) -> int:
        """Return the bytes of memory that are free on the device."""

    def failed_allocations(self) -> int:
        """Return how often the device had no memory for an allocation of torch's."""

    def lock(self, address: int, nbytes: int) -> str:
        """Page-lock host memory; return the reason if that failed, else an empty text."""

    def unlock(self, address: int) -> None:
        """Undo `lock`."""


class AcceleratorStreams(Streams):
    """Streams of one device, over torch.accelerator. A vendor's class adds page-locking."""

    def __init__(self, device: torch.device) -> None:
        """Use `device`, which must have an index."""
        self._device = device

    def open(self) -> torch.Stream:
        """See Streams."""
        return torch.Stream(self._device)

    def current(self) -> torch.Stream:
        """See Streams."""
        return torch.accelerator.current_stream(self._device)

    def enter(self, stream: Any) -> None:
        """See Streams."""
        torch.accelerator.set_stream(stream)

    def record(self, stream: Any) -> Event:
        """See Streams."""
        event: Event = stream.record_event(torch.Event(self._device))
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """See Streams."""
        stream.wait_event(event)

    def copy(self, stream: Any, to: torch.Tensor, source: torch.Tensor) -> None:
        """See Streams."""
        with stream:
            to.copy_(source, non_blocking=True)

    def keep(self, stream: Any, tensor: torch.Tensor) -> None:
        """See Streams."""
        tensor.record_stream(stream)

    def free_nbytes(self) -> int:
        """See Streams."""
        module: Any = torch.get_device_module(self._device)
        return int(module.mem_get_info(self._device)[0])

    def failed_allocations(self) -> int:
        """See Streams; 0 where torch's allocator does not count them."""
        module: Any = torch.get_device_module(self._device)
        if not hasattr(module, "memory_stats"):
            return 0
        return int(module.memory_stats(self._device).get("num_ooms", 0))


class Copy:
    """A copy on a stream: a Transfer. It began when it was queued, and ended when the host first saw that its
    event had passed.
    """

    def __init__(self, event: Event) -> None:
        self.began_s = time.perf_counter()
        self._event = event
        self._ended_s: float | None = None

    @property
    def done(self) -> bool:
        """See Future."""
        if self._ended_s is None and self._event.query():
            self._ended_s = time.perf_counter()
        return self._ended_s is not None

    @property
    def ended_s(self) -> float | None:
        """See Transfer."""
        return self._ended_s if self.done else None

    def wait(self, timeout_s: float | None = None) -> None:
        """See Transfer."""
        if timeout_s is None and not self.done:
            self._event.synchronize()
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.done:
            if time.monotonic() >= end_s:
                raise TimeoutError(f"a copy between host and device is not over after {timeout_s} s")
            time.sleep(_POLL_S)


class HostMemory(Buffers):
    """Page-locked host memory, whose copies do not make the host wait: what `pin` locked, and buffers."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._closed = False
        self._ahead: dict[int, int] = {}
        self.ahead_nbytes = 0
        """Bytes of the buffers made ahead, lent or free."""
        self.pageable_reason = ""
        """Why some memory could not be page-locked; empty if all could."""
        self.up, self.down = streams.open(), streams.open()
        """The streams of uploads and downloads."""
        self._streams = streams
        self._pinned: set[int] = set()
        self._last: dict[int, Copy | None] = {}
        """Of each buffer that is lent, by its address, the last copy from or to it."""
        self._late: deque[tuple[Arena, Copy]] = deque()
        """Buffers that have come back before that copy is over, which nobody gets."""

    @property
    def spare_nbytes(self) -> int:
        """See Buffers; 0 once closed."""
        return 0 if self._closed else super().spare_nbytes

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See Buffers."""
        taken = super().take(numel, dtype)
        if numel:
            self._last[taken.data_ptr()] = None
        return taken

    def copies(self, address: int, copy: Copy) -> None:
        """Note a copy from or to `address`, in whatever memory: a buffer that begins there is lent to nobody
        else before it is over, though all tensors in it are gone.
        """
        if address in self._last:
            self._last[address] = copy

    def _take(self, nbytes: int) -> Arena | None:
        self.look_at_late()
        return super()._take(nbytes)

    def _give_back(self, arena: Arena) -> None:
        copy = self._last.pop(arena.address, None)
        if copy is None or copy.done:
            super()._give_back(arena)
        else:
            self._late.append((arena, copy))

    def look_at_late(self) -> None:
        """Have those buffers back whose copies are over by now."""
        for _ in range(len(self._late)):
            try:
                arena, copy = self._late.popleft()
            except IndexError:  # another thread, or the garbage collector, has looked as well
                return
            if copy.done:
                super()._give_back(arena)
            else:
                self._late.append((arena, copy))

    def trim(self, nbytes: int) -> None:
        """Keep at most `nbytes` of free buffers, and those made ahead, until it is closed.

        The lock is held until the others are unlocked: else another thread could lock new memory in their
        place while they still count.
        """
        dropped = []
        with self._lock:
            stays = Counter({} if self._closed else self._ahead)
            stays.subtract(self._there - Counter(arena.nbytes for arena in self._free))  # those that are lent
            left = nbytes
            for arena in reversed(list(self._free)):  # the longest idle go first
                if stays[arena.nbytes] > 0:
                    stays[arena.nbytes] -= 1
                elif arena.nbytes <= left:
                    left -= arena.nbytes
                elif arena in self._free:
                    left = 0
                    self._free.remove(arena)
                    self._there[arena.nbytes] -= 1
                    dropped.append(arena)
            self.are_dropped(dropped)

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock existing memory; the first failure is logged."""
        if not nbytes:
            return
        failure = self._streams.lock(address, nbytes)
        if not failure:
            self._pinned.add(address)
        elif not self.pageable_reason:
            self.pageable_reason = failure
            cure = (
                " Likely cause: a limit on locked memory. Raise it (ulimit -l unlimited; docker run --ulimit "
                "memlock=-1), or give Config a smaller host_memory."
            )
            logger.warning(
                "%s of host memory cannot be page-locked: %s. Copies from and to it make the host wait.%s",
                format_size(nbytes),
                failure,
                "" if failure == NO_LOCK else cure,
            )

    def unpin(self, address: int) -> None:
        """Undo `pin`; nothing happens for memory that is not page-locked."""
        if address in self._pinned:
            self._pinned.discard(address)
            self._streams.unlock(address)

    def prepare(self, nbytes: int, count: int) -> bool:
        """See Buffers; buffers made here are kept."""
        self.look_at_late()
        more = count - self._ahead.get(nbytes, 0)
        if more > 0:
            self._ahead[nbytes] = count
            self.ahead_nbytes += more * nbytes
        return super().prepare(nbytes, count)

    def was_made(self, arena: Arena) -> None:
        """Page-lock a new buffer."""
        self.pin(arena.address, arena.nbytes)

    def are_dropped(self, arenas: Sequence[Arena]) -> None:
        """Unlock buffers before they are freed. No copy uses one that is free: see `copies`."""
        for arena in arenas:
            self.unpin(arena.address)

    def synchronize(self) -> None:
        """Return when every copy begun so far is over."""
        for stream in (self.up, self.down):
            self._streams.record(stream).synchronize()

    def close(self) -> None:
        """Undo every `pin`, after the last copy. Buffers still lent stay readable."""
        self._closed = True
        self.trim(0)
        for address in list(self._pinned):
            self.unpin(address)
