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

from infinity.planning.budget import Budget, scratch_nbytes
from infinity.planning.placement import (
    Candidate,
    Placement,
    PlacementBudget,
    is_of_most_steps,
    revise,
    revise_in_turn,
)
from infinity.planning.setting import Setting
from infinity.planning.unit_sizes import UnitSizes


def place_fields(
    sizes: UnitSizes, setting: Setting, budget: Budget, once: Sequence[int], opening: int
) -> Placement:
    """Return what `pins` would put into host memory and on the device after the first step; once: fetches of
    each unit in one micro-batch, which is all that the engine plans for before it has seen a step. opening:
    units that open it.
    """
    candidates = []
    for unit, count in enumerate(once):
        opens = unit < opening and is_of_most_steps(sizes.shares[unit])
        updates = sizes.shares[unit] * (sizes.gradients[unit] > 0)
        for name in sizes.schema.fields if updates else sizes.schema.weights:
            nbytes = sizes.field(unit, name, budget.tile_numel)
            fetches = sizes.shares[unit] * count * setting.micro_batches - (
                updates if name in sizes.schema.derived else 0
            )
            reads = fetches if name == "hi" else updates
            whole = updates > 0 and sizes.schema.is_updated_on_device
            beside = _staying_nbytes(sizes, setting, unit) * (name == sizes.schema.fields[-1])
            lasts = not updates
            of_tiers = lasts, True, None, whole, beside, opens, sizes.holders[unit]
            candidates.append(Candidate(unit, name, nbytes, reads, updates, *of_tiers))
    room = setting.device_nbytes or 0
    scratch = scratch_nbytes(room, max(sizes.resident)) if any(one.whole for one in candidates) else 0
    on_device = max(0, room - 2 * max(sizes.resident))
    kept = budget.kept_nbytes if setting.nvme else 0
    gradients = 0 if setting.update == "backward" else min(kept, sum(sizes.gradients))
    rooms = PlacementBudget(on_device, kept, gradients, scratch)
    if setting.device_nbytes is not None and setting.data_ranks > 1:
        chosen = revise_in_turn({}, candidates, rooms, agreed=lambda _: True).placement
    else:
        chosen = revise({}, candidates, rooms).placement
    if setting.nvme:
        return chosen
    keys = [(unit, name) for unit in range(len(sizes.numels)) for name in sizes.schema.fields]
    there = {key: tier for key, tier in chosen.items() if tier == "device"}
    return MappingProxyType({**dict.fromkeys(keys, "host"), **there})


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
        return sizes.numels[unit] * (4 + width if setting.micro_batches > 1 else width)
    return 0 if setting.update == "backward" else sizes.gradients[unit]


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
    scratch = scratch_nbytes(setting.device_nbytes or 0, max(sizes.resident)) if records else 0
    return copies + records + scratch, records + scratch


def without_records(sizes: UnitSizes, placement: Placement) -> UnitSizes:
    """Return the sizes without the gradients of records that live on the device: these never leave it."""
    there = [is_record(sizes, placement, unit) for unit in range(len(sizes.numels))]
    numels, nbytes = (
        tuple(0 if gone else one for one, gone in zip(values, there, strict=True))
        for values in (sizes.gradient_numels, sizes.gradients)
    )
    return replace(sizes, gradient_numels=numels, gradients=nbytes)
