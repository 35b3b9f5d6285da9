"""Memory that O_DIRECT takes: whole pages, aligned.

Huge pages where there is room for one, as the training's pools have them: pinning and mapping every page of a
request is most of what direct I/O costs the CPU, and 2 MiB are then one page instead of 512.
"""

import contextlib
import mmap

from infinity.aio.library import ffi

_HUGE_NBYTES = 2 << 20


class AlignedMemory:
    """Anonymous pages, zero at first.  For trials, measurements and tests; the engine's pools are elsewhere.

    Attributes:
        address: of the first byte.
        view: the bytes, writable.
    """

    def __init__(self, nbytes: int, *, huge: bool = True) -> None:
        self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and nbytes >= _HUGE_NBYTES:
            with contextlib.suppress(OSError):  # a kernel without them
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._pages)
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self._pages)))

    def __len__(self) -> int:
        return len(self._pages)

    def __repr__(self) -> str:
        return f"<AlignedMemory {len(self)} B at {self.address:#x}>"
