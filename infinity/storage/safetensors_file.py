"""Safetensors files, written and read in pieces: a file is never in memory as a whole. Without torch.

The format (huggingface/safetensors): 8 bytes with the header's length; the header, JSON, padded with spaces;
the tensors back to back. So the header is known before any value, and values may be written in any order. The
safetensors library needs all tensors of a file at once to write it, and reads by mapping, so that a reader's
resident memory grows with the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from infinity.aio import StorageFullError
from infinity.errors import InfinityError
from infinity.sizes import format_size

WIDTHS = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "BOOL": 1,
}
"""Bytes of one element, by the format's names of dtypes."""

Bytes = bytes | memoryview

_MORE = "Free space there, or write to another drive"
_PIECE_NBYTES = 16 << 20
_HEADER_NBYTES_MOST = 100_000_000
"""The longest header that the library reads."""


class TensorFileError(InfinityError, ValueError):
    """A file that is not in the safetensors format, or not the expected one."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str  # a key of WIDTHS
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return self.numel * WIDTHS[self.dtype]


def split_by_size(entries: Iterable[TensorEntry], most_nbytes: int) -> list[list[TensorEntry]]:
    """Split tensors into files of at most `most_nbytes`; a larger tensor gets its own."""
    files: list[list[TensorEntry]] = [[]]
    nbytes = 0
    for entry in entries:
        nbytes += entry.nbytes
        if files[-1] and nbytes > most_nbytes:
            files.append([])
            nbytes = entry.nbytes
        files[-1].append(entry)
    return files


def storage_full(path: Path, needed: int, free: int, number: int = errno.ENOSPC) -> StorageFullError:
    """Return the error for a file or folder of `needed` bytes where `free` bytes are available.

    number: the errno, which tells a full file system from a quota and from a limit of file sizes.
    """
    why = f"{format_size(needed)} are needed"
    if number == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY and limit < needed:
            what = f"this process may write files of {format_size(limit)}"
            cure = "`ulimit -f unlimited` in the shell that starts it"
        else:
            what, cure = "the file system allows less", "Write to another file system"
        why += f" in one file, and {what} (the limit of file sizes; {format_size(free)} are free). {cure}"
    elif needed > free:
        why += f", {format_size(free)} free, {format_size(needed - free)} short. {_MORE}"
    else:
        limits = "this user's quota" if number == errno.EDQUOT else "a quota, or space that is reserved,"
        why += f", and {limits} does not allow it although {format_size(free)} are free. {_MORE}"
    full = StorageFullError(number, f"{path}: {os.strerror(number)}: {why}.", str(path))
    return full.with_sizes(needed=needed, free=free)


class TensorWriter:
    """A new file whose tensors are written in pieces, in any order."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> None:
        """Create the file, allocate its space and write its header.

        Raises: aio.StorageFullError with the numbers; FileExistsError.
        """
        self.path = path
        text = self._lay_out(entries, metadata)
        self._fd = self._open()
        try:
            self._begin(text)
        except BaseException:
            self.close()
            raise
        if not self._left_nbytes:
            self.finish()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def _begin(self, text: bytes) -> None:
        self._allocate()
        self._write(0, len(text).to_bytes(8, "little") + text)

    def _lay_out(self, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
        """Set the tensors' offsets; return the header."""
        self._offsets: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        at = 0
        # Wide types first, so that every tensor is aligned to its type: readers map the file.
        for entry in sorted(entries, key=lambda entry: -WIDTHS[entry.dtype]):
            end = at + entry.nbytes
            header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, end]}
            self._offsets[entry.name] = at
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self.nbytes = self._start + at
        self._left_nbytes = at
        self.written_nbytes = 0
        """Bytes of tensors that this process has written."""
        return text

    def _allocate(self) -> None:
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> OSError:
        """Return the error to raise for a failed write: with sizes, if the file system is full."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return OSError(error.errno, error.strerror, str(self.path))
        there = os.statvfs(self.path.parent)
        free = there.f_bavail * there.f_frsize
        return storage_full(self.path, self.nbytes, free, error.errno)

    def write(self, name: str, offset: int, values: Bytes) -> None:
        """Write a part of a tensor, at byte `offset` of the tensor. Every byte has to be written once."""
        nbytes = memoryview(values).nbytes
        self._write(self._start + self._offsets[name] + offset, values)
        self._left_nbytes -= nbytes
        self.written_nbytes += nbytes
        if not self._left_nbytes:
            self.finish()

    def _write(self, at: int, values: Bytes) -> None:
        left = memoryview(values).cast("B")
        while left:
            try:
                done = os.pwrite(self._fd, left, at)
            except OSError as error:
                raise self._full(error) from error
            left, at = left[done:], at + done

    def finish(self) -> None:
        """Sync what this process has written to disk, and close the file."""
        if self._fd >= 0:
            os.fsync(self._fd)
            self.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def check_whole(self) -> None:
        """Raise TensorFileError if bytes were not written."""
        if self._left_nbytes:
            raise TensorFileError(f"{self.path}: {self._left_nbytes} of {self.nbytes} bytes were not written")


class TensorJoiner(TensorWriter):
    """A file that another process has created from the same entries, opened to write parts of it.

    Raises: TensorFileError for a file of another size; FileNotFoundError.
    """

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)

    def _begin(self, text: bytes) -> None:
        found = os.fstat(self._fd).st_size
        if found != self.nbytes:
            raise TensorFileError(f"{self.path}: {found} bytes, expected {self.nbytes}: it is another file")


class TensorReader:
    """A file whose tensors are read in pieces."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises: TensorFileError naming the file and what is wrong with it; OSError.
        """
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.nbytes = os.fstat(self._fd).st_size
            self.metadata: dict[str, str] = {}
            self.entries: dict[str, TensorEntry] = {}
            self._offsets: dict[str, int] = {}
            self._start = 8
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if length > min(_HEADER_NBYTES_MOST, self.nbytes - 8):
            raise TensorFileError(
                f"{self.path}: not a safetensors file, or truncated: a header of {length} bytes in a file of "
                f"{self.nbytes}"
            )
        self._start = 8 + length
        try:
            header = json.loads(os.pread(self._fd, length, 8))
            self.metadata = dict(header.pop("__metadata__", {}))
            for name, about in header.items():
                first, last = about["data_offsets"]
                entry = TensorEntry(name, about["dtype"], tuple(about["shape"]))
                if entry.dtype not in WIDTHS or any(
                    type(size) is not int or size < 0 for size in entry.shape
                ):
                    raise TensorFileError(f"{self.path}: {name}: {entry.dtype} {list(entry.shape)}")
                if not 0 <= first <= last <= self.nbytes - self._start or last - first != entry.nbytes:
                    raise TensorFileError(
                        f"{self.path}: {name}: bytes {first} to {last} of {self.nbytes - self._start} cannot "
                        f"hold {entry.dtype} {list(entry.shape)}, which takes {entry.nbytes}"
                    )
                self.entries[name], self._offsets[name] = entry, first
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, TensorFileError):
                raise
            raise TensorFileError(f"{self.path}: the safetensors header cannot be read: {error}") from error

    def begins_at(self, name: str) -> int:
        """Return the byte of the file at which a tensor begins."""
        return self._start + self._offsets[name]

    def read(self, name: str, offset: int, into: Bytes) -> None:
        """Fill `into` with a tensor's bytes, from byte `offset` of the tensor on."""
        left = memoryview(into).cast("B")
        if offset + len(left) > self.entries[name].nbytes:
            raise TensorFileError(f"{self.path}: {name}: {offset + len(left)} bytes asked for")
        at = self._start + self._offsets[name] + offset
        while left:
            done = os.preadv(self._fd, [left], at)
            if not done:
                raise TensorFileError(f"{self.path}: the file ended at byte {at}: it was truncated meanwhile")
            left, at = left[done:], at + done

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> TensorReader:  # noqa: PYI034 - Self is of Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def add_metadata(path: Path, more: Mapping[str, str]) -> None:
    """Rewrite a file, in pieces, with more metadata in its header."""
    filling = path.with_name(f"{path.name}.filling")
    with TensorReader(path) as old:
        entries = list(old.entries.values())
        writer = TensorWriter(filling, entries, {**old.metadata, **more})
        with contextlib.closing(writer):
            for entry in entries:
                for start in range(0, entry.nbytes, _PIECE_NBYTES):
                    piece = bytearray(min(_PIECE_NBYTES, entry.nbytes - start))
                    old.read(entry.name, start, memoryview(piece))
                    writer.write(entry.name, start, memoryview(piece))
            writer.check_whole()
    filling.replace(path)
