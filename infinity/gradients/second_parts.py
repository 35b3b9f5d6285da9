"""Where a rank's second part of a unit lies: in host memory, or, where that has no room, on NVMe.

[Note: second parts on NVMe]
A part that comes is put into a buffer, which takes its bytes of the outgoing share, by the collective that
assembles its unit. When that is over, the thread that computes queues the pass that writes it, as it comes by
for the next unit: a pass that waited for the collective would hold slots that the fetches before it need.
Until it is written it is sent from its buffer; from then on it is read to another one first. A part of which
the values have changed before it was written is not written. It is a record of its own, with a hash, and
belongs to no commit: a run that goes on begins without second parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from infinity import kernels
from infinity.device.device import Device
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease, OutgoingShare
from infinity.lane.whole_records import ELEMENT_NBYTES, SECOND, LoadPass, SavePass
from infinity.planning.layout import lay_out
from infinity.planning.queue import Job
from infinity.records.record import Record
from infinity.storage.store import Store
from infinity.units.unit import Unit


class PartPlace:
    """Memory of a part, and what it is of the unit's values."""

    def __init__(self, flat: torch.Tensor, number: int, lease: Lease | None = None) -> None:
        """flat: memory for it; number: which of the parts it is; lease: of its bytes, which end with it."""
        self.flat, self._number, self._lease = flat, number, lease

    def keep(self, whole: torch.Tensor) -> None:
        """Copy this part of a unit's values, which are all there. Called by the collectives' thread."""
        nbytes = self.flat.nbytes
        kernels.copy(nbytes, self.flat.data_ptr(), whole.data_ptr() + self._number * nbytes)

    def let_go(self) -> None:
        """Nothing reads it any more."""
        if self._lease is not None:
            self._lease.end()


class SecondPart(Protocol):
    """A rank's second part of a unit. Used by the thread that computes."""

    version: int | None
    """The version of the unit that it is of, or will be once what is queued has run; None: of none."""

    def comes(self, version: int) -> PartPlace:
        """Return where the values of this version are about to be put."""

    def filled_by(self, job: Job) -> None:
        """Note the collective that puts them there."""

    def read(self) -> tuple[Job | None, PartPlace]:
        """Return what is done when the part is in memory, and where; None where it is, or is put there by
        what was queued before.
        """


class HostPart:
    """One that stays in host memory."""

    def __init__(self, flat: torch.Tensor, number: int) -> None:
        """flat: memory for it; number: which part it is."""
        self.version: int | None = None
        self._place = PartPlace(flat, number)

    def comes(self, version: int) -> PartPlace:
        """See SecondPart."""
        self.version = version
        return self._place

    def filled_by(self, job: Job) -> None:
        """See SecondPart: it stays where it is put."""

    def read(self) -> tuple[Job | None, PartPlace]:
        """See SecondPart."""
        return None, self._place


class StoredPart:
    """One that lies on NVMe: see [Note: second parts on NVMe]."""

    def __init__(self, parts: StoredParts, record: Record, unit: Unit, numel: int, number: int) -> None:
        """record: its place; numel: elements of the unit's type; number: which part it is."""
        self.version: int | None = None
        self._parts, self._record, self._number = parts, record, number
        self._numel, self._dtype = numel, unit.flat.dtype
        self._fresh: PartPlace | None = None
        """Where it is until it is written."""
        self._filling: Job | None = None

    def comes(self, version: int) -> PartPlace:
        """See SecondPart."""
        self.version, self._filling = version, None
        self._fresh = self._parts.place_for(self._numel, self._dtype, self._number)
        return self._fresh

    def filled_by(self, job: Job) -> None:
        """See SecondPart."""
        self._filling = job
        self._parts.fills(self, job)

    def read(self) -> tuple[Job | None, PartPlace]:
        """See SecondPart."""
        if self._fresh is not None:
            return None, self._fresh
        return self._parts.load(self._record, self._numel, self._dtype, self._number)

    def write(self, job: Job) -> None:
        """Begin to write what `job` has filled, unless other values have come since."""
        fresh = self._fresh
        if fresh is not None and self._filling is job:
            self._fresh = None
            self._parts.save(self._record, fresh, job)


class StoredParts:
    """Owns the way of second parts to NVMe and back. Used by the thread that computes."""

    def __init__(
        self,
        lane: StreamLane,
        device: Device,
        outgoing_share: OutgoingShare,
        store: Store,
        record_of: Callable[..., Record],
    ) -> None:
        """Keep parts in `store`, in records that `record_of` makes of a layout, by passes of `lane`."""
        self._lane, self._device, self._outgoing_share = lane, device, outgoing_share
        self._store, self._record_of = store, record_of
        self._filling: deque[tuple[StoredPart, Job]] = deque()
        self._saving: deque[tuple[Job, int]] = deque()
        """Passes that write parts, the oldest first, and their bytes."""

    def new(self, unit: Unit, numel: int, number: int) -> StoredPart:
        """Make room for a part of `numel` elements of a unit. Raises: aio.StorageFullError."""
        elements = -(-numel * unit.flat.itemsize // ELEMENT_NBYTES)
        record = self._record_of(lay_out([(unit.name, (elements,))]), name=unit.name)
        record.add(SECOND, self._store)
        return StoredPart(self, record, unit, numel, number)

    def place_for(self, numel: int, dtype: torch.dtype, number: int, blocks: int = 0) -> PartPlace:
        """Return memory for a part, once those that are being written leave it some of the outgoing share.
        blocks: elements of 16 bits that are read at once, where these are more.
        """
        nbytes = max(numel * dtype.itemsize, ELEMENT_NBYTES * blocks)
        most = self._outgoing_share.ledger.limit_nbytes // 4
        while self._saving and sum(size for _, size in self._saving) + nbytes > most:
            self._outgoing_share.stall(self._saving.popleft()[0])
        lease = self._outgoing_share.lease_anyway(nbytes)
        memory = self._outgoing_share.buffers.take(nbytes, torch.uint8)
        return PartPlace(memory[: numel * dtype.itemsize].view(dtype), number, lease)

    def fills(self, part: StoredPart, job: Job) -> None:
        """A part is being filled by `job`."""
        self._filling.append((part, job))

    def settle(self) -> None:
        """Begin to write what has come since."""
        while self._filling and self._filling[0][1].done:
            part, job = self._filling.popleft()
            part.write(job)

    def save(self, record: Record, place: PartPlace, job: Job) -> None:
        """Write a part, which `job` has filled."""
        saving = SavePass(record, place.flat, job, record.tile_numel, place.let_go, SECOND)
        self._lane.submit(saving)
        while self._saving and self._saving[0][0].done:
            self._saving.popleft()
        self._saving.append((saving, place.flat.nbytes))

    def load(self, record: Record, numel: int, dtype: torch.dtype, number: int) -> tuple[Job, PartPlace]:
        """Begin to read a part; return the pass, and where it comes to."""
        place = self.place_for(numel, dtype, number, record.shard.numel)
        loading = LoadPass(record, self._device, place.flat, record.tile_numel, SECOND)
        self._lane.submit(loading, urgent=True)
        return loading, place
