"""Memory that O_DIRECT takes: whole pages, aligned."""

import mmap

from infinity.aio.library import ffi


class AlignedMemory:
    """Anonymous pages, zero at first.  For trials, measurements and tests; the engine's pools are elsewhere.

    Attributes:
        address: of the first byte.
        view: the bytes, writable.
    """

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._pages)
        self.address = int(ffi.cast("uintptr_t", ffi.from_buffer(self._pages)))

    def __len__(self) -> int:
        return len(self._pages)

    def __repr__(self) -> str:
        return f"<AlignedMemory {len(self)} B at {self.address:#x}>"
