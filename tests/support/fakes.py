"""Stand-ins: a store whose transfers complete in random order and may fail, seeded."""

from __future__ import annotations

import errno
import random
import threading
import time

from infinity.storage.memory import view
from infinity.storage.store import Extent


class _Transfer:
    """A copy that happens at a random moment between its submission and the first wait for it."""

    def __init__(self, copy, delay_s, error, owner=None):
        self._copy, self._error = copy, error
        self._owner = owner  # keeps the memory alive, as a Request says
        self._ready = time.monotonic() + delay_s
        self._lock = threading.Lock()
        self._over = self.waited_for = False
        self.began_s, self.ended_s = time.perf_counter(), time.perf_counter() + delay_s

    @property
    def done(self):
        return time.monotonic() >= self._ready

    def wait(self, timeout_s=None):
        time.sleep(max(0.0, self._ready - time.monotonic()))
        self.waited_for = True
        if self._error is not None:
            raise self._error
        with self._lock:
            if not self._over:
                self._copy()
                self._over = True


class FakeDisk:
    """A store in a bytearray. fail_at, flip_at: which transfer raises EIO, or comes back wrong."""

    tier = "nvme"

    def __init__(self, seed=0, fail_at=None, flip_at=None, delay_s=0.0005):
        self.data = bytearray()
        self.transfers = 0
        self._random = random.Random(seed)
        self._fail_at, self._flip_at, self._delay_s = fail_at, flip_at, delay_s

    def allocate(self, nbytes, what):
        extent = Extent(self, len(self.data), nbytes)
        self.data.extend(bytes(nbytes))
        return extent

    def free(self, extent):
        pass

    def where(self, extent, start):
        return f"fake disk at byte {extent.offset + start}"

    def _begin(self, copy, what, owner):
        self.transfers += 1
        error = OSError(errno.EIO, f"{what}: injected") if self.transfers == self._fail_at else None
        return _Transfer(copy, self._random.random() * self._delay_s, error, owner)

    def read(self, request):
        extent, start, address, nbytes, what, owner, *_ = request
        flip = self.transfers + 1 == self._flip_at

        def copy():
            memory = view(address, nbytes)
            memory[:] = self.data[extent.offset + start : extent.offset + start + nbytes]
            if flip:
                memory[0] = memory[0][0] ^ 1 if isinstance(memory[0], bytes) else memory[0] ^ 1

        return self._begin(copy, what, owner)

    def write(self, request):
        extent, start, address, nbytes, what, owner, *_ = request

        def copy():
            self.data[extent.offset + start : extent.offset + start + nbytes] = bytes(view(address, nbytes))

        return self._begin(copy, what, owner)
