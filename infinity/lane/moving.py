"""The pass that moves `hi` in host memory by an update that counts: see [Note: moves of hi]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from infinity.lane.base import Pass
from infinity.planning.layout import tiles
from infinity.records.checksums import TileChecksums
from infinity.records.hi_moves import HiMoves
from infinity.storage.store import Transfer

_PLACE = "lo"
"""The field in whose part of a slot the moves of a tile are: they take no more."""


class MoveHiPass(Pass):
    """Bring `hi` up to date, where it lies."""

    def __init__(self, moves: HiMoves, tile_numel: int) -> None:
        """Prepare to move all of it, behind the pass that makes the update."""
        super().__init__(moves.record)
        self._moves, self._tile_numel = moves, tile_numel

    @property
    def goes_last(self) -> bool:
        """See QueuedPass: whoever uses the unit queues a pass behind this one."""
        return True

    def touched(self) -> Iterable[str]:
        """`hi`, and what is on NVMe."""
        return ("hi", _PLACE)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """All tiles, as many at once as a slot has room for; none where the update was not decided."""
        if not self._moves.counts:
            return iter(())
        record = self.record
        if record.volatile(_PLACE):
            raise AssertionError(f"{record.name}: hi was not moved before its record was")
        width = record.schema.width * (1 if record.in_host("hi") else 2)
        return tiles(record.shard.numel, self._tile_numel * max(1, record.schema.slot_nbytes // width))

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """`hi`, and its moves."""
        return ("hi", _PLACE), ("hi",)

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        address: int,
        owner: object,
        *,
        more: bool = False,
        window: tuple[int, int] = (0, 0),
    ) -> Transfer:
        """See Pass."""
        if name == _PLACE:
            return self._moves.read(start, stop, address, owner, urgent=self.urgent, more=more)
        return super().read(name, start, stop, address, owner, more=more, window=window)

    def checksums_of(
        self, start: int, stop: int, addresses: dict[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> TileChecksums:
        """See Pass: the moves have their own."""
        reads = [name for name in reads if name != _PLACE]
        return super().checksums_of(start, stop, addresses, reads, writes)

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Move its tiles."""
        self._moves.move(start, stop, addresses[_PLACE], addresses["hi"])
