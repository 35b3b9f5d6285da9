"""The fields of a record as an update would leave them that step() has not decided yet.

[Note: two generations of a record]
An update that is made ahead of its decision reads the fields of the record that count, and writes others,
beside them on NVMe: nobody else sees these. When step() decides that very update, they take the place of the
fields that count: extents and checksums are exchanged, in memory. Else they are dropped, and nothing has
happened. What would make them wrong, any other change of the record's values, spoils them, see
`Record.watchers`: they can only be dropped then.

In a durable run they are the other sides of the twins that the fields lie in, see storage/generations.py, and
the twins turn to them.

A field that lies in host memory is written to NVMe as well. When it is replaced, its place in host memory
becomes its target, so that it comes back there with the next pass that reads it; see Record.targets. Of a
bf16 `hi` there, what is written is how far it moves, and it stays: see [Note: moves of hi].
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from infinity.records.checksums import TileChecksums
from infinity.records.hi_moves import HiMoves
from infinity.records.record import Record
from infinity.storage.generations import OtherSides
from infinity.storage.store import Extent, Transfer


class NextFields:
    """All fields of one record, of another generation: see [Note: two generations of a record]."""

    def __init__(self, record: Record, extents: Mapping[str, Extent]) -> None:
        """Begin with nothing written. extents: on NVMe, one for each of the record's fields."""
        self.record = record
        self.spoiled = False
        """Whether the record has other values by now than those that these were made from."""
        self._extents = dict(extents)
        self._hashes: dict[str, array[int]] = {name: record.new_hashes(name) for name in extents}
        self._homes: dict[str, tuple[Extent, array[int]]] = {}
        """What has taken the place of the record's fields, or is about to."""
        self.moves = HiMoves(record, extents["hi"]) if HiMoves.can_tell(record) else None
        """How `hi` moves, in the place of its field; None where it is written as others are."""
        record.watchers.add(self._spoil)

    def _spoil(self) -> None:
        self.spoiled = True

    def write(
        self, name: str, start: int, stop: int, address: int, owner: object, *, more: bool = False
    ) -> Transfer:
        """Start to write elements [start, stop) of a field; see Record.write."""
        return self.record.write_at(self._extents[name], name, start, stop, address, owner, more=more)

    def checksums(
        self, start: int, stop: int, at: Mapping[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> TileChecksums:
        """Return the checksums of elements [start, stop): those of what was read are compared with the
        record's, those of what is written are kept here; see Record.checksums.
        """
        kept = {name: self._hashes[name] for name in writes}
        return self.record.checksums_kept_in(start, stop, at, reads, kept)

    def write_whole(self) -> None:
        """Write `hi` as other fields are, since it does not lie in host memory any more. Before anything is
        written.
        """
        if self.moves is not None:
            self.moves.leave()
            self.moves = None

    def stop_watching(self) -> None:
        """Be told no more of changes of the record: it is decided what becomes of these fields."""
        self.record.watchers.discard(self._spoil)

    @property
    def may_replace(self) -> bool:
        """Whether they may take the place of the record's fields, once they are written."""
        record = self.record
        if self.spoiled or record.on_device or record.fields != tuple(self._extents):
            return False
        sides = ((name, one) for name, one in self._extents.items() if isinstance(one.store, OtherSides))
        return all(_twin(one) == record.home(name)[0] for name, one in sides)

    def replace(self) -> dict[str, Extent]:
        """Take the place of the record's fields; return the extents on NVMe that are free for others. Called
        under the lane's lock, when the pass that writes them has worked on all of it; again where a Ctrl-C
        has ended it. The place of moves is free when the pass that reads them, queued then, is over.
        """
        for name, extent in self._extents.items():
            if name not in self._homes and not (self.moves and name == "hi"):
                self._homes[name] = _turned(extent), self._hashes[name]
        left = self.record.exchange(self._homes)
        free = {name: extent for name, extent in left.items() if extent != self._homes[name][0]}
        return free if self.moves is None else {"hi": self._extents["hi"], **free}

    def home(self, name: str) -> tuple[Extent, array[int]]:
        """Return what a field is written to, and its checksums."""
        return self._extents[name], self._hashes[name]

    def drop(self) -> dict[str, Extent]:
        """Never take that place; return the extents, to which a pass may still be writing."""
        self.stop_watching()
        return self._own

    @property
    def nbytes(self) -> int:
        """Bytes of the extents, but for other sides, which their twins have anyway."""
        return sum(extent.nbytes for extent in self._own.values())

    @property
    def _own(self) -> dict[str, Extent]:
        return {name: one for name, one in self._extents.items() if not isinstance(one.store, OtherSides)}


def _twin(side: Extent) -> Extent:
    return side.store.twin(side) if isinstance(side.store, OtherSides) else side


def _turned(extent: Extent) -> Extent:
    """Have the twin of an other side turn to it, and return the twin; any other extent as it is."""
    return extent.store.turn(extent) if isinstance(extent.store, OtherSides) else extent
