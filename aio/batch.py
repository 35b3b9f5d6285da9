"""Requests that are submitted together: one call into C, and one entry among what is in flight."""

import platform

from infinity.aio.files import Descriptor
from infinity.aio.library import DONE, AioLibrary, CData, ffi

InFlight = tuple[CData, str, object, Descriptor]
"""A request that the kernel may be working on, what it moves, the owner of its memory, and the descriptor of
its file: not the File, which refers to the engine, which could then never be collected."""

_LOOKS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor sees in their order what another has stored: elsewhere C has to ask."""


class RequestBatch:
    """Requests that are submitted together, and whose memory is released together.

    Attributes:
        entries: the requests; none any more when `is_over`.
        is_over: whether all have ended, and their memory is released.
    """

    __slots__ = ("entries", "is_over")

    def __init__(self) -> None:
        self.entries: list[InFlight] = []
        self.is_over = False

    def add(self, entry: InFlight) -> None:
        """Add a request. A garbage collection just before may have run a finalizer that waited for those that
        were there, so that it was over.
        """
        self.entries.append(entry)
        self.is_over = False

    def let_go(self) -> list[InFlight]:
        """Note that all requests have ended; returns what was kept for them."""
        entries, self.entries, self.is_over = self.entries, [], True
        return entries

    def submit(self, library: AioLibrary, engine: CData) -> int:
        """Submit those that are not submitted yet; returns -errno if they were refused, and are over.

        A Ctrl-C leaves them submitted or not: what may or may not have happened can be repeated.
        """
        requests = [entry[0] for entry in self.entries]
        return library.aio_submit(engine, ffi.new("struct aio_request *[]", requests), len(requests))

    def has_ended(self, library: AioLibrary) -> bool:
        """Whether all requests have. The last is looked at first: it mostly is the last to end."""
        for entry in reversed(self.entries):
            request = entry[0]
            if request.state != DONE or not (_LOOKS_IN_ORDER or library.aio_done(request)):
                return False
        return True


def has_ended(library: AioLibrary, request: CData) -> bool:
    """Whether a request has ended. A plain look saves a call into C, which gives up the interpreter's lock.

    What was moved may be looked at after it.
    """
    return request.state == DONE and (_LOOKS_IN_ORDER or bool(library.aio_done(request)))
