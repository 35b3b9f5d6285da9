"""The pass that makes an update before step() has decided it: see [Note: two generations of a record]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from infinity import kernels
from infinity.device.device import Device
from infinity.lane.fetch import FetchTarget, UpdatePass
from infinity.lane.told import ToldGradients
from infinity.records.checksums import TileChecksums
from infinity.records.next_fields import NextFields
from infinity.records.updates import Update
from infinity.storage.store import Transfer

_MOVES = "grad16"
"""The field in whose part of a slot the moves of `hi` are: of the same size as `hi`."""


class AheadPass(UpdatePass):
    """Read a record and write to other fields what updates would make of it. The record stays as it is, and
    so does what is pending for it.
    """

    rewrites = False

    def __init__(
        self,
        unit: FetchTarget,
        device: Device,
        tile_numel: int,
        updates: Mapping[int, Update],
        to: NextFields,
        told: ToldGradients | None = None,
    ) -> None:
        """Prepare to make `updates`, one for every parameter of the unit. told: tells gradients of it, when
        it is made: see [Note: told gradients].
        """
        super().__init__(unit, device, tile_numel)
        self.updates = dict(updates)
        self._to, self._told = to, told
        self._packed.write_to(to)
        self._reads_memory = [self.record.memory(name) for name in self.record.fields]
        """Where fields lie in host memory: the record may get other memory meanwhile, of the same values."""

    def take_over(self) -> None:
        """Nothing: its updates are its own."""

    def hand_back(self) -> None:
        """Nothing: they are pending nowhere."""

    @property
    def in_memory(self) -> bool:
        """See Pass."""
        return False

    def tiles(self) -> Iterator[tuple[int, int]]:
        """All tiles; no field goes to its target."""
        if not self.record.in_host("hi"):  # it has left since this was prepared
            self._to.write_whole()
        ranges = super().tiles()
        self.adopts = frozenset()
        return ranges

    def address(self, field: str, start: int) -> int | None:
        """In the unit's memory, or in a slot: what lies in host memory keeps its values."""
        in_slot = field == _MOVES or self.record.in_host(field)
        return None if in_slot else self.own_address(field, start)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """See Pass: of `hi` in host memory its moves are written."""
        reads, writes = super().reads_and_writes(start, stop)
        if self._to.moves is None:
            return reads, writes
        return reads, [_MOVES if name == "hi" else name for name in writes]

    def work(
        self, start: int, stop: int, addresses: dict[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> Sequence[Transfer] | None:
        """See Pass."""
        others = [name for name in writes if name != _MOVES]
        more = super().work(start, stop, addresses, reads, others)
        if self._to.moves is not None:
            before = self.record.host_address("hi", start)
            self._to.moves.encode(start, stop, before, addresses["hi"], addresses[_MOVES])
        return more

    def is_stored(self, field: str) -> bool:
        """All of it."""
        return True

    def checksums_of(
        self, start: int, stop: int, addresses: dict[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> TileChecksums:
        """See Pass."""
        return self._to.checksums(start, stop, addresses, reads, writes)

    def write(
        self, name: str, start: int, stop: int, address: int, owner: object, *, more: bool = False
    ) -> Transfer:
        """See Pass."""
        if name == _MOVES and self._to.moves is not None:
            return self._to.moves.write(start, address, owner, more=more)
        if name in self.record.packed:
            return self._packed.write(name, start, stop, address)
        return self._to.write(name, start, stop, address, owner, more=more)

    def told_gradient(self, index: int) -> kernels.ToldGradient | None:
        """See UpdatePass."""
        return None if self._told is None else self._told.of.get(index)

    def done_processing(self) -> None:
        """Let go of that memory as well, and know which gradients are told."""
        self._reads_memory = []
        if self._told is not None:
            self._told.end()
            self._told = None
        super().done_processing()

    def _process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Copy what lies in host memory, then apply the updates to all of it."""
        for name, address in addresses.items():
            if name != _MOVES and self.record.in_host(name) and self.record.written(name, start):
                nbytes = self.record.tile_nbytes(name, stop - start)
                kernels.copy(nbytes, address, self.record.host_address(name, start))
        super()._process(start, stop, addresses)
