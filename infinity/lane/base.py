"""The base class of passes: walks over the tiles of one record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from infinity import kernels
from infinity.planning.queue import JobLane, QueuedPass
from infinity.records.checksums import TileChecksums
from infinity.records.packing import PackedSpans
from infinity.records.record import Record
from infinity.storage.store import Transfer


class Pass(QueuedPass[Record], ABC):
    """One walk over a record. Subclasses name the fields that each tile reads and writes, and do the work in
    between.
    """

    moves = "write"
    """What the timeline calls the transfers that `process` returns."""

    def __init__(self, record: Record) -> None:
        """Prepare a walk over `record`."""
        super().__init__(record)
        self.adopts: frozenset[str] = frozenset()
        """Fields that this pass leaves in their target; see Record.targets. Known from the first tile on."""
        self.checksums: kernels.Checksums | None = None
        """Of the tile that is worked on, where `takes_checksums` says that its kernel takes them."""
        self._packed = PackedSpans(record)

    @abstractmethod
    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Return the fields to read and to write of the tile at elements [start, stop). Called when it is
        admitted.
        """

    @property
    def in_memory(self) -> bool:
        """Whether all that it may touch lies in host memory."""
        record = self.record
        for name in self.touched():  # noqa: SIM110 - all() takes twice as long, and each pass asks
            if name in record and not record.in_host(name):
                return False
        return True

    def touched(self) -> Iterable[str]:
        """Return the fields that it may touch."""
        return [name for name, _ in self.record.tiers()]

    rewrites = False
    """Whether it changes values of the record's weights or state: see records/next_fields.py."""

    def submitted(self, lane: JobLane) -> None:
        """Note the lane; tell those who watch the record of what changes."""
        super().submitted(lane)
        if self.rewrites and self.record.watchers:
            self.record.values_change()

    def address(self, field: str, start: int) -> int | None:
        """Return the address at which a field is worked on from element `start` on; None for a slot."""
        if field in self.adopts:
            return self.record.target_address(field, start)
        address = self.record.address(field, start)
        return self.own_address(field, start) if address is None else address

    def is_stored(self, field: str) -> bool:
        """Whether what a tile changes of a field is written to NVMe, and does not stay where it is."""
        return not self.record.in_host(field) and field not in self.adopts

    def own_address(self, field: str, start: int) -> int | None:
        """Return the address, on a whole block, of memory of the pass's own for a field on NVMe from element
        `start` on; None to use a slot.
        """
        return None

    @property
    def only_uploads(self) -> bool:
        """Whether all that it does is to begin copies from host memory to an accelerator."""
        return False

    def let_copies_end(self) -> None:
        """Return when no copy that `process` has begun is under way, also one that an interrupt has kept it
        from returning.
        """

    @property
    def ready(self) -> bool:
        """Whether its work need not wait for gradients, or values, that are on their way to host memory."""
        return True

    @property
    def own_memory(self) -> object:
        """The object that keeps the memory of `own_address` alive."""
        return None

    def takes_checksums(self, start: int, stop: int) -> bool:
        """Whether the kernel of `process` takes all of a tile, `checksums`, on the way. Else they are taken
        before and after.
        """
        return False

    @abstractmethod
    def process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Work on one tile; `addresses` are those of its fields. Return transfers that still use them."""

    def run_in_memory(self) -> None:
        """Do the whole pass now, where all that it touches lies in host memory."""
        transfers: list[Transfer] = []
        for start, stop in self.tiles():
            reads, writes = self.reads_and_writes(start, stop)
            addresses = {
                name: self.record.host_address(name, start) for name in dict.fromkeys((*reads, *writes))
            }
            transfers += self.process(start, stop, addresses) or ()
            for name in writes:
                self.note_written(name, start, stop)
        for transfer in (*transfers, *self.settle()):
            transfer.wait()

    def work(
        self, start: int, stop: int, addresses: dict[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> Sequence[Transfer] | None:
        """Process one tile; compare the checksums of what was read, and keep those of what is to be written.

        Raises: CorruptionError. What the tile holds then is used no more: its pass is never over.
        """
        packed = self.record.packed
        if packed:  # these are summed up when their span comes and goes
            reads, writes = ([name for name in names if name not in packed] for names in (reads, writes))
        sums = self.checksums_of(start, stop, addresses, reads, writes)
        on_the_way = self.takes_checksums(start, stop)
        if not on_the_way:
            sums.compare()
        self.checksums = sums.fields if on_the_way else None
        more = self.process(start, stop, addresses)
        if on_the_way:
            sums.compare(taken=True)
        sums.keep(taken=on_the_way)
        return more

    def checksums_of(
        self, start: int, stop: int, addresses: dict[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> TileChecksums:
        """Return the checksums of a tile; see Record.checksums."""
        return self.record.checksums(start, stop, addresses, reads, writes)

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
        """Begin to read a tile of a field on NVMe to `address`. more, window: see Request."""
        if name in self.record.packed:
            return self._packed.read(name, start, stop, address, urgent=self.urgent)
        urgent = self.urgent
        return self.record.read(name, start, stop, address, owner, urgent=urgent, more=more, window=window)

    def write(
        self, name: str, start: int, stop: int, address: int, owner: object, *, more: bool = False
    ) -> Transfer:
        """Begin to write a tile of a field on NVMe, or put it to others that are written with it, the last of
        them in `settle`. more: see Request.
        """
        if name in self.record.packed:
            return self._packed.write(name, start, stop, address)
        return self.record.write(name, start, stop, address, owner, more=more)

    def ordered(self, names: list[str]) -> list[str]:
        """Put fields in the order in which to read or write them: the last one is a transfer in any case."""
        packed = self.record.packed
        return sorted(names, key=packed.__contains__, reverse=True) if packed else names

    def note_written(self, name: str, start: int, stop: int) -> None:
        """Remember that a tile of a field was written where it lies: see Record, and packing."""
        (self._packed if name in self.record.packed else self.record).note_written(name, start, stop)

    def settle(self) -> Sequence[Transfer]:
        """Begin to write what is left, when the last tile was worked on."""
        return self._packed.settle()
