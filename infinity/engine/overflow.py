"""A model that host memory, or the disk, does not hold, found while it is built: the rest of it is counted,
not kept.

The first record that does not fit tells where memory ran out, but not how much would be enough: that is known
only when the whole model is built, and so are the names of its modules. So building goes on: records get no
memory, values are dropped and read as zeros.
Then the model is refused with the smallest host_memory that works, or with the space that it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from infinity.aio import StorageFullError
from infinity.engine.engine import Engine
from infinity.errors import HostMemoryError
from infinity.planning.budget import Budget, divide, least_that
from infinity.planning.layout import RecordSchema
from infinity.records.record import Record
from infinity.sizes import format_size
from infinity.storage.full_disk import of_whole

logger = logging.getLogger("infinity")


class Overflow:
    """Gives records their memory until there is none left."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first: Record | None = None
        self._held_nbytes = 0
        self._full: StorageFullError | None = None
        """The disk's error, if that is what is too small."""

    def __bool__(self) -> bool:
        """Whether a record did not fit: from then on values are not kept."""
        return self._first is not None

    def give_room(self, record: Record) -> None:
        """Give a record room for its weights, if there is any."""
        if self._first is not None:
            return
        try:
            for field in record.schema.weights:
                record.add(field, self._engine.store)
        except HostMemoryError:
            self._first, self._held_nbytes = record, self._engine.kept.held_nbytes
            logger.info("host memory is full at %s; what the rest of the model needs is counted", record.name)
        except StorageFullError as full:
            self._first, self._full = record, full.with_traceback(None)
            logger.info("the disk is full at %s; what the rest of the model needs is counted", record.name)

    def refuse(self, built: Sequence[Record], model: Mapping[Record, Sequence[nn.Parameter]]) -> None:
        """Refuse a finished model if it does not fit. built: all records, those of replaced parameters too;
        model: the parameters in each of those that the model keeps.

        Raises: HostMemoryError with the smallest host_memory that works; aio.StorageFullError with the space
        that the model needs.
        """
        trained = [
            (record, any(one.requires_grad for one in parameters)) for record, parameters in model.items()
        ]
        if self._full is not None and self._first is not None:
            raise self._refused_by_disk(self._first, self._full, trained)
        where = self._where(self._first) if self._first is not None else self._beside_uses(model)
        if not where:
            return
        frozen = [(record, False) for record, _ in trained]
        raise HostMemoryError(
            f"{where}. The smallest host_memory that works is "
            f"{self._least(built, trained)} with AdamW ({self._least(built, frozen)} without an optimizer); "
            "or give Config a folder on NVMe (nvme=...)."
        )

    def refuse_half(self, built: Sequence[Record], error: BaseException) -> None:
        """Refuse a model whose building ended with `error`, which zeros in place of values may have caused.

        Raises: HostMemoryError with a host_memory below which nothing works; aio.StorageFullError with space
        below which nothing works.
        """
        if self._first is None or not isinstance(error, Exception):
            return
        if self._full is not None:
            said = self._refused_by_disk(self._first, self._full, [(record, False) for record in built])
            said.add_note(
                "Building went on, to count that, without keeping values, and failed (the error above)."
            )
            raise said from error
        raise HostMemoryError(
            f"{self._where(self._first)}. Building went on, to count what the model needs, without keeping "
            f"its values, and failed (the error above): it needs {self._least(built, ())} or more. Give "
            "Config a larger host_memory, or a folder on NVMe (nvme=...)."
        ) from error

    def _refused_by_disk(
        self, first: Record, full: StorageFullError, model: Sequence[tuple[Record, bool]]
    ) -> StorageFullError:
        """Return the error that tells what a model needs of the disk; see `refuse`."""
        store, copies = self._engine.nvme_store, 2 if self._engine.durable is not None else 1
        weights, whole = (
            copies
            * sum(
                _stored_on_nvme(record, self._engine.budget, trained=every and one) for record, one in model
            )
            for every in (False, True)
        )
        what = f"the model's weights, {format_size(weights)}"
        if whole > weights:
            what += f", and moments of AdamW, {format_size(whole)} with them"
        what += ", all of it twice in a durable run" if copies > 1 else ""
        taken = store.allocated_nbytes if store is not None else 0
        return of_whole(full, first.name, [one.name for one in first.shard.segments], what, whole, taken)

    def _where(self, first: Record) -> str:
        names = [one.name for one in first.shard.segments]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        nbytes = sum(map(first.field_nbytes, first.schema.weights))
        return (
            f"{first.name}: {', '.join(names[:2])}{more}, {format_size(nbytes)}, do not fit host memory: "
            "without an NVMe tier all state stays there, and "
            f"host_memory={format_size(self._engine.budget.total_nbytes)} leaves "
            f"{format_size(self._engine.kept.limit_nbytes)} for it, of which "
            f"{format_size(self._held_nbytes)} were taken"
        )

    def _beside_uses(self, model: Mapping[Record, Sequence[nn.Parameter]]) -> str:
        """Say that weights which had room while the model was built have none beside the layers in use; ""
        where they have.
        """
        engine = self._engine
        if engine.nvme_store is not None:
            return ""
        largest, on_device = _largest_nbytes(model), not engine.device.is_host
        share = divide(engine.budget.total_nbytes, largest, engine.schema, on_device=on_device).kept_nbytes
        held = engine.kept.held_nbytes
        if held <= share:
            return ""
        return (
            f"the model's weights, {format_size(held)}, do not fit host memory: without an NVMe tier they "
            f"stay there, and beside layers in use (the largest has {format_size(largest)}) "
            f"host_memory={format_size(engine.budget.total_nbytes)} leaves {format_size(share)} for them"
        )

    def _least(self, built: Sequence[Record], model: Sequence[tuple[Record, bool]]) -> str:
        engine = self._engine
        least = _least_total(built, model, engine.schema, on_device=not engine.device.is_host)
        return format_size(least * engine.ranks.local_size)


def _least_total(
    built: Sequence[Record], model: Sequence[tuple[Record, bool]], schema: RecordSchema, *, on_device: bool
) -> int:
    """Return the host_memory, in bytes, that holds the weights of `built` at once, and then a model's weights
    with moments (AdamW's) and gradients of its trainable records.

    model: records, and whether they are trained; schema: Config's.
    """

    def needed(records: Sequence[Record], budget: Budget, *, trained: bool = False) -> int:
        return sum(_stored_nbytes(record, budget, trained=trained) for record in records)

    def holds(total_nbytes: int) -> bool:
        building, training = (divide(total_nbytes, one, schema, on_device=on_device) for one in (0, largest))
        learn = needed([record for record, trained in model if trained], building, trained=True)
        rest = needed([record for record, trained in model if not trained], building)
        return needed(built, building) <= building.kept_nbytes and learn + rest <= training.kept_nbytes

    largest = _largest_nbytes(record for record, _ in model)
    return least_that(holds, schema)


def _largest_nbytes(records: Iterable[Record]) -> int:
    """Return what the largest unit takes while it is used."""
    return max((record.schema.width * record.unit_layout.numel for record in records), default=0)


def _stored_nbytes(record: Record, budget: Budget, *, trained: bool) -> int:
    schema, numel, tile_numel = record.schema, record.shard.numel, budget.tile_of(record.schema)
    names = (*schema.fields, schema.gradient) if trained else schema.weights
    if record.in_files is not None and not trained:
        names = ()
    return sum(schema.stored_nbytes(name, numel, schema.span(name, tile_numel)) for name in names)


def _stored_on_nvme(record: Record, budget: Budget, *, trained: bool) -> int:
    schema, numel, tile_numel = record.schema, record.shard.numel, budget.tile_of(record.schema)
    names = schema.fields if trained else schema.weights if record.in_files is None else ()
    return sum(schema.stored_nbytes(name, numel, schema.span(name, tile_numel)) for name in names)
