"""Stand-ins for torch.cuda's streams: one that sees races, one that is as late as it may be."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from infinity.device.device import AcceleratorDevice
from infinity.engine import engine as engine_module


class RaceError(AssertionError):
    """Two accesses to one place, at least one of them a write, in no certain order."""


class Actor:
    """The host, or a stream: what it did, and all that is certain to be over before its next access."""

    def __init__(self, name):
        self.name = name
        self.known = Counter()  # accesses by actor

    def learn(self, known):
        for name, count in known.items():
            self.known[name] = max(self.known[name], count)


@dataclass
class Point:
    """An event."""

    streams: RecordedStreams
    known: Counter

    def query(self):
        over = all(self.streams.over[name] >= count for name, count in self.known.items())
        if over:
            self.streams.host.learn(self.known)
        return over

    def synchronize(self):
        self.streams.host.learn(self.known)
        for name, count in self.known.items():
            self.streams.over[name] = max(self.streams.over[name], count)


@dataclass
class Access:
    actor: str
    number: int
    start: int
    stop: int
    write: bool
    what: str


class RecordedStreams:
    """Copies at once; but what an event does not order counts as unordered, and raises.

    In a finalizer an error is swallowed. So each is kept as well, but for those that a test expects by
    `refuses`; a fixture that every test has raises the first.
    """

    unseen: ClassVar[list] = []  # of all instances

    def __init__(self, refusal=""):
        self.refusal = refusal
        self._opened = 0
        self.locked = {}
        self.over = Counter()  # accesses that the host may find to be over, by actor
        self.host = Actor("host")
        self.main = self.open()
        self.on = self.main
        self._accesses = []
        self._kept = []

    # What AcceleratorDevice calls

    def open(self):
        self._opened += 1
        return Actor(f"stream {self._opened}")

    def current(self):
        return self.on

    def enter(self, stream):
        self.on = stream

    def record(self, stream):
        return Point(self, Counter(stream.known))

    def wait(self, stream, event):
        stream.learn(event.known)

    def copy(self, stream, to, source):
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert to.dtype == source.dtype
        stream.learn(self.host.known)  # what the host did before it queued this
        self._access(stream, source, False, "a copy reads")
        self._access(stream, to, True, "a copy writes")
        to.copy_(source)

    def free_nbytes(self):
        return 1 << 40

    def failed_allocations(self):
        return 0

    def keep(self, stream, tensor):
        self._kept.append((stream, tensor.untyped_storage().data_ptr()))

    def lock(self, address, nbytes):
        if not self.refusal:
            assert address not in self.locked
            self.locked[address] = nbytes
        return self.refusal

    def unlock(self, address):
        self._touch(self.host, address, address + self.locked.pop(address), True, "unlocking")

    # What tests call

    @classmethod
    def raise_unseen(cls):
        """Raise the first race that no test expected since the last call."""
        unseen, cls.unseen = cls.unseen, []
        if unseen:
            raise unseen[0]

    @contextlib.contextmanager
    def refuses(self, match=None):
        """A race is met in the `with`."""
        with pytest.raises(RaceError, match=match) as met:
            yield
        self.unseen.remove(met.value)

    def kernel(self, reads=(), writes=()):
        """Compute on the current stream."""
        self.on.learn(self.host.known)
        for tensor in reads:
            self._access(self.on, tensor, False, "a kernel reads")
        for tensor in writes:
            self._access(self.on, tensor, True, "a kernel writes")

    def host_reads(self, tensor):
        self._access(self.host, tensor, False, "the host reads")

    def host_writes(self, tensor):
        self._access(self.host, tensor, True, "the host writes")

    def recycle(self, tensor):
        """Free a tensor and allocate its memory again, as the caching allocator does, for the main stream."""
        address = tensor.untyped_storage().data_ptr()
        for stream, kept in self._kept:
            if kept == address:
                self.main.learn(stream.known)
        self._kept = [one for one in self._kept if one[1] != address]

    def _access(self, actor, tensor, write, what):
        self._touch(actor, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, write, what)

    def _touch(self, actor, start, stop, write, what):
        for one in self._accesses:
            apart = one.stop <= start or stop <= one.start or not (write or one.write)
            if not apart and actor.known[one.actor] < one.number:
                error = RaceError(f"{what}, on {actor.name}, not ordered behind: {one.what}, on {one.actor}")
                self.unseen.append(error)
                raise error
        actor.known[actor.name] += 1
        self._accesses.append(Access(actor.name, actor.known[actor.name], start, stop, write, what))


class LateStreams:
    """Copies on streams of their own, each made as late as its events allow; the CPU computes at once.

    A reader that does not wait sees what was there before the copy, and memory that is used again too early
    is copied with its new content: training then differs from the reference.
    """

    free = 1 << 40  # bytes
    failed = 0  # allocations

    def __init__(self):
        self.copies = 0
        self._lock = threading.RLock()

    def open(self):
        return LateStream(self._lock)

    def free_nbytes(self):
        return self.free

    def failed_allocations(self):
        return self.failed

    def current(self):
        return None

    def enter(self, stream):
        pass

    def record(self, stream):
        return LatePoint(stream, stream.queued if stream else 0)

    def wait(self, stream, event):
        if stream is None:
            event.synchronize()  # what follows computes now
        else:
            stream.put(event.synchronize)

    def copy(self, stream, to, source):
        self.copies += 1
        stream.put(functools.partial(ctypes.memmove, to.data_ptr(), source.data_ptr(), to.nbytes))

    def keep(self, stream, tensor):
        stream.put(functools.partial(id, tensor))  # holds the tensor until the stream has come so far

    def lock(self, address, nbytes):
        return ""

    def unlock(self, address):
        pass


class LateStream:
    """Work that is queued, and done when an event behind it is waited for."""

    def __init__(self, lock):
        self.queued = self.done = 0
        self._lock = lock
        self._work = deque()

    def put(self, work):
        with self._lock:
            self._work.append(work)
            self.queued += 1

    def run(self, count):
        with self._lock:
            while self.done < count:
                self._work.popleft()()
                self.done += 1


@dataclass(frozen=True)
class LatePoint:
    """An event: behind the first `count` pieces of a stream's work."""

    stream: object
    count: int

    def query(self):
        return self.stream is None or self.stream.done >= self.count

    def synchronize(self):
        if self.stream is not None:
            self.stream.run(self.count)


def compute_late(monkeypatch, free=LateStreams.free):
    """Let engines compute on the CPU as on an accelerator whose copies are late; return its streams. free:
    the bytes of its memory.
    """
    streams = LateStreams()
    streams.free = free
    device = AcceleratorDevice(torch.device("cpu"), streams)
    monkeypatch.setattr(engine_module, "open_device", lambda *_: device)
    return streams
