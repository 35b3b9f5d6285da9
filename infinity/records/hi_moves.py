"""How an update that is made ahead moves `hi` that lies in host memory, where the old values have to stay.

[Note: moves of hi]
Where an update that step() has not decided yet makes a second generation of a record, see next_fields, `hi`
in host memory keeps its values. The new ones are written to NVMe, as how far each has moved in steps of bf16:
a byte where two would be, as an update moves few weights by more than 127 of their steps. Those that it does
follow, whole. When step() decides the update, a pass reads that, and moves `hi` where it lies. A tile of
which too many have moved far is written as it is.

All units' are decided at once, when the next step begins, whose first fetches are not to wait for them. So
these passes let all others by, until one over their record is queued: the unit is about to be used. Each
takes as many tiles at once as a slot has room for.
"""

from __future__ import annotations

from collections.abc import Iterator

from infinity import kernels
from infinity.records.record import Record
from infinity.sizes import BLOCK, round_up
from infinity.storage.store import AllOf, Extent, Transfer


class HiMoves:
    """The moves of one record's `hi`, by tiles, on NVMe."""

    def __init__(self, record: Record, extent: Extent) -> None:
        """There are none yet. extent: has room for all of `hi`."""
        self.record = record
        self._extent = extent
        self._hashes = record.new_hashes("hi")
        self._decided = self._left = False
        self._sizes: dict[int, tuple[int, bool]] = {}
        """By a tile's first element: the elements of `hi` whose room its codes take, and whether it is as it
        is.
        """

    @staticmethod
    def can_tell(record: Record) -> bool:
        """Whether `hi` of a record is moved so."""
        return record.in_host("hi") and record.schema.kept == "bf16" and not record.packed

    @property
    def counts(self) -> bool:
        """Whether the update is decided, so that `hi` is to be moved."""
        return self._decided and not self._left

    def decide(self) -> None:
        """Note that the update is decided."""
        self._decided = True

    def leave(self) -> None:
        """Note that nothing is moved: all of `hi` is written."""
        self._left = True

    def encode(self, start: int, stop: int, before: int, behind: int, to: int) -> None:
        """Put the moves of a tile to `to`, where there is room for the tile, by the addresses of its values
        before and behind the update.
        """
        numel, width = stop - start, self.record.schema.width
        most = self.record.tile_nbytes("hi", numel) - BLOCK
        nbytes = kernels.encode_moves(numel, before, behind, max(0, most), to)
        if not nbytes:
            kernels.copy(width * numel, to, behind)
        taken = round_up(nbytes, BLOCK) // width if nbytes else numel
        self._sizes[start] = taken, not nbytes
        kept = {"hi": self._hashes}
        self.record.checksums_kept_in(start, start + taken, {"hi": to}, (), kept).keep()

    def write(self, start: int, address: int, owner: object, *, more: bool) -> Transfer:
        """Begin to write the moves of a tile from `address`; see Record.write."""
        stop = start + self._sizes[start][0]
        return self.record.write_at(self._extent, "hi", start, stop, address, owner, more=more)

    def _tiles(self, start: int, stop: int, address: int) -> Iterator[tuple[int, int, int]]:
        """Return the first element of each tile, that behind it, and the tile's place in all of them at
        `address`, in which its moves have room.
        """
        for first in range(start, stop, self.record.tile_numel):
            last = min(first + self.record.tile_numel, stop)
            yield first, last, address + self.record.tile_nbytes("hi", first - start)

    def read(
        self, start: int, stop: int, address: int, owner: object, *, urgent: bool, more: bool
    ) -> Transfer:
        """Begin to read the moves of tiles to their places at `address`; see Record.read."""
        begun: list[Transfer] = []
        try:
            for first, last, at in self._tiles(start, stop, address):
                where = "hi", first, first + self._sizes[first][0], at, owner
                follows, extent = more or last < stop, self._extent
                begun.append(self.record.read(*where, urgent=urgent, more=follows, extent=extent))
        except Exception:
            AllOf.settle(begun)
            raise
        return begun[0] if len(begun) == 1 else AllOf(begun)

    def move(self, start: int, stop: int, moves: int, hi: int) -> None:
        """Move tiles of `hi` by what was read.

        Raises: CorruptionError where that is not what was written.
        """
        record = self.record
        for first, last, at in self._tiles(start, stop, moves):
            taken, as_it_is = self._sizes[first]
            record.checksums_kept_in(first, first + taken, {"hi": at}, ("hi",), {}, self._compare).compare()
            to = hi + record.tile_nbytes("hi", first - start)
            if as_it_is:
                kernels.copy(record.schema.width * (last - first), to, at)
            else:
                kernels.move(last - first, at, to)

    def _compare(self, name: str, tile: int, nbytes: int, found: int) -> None:
        self.record.compare(name, tile, nbytes, found, (self._extent, self._hashes))
