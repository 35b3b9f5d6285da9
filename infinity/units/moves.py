"""What a unit moves from and to NVMe, as forecasts have it."""

from __future__ import annotations

from infinity.planning.forecast import Moves
from infinity.units.unit import Unit


def moves_of(unit: Unit) -> Moves:
    """Return what one rank moves of a unit, by where its fields lie now."""
    stored = {
        name: unit.record.field_nbytes(name)
        for name, tier in unit.record.tiers()
        if tier not in ("host", "device") and name in unit.record.fields
    }
    hi_nbytes = stored.pop("hi", 0)
    return Moves(
        unit.record.shard.numel,
        hi_nbytes,
        sum(stored.values()),
        unit.window_nbytes,
        in_place=unit.in_place,
        trainable=unit.trainable and not unit.record.on_device,
        part_there=unit.record.on_device and unit.in_parts,
        width=unit.record.schema.width,
        derived=bool(unit.record.schema.derived),
        state_fields=len(stored),
    )
