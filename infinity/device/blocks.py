"""Memory for resident units: our own buffers if the CPU computes, else torch's allocator."""

from __future__ import annotations

from mmap import mmap
from typing import Protocol

import torch

from infinity.device.buffers import Buffers
from infinity.device.device import Device
from infinity.storage.memory import Ledger


class Blocks(Protocol):
    """Allocates the memory of resident units. `flat`: a unit's memory, 1-D."""

    def come(self, numel: int, dtype: torch.dtype, skew_nbytes: int = 0) -> torch.Tensor:
        """Return uninitialised memory for `numel` elements, which a fetch brings. skew_nbytes: where the CPU
        computes, how far behind the begin of a block it begins; if that is not 0, the blocks in which it
        begins and ends are its own.
        """

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Likewise, for a copy of them."""

    def leaving(self, flat: torch.Tensor) -> None:
        """The unit is about to drop its memory."""

    def outlived(self, flat: torch.Tensor) -> None:
        """Views of the program's keep the memory, which the unit is about to drop."""


class BlocksOfAll(Blocks, Protocol):
    """The blocks of all units that have none of their own."""

    def period_ended(self) -> None:
        """A step has ended, or a round."""


class UnitBuffers(Buffers):
    """Buffers of units that wait, which have shares of the budget, and of units in use, which have none.

    Free ones are kept also where, together with those lent, they are no more than were lent at once in this
    period (a step or a round) or the one before: that memory was in use then, and will be again. They take no
    more than the shares have in all, so that little is left of a whole model that was gathered. Without that,
    units of several sizes in a window that is full would take turns in giving their pages to the system and
    faulting them in anew (measured: a quarter of what a generation reads, and 15 % of its seconds). Where the
    window holds less than two or three of the largest units, some still do.
    """

    def __init__(self, *shares: Ledger) -> None:
        super().__init__(*shares)
        self._most_nbytes = self._most_before_nbytes = 0

    @property
    def spare_nbytes(self) -> int:
        """See Buffers."""
        again = max(self._most_nbytes, self._most_before_nbytes) - self.lent_nbytes
        return max(super().spare_nbytes, min(again, sum(share.limit_nbytes for share in self.shares)))

    def _lend(self, nbytes: int) -> None:
        super()._lend(nbytes)
        self._most_nbytes = max(self._most_nbytes, self.lent_nbytes)

    def period_ended(self) -> None:
        """Forget the period before this one."""
        self._most_before_nbytes, self._most_nbytes = self._most_nbytes, self.lent_nbytes


class HostBlocks:
    """Blocks in host memory; free ones are kept for reuse, see UnitBuffers."""

    def __init__(self, *shares: Ledger) -> None:
        self.buffers = UnitBuffers(*shares)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Borrow a buffer."""
        return self.buffers.take(numel, dtype)

    def come(self, numel: int, dtype: torch.dtype, skew_nbytes: int = 0) -> torch.Tensor:
        """Borrow a buffer; see Blocks."""
        if skew_nbytes:
            return self.buffers.take_framed(numel, dtype, skew_nbytes)
        return self.buffers.take(numel, dtype)

    def leaving(self, flat: torch.Tensor) -> None:
        """Do nothing: a buffer returns when its last tensor is gone."""

    def outlived(self, flat: torch.Tensor) -> None:
        """Do nothing, likewise."""

    def period_ended(self) -> None:
        """Keep free blocks by what the new period needs, and the one that ended."""
        self.buffers.period_ended()


class DeviceBlocks:
    """Blocks of another device, from torch's allocator, which reuses them."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate with torch, when device_memory has room."""
        room = self._device.room
        taken = room.take(numel * dtype.itemsize, "a unit") if room is not None else 0
        try:
            flat = self._empty(numel, dtype)
        except BaseException:
            if room is not None:
                room.give_back(taken)
            raise
        self._device.allocated(flat)
        return flat

    def come(self, numel: int, dtype: torch.dtype, skew_nbytes: int = 0) -> torch.Tensor:
        """See Blocks."""
        return self.take(numel, dtype)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate; where the device has no memory left, once more when what waits there has left."""
        room = self._device.room
        with torch.inference_mode(mode=False), torch.no_grad():
            try:
                return torch.empty(numel, dtype=dtype, device=self._device.torch_device)
            except torch.OutOfMemoryError:
                if room is None or not room.empty():
                    raise
            flat = torch.empty(numel, dtype=dtype, device=self._device.torch_device)
        self._device.failure_was_handled()
        return flat

    def leaving(self, flat: torch.Tensor) -> None:
        """Make later uses of the memory wait for uploads that may still write to it, or keep it until a copy
        to the host has read it.
        """
        copy, room = self._device.leaving(flat), self._device.room
        if room is None:
            return
        if copy is None or copy.done:
            room.give_back(room.nbytes(flat.nbytes))
        else:
            room.leaves(room.nbytes(flat.nbytes), copy, flat)

    def outlived(self, flat: torch.Tensor) -> None:
        """Keep the memory from other uses until all streams are done with it by then."""
        self._device.outlived(flat)

    def period_ended(self) -> None:
        """Do nothing: torch's allocator keeps what it has."""


def wrap(memory: mmap | torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over mapped memory, or over a tensor of bytes, which it keeps alive."""
    with torch.inference_mode(mode=False), torch.no_grad():
        if isinstance(memory, torch.Tensor):
            return memory.view(dtype)[:numel]
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(memory, dtype=dtype, count=numel)
