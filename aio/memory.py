"""Memory for O_DIRECT: whole, aligned pages.

It uses huge pages if it is large enough for one, as the pools of training do. Pinning and mapping the pages
of a request is most of the CPU time of direct I/O, and 2 MiB are then one page instead of 512.
"""

import contextlib
import mmap

from infinity.aio.library import ffi

_HUGE_NBYTES = 2 << 20


class AlignedMemory:
    """Anonymous pages, zero at first, for trials, measurements and tests; training has pools of its own.

    Attributes:
        address: of the first byte.
        view: the bytes, writable.
    """

    def __init__(self, nbytes: int, *, huge: bool = True) -> None:
        self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and nbytes >= _HUGE_NBYTES:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._pages)
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self._pages)))

    def __len__(self) -> int:
        return len(self._pages)

    def __repr__(self) -> str:
        return f"<AlignedMemory {len(self)} B at {self.address:#x}>"
