"""Which pass fetches a unit without updates; and the one that brings weights from NVMe to an accelerator's
memory directly: [Note: read directly] in device/direct.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.device.device import Device
from infinity.lane.fetch import FetchPass, FetchTarget
from infinity.lane.outgoing import OutgoingShare
from infinity.records.record import Record
from infinity.storage.direct import DirectTarget
from infinity.storage.store import Transfer


class DirectFetchPass(FetchPass):
    """Bring the `hi` of a unit without pending updates to its memory, with no host memory in between."""

    def __init__(self, unit: FetchTarget, device: Device, tile_numel: int, target: DirectTarget) -> None:
        """Prepare to fill the memory that the unit has now, which is `target`."""
        super().__init__(unit, device, tile_numel)
        self._direct: DirectTarget | None = target
        self._address = unit.flat.data_ptr() + unit.flat.itemsize * unit.base
        self._width = unit.flat.itemsize
        self.on_finished.append(self._drop_target)

    def _drop_target(self) -> None:
        self._direct = None

    def own_address(self, field: str, start: int) -> int | None:
        """See Pass: on the device."""
        return self._address + self._width * start if field == "hi" else None

    @property
    def own_memory(self) -> object:
        """See Pass."""
        return self._direct

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Nothing: it is there."""


def can_be_read_directly(record: Record) -> bool:
    """Whether a record's `hi` lies on NVMe, in one piece, and goes nowhere else when it is fetched."""
    return (
        not record.in_host("hi")
        and not record.on_device
        and record.in_files is None
        and not record.targets
        and not record.packed
        and record.in_one_piece(("hi",))
        and record.written("hi", 0)
    )


def fetch_of(unit: FetchTarget, device: Device, tile_numel: int, share: OutgoingShare | None) -> FetchPass:
    """Return a pass that brings `hi`, directly where the device reads so. Else it takes of `share` what it is
    put together in, if that pays.
    """
    direct = device.direct_target(unit.flat)
    if direct is not None and can_be_read_directly(unit.record):
        return DirectFetchPass(unit, device, tile_numel, direct)
    stage = None
    if share is not None and not device.is_host and unit.record.is_transposed:
        stage = share.try_lease(unit.record.field_nbytes("hi"))
    return FetchPass(unit, device, tile_numel, stage)
