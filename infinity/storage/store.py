"""Extents, their transfers, and the stores they are of: on disk, in host memory, on an accelerator."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING, NamedTuple, Protocol

from infinity import aio, kernels
from infinity.errors import HostMemoryError
from infinity.sizes import BLOCK, format_size, round_up
from infinity.storage.memory import Arena, Ledger

if TYPE_CHECKING:
    import torch


class Future(Protocol):
    """Work that may still be under way: a transfer, a copy between host and device, a pass over a record, a
    collective. It brings no value; what it works on may be read or reused once it is done.
    """

    @property
    def done(self) -> bool:
        """Whether it is over, well or badly, so that `wait` returns or raises at once."""

    def wait(self) -> None:
        """Return when it is over; raise what went wrong."""


class Transfer(Future, Protocol):
    """A Future that moves bytes and knows when it did so: the timeline shows it."""

    @property
    def began_s(self) -> float:
        """When it began, by time.perf_counter."""

    @property
    def ended_s(self) -> float | None:
        """When it ended, on the same clock; None while it runs, or where nothing was moved."""

    def wait(self, timeout_s: float | None = None) -> None:
        """See Future. Raises: a TimeoutError if it still runs after `timeout_s`."""


class _Done:
    """A transfer that had nothing to move."""

    done = True
    began_s = 0.0
    ended_s: float | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""


DONE = _Done()


class AllOf:
    """Several transfers awaited as one; done when all are done."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        """Whether all parts have ended, successfully or not."""
        return all(part.done for part in self._parts)

    @property
    def began_s(self) -> float:
        """When the first part was accepted, by the clock of `time.perf_counter`."""
        return min(part.began_s for part in self._parts)

    @property
    def ended_s(self) -> float | None:
        """When the last part ended, on the same clock; None while one runs."""
        ends = [part.ended_s for part in self._parts]
        over = [end for end in ends if end is not None]
        return max(over) if len(over) == len(ends) else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all parts have ended; only then raise an error, so that the memory may be used again.

        Raises: the error of the first part that failed; aio.IoTimeoutError while a part is still in flight.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        first: Exception | None = None
        for part in self._parts:
            try:
                part.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
            except aio.IoTimeoutError:
                raise
            except (OSError, RuntimeError) as error:
                first = first or error
        if first is not None:
            raise first

    @staticmethod
    def settle(begun: Sequence[Transfer]) -> None:
        """Wait for the parts begun before another part was refused: they still use the memory."""
        with contextlib.suppress(OSError, RuntimeError):
            AllOf(begun).wait()


@dataclass(frozen=True, slots=True)
class Extent:
    """One aligned byte range of one store."""

    store: Store
    offset: int  # bytes from the start of the store
    nbytes: int


class Request(NamedTuple):
    """A transfer to make between an extent on storage and memory."""

    extent: Extent
    start: int
    """Bytes from the start of the extent."""
    address: int
    """Of the memory."""
    nbytes: int
    what: str
    """Names the bytes in errors."""
    owner: object
    """What keeps the memory alive."""
    urgent: bool = False
    """A thread waits for it: it goes first."""
    more: bool = False
    """More requests follow at once, and this one may start with the last of them. See aio.IoEngine.read."""
    window: tuple[int, int] = (0, 0)
    """Address and bytes of spare memory, kept by `owner`, for a store that has to read more than is asked."""
    framed: bool = False
    """Whether the blocks in which memory of the whole extent, of which this may be a part, begins and ends
    are its own: others are not overwritten. For a store that has to read more than is asked.
    """


class DiskStore(Protocol):
    """Storage whose extents are read into memory and, if it is `writable`, written from it."""

    tier: str
    writable: bool

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Return a new extent of `nbytes`, rounded up to whole blocks; `what` names its owner in errors."""

    def free(self, extent: Extent) -> None:
        """Free an extent for reuse."""

    def read(self, request: Request) -> Transfer:
        """Begin to copy bytes of an extent to memory."""

    def write(self, request: Request) -> Transfer:
        """Begin to copy memory to bytes of an extent."""

    def where(self, extent: Extent, start: int) -> str:
        """Name byte `start` of `extent` for an error message."""


class PageLocker(Protocol):
    """Page-locks host memory: a device, whose copies are then faster."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock existing memory."""

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is freed."""


class HostStore:
    """Extents in host memory, used in place and charged to a ledger."""

    tier = "host"
    writable = True

    def __init__(self, ledger: Ledger, locker: PageLocker | None = None) -> None:
        """Open an empty store within the limit of `ledger`. locker: page-locks the extents."""
        self.ledger = ledger
        self._locker = locker
        self._arenas: dict[int, Arena] = {}
        self.held_nbytes = 0
        """Bytes of all extents."""

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Return an extent in memory of its own.

        Raises: HostMemoryError naming `what`, with the numbers, if it does not fit the ledger.
        """
        nbytes = round_up(max(nbytes, 1), BLOCK)
        if not self.ledger.try_reserve(nbytes):
            raise HostMemoryError(
                f"{what}: {format_size(nbytes)} do not fit host memory, of which "
                f"{format_size(self.ledger.held_nbytes)} of {format_size(self.ledger.limit_nbytes)} are in "
                "use. Give Config a larger host_memory, or a folder on NVMe (nvme=...)."
            )
        return self._extent(nbytes)

    def allocate_promised(self, nbytes: int) -> Extent:
        """Return an extent for bytes that were set aside in the ledger."""
        self.ledger.set_aside(-nbytes)
        self.ledger.reserve_anyway(nbytes)
        return self._extent(nbytes)

    def _extent(self, nbytes: int) -> Extent:
        arena = Arena(max(nbytes, BLOCK))  # parameters may be empty
        self._arenas[arena.address] = arena
        self.held_nbytes += nbytes
        if self._locker is not None:
            self._locker.pin(arena.address, nbytes)
        return Extent(self, arena.address, nbytes)

    def free(self, extent: Extent) -> None:
        """Free an extent's memory."""
        self._forget(extent)
        self.ledger.release(extent.nbytes)

    def memory(self, extent: Extent) -> mmap:
        """Return an extent's memory as an object that keeps it alive."""
        return self._arenas[extent.offset].map

    def replace(self, extent: Extent) -> Extent:
        """Return a copy of an extent, and drop the old one without releasing its memory: others hold it."""
        new = self._extent(extent.nbytes)
        kernels.copy(extent.nbytes, new.offset, extent.offset)
        self._forget(extent)
        return new

    def _forget(self, extent: Extent) -> None:
        if self._locker is not None:
            self._locker.unpin(extent.offset)
        del self._arenas[extent.offset]
        self.held_nbytes -= extent.nbytes


class TensorStore(ABC):
    """Extents in an accelerator's memory: a DiskStore for passes, whose transfers are copies over the link,
    and memory that torch's kernels use in place.
    """

    tier = "device"
    writable = True
    held_nbytes = 0
    """Bytes of all extents."""

    @abstractmethod
    def allocate(self, nbytes: int, what: str) -> Extent:
        """See DiskStore; of zeros.

        Raises: DeviceMemoryError naming `what` where device_memory has no room.
        """

    @abstractmethod
    def free(self, extent: Extent) -> None:
        """See DiskStore."""

    @abstractmethod
    def read(self, request: Request) -> Transfer:
        """See DiskStore."""

    @abstractmethod
    def write(self, request: Request) -> Transfer:
        """See DiskStore."""

    @abstractmethod
    def where(self, extent: Extent, start: int) -> str:
        """See DiskStore."""

    @abstractmethod
    def tensor(self, extent: Extent) -> torch.Tensor:
        """Return an extent's bytes, 1-D, always the same tensor; work on it goes between `arrived` and
        `used`.
        """

    @abstractmethod
    def arrived(self, extent: Extent) -> None:
        """Have later work on the calling thread's stream see what was copied to an extent, or done there."""

    @abstractmethod
    def used(self, extent: Extent) -> None:
        """Have later copies from and to an extent wait for the work queued on the calling thread's stream."""

    @abstractmethod
    def replace(self, extent: Extent) -> Extent:
        """Return a copy of an extent, and drop the old one, whose memory others hold."""


Store = DiskStore | HostStore | TensorStore
"""A place for extents: fields on disk are moved by transfers, those in host memory are used in place, and
those in the memory of an accelerator are both.
"""
