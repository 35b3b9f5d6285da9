"""Checksums of the tiles that a pass works on: what was read is compared, what is written is kept."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from infinity import kernels
from infinity.planning.layout import Format


class FieldTile(NamedTuple):
    """A tile of a field in memory, and what is asked about it."""

    name: str
    tile: int
    address: int
    nbytes: int
    compared: bool
    hashes: array[int] | None
    """Where the checksum of what is written goes; None for what is not."""


class TileChecksums:
    """Checksums of some tiles of a record that a pass works on: compared before, kept behind.

    All in one call where it can be, or, by a kernel that works on `fields`, in none: see kernels.
    """

    def __init__(
        self,
        form: Format,
        parts: Sequence[FieldTile],
        compare: Callable[[str, int, int, int], None],
        *,
        taken: bool,
    ) -> None:
        """Prepare to sum up `parts`, or, not `taken`, to note alone which are written. compare: the record's,
        called with field, tile, its bytes and the checksum of what was read.
        """
        self._parts, self._compare = parts, compare
        of, numel = form.nbytes, kernels.STRETCH_NUMEL
        fields = [
            kernels.Field(one.address, one.nbytes, of(one.name, numel), one.compared, one.hashes is not None)
            for one in (parts if taken else ())
        ]
        self.fields = kernels.Checksums(fields) if fields else None
        """What a kernel is given."""

    def compare(self, *, taken: bool = False) -> None:
        """Compare what was read with what was once written; `taken`: a kernel has summed it up.

        Raises: CorruptionError naming unit, field, file and offset.
        """
        if self.fields is None:
            return
        if not taken:
            self.fields.take_before()
        for index, one in enumerate(self._parts):
            if one.compared:
                self._compare(one.name, one.tile, one.nbytes, self.fields.before(index) or 1)

    def keep(self, *, taken: bool = False) -> None:
        """Keep the checksums of what is to be written: from now on it counts as such."""
        if self.fields is not None and not taken:
            self.fields.take_after()
        for index, one in enumerate(self._parts):
            if one.hashes is not None:  # 0 stands for "not written"
                one.hashes[one.tile] = (self.fields.after(index) if self.fields else 0) or 1
