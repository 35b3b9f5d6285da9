"""An engine: reads and writes that run while Python does other work.

[Note: who keeps the memory] The kernel writes into memory that Python could free. Therefore `_in_flight`
holds each request and the owner of its memory from before the submission until the request is known to have
ended; the C code never touches a request after that (aio.h). Whatever happens in Python in between (a dropped
completion, Ctrl-C anywhere), memory may be kept too long, but is never freed too early.

[Note: requests that others follow] They are gathered in the open batch, and the last one submits them all: a
call into C for each, the interpreter's lock that it gives up, and a wake-up would cost more than all else. A
batch is in `_in_flight` from its first request on, and any thread may submit it, any number of times: the C
code takes what it has not taken before. So whoever asks or waits for a request that is still gathered submits
it, and nothing is lost where an exception, or Ctrl-C, came before the last. Requests are added to the open
batch alone, and only other batches are released, both under the lock.
"""

import errno
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinity.aio import errors, files
from infinity.aio.batch import RequestBatch, has_ended
from infinity.aio.completion import Completion
from infinity.aio.counts import EngineStatistics
from infinity.aio.ending import Native, abandoned, end, end_forgotten
from infinity.aio.errors import EngineClosedError, ForkedError, IoEngineFailedError, IoTimeoutError
from infinity.aio.files import File, Folder
from infinity.aio.library import (
    ALIGNED,
    BLOCK,
    REGISTERED_NBYTES,
    RINGS,
    SLICE_MS,
    WRITE,
    CData,
    Priority,
    ffi,
    load,
)

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

HANG_S = 60.0
"""The default number of seconds after which a request without a response means that the disk hangs."""

_HUNG_CLOSE_S = 0.2
_END = 1 << 63
_NO_COUNT = (1 << 64) - 1
_engines: "weakref.WeakSet[IoEngine]" = weakref.WeakSet()
_GATHERED_MOST = 16
"""Requests of a batch: the first of many more begin before the last is there."""


def _close_in_child() -> None:
    for engine in list(_engines):
        engine.leave()


os.register_at_fork(after_in_child=_close_in_child)


class IoEngine:
    """Asynchronous file I/O; open one with `open_engine`. All methods may be called from any thread.

    Attributes:
        kind: "io_uring", "threads" or "buffered".
        reason: one sentence that says why this kind was chosen, and not an earlier one of KINDS.
        direct: whether files are opened with O_DIRECT.
        depth: pieces in flight at once.
        piece_nbytes: the size of the pieces into which requests are split.
        ring: the kind of ring, one of RINGS; None without io_uring.
        registered_nbytes: registered bytes of the memory given to `register`.
        hang_s: after so many seconds without a response, a request's `wait` reports that the disk hangs.
        hung: whether it has. Closing then waits for nothing, and memory in flight is never reused.
    """

    def __init__(
        self, kind: str, reason: str, pointer: CData, *, direct: bool, depth: int, piece_nbytes: int
    ) -> None:
        self.kind = kind
        self.reason = reason
        self.direct = direct
        self.depth = depth
        self.piece_nbytes = piece_nbytes
        self.library = load()
        self.pointer = pointer
        ring = self.library.aio_ring(pointer)
        self.ring = RINGS[ring - 1] if ring else None
        if self.ring:
            self.reason += f" (ring: {self.ring})"
        self.registered_nbytes = 0
        self._registered: object = None
        self.pid = os.getpid()
        self.hang_s = HANG_S
        self.hung = False
        self._closed = self._forked = False
        # Guards _in_flight and _open. Reentrant: a garbage collection while it is held may run a finalizer
        # that takes it.
        self._lock = threading.RLock()
        self._in_flight: dict[RequestBatch, None] = {}
        self._open: RequestBatch | None = None
        self._type = ffi.typeof("struct aio_request *")
        native = Native(self.library, pointer, self._in_flight, self.pid)
        self._native = native
        self._finalizer = weakref.finalize(self, end_forgotten, native)
        _engines.add(self)

    # Files

    def open_nameless(self, folder: Folder) -> File:
        """Open a new file without a name: the kernel frees its space when the process ends."""
        self._check()
        fd, path = files.open_nameless(folder, self._flags)
        return File(self, fd, path, direct=self.direct)

    def create_named(self, folder: Folder, name: str) -> File:
        """Create `name` in a folder, mode 0600; FileExistsError if it exists."""
        self._check()
        fd, path = files.open_named(folder, name, self._flags | os.O_CREAT | os.O_EXCL)
        return File(self, fd, path, direct=self.direct)

    def open_named(self, folder: Folder, name: str) -> File:
        """Open the existing file `name` in a folder; links are not followed."""
        self._check()
        fd, path = files.open_named(folder, name, self._flags)
        return File(self, fd, path, direct=self.direct)

    def open_to_read(self, path: str | os.PathLike[str], *, direct: bool) -> File:
        """Open an existing file, anywhere, to be read alone; links are followed.

        Args:
            path: of the file.
            direct: with O_DIRECT, whatever the engine's own files have.

        Raises:
            OSError: there is no such file, it may not be read, or its file system has no O_DIRECT.
        """
        self._check()
        fd, real = files.open_to_read(path, os.O_DIRECT if direct else 0)
        return File(self, fd, real, direct=direct)

    @property
    def _flags(self) -> int:
        return os.O_DIRECT if self.direct else 0

    # Memory

    def register(self, address: int, nbytes: int, owner: object) -> None:
        """Register the memory of most requests with io_uring, before the first of them.

        io_uring then keeps the pages pinned and need not pin them for each request, which is some 40 % of its
        thread's CPU time. Other engines do nothing; if the kernel refuses, `reason` says so. At most 1 GiB is
        registered. `owner` keeps the memory alive, and is held as long as the engine.

        Raises:
            ValueError: memory has been registered before.
        """
        self._check()
        if self.ring is None:
            return
        if self._registered is not None:
            raise ValueError(f"{self!r} has registered memory already: call register once")
        self._registered = owner
        result = -self.library.aio_register(self.pointer, address, nbytes)
        self.registered_nbytes = 0 if result else min(nbytes, REGISTERED_NBYTES)
        self.reason += f"; {self.registered_nbytes} B of memory are registered"
        self.reason += f", not {nbytes}: {errors.why_not_registered(result)}" if result else ""

    # Requests

    def read(
        self,
        file: File,
        offset: int,
        address: int,
        nbytes: int,
        *,
        what: str = "",
        owner: object = None,
        priority: Priority = Priority.NORMAL,
        more: bool = False,
    ) -> Completion:
        """Start to read `nbytes` at `offset` of a file into memory at `address`.

        Args:
            file: the file to read from.
            offset: in the file, in bytes.
            address: of the memory; writable, and used by nothing else until the request has ended.
            nbytes: bytes to read.
            what: names the bytes in errors, such as the unit and field.
            owner: the object that keeps the memory alive; held until the request has ended.
            priority: the order among waiting requests.
            more: further requests follow at once, the last without this flag. The request begins with that
                one, or when a thread asks for it, or waits for any request of this engine: several together
                cost little more than one.

        Raises:
            ValueError: on a direct file, one of the three numbers is not whole blocks.
        """
        return self._begin(priority, file, offset, address, nbytes, what, owner, more=more)

    def write(
        self,
        file: File,
        offset: int,
        address: int,
        nbytes: int,
        *,
        what: str = "",
        owner: object = None,
        priority: Priority = Priority.NORMAL,
        more: bool = False,
    ) -> Completion:
        """Start to write `nbytes` from memory at `address` to a file at `offset`; otherwise like `read`."""
        return self._begin(WRITE | priority, file, offset, address, nbytes, what, owner, more=more)

    def _begin(
        self,
        flags: int,
        file: File,
        offset: int,
        address: int,
        nbytes: int,
        what: str,
        owner: object,
        *,
        more: bool,
    ) -> Completion:
        if self._closed:
            self._check()
        any_negative = (offset | nbytes | address - 1) < 0
        if any_negative or offset + nbytes >= _END:
            raise ValueError(f"{what}: {nbytes} B at offset {offset}, address {address:#x}: out of range")
        if file.direct:
            if (offset | address | nbytes) % BLOCK:
                raise ValueError(
                    f"{what or 'request'}: address {address:#x}, offset {offset} and {nbytes} B must all be"
                    f" whole blocks of {BLOCK} B, because {file.path} is opened with O_DIRECT"
                )
            flags |= ALIGNED
        descriptor = file.descriptor
        fd = descriptor.fd if descriptor.is_open else file.fd
        request = ffi.new(self._type, (address, offset, nbytes, fd, flags))
        entry = request, what, owner, descriptor
        with self._lock:
            batch = self._open or self._open_batch()
            batch.add(entry)
            self._in_flight[batch] = None  # again: see RequestBatch.add
        if not more or batch is not self._open or len(batch.entries) >= _GATHERED_MOST:
            result = self.submit(batch)
            if result < 0:
                raise self.refusal(-result)
        return Completion(self, batch, request, file, what)

    def _open_batch(self) -> RequestBatch:
        self._open = batch = RequestBatch()
        return batch

    def submit(self, batch: RequestBatch) -> int:
        """Submit the requests of a batch that are still gathered; returns -errno if they were refused."""
        if self._forked:
            return 0  # the lock may be held for ever
        with self._lock:
            if batch is self._open:
                self._open = None
        result = batch.submit(self.library, self.pointer)
        if result < 0:
            self.release(batch)
        else:
            self._release_oldest()
        return result

    def submit_gathered(self) -> None:
        """Submit the requests that are still gathered, of whichever thread: it is about to wait."""
        batch = self._open
        if batch is not None:
            self.submit(batch)

    # Waiting

    def wait_any(self, completions: Sequence[Completion], timeout_s: float | None = None) -> Completion:
        """Wait until one of several requests has ended, and return it; its `wait` raises its error.

        Raises:
            IoTimeoutError: none has ended after `timeout_s` seconds.
        """
        self._check_process()
        self.submit_gathered()
        if not completions:
            raise ValueError("wait_any needs at least one completion")
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            seen = self.library.aio_wait_change(self.pointer, _NO_COUNT, 0)
            for completion in completions:
                if completion.done:
                    return completion
            slice_ms = self._slice_ms(end_s, f"none of {len(completions)} requests done after {timeout_s} s")
            if self.library.aio_wait_change(self.pointer, seen, slice_ms) == seen:
                self._raise_if_broken()

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight; errors are raised by the completions' own `wait`.

        Raises:
            IoTimeoutError: requests are still in flight after `timeout_s` seconds.
        """
        self._check_process()
        self.submit_gathered()
        self._native.submit_all()
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (result := self.library.aio_wait_idle(self.pointer, self._slice_ms(end_s, "not idle"))):
            pass
        if result < 0:
            raise IoEngineFailedError.of_engine(-result)
        self._release_all()

    def hangs(self, what: str) -> IoTimeoutError:
        """Record that the disk does not respond to `what`, and return the error that says so."""
        self.hung = True
        in_flight = [
            f"{'write' if request.flags & WRITE else 'read'} of {name or 'unnamed data'}, "
            f"{request.nbytes} B at {request.offset}"
            for batch in list(self._in_flight)
            for request, name, *_ in batch.entries
            if not has_ended(self.library, request)
        ]
        return IoTimeoutError.of_hang(what, self.hang_s, in_flight)

    def wait_for_file(self, file: File) -> None:
        """Wait until no request on a file is in flight, or the disk hangs."""
        if self.pid != os.getpid() or self.hung:
            return
        for batch in list(self._in_flight):
            requests = [entry[0] for entry in batch.entries if entry[-1] is file.descriptor]
            if requests:
                self.submit(batch)
            for request in requests:
                while not (result := self.library.aio_wait(self.pointer, request, SLICE_MS)):
                    pass
                if result < 0:
                    raise IoEngineFailedError.of_engine(-result)
            self.release(batch)

    def _slice_ms(self, end_s: float | None, message: str) -> int:
        if end_s is None:
            return SLICE_MS
        left_s = end_s - time.monotonic()
        if left_s < 0:
            raise IoTimeoutError(errno.ETIMEDOUT, f"{message}: {self!r}")
        return min(SLICE_MS, max(1, round(left_s * 1000)))

    def _raise_if_broken(self) -> None:
        result = self.library.aio_wait_idle(self.pointer, 0)
        if result < 0:
            raise IoEngineFailedError.of_engine(-result)

    # Releasing memory

    def release(self, batch: RequestBatch) -> bool:
        """Release the owners of a batch if all its requests have ended; returns whether they are released."""
        if batch.is_over or self._forked:  # in a forked child the lock may be held for ever
            return batch.is_over
        with self._lock:
            if batch is self._open or not batch.has_ended(self.library):
                return False
            self._in_flight.pop(batch, None)
            entries = batch.let_go()
        del entries  # outside the lock, because an owner's finalizer may run any code
        return True

    def _release_oldest(self) -> None:
        """Release the oldest requests if they have ended: their completions may have been dropped.

        Requests end roughly in the order in which they began, so usually this looks at one request only.
        """
        while True:
            with self._lock:
                batch = next(iter(self._in_flight), None)
            if batch is None or not self.release(batch):
                return

    def _release_all(self) -> None:
        for batch in list(self._in_flight):
            self.release(batch)

    # Life

    def statistics(self) -> EngineStatistics:
        """Return the counts so far; releases requests that have ended."""
        self._check_process()
        self.submit_gathered()
        self._release_all()
        return EngineStatistics.of(self.library, self.pointer)

    def say_hang_after(self, seconds: float) -> None:
        """Set `hang_s`."""
        self.hang_s = seconds

    def close(self) -> None:
        """Finish all requests, then end the engine's threads. A second call does nothing."""
        if self._closed or self.pid != os.getpid():
            return
        self.submit_gathered()
        over = end(self._native, _HUNG_CLOSE_S if self.hung else None)
        self._closed = True
        if not over:
            abandoned.append(self._native)
            self._finalizer.detach()
            return
        self._release_all()
        self._finalizer()

    def leave(self) -> None:
        """Refuse all from now on: this is a forked child, and the engine is its parent's."""
        self._closed = self._forked = True

    def _check(self) -> None:
        if self._closed:
            self._check_process()
            raise EngineClosedError(f"{self!r} is closed")

    def _check_process(self) -> None:
        if self.pid != os.getpid():
            raise ForkedError(
                f"this I/O engine belongs to process {self.pid}, and this is a forked child ({os.getpid()})\n"
                f"  try: open an engine in the child, or start it with the 'spawn' method"
            )

    def refusal(self, number: int) -> Exception:
        """Return the error of a request that the C engine has refused."""
        if number == errno.ESHUTDOWN:
            return EngineClosedError(f"{self!r} is closed")
        return IoEngineFailedError.of_engine(number)

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.pid != os.getpid():
            return f"<IoEngine {self.kind} of process {self.pid}, forked>"
        counts = self.statistics()
        opening = "direct" if self.direct else "buffered"
        return (
            f"<IoEngine {self.kind}, {opening}{', closed' if self._closed else ''},"
            f" {counts.in_flight} of {counts.requests} requests in flight, {counts.failed} failed,"
            f" {counts.bytes_read / 1e9:.3f} GB read, {counts.bytes_written / 1e9:.3f} GB written>"
        )
