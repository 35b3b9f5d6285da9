"""What lets `from_pretrained` run inside Init: values that come later, out of mapped files.

[Note: from_pretrained]
Hugging Face builds a model on the meta device, maps the safetensors files and sets one parameter after the
other (setattr, so registration tells Init). A parameter without values is therefore left alone until it is
replaced. Pages of the files that were read would count as this process's memory until the last is loaded, so
they are paged out now and then; they stay in the page cache, where the other ranks of this machine find them.
Nothing of transformers is replaced: one of its own settings makes it load in order, since its threads would
convert types far ahead of eviction.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from infinity.errors import UnsupportedError
from infinity.storage.safetensors_file import TensorFileError

_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"
_MADV_DONTNEED, _MADV_PAGEOUT = 4, 21  # asm-generic/mman-common.h; the second since Linux 5.4
_LARGE_NBYTES = 1 << 20
_TOGETHER_NBYTES = 16 << 20
_SHOWN = 10


@contextlib.contextmanager
def loading_in_order() -> Iterator[None]:
    """Have transformers load one tensor at a time; see [Note: from_pretrained]."""
    before = os.environ.get(_IN_ORDER)
    os.environ[_IN_ORDER] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_IN_ORDER, None)
        else:
            os.environ[_IN_ORDER] = before


def name_file(error: BaseException) -> None:
    """Name the file that safetensors could not open: its own errors do not.

    Raises: TensorFileError, for such an error.
    """
    if type(error).__name__ != "SafetensorError":
        return
    files = [
        value
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for value in map(frame.f_locals.get, ("file", "checkpoint_file", "filename"))
        if isinstance(value, str) and os.path.isfile(value)  # noqa: PTH113 - text of somebody else's
    ]
    if files:
        raise TensorFileError(
            f"{files[-1]}: {error}. It is no safetensors file, or was cut: {os.stat(files[-1]).st_size} B. "
            "Fetch it again; nothing was read from the others."
        ) from error


class Mapped:
    """Files that were mapped into this process since a point in time; see [Note: from_pretrained]."""

    def __init__(self) -> None:
        """Note which files are mapped now: those are not touched."""
        self._before = set(_mappings())
        self._nbytes = 0

    def taken(self, nbytes: int) -> None:
        """Count bytes that were taken from the files; page the files out after every few of them."""
        self._nbytes += nbytes
        if self._nbytes >= _TOGETHER_NBYTES:
            self.page_out()

    def page_out(self) -> None:
        """Take the files' pages out of this process's memory. A page that is read again has the same values.

        Pages that somebody has changed are this process's own: the kernel pages them out, if it can.
        """
        self._nbytes = 0
        libc = ctypes.CDLL(None)
        changed = set(_changed())
        for start, nbytes in set(_mappings()) - self._before:
            advice = _MADV_PAGEOUT if start in changed else _MADV_DONTNEED
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice)


def _mappings() -> Iterator[tuple[int, int]]:
    """Return address and bytes of every large mapped file that is not code."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _offset, _device, _inode, *path = line.split(maxsplit=5)
        start, stop = (int(address, 16) for address in addresses.split("-"))
        ours = bool(path) and path[0].startswith("/") and not path[0].startswith("/dev/")
        if ours and "x" not in access and stop - start >= _LARGE_NBYTES:
            yield start, stop - start


def _changed() -> Iterator[int]:
    """Return the address of every mapping with pages that are not the file's."""
    start = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            start = int(key.split("-")[0], 16)
        elif key == "Anonymous:" and values[0] != "0":
            yield start


def check_values(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse a finished model with parameters that never got values.

    Raises: UnsupportedError naming them.
    """
    empty = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in modules
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    if empty:
        more = f" and {len(empty) - _SHOWN} more" if len(empty) > _SHOWN else ""
        raise UnsupportedError(
            f"{len(empty)} parameters are on the meta device, without values, at the end of Init: "
            f"{', '.join(empty[:_SHOWN])}{more}. Load them inside Init (from_pretrained does), or build the "
            "model on the CPU there."
        )
