"""Gradients that stay on the device, beside the record that lives there and is updated there.

[Note: means that stay]
Of several ranks each has its part of the mean of a unit's gradients there, in one piece, which all of them
take, and let go of, together: a parameter may lie in one rank's part or in another's, and yet what is counted
is the same on all ranks, which have to find room, or none, alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import torch

from infinity.device.device import Device
from infinity.gradients.gradient import Form, Gradient, total_of
from infinity.lane.outgoing import Lease, leases_of
from infinity.tensors import is_part
from infinity.units.device_updates import DeviceUpdates
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit


class GradientsOnDevice:
    """Owns which gradients stay on an accelerator. Used by the thread that computes."""

    def __init__(
        self,
        device: Device,
        residency: UnitResidency,
        outgoing: defaultdict[Unit, dict[int, Gradient]],
        place: Callable[[Gradient, torch.Tensor], None],
    ) -> None:
        """Begin without any. outgoing: those that wait for the others of their unit. place: has one that
        leaves lie in host memory, or wait to be spilled.
        """
        self._device, self._residency = device, residency
        self._outgoing, self._place = outgoing, place
        self._there: defaultdict[Unit, WeakValueDictionary[int, Gradient]]
        self._there = defaultdict(WeakValueDictionary)
        self._updates: DeviceUpdates | None = None
        self._adds = False
        """Whether a further backward has added to a gradient."""

    def update_on_device_by(self, updates: DeviceUpdates) -> None:
        """Have gradients of units that live on the device be measured there."""
        self._updates = updates

    def are_added_to(self) -> None:
        """A further backward adds to a gradient."""
        self._adds = True

    def staying_nbytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's gradients that stay on the device until they are applied: none where
        that is in the backward, twice as many where further backwards add to them. Of several ranks those of
        this rank's part, in any case.
        """
        room, width = self._device.room, unit.flat.itemsize
        if room is None:
            return 0
        if unit.in_parts:
            return room.nbytes(unit.record.shard.numel * (4 + width if self._adds else width))
        if not self._residency.updates_at_fetch:
            return 0
        return sum(room.nbytes(one.numel * (4 if self._adds else width)) for one in unit.layout.segments)

    # From a backward

    def take(self, gradient: Gradient, grad: torch.Tensor, *, keep: bool) -> bool:
        """Let a new gradient stay on the device, where its unit's record lives, if there is room."""
        room = self._device.room
        if room is None or not gradient.unit.record.on_device or not room.fits(grad.nbytes):
            return False
        lease = Lease(room.ledger, room.take(grad.nbytes, f"{gradient.unit.name}: a gradient that stays"))
        grad = grad.detach()
        self.stay(gradient, grad.clone() if is_part(grad) else grad.contiguous(), lease, keep=keep)
        return True

    def stay(self, gradient: Gradient, grad: torch.Tensor, lease: Lease, *, keep: bool) -> None:
        """Let a gradient be `grad`, which is on the device, with `lease` of device_memory. keep: it does not
        wait for the others of its unit.
        """
        if keep:
            gradient.stay(grad, lease)
        else:
            gradient.wait_on_device(grad, lease)
            self._outgoing[gradient.unit][gradient.index] = gradient
        self._there[gradient.unit][gradient.index] = gradient

    def add(self, gradient: Gradient, grad: torch.Tensor) -> bool:
        """Add a further backward's gradient on the device; False where the sum has no room there."""
        room, unit = self._device.room, gradient.unit
        if room is None or not unit.record.on_device:
            return False
        if gradient.form is Form.ZERO:
            self._flush(gradient)
            return self.take(gradient, grad, keep=True)
        if not gradient.on_device:
            return False
        self._flush(gradient)
        stored = gradient.in_memory
        widens = stored.dtype != torch.float32
        if widens and not room.fits(4 * stored.numel()):
            return False
        self.wait_no_more(unit)
        if widens:
            taken = room.take(4 * stored.numel(), f"{unit.name}: a sum of gradients that stays")
            lease = Lease(room.ledger, taken)
            gradient.stay(total_of(stored, grad.detach()), lease)
        else:
            total_of(stored, grad.detach())
            gradient.was_changed()
        return True

    def add_mean(self, gradient: Gradient, mean: torch.Tensor, lease: Lease) -> bool:
        """Add a further mean of several ranks, which is on the device, there; False where the sums of its
        unit have no room.
        """
        unit = gradient.unit
        if not unit.record.on_device or not (gradient.on_device or gradient.form is Form.ZERO):
            return False
        self._flush(gradient)
        if gradient.form is Form.ZERO:
            self.stay(gradient, mean, lease, keep=True)
            return True
        self.wait_no_more(unit)
        if gradient.in_memory.dtype != torch.float32 and not self._widen(unit):
            return False
        total_of(gradient.in_memory, mean)
        gradient.was_changed()
        lease.end()
        return True

    def _widen(self, unit: Unit) -> bool:
        """Have all gradients of a unit that are on the device be fp32; see [Note: means that stay]."""
        room, shard = self._device.room, unit.record.shard
        if room is None or not room.fits(4 * shard.numel):
            return False
        there = [one for _, one in sorted(self._there[unit].items()) if one.on_device]
        taken = room.take(4 * shard.numel, f"{unit.name}: sums of gradients that stay")
        leases = leases_of(room.ledger, taken, len(there))
        sums = torch.empty(shard.numel, dtype=torch.float32, device=self._device.torch_device)
        for gradient, lease in zip(there, leases, strict=True):
            segment = shard.segments[gradient.index]
            part = sums[segment.start : segment.stop]
            part.copy_(gradient.await_tensor().view(-1))
            gradient.stay(part, lease)
        return True

    def _flush(self, gradient: Gradient) -> None:
        if gradient.index in gradient.unit.pending:
            self._residency.flush(gradient.unit)

    def wait_no_more(self, unit: Unit) -> None:
        """Have a unit's gradients that wait on the device for others stay there."""
        if self._updates is None:
            return
        for index, gradient in dict(self._outgoing.get(unit, {})).items():
            if gradient.on_device:
                del self._outgoing[unit][index]
                gradient.stay_on_device()

    # Off the device

    def leave(self, unit: Unit) -> None:
        """Take a unit's gradients off the device, where its record stays no longer."""
        self.wait_no_more(unit)
        for gradient in dict(self._there.pop(unit, {})).values():
            self.bring_down(gradient)

    def bring_down(self, gradient: Gradient) -> None:
        """Have a gradient lie in host memory, or wait to be spilled, if it is on the device."""
        if gradient.on_device:
            self.wait_no_more(gradient.unit)
            self._place(gradient, self.in_host(gradient.leave_device()))

    def in_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory of what a gradient is, on the device, which counts it."""
        return self._device.to_host(tensor, ours=False)

    def measure(self, gradients: Iterable[Gradient]) -> None:
        """Measure those of these gradients that are on the device, and all others there with them: the host
        waits for that once, though torch may ask for one norm at a time.
        """
        if self._updates is None or not any(one.on_device and one.square_sum is None for one in gradients):
            return
        there = [one for unit in list(self._there.values()) for one in list(unit.values())]
        wanted = [one for one in there if one.on_device and one.square_sum is None]
        sums = self._updates.square_sums([one.await_tensor() for one in wanted])
        for gradient, square_sum in zip(wanted, sums, strict=True):
            gradient.was_measured(square_sum)
