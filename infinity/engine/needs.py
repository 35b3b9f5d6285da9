"""How much host memory a model needs whose records lie there."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.planning.budget import Budget, divide, least_that
from infinity.planning.layout import Format
from infinity.records.record import Record
from infinity.units.unit import Unit


def gradients_nbytes(units: Sequence[Unit], field: str | None = None) -> int:
    """Bytes of the gradients of all trainable units: as one backward yields them, or, where that is more, in
    `field` of their records.
    """
    records = [unit.record for unit in units if unit.trainable]
    least = [one.field_nbytes(one.form.gradient) for one in records]
    wanted = [one.field_nbytes(field) for one in records] if field else least
    return sum(map(max, least, wanted))


def least_total_to_build(built: Sequence[Record], model: Sequence[tuple[Record, bool]], form: Format) -> int:
    """Return the host_memory, in bytes, that holds the weights of `built` at once, and then a model's weights
    with moments (AdamW's) and gradients of its trainable records.

    model: records, and whether they are trained; form: Config's.
    """

    def needed(records: Sequence[Record], budget: Budget, *, trained: bool = False) -> int:
        return sum(_stored_nbytes(record, budget, trained=trained) for record in records)

    def holds(total_nbytes: int) -> bool:
        building, training = divide(total_nbytes, form=form), divide(total_nbytes, largest, form)
        learn = needed([record for record, trained in model if trained], building, trained=True)
        rest = needed([record for record, trained in model if not trained], building)
        return needed(built, building) <= building.kept_nbytes and learn + rest <= training.kept_nbytes

    largest = max((record.form.width * record.whole.numel for record, _ in model), default=0)
    return least_that(holds, form)


def _stored_nbytes(record: Record, budget: Budget, *, trained: bool) -> int:
    form, numel, tile_numel = record.form, record.shard.numel, budget.tile_of(record.form)
    names = (*form.fields, form.gradient) if trained else form.weights
    return sum(form.stored_nbytes(name, numel, form.span(name, tile_numel)) for name in names)
