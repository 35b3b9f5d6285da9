"""Checksums of fields: what they are of, and how they are taken, alone or by a kernel on its way."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from infinity.kernels.library import ffi, library

STRETCH_NUMEL = 8192  # elements whose bytes are summed up at once, as in internal.h
LEAST_NBYTES = 256  # of a stretch


class Field(NamedTuple):
    """A field, or a part of it, whose checksums are asked for."""

    address: int
    nbytes: int
    stretch: int
    """Bytes of STRETCH_NUMEL of its elements."""
    before: bool
    """Whether the one before a kernel's work is asked for."""
    after: bool


class Checksums:
    """Checksums of some fields, before and after a kernel works on them: [Note: checksums].

    Every step takes them on its way, or `take_before` and `take_after` do, each once. They depend neither on
    threads nor on the instruction set, and any change within one stretch that xxh3 sees changes them.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        """Prepare to sum up `fields`, whose memory the caller keeps.

        Raises:
            ValueError: a stretch, the last of a field too, has less than 256 bytes.
        """
        self.count = len(fields)
        for _, nbytes, stretch, _, _ in fields:
            if min(stretch, nbytes % stretch or stretch) < LEAST_NBYTES or nbytes <= 0:
                message = f"{nbytes} B in stretches of {stretch}: expected {LEAST_NBYTES} B or more in each"
                raise ValueError(message)
        self.pointer: Any = ffi.new(
            "struct infinity_field[]",
            [(ffi.cast("void *", address), *others) for address, *others in fields],
        )

    def take_before(self) -> None:
        """Take those that are asked for before a kernel's work."""
        library.infinity_checksum(self.count, self.pointer, 0)

    def take_after(self) -> None:
        """Take those that are asked for after it."""
        library.infinity_checksum(self.count, self.pointer, 1)

    def before(self, index: int) -> int:
        """Return what a field's was before."""
        return int(self.pointer[index].before)

    def after(self, index: int) -> int:
        """Return what a field's was after."""
        return int(self.pointer[index].after)
