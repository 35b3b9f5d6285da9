"""The passes of a tensor that is a record of its own, as what checkpoints save is: there, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from infinity import kernels
from infinity.device.device import Device
from infinity.lane.base import Pass
from infinity.lane.passes import clear
from infinity.planning.budget import SLOT_NBYTES_PER_ELEMENT
from infinity.planning.layout import tiles
from infinity.records.record import Record
from infinity.storage.store import Future, Transfer

ACTIVATION, SECOND = "activation", "second"
"""The only field of such a record: of what checkpoints save, and of second parts of weights."""
ELEMENT_NBYTES = 2
"""Of either, whatever the tensor's dtype."""


class SavePass(Pass):
    """Write a tensor in host memory, dense, to a record."""

    def __init__(
        self,
        record: Record,
        tensor: torch.Tensor,
        arriving: Future,
        tile_numel: int,
        over: Callable[[], None],
        field: str = ACTIVATION,
    ) -> None:
        """arriving: of `tensor`, which may be read when this is over. over: called when it has been read."""
        super().__init__(record)
        self._field = field
        self._tensor: torch.Tensor | None = tensor
        self._arriving = arriving
        self._wide = tile_numel * SLOT_NBYTES_PER_ELEMENT // ELEMENT_NBYTES
        self._over = over

    @property
    def computes(self) -> bool:
        """See QueuedPass: it may wait for the tensor."""
        return True

    @property
    def ready(self) -> bool:
        """Whether the tensor has come."""
        return self._arriving.done

    def tiles(self) -> Iterator[tuple[int, int]]:
        """As much as a slot holds at once."""
        return tiles(self.record.shard.numel, self._wide)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Writes alone."""
        return (), (self._field,)

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Copy the tensor's bytes; the last block is filled with zeros."""
        self._arriving.wait()
        if self._tensor is None:
            raise AssertionError("a tensor was written twice")
        first = start * ELEMENT_NBYTES
        nbytes = min(stop * ELEMENT_NBYTES, self._tensor.nbytes) - first
        if nbytes < (stop - start) * ELEMENT_NBYTES:
            clear(self.record, addresses, self._field, stop - start)
        kernels.copy(nbytes, addresses[self._field], self._tensor.data_ptr() + first)

    def done_processing(self) -> None:
        """Release the tensor."""
        self._tensor = None
        self._over()


class LoadPass(Pass):
    """Read a record to `flat`, 16-bit elements where the device computes."""

    def __init__(
        self, record: Record, device: Device, flat: torch.Tensor, tile_numel: int, field: str = ACTIVATION
    ) -> None:
        """`flat` holds whole blocks where it is read into, and else as much of them as counts."""
        super().__init__(record)
        self._field = field
        self._device = device
        self._flat: torch.Tensor | None = flat
        self._wide = tile_numel * SLOT_NBYTES_PER_ELEMENT // ELEMENT_NBYTES
        self.on_finished.append(self._let_go)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """As much as a slot holds at once."""
        return tiles(self.record.shard.numel, self._wide)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Reads alone."""
        return (self._field,), ()

    def own_address(self, field: str, start: int) -> int | None:
        """On the CPU it is read straight to where it is used."""
        if self._flat is None or not self._device.is_host:
            return None
        return int(self._flat.data_ptr()) + start * ELEMENT_NBYTES

    @property
    def own_memory(self) -> object:
        """The memory it is read to, if it is."""
        return self._flat if self._device.is_host else None

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer] | None:
        """Upload, unless it is there."""
        if self._flat is None or self._device.is_host:
            return None
        numel = min(stop, self._flat.numel()) - start
        return (self._device.upload(self._flat, start, addresses[self._field], numel),) if numel > 0 else None

    def done_processing(self) -> None:
        """Hold an accelerator's memory no longer: who frees it orders that behind its uploads."""
        super().done_processing()
        if not self._device.is_host:
            self._let_go()

    def _let_go(self) -> None:
        self._flat = None
