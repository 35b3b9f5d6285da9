"""Where a plan has fields of records live: on NVMe, in host memory, on the accelerators of its ranks.

Pure: no torch, no I/O.

[Note: on the devices of several ranks]
As in a run: a rank's part of a record lives on its device, and is updated there; the unit is put together
from all parts for each use, and waits for it as others do. A copy of weights that last is all of the unit, on
every device. What lives there is decided first, and does not depend on the room of the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from infinity.planning.budget import Budget, DeviceBudget
from infinity.planning.placement import (
    Candidate,
    Placement,
    PlacementBudget,
    fields_of_unit,
    is_of_most_steps,
    place_before_first_step,
    revise,
    revise_in_turn,
)
from infinity.planning.setting import Setting
from infinity.planning.unit_sizes import UnitSizes
from infinity.sizes import DEVICE_BLOCK, round_up


def place_fields(
    sizes: UnitSizes, setting: Setting, budget: Budget, fetches: Sequence[int], opening: int
) -> Placement:
    """Return what `pins` would put into host memory and on the device after the first step; fetches: of each
    unit in that step. opening: units that open it.
    """
    candidates: list[Candidate] = []
    for unit, count in enumerate(fetches):
        updates = sizes.shares[unit] * (sizes.gradients[unit] > 0)
        names = sizes.schema.fields if updates else sizes.schema.weights
        whole = updates > 0 and sizes.schema.is_updated_on_device
        candidates += fields_of_unit(
            unit,
            {name: sizes.field(unit, name, budget.tile_numel) for name in names},
            sizes.schema.derived,
            sizes.shares[unit] * count,
            updates,
            lasts=not updates,
            beside_nbytes=_staying_nbytes(sizes, setting, unit) if whole else None,
            opens=unit < opening and is_of_most_steps(sizes.shares[unit]),
            copies=sizes.holders[unit],
        )
    kept = budget.kept_nbytes if setting.nvme else 0
    gradients = 0 if setting.update == "backward" else min(kept, sum(sizes.gradients))
    device = device_budget(sizes, setting)
    on_device, scratch = (device.lodging_nbytes, device.scratch_nbytes) if device is not None else (0, 0)
    rooms = PlacementBudget(on_device, kept, gradients, scratch)
    before = _before_first_step(sizes, budget, rooms)
    if device is not None and setting.data_ranks > 1:
        chosen = revise_in_turn(before, candidates, rooms, agreed=lambda _: True).placement
    else:
        chosen = revise(before, candidates, rooms).placement
    if setting.nvme:
        return chosen
    keys = [(unit, name) for unit in range(len(sizes.numels)) for name in sizes.schema.fields]
    there = {key: tier for key, tier in chosen.items() if tier == "device"}
    return MappingProxyType({**dict.fromkeys(keys, "host"), **there})


def _before_first_step(sizes: UnitSizes, budget: Budget, rooms: PlacementBudget) -> Placement:
    """Return which frozen weights come to the device before a use is counted."""
    frozen = [
        (unit, sizes.field(unit, "hi", budget.tile_numel), sizes.holders[unit])
        for unit, (gradients, share) in enumerate(zip(sizes.gradients, sizes.shares, strict=True))
        if sizes.resident[unit] and not gradients and share == 1
    ]
    return place_before_first_step(frozen, rooms)


def device_budget(sizes: UnitSizes, setting: Setting) -> DeviceBudget | None:
    """Return how a rank divides its device_memory, of which the setting says what is left beside the units in
    use: two of the largest, with their gradients. None where the CPU computes.
    """
    if setting.device_nbytes is None:
        return None
    largest = max(sizes.resident)
    return DeviceBudget(setting.device_nbytes + 4 * largest, 4 * largest, largest)


def is_record(sizes: UnitSizes, placement: Placement, unit: int) -> bool:
    """Whether a unit's whole record, or this rank's part of it, lives on the device."""
    fields = sizes.schema.fields
    return sizes.gradients[unit] > 0 and all(placement.get((unit, name)) == "device" for name in fields)


def is_part(sizes: UnitSizes, placement: Placement, unit: int) -> bool:
    """Whether it is a part that lives there, so that a use puts the unit together first."""
    return sizes.holders[unit] > 1 and is_record(sizes, placement, unit)


def is_lodged(sizes: UnitSizes, placement: Placement, unit: int) -> bool:
    """Whether all of a unit's weights live on the device, and a use moves nothing."""
    return placement.get((unit, "hi")) == "device" and not is_part(sizes, placement, unit)


def is_in_place(sizes: UnitSizes, setting: Setting, placement: Placement, unit: int) -> bool:
    """Whether a unit computes where its weights lie."""
    if setting.device_nbytes is not None:
        return is_lodged(sizes, placement, unit)
    return setting.data_ranks == 1 and (unit, "hi") in placement


def _staying_nbytes(sizes: UnitSizes, setting: Setting, unit: int) -> int:
    """Return the bytes of a unit's gradients that stay on the device with its record: of several ranks those
    of this one's part, which come there when the ranks have summed them, until the next use.
    """
    if sizes.holders[unit] > 1:
        width = sizes.schema.width
        width = 4 + width if setting.micro_batches > 1 else width
        return round_up(sizes.numels[unit] * width, DEVICE_BLOCK)
    return 0 if setting.update == "backward" else sizes.staying[unit]


def lodged_nbytes(
    sizes: UnitSizes, setting: Setting, budget: Budget, placement: Placement
) -> tuple[int, int]:
    """Return the bytes of all that lives on the device, and of whole records among it, with the gradients
    that stay there and what updates there need.
    """
    copies = records = 0
    for unit, resident_nbytes in enumerate(sizes.resident):
        if is_record(sizes, placement, unit):
            records += sum(sizes.field(unit, name, budget.tile_numel) for name in sizes.schema.fields)
            records += _staying_nbytes(sizes, setting, unit)
        elif placement.get((unit, "hi")) == "device":
            copies += resident_nbytes
    device = device_budget(sizes, setting)
    scratch = device.scratch_nbytes if device is not None and records else 0
    return copies + records + scratch, records + scratch


def without_records(sizes: UnitSizes, placement: Placement) -> UnitSizes:
    """Return the sizes without the gradients of records that live on the device: these never leave it."""
    there = [is_record(sizes, placement, unit) for unit in range(len(sizes.numels))]
    numels, nbytes = (
        tuple(0 if gone else one for one, gone in zip(values, there, strict=True))
        for values in (sizes.gradient_numels, sizes.gradients)
    )
    return replace(sizes, gradient_numels=numels, gradients=nbytes)
