"""The parameters that one engine keeps: which unit has each, and its values, read from records and written
there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from infinity.durable.committer import Durable
from infinity.engine.partition import Partition
from infinity.errors import UnsupportedError
from infinity.lane.base import Pass
from infinity.lane.lane import StreamLane
from infinity.lane.passes import CopyOutPass, ReadPass, WritePass
from infinity.records.record import Record
from infinity.records.weights import compute_dtype
from infinity.sizes import format_size
from infinity.storage.store import Store
from infinity.tensors import as_bytes, part_of, spread_as
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")


class Parameters:
    """Finds parameters and their values. Used by the thread that computes."""

    def __init__(
        self,
        lane: StreamLane,
        residency: UnitResidency,
        partition: Partition | None,
        durable: Durable | None,
        store: Store,
    ) -> None:
        """Begin without parameters. partition: None with one rank. durable: the run that has to know before
        records change; None for none. store: where records have their own weights.
        """
        self._store = store
        self._lane = lane
        self._residency = residency
        self._partition = partition
        self._durable = durable
        self._places: dict[int, tuple[Unit, int]] = {}

    def add(self, unit: Unit) -> None:
        """Keep the parameters of a unit of a finished model."""
        self._places |= {id(parameter): (unit, index) for index, parameter in enumerate(unit.parameters)}

    def packed_count(self) -> int:
        """Return the number of units whose weights are packed in fewer bits."""
        units = {unit for unit, _ in self._places.values()}
        return sum(unit.record.packed_nbytes is not None for unit in units)

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether `parameter` is in a finished model of the engine."""
        return id(parameter) in self._places

    def unit_of(self, parameter: torch.Tensor) -> tuple[Unit, int]:
        """Return a parameter's unit and its index there.

        Raises: UnsupportedError while the model is being built, and for a parameter that was replaced then.
        """
        found = self._places.get(id(parameter))
        if found is None:
            raise UnsupportedError(
                f"a parameter of shape {tuple(parameter.shape)} is in no finished model. Inside "
                "`with infinity.Init(...)` the model is still being built: do this after the `with`. After "
                "it, the model has another parameter in the place of this one: use that."
            )
        return found

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return a parameter's name in the model."""
        unit, index = self.unit_of(parameter)
        return unit.layout.segments[index].name

    def part_numel(self, parameter: nn.Parameter) -> int:
        """Return how many of a parameter's elements this rank holds."""
        unit, index = self.unit_of(parameter)
        return unit.record.shard.segments[index].numel

    # Values

    def read(self, parameter: nn.Parameter, fields: Sequence[str]) -> list[torch.Tensor]:
        """Return fields ("hi", "master", "m", "v") of a parameter as new CPU tensors in its shape, DTensors
        of a DTensor, pending updates applied. With several ranks every rank calls it.
        """
        unit, index = self.unit_of(parameter)
        self._residency.flush(unit)
        dtypes = {field: unit.flat.dtype if field == "hi" else torch.float32 for field in fields}
        values = self.read_record(unit.record, index, dtypes)
        shape = unit.layout.segments[index].shape
        return [spread_as(parameter, values[field].view(shape)) for field in fields]

    def read_part(self, parameter: nn.Parameter, field: str) -> torch.Tensor:
        """Return what this rank holds of a field ("master", "m", "v") of a parameter, pending updates
        applied, as a new one-dimensional fp32 tensor on the CPU.
        """
        unit, index = self.unit_of(parameter)
        self._residency.flush(unit)
        return self._read(unit.record, index, {field: torch.float32})[field]

    def write(self, parameter: nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Set fields ("master", "m", "v") of a parameter, after the updates that are pending: of a DTensor by
        DTensors, of any placements.

        Raises: UnsupportedError where a DTensor is given for an ordinary parameter, or the other way round.
        """
        unit, index = self.unit_of(parameter)
        name = unit.layout.segments[index].name
        values = {field: part_of(parameter, one, f"{name}, {field}") for field, one in values.items()}
        self.write_part(
            parameter, {field: unit.record.rank_part(index, one) for field, one in values.items()}
        )

    def write_part(self, parameter: nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Set fields of this rank's part of a parameter; see `write`."""
        self.before_change()
        unit, index = self.unit_of(parameter)
        self._residency.flush(unit)
        host = {}
        for field, tensor in values.items():
            own = (field, tensor.dtype) == ("master", unit.flat.dtype)
            taken = tensor.detach().to("cpu", None if own else torch.float32)
            host[field] = taken.resolve_neg().contiguous()  # which torch may negate lazily
        if "master" in values:
            self._residency.changed(unit)
        self.write_record(unit.record, {index: host})

    def before_change(self) -> None:
        """Called before records are changed: a durable run first captures the step that they belong to."""
        if self._durable is not None:
            self._durable.before_change()

    # Records, also of a model that is being built

    def read_record(
        self, record: Record, index: int, dtypes: dict[str, torch.dtype]
    ) -> dict[str, torch.Tensor]:
        """Return fields of a parameter, by their types, as one-dimensional CPU tensors, with the parts of
        all ranks.
        """
        return self.read_elements(record, index, range(math.prod(record.shard.segments[index].shape)), dtypes)

    def read_elements(
        self, record: Record, index: int, elements: range, dtypes: dict[str, torch.dtype]
    ) -> dict[str, torch.Tensor]:
        """Return consecutive elements of fields of a parameter; see `read_record`."""
        parts = self._read(record, index, dtypes, elements)
        if self._partition is None:
            return parts
        return {
            field: self._partition.collect(record, index, part, elements) for field, part in parts.items()
        }

    def _read(
        self, record: Record, index: int, dtypes: dict[str, torch.dtype], elements: range | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what this rank holds of a parameter, or of some of its elements."""
        segment = record.shard.segments[index]
        own = segment.elements if elements is None else segment.elements_of(elements)
        into = {field: torch.empty(len(own), dtype=dtype, device="cpu") for field, dtype in dtypes.items()}
        self._run(ReadPass(record, index, record.tile_numel, into, own.start - segment.first))
        return into

    def read_range(self, record: Record, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return elements [start, stop) of the weights of a record that compute, of their type, as they are
        on this rank.
        """
        values = torch.empty(stop - start, dtype=dtype, device="cpu")
        self._run(CopyOutPass(record, record.tile_numel, start, stop, {"hi": values}))
        return values

    def write_record(
        self, record: Record, values: dict[int, dict[str, torch.Tensor]], *, rewrite: bool = False
    ) -> None:
        """Set fields of this rank's parts of a record's parameters; see WritePass. A record whose weights lie
        in a checkpoint's files gets its own, unless these are the values that it has.
        """
        if record.in_files is not None:
            if self._are_there(record, values):
                return
            self.make_own([record], "new values are written to them")
        self._run(WritePass(record, record.tile_numel, values, rewrite=rewrite))

    def _are_there(self, record: Record, values: Mapping[int, Mapping[str, torch.Tensor]]) -> bool:
        """Whether a record whose weights lie in files has these values, with masters equal to them."""
        if any(set(fields) != {"master"} for fields in values.values()):
            return False
        dtype = compute_dtype(record.schema)
        for index, fields in values.items():
            (here,) = self._read(record, index, {"hi": dtype}).values()
            new = fields["master"].reshape(-1)
            if as_bytes(here.to(new.dtype)) != as_bytes(new):
                return False
        return True

    def make_own(self, records: Sequence[Record], why: str) -> None:
        """Copy weights that lie in a checkpoint's files to records of their own. why: for the log.

        Raises: HostMemoryError or aio.StorageFullError where they do not fit, named; CorruptionError.
        """
        records = [record for record in records if record.in_files is not None]
        if not records:
            return
        self.before_change()
        self._lane.drain()
        for record in records:
            dtype = compute_dtype(record.schema)
            values = {
                index: {"master": self._read(record, index, {"hi": dtype})["hi"]}
                for index in range(len(record.shard.segments))
            }
            record.make_own(self._store)
            self._run(WritePass(record, record.tile_numel, values))
        nbytes = sum(one.field_nbytes(name) for one in records for name in one.schema.weights)
        more = f" and {len(records) - 1} more" if records[1:] else ""
        logger.info(
            "%s%s were copied from the checkpoint's files to records of their own, %s, since %s",
            records[0].name,
            more,
            format_size(nbytes),
            why,
        )

    def _run(self, job: Pass) -> None:
        self._lane.submit(job, urgent=True)
        self._lane.wait(job)
