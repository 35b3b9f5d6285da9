"""What a model whose records lie in host memory needs of it."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.memory import least_total
from infinity.shard import Format
from infinity.unit import Unit


def gradients_nbytes(units: Sequence[Unit], field: str | None = None) -> int:
    """Bytes of every gradient in `field`, where one backward does not yield more than that holds; None: as
    one backward yields it.
    """
    records = [unit.record for unit in units if unit.trainable]
    least = [one.field_nbytes(one.form.gradient) for one in records]
    wanted = [one.field_nbytes(field) for one in records] if field else least
    return sum(map(max, least, wanted))


def least_total_with(units: Sequence[Unit], held_nbytes: int, field: str | None, form: Format) -> int:
    """Return the host_memory, in bytes, that holds so much, and every gradient in `field`; form: Config's."""
    largest = max(unit.resident_nbytes for unit in units)
    return least_total(held_nbytes + gradients_nbytes(units, field), largest, form)
