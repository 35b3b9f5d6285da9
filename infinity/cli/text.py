"""Windows of bytes of a text file or folder of any size: only those of a step are read.

[Note: one long text]
The files of a folder, in the order of their names, are one long text. A window is drawn anywhere in it, so
it may begin in one file and end in the next. Memory holds the files' paths and offsets, not their text.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from infinity.errors import InfinityError

_LOOK_NBYTES = 4096
_DRAWN = 4096
"""Places that are drawn at once."""
_APART = 0x9E3779B97F4A7C15
"""From the seed of one draw to that of the next: no small one, so that seeds beside each other share none."""
_NOT_TEXT = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})


class TextError(InfinityError, ValueError):
    """There is no text, or it changed while it was read."""


def default_text() -> Text:
    """Return the sources of Python's standard library."""
    return Text(sysconfig.get_path("stdlib"), suffix=".py")


class Text:
    """The bytes of a file, or of all text files below a folder; see [Note: one long text].

    Raises: TextError naming the path, where it holds no text; an OSError naming the file that cannot be read.
    """

    def __init__(self, path: str, suffix: str = "") -> None:
        """Look through the folder, at the first 4 KiB of each file."""
        self.path = path
        self._files: list[str] = []
        sizes: list[int] = []
        for file, nbytes in _text_files(path, suffix):
            self._files.append(file)
            sizes.append(nbytes)
        ends = list(accumulate(sizes))
        self._starts = [0, *ends[:-1]]
        self.nbytes = ends[-1] if ends else 0
        if not self.nbytes:
            found = "is empty" if self._files or Path(path).is_file() else "holds no text file"
            raise TextError(f"text: {path} {found}. Name a text file, or a folder that holds some.")

    @property
    def files(self) -> int:
        """The number of files."""
        return len(self._files)

    def read(self, start: int, nbytes: int) -> bytes:
        """Return bytes [start, start + nbytes) of the text.

        Raises: TextError naming a file that has become shorter.
        """
        parts = []
        index = bisect_right(self._starts, start) - 1
        while nbytes:
            end = self._starts[index + 1] if index + 1 < len(self._files) else self.nbytes
            take = min(nbytes, end - start)
            parts.append(_read(self._files[index], start - self._starts[index], take))
            start, nbytes, index = start + take, nbytes - take, index + 1
        return b"".join(parts)

    def __repr__(self) -> str:
        return f"<Text {self.path}: {self.files} files, {self.nbytes} B>"


class Windows(Dataset[dict[str, Tensor]]):
    """Windows anywhere in a text, the same ones for the same text, length and seed: what the next one is
    depends on its number alone.

    Raises: TextError where the text is shorter than one window.
    """

    def __init__(self, text: Text, *, sequence: int, count: int, seed: int) -> None:
        """sequence: bytes of a window. count: of windows. seed: of the places."""
        if text.nbytes < sequence:
            raise TextError(
                f"text: {text.path} has {text.nbytes} B, less than one sequence of {sequence}. "
                "Give more text, or a smaller --sequence."
            )
        self._text = text
        self._sequence, self._count, self._seed = sequence, count, seed
        self._starts: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return a window's token ids, which are its labels too: int64 [sequence] each."""
        if not 0 <= number < self._count:
            raise IndexError(number)
        read = self._text.read(self._start(number), self._sequence)
        ids = torch.frombuffer(bytearray(read), dtype=torch.uint8).long()
        return {"input_ids": ids, "labels": ids}

    def _start(self, number: int) -> int:
        """Return where a window begins; places are drawn in blocks, of which one is kept."""
        block, within = divmod(number, _DRAWN)
        if self._starts[0] != block:
            generator = torch.Generator().manual_seed((self._seed + block * _APART) % 2**64)
            last = self._text.nbytes - self._sequence
            drawn = torch.randint(last + 1, (_DRAWN,), generator=generator, device="cpu")
            self._starts = block, drawn.tolist()
        return self._starts[1][within]


def _text_files(path: str, suffix: str) -> Iterator[tuple[str, int]]:
    """Yield (path, bytes) of the file, or of the folder's text files in the order of their names.

    Skipped in a folder: hidden files, links, installed packages, caches, and binary files.
    """
    status = os.stat(path)
    if stat.S_ISREG(status.st_mode):
        yield path, status.st_size
        return
    if not stat.S_ISDIR(status.st_mode):
        raise TextError(f"text: {path} is neither a file nor a folder")
    if not os.access(path, os.R_OK | os.X_OK):
        os.scandir(path).close()  # raises an error that names the folder
    for folder, below, names in os.walk(path):
        below[:] = sorted(name for name in below if name not in _NOT_TEXT and not name.startswith("."))
        for name in sorted(names):
            file = str(Path(folder, name))
            status = os.lstat(file)
            fits = stat.S_ISREG(status.st_mode) and name.endswith(suffix) and not name.startswith(".")
            if fits and _looks_like_text(file):
                yield file, status.st_size


def _looks_like_text(file: str) -> bool:
    """Whether the file begins without a zero byte; an unreadable file does not."""
    try:
        with Path(file).open("rb", buffering=0) as opened:
            return b"\0" not in opened.read(_LOOK_NBYTES)
    except PermissionError:
        return False


def _read(file: str, offset: int, nbytes: int) -> bytes:
    with Path(file).open("rb", buffering=0) as opened:
        opened.seek(offset)
        parts = []
        while nbytes and (part := opened.read(nbytes)):
            parts.append(part)
            nbytes -= len(part)
    if nbytes:
        raise TextError(
            f"text: {file} has become shorter since training began. Train on a copy that nobody changes."
        )
    return b"".join(parts)
