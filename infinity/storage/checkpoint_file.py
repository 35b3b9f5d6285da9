"""Files of somebody else's checkpoint, open to be read.

[Note: files that change]
Nobody keeps others from writing to these files. What a file was when it was opened, its size and the time of
its last change, is compared before every read; the content is compared, too, with what the first read of each
tile found (see records). A file that is replaced by another of its name stays open, and its bytes stay.
"""

from __future__ import annotations

import os
import time

from infinity import aio
from infinity.errors import CorruptionError
from infinity.sizes import BLOCK
from infinity.storage.memory import Arena, view


class CheckpointFile:
    """A file of somebody else's, open to be read; see [Note: files that change]."""

    def __init__(self, engine: aio.IoEngine, path: str) -> None:
        """Open it, with O_DIRECT if its file system has that.

        Raises: OSError naming the file.
        """
        self._buffered = engine.open_to_read(path, direct=False)
        self.path = self._buffered.path
        self.nbytes, self.modified_ns = self._seen()
        self.refused: OSError | None = None
        """Why it is not read with O_DIRECT, where the engine would."""
        self.io = self._opened(engine)
        """What the engine reads from."""

    @property
    def direct(self) -> bool:
        """Whether it is read with O_DIRECT."""
        return self.io.direct

    def _opened(self, engine: aio.IoEngine) -> aio.File:
        """Return the file opened with O_DIRECT, after a trial; as it is where that does not work."""
        if self.nbytes < BLOCK or not engine.direct:
            return self._buffered
        try:
            file = engine.open_to_read(self.path, direct=True)
            memory = Arena(BLOCK)
            engine.read(file, 0, memory.address, BLOCK, what=f"a trial of {self.path}", owner=memory).wait()
        except OSError as error:
            self.refused = error
            return self._buffered
        return file

    def _seen(self) -> tuple[int, int]:
        status = os.fstat(self._buffered.fd)
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """See that the file is what it was when it was opened.

        Raises: CorruptionError naming it, and what changed.
        """
        try:
            nbytes, modified_ns = self._seen()
        except OSError as error:  # ESTALE: another machine has removed it from what both have mounted
            raise CorruptionError(
                f"{self.path} is gone while weights are read from it: {error.strerror}. Likely cause: "
                "another machine removed it, or its filesystem was unmounted. Load the model again, and "
                "leave its files alone while it is in use."
            ) from error
        if (nbytes, modified_ns) != (self.nbytes, self.modified_ns):
            raise CorruptionError(
                f"{self.path} was changed while weights are read from it: {nbytes} B, changed at "
                f"{_moment(modified_ns)}; when the model was loaded it had {self.nbytes} B, changed at "
                f"{_moment(self.modified_ns)}. Load the model again, and leave its files alone while it is "
                "in use."
            )

    def read_end(self, offset: int, address: int, nbytes: int) -> None:
        """Read bytes at the end of the file, less than a block, through the page cache.

        Raises: CorruptionError where the file has ended before.
        """
        if os.preadv(self._buffered.fd, [view(address, nbytes)], offset) != nbytes:
            raise CorruptionError(f"{self.path} ended before byte {offset + nbytes}: it was cut meanwhile")

    def close(self) -> None:
        """Close it once its requests are over."""
        self.io.close()
        self._buffered.close()


def _moment(ns: int) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(ns // 10**9))}.{ns % 10**9:09d}"
