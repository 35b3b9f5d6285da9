"""Where the values of parameters come from, while a model is built: ranges of a checkpoint's own files.

[Note: mapped parameters]
from_pretrained maps safetensors files and makes parameters of the mapped bytes; whatever is done to these on
the way (a conversion, a merge of several tensors) gives memory of its own. So a parameter's address tells
what it is: one that lies in a mapping of a safetensors file, within one tensor of its type there, has that
file's bytes, whatever its name in the model. The kernel knows which pages of the mapping were written to
since: they are this process's own. Both are asked at the moment that the parameter is given up, so nothing
has to be trusted that happened before; and nothing is read for it but the files' headers.
"""

from __future__ import annotations

import bisect
import functools
import os
from array import array
from pathlib import Path
from typing import NamedTuple

import torch

from infinity.storage.packed import FileRange
from infinity.storage.safetensors_file import TensorFileError, TensorReader
from infinity.tensors import DTYPES, is_distributed

_NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, torch.float8_e4m3fn: "F8_E4M3"}
_PAGE = os.sysconf("SC_PAGE_SIZE")
_OF_A_FILE, _SWAPPED, _PRESENT = 61, 62, 63  # bits of /proc/self/pagemap (admin-guide/mm/pagemap.rst)


class _Mapping(NamedTuple):
    """A mapped range of a file."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str

    def goes_on_in(self, other: _Mapping) -> bool:
        """Whether `other` is the next part of the same mapping, which the kernel lists by itself."""
        if self.stop != other.start:
            return False
        there = self.offset + self.stop - self.start, self.inode, self.path
        return there == (other.offset, other.inode, other.path)


@functools.lru_cache(maxsize=1 << 13)  # the libraries' lines are the same at every look
def _mapping_of(line: str) -> _Mapping | None:
    """Return what a line of /proc/self/maps shows; None for memory of no file, and for code."""
    addresses, access, offset, _device, inode, *path = line.split(maxsplit=5)
    if not path or not path[0].startswith("/") or "x" in access:
        return None
    start, stop = (int(address, 16) for address in addresses.split("-"))
    return _Mapping(start, stop, int(offset, 16), int(inode), path[0])


class _Tensors:
    """The tensors of one file, by where they begin."""

    def __init__(self, path: str) -> None:
        """Read the header. Raises: TensorFileError, OSError."""
        with TensorReader(Path(path)) as reader:
            found = [(reader.begins_at(name), one) for name, one in reader.entries.items() if one.nbytes]
        found.sort(key=lambda one: one[0])
        self._begin = [at for at, _ in found]
        self._entries = [entry for _, entry in found]
        self.inode = os.stat(path).st_ino

    def dtype_of(self, offset: int, nbytes: int) -> str | None:
        """Return the type of the tensor that holds these bytes of the file; None if none holds all."""
        index = bisect.bisect_right(self._begin, offset) - 1
        if index < 0 or offset + nbytes > self._begin[index] + self._entries[index].nbytes:
            return None
        return self._entries[index].dtype


class Origins:
    """Finds the ranges of files that parameters' values are; see [Note: mapped parameters]."""

    def __init__(self) -> None:
        """Know no file yet."""
        self._mappings: list[_Mapping] = []
        self._files: dict[str, _Tensors | str] = {}

    def may_have(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter seems to lie in a mapped file; `of` makes sure."""
        if self._mapping(parameter) is None:
            self.look()
        return self._mapping(parameter) is not None

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter lies in a file that was mapped when this looked last."""
        return self._mapping(parameter) is not None

    def look(self) -> None:
        """Look anew at what is mapped; `of` answers for this moment."""
        self._mappings = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            new = _mapping_of(line)
            if new is None:
                continue
            if self._mappings and self._mappings[-1].goes_on_in(new):
                last = self._mappings.pop()
                new = new._replace(start=last.start, offset=last.offset)
            self._mappings.append(new)

    def _mapping(self, parameter: torch.Tensor) -> _Mapping | None:
        if is_distributed(parameter):
            return None  # its local tensor, a part of a file's, is copied
        address = parameter.data_ptr()
        index = bisect.bisect_right(self._mappings, address, key=lambda one: one.start) - 1
        if index < 0 or address + parameter.nbytes > self._mappings[index].stop:
            return None
        return self._mappings[index]

    def of(self, parameter: torch.Tensor, dtype: torch.dtype) -> FileRange | str:
        """Return the range of a file that a parameter's values are, where these are of the type that
        computes, `dtype`; else a text that says why there is none.
        """
        mapping = self._mapping(parameter)
        if is_distributed(parameter):
            return "ranks have parts of it"
        if parameter.dtype != dtype:
            return f"{parameter.dtype} is converted to {dtype}"
        if mapping is None or not parameter.is_contiguous():
            return "made anew while it was loaded: merged, transposed or initialised"
        return self._in_file(parameter, mapping)

    def _in_file(self, parameter: torch.Tensor, mapping: _Mapping) -> FileRange | str:
        tensors = self._tensors(mapping)
        if isinstance(tensors, str):
            return tensors
        offset = mapping.offset + parameter.data_ptr() - mapping.start
        if tensors.dtype_of(offset, parameter.nbytes) != _NAMES.get(parameter.dtype):
            return f"not a tensor of {mapping.path}"
        if _changed(parameter.data_ptr(), parameter.nbytes):
            return "changed after it was loaded"
        return FileRange(mapping.path, offset, parameter.nbytes)

    def where(self, tensor: torch.Tensor) -> FileRange | None:
        """Return the range of a file that a tensor's bytes are; None for one that is in memory."""
        found = self.of(tensor, tensor.dtype)
        return found if isinstance(found, FileRange) else None

    def _tensors(self, mapping: _Mapping) -> _Tensors | str:
        """Return what is in a mapped file, or why that is not known."""
        if mapping.path not in self._files:
            try:
                self._files[mapping.path] = _Tensors(mapping.path)
            except TensorFileError:
                self._files[mapping.path] = f"{mapping.path} is not a safetensors file"
            except OSError as error:
                self._files[mapping.path] = f"{mapping.path} cannot be opened ({error.strerror})"
        found = self._files[mapping.path]
        if not isinstance(found, str) and found.inode != mapping.inode:
            return f"{mapping.path} is another file by now, or its file system shows it as one"
        return found


def _changed(address: int, nbytes: int) -> bool:
    """Whether any page of a private mapping was written to by this process; so, too, if nobody can tell."""
    first, last = address // _PAGE, -(-(address + nbytes) // _PAGE)
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            file.seek(8 * first)
            pages = array("Q", file.read(8 * (last - first)))
    except OSError:
        return True
    own = (1 << _PRESENT) | (1 << _OF_A_FILE)
    return len(pages) < last - first or any(
        page & (1 << _SWAPPED) or page & own == 1 << _PRESENT for page in pages if page
    )
