"""Checksums of fields, computed alone or by a kernel while it works on them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from infinity.kernels.library import ffi, library

STRETCH_NUMEL = 8192  # elements whose bytes are summed up at once, as in internal.h
LEAST_NBYTES = 256  # of a stretch
_FIELDS, _VOID = ffi.typeof("struct infinity_field[]"), ffi.typeof("void *")


class Field(NamedTuple):
    """A field, or a part of it, and which of its checksums to take."""

    address: int
    nbytes: int
    stretch: int
    """Bytes of STRETCH_NUMEL of its elements."""
    before: bool
    """Whether to take the checksum before a kernel's work."""
    after: bool
    """Whether to take the checksum after it."""


class Checksums:
    """Checksums of some fields, before and after a kernel works on them: [Note: checksums].

    Steps take them while they work, or `take_before` and `take_after` do, each once; those before the work
    also `copy_from`, which brings the bytes. Checksums depend neither on threads nor on the instruction set,
    and any change within one stretch that changes its xxh3 changes them.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        """Prepare the checksums of `fields`, whose memory the caller keeps.

        Raises:
            ValueError: a stretch, also the last of a field, has fewer than 256 bytes.
        """
        self.count = len(fields)
        self._asks_before = self._asks_after = False
        rows = []
        for address, nbytes, stretch, before, after in fields:
            if stretch < LEAST_NBYTES or 0 < nbytes % stretch < LEAST_NBYTES or nbytes <= 0:
                message = f"{nbytes} B in stretches of {stretch}: expected {LEAST_NBYTES} B or more in each"
                raise ValueError(message)
            self._asks_before |= before
            self._asks_after |= after
            rows.append((ffi.cast(_VOID, address), nbytes, stretch, before, after))
        self._fields = fields
        self.pointer: Any = ffi.new(_FIELDS, rows)

    def copy_from(self, source: int, address: int, nbytes: int) -> bool:
        """Copy `nbytes` from `source` to `address`, and take the checksums before a kernel's work on the way.
        Where the fields are not these bytes, one behind the other, do nothing and return False.
        """
        end = address
        for one in self._fields:
            if one.address != end:
                return False
            end += one.nbytes
        if end != address + nbytes:
            return False
        library.infinity_take(self.count, self.pointer, ffi.cast(_VOID, source))
        self._asks_before = False  # these have been taken
        return True

    def take_before(self) -> None:
        """Take the checksums before a kernel's work, if any are asked for, unless `copy_from` has."""
        if self._asks_before:
            library.infinity_checksum(self.count, self.pointer, 0)

    def take_after(self) -> None:
        """Take the checksums after a kernel's work, if any are asked for: else threads would wake in vain."""
        if self._asks_after:
            library.infinity_checksum(self.count, self.pointer, 1)

    def before(self, index: int) -> int:
        """Return a field's checksum before the work."""
        return int(self.pointer[index].before)

    def after(self, index: int) -> int:
        """Return a field's checksum after the work."""
        return int(self.pointer[index].after)
