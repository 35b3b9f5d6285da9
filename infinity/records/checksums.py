"""Checksums of the tiles that a pass works on: compared after a read, kept before a write."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from infinity import kernels
from infinity.planning.layout import RecordSchema

SAMPLED = 16
"""With verify="sample", one tile in this many is compared when it is read."""

_GOLDEN = 2654435769  # 2**32 / the golden ratio: multiples of it, mod 2**32, are spread evenly


class ReadSample:
    """Chooses the tiles that are compared: all that are read, or a sample of them."""

    def __init__(self, some: bool) -> None:  # noqa: FBT001 - its only argument
        """Choose all, or only `some`."""
        self._some = some
        self._reads = 0

    def has_next(self) -> bool:
        """Whether to compare the next tile that is read."""
        self._reads += 1
        return not self._some or self._reads * _GOLDEN % (1 << 32) < (1 << 32) // SAMPLED

    @contextmanager
    def of_all(self) -> Iterator[None]:
        """Choose all within the `with`."""
        some, self._some = self._some, False
        try:
            yield
        finally:
            self._some = some


class FieldTile(NamedTuple):
    """A tile of a field in memory, and what to do with its checksum."""

    name: str
    tile: int
    address: int
    nbytes: int
    compared: bool
    hashes: array[int] | None
    """The field's checksums, which get that of a tile to be written; None for a tile that is only read."""


class TileChecksums:
    """Checksums of some tiles of a record: compared before the pass works on them, kept afterwards.

    They are computed in one call, or by the kernel of an update itself, which is given `fields`: see kernels.
    """

    def __init__(
        self,
        schema: RecordSchema,
        parts: Sequence[FieldTile],
        compare: Callable[[str, int, int, int], None],
        *,
        taken: bool,
    ) -> None:
        """Prepare to sum `parts`; without `taken`, only to note which are written. compare: Record.compare,
        called with the field, the tile, its bytes and the checksum of what was read.
        """
        self._parts, self._compare = parts, compare
        of, numel = schema.nbytes, kernels.STRETCH_NUMEL
        fields = [
            kernels.Field(one.address, one.nbytes, of(one.name, numel), one.compared, one.hashes is not None)
            for one in (parts if taken else ())
        ]
        self.fields = kernels.Checksums(fields) if fields else None
        """What a kernel that takes checksums is given; None if there is nothing to sum."""

    def compare(self, *, taken: bool = False) -> None:
        """Compare what was read with what was written before. taken: a kernel has summed it already.

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
        """Keep the checksums of what is to be written, which counts as written from now on."""
        if self.fields is not None and not taken:
            self.fields.take_after()
        for index, one in enumerate(self._parts):
            if one.hashes is not None:  # 0 stands for "not written"
                one.hashes[one.tile] = (self.fields.after(index) if self.fields else 0) or 1
