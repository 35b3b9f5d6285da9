"""What is known of one parameter of a model that is being built: its type, and where it was evicted to."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from infinity.engine.asked import KEPT
from infinity.engine.refused import wrong_dtype
from infinity.errors import UnsupportedError
from infinity.planning.layout import RecordSchema
from infinity.records.record import Record
from infinity.records.weights import compute_dtype
from infinity.storage.packed import FileRange, Packed
from infinity.tensors import local, sharers


class BuiltParameter:
    """One parameter of a model that is being built."""

    __slots__ = ("asked", "dtype", "index", "is_mapped", "lies", "module", "name", "parameter", "record")

    def __init__(
        self, parameter: nn.Parameter, module: nn.Module, name: str, asked: torch.dtype | None
    ) -> None:
        """Begin real, without a record."""
        self.parameter = weakref.ref(parameter)
        self.module = weakref.ref(module)
        self.name = name
        self.dtype = parameter.dtype
        self.asked = asked
        """The type that it is to compute in; None for Config's."""
        self.record: Record | None = None
        """Where it was evicted to; None as long as it never was."""
        self.lies: FileRange | Packed | None = None
        """Where in a checkpoint's files its values are, if its record was laid there."""
        self.index = 0
        self.is_mapped = False
        """Whether its values are a mapped file's, and take no memory until they are looked at."""

    def note_mapped(self, *, is_mapped: bool) -> None:
        """Note whether its values are a mapped file's."""
        self.is_mapped = is_mapped

    def belongs_to(self, record: Record, index: int) -> None:
        """Note that its values are those of parameter `index` of `record`."""
        self.record, self.index = record, index

    def lie(self, where: FileRange | Packed) -> None:
        """Note where in a checkpoint's files its values are."""
        self.lies = where

    def part_of(self, parameter: nn.Parameter, record: Record) -> torch.Tensor:
        """Return this rank's part of the values of the parameter, which is real, for its record."""
        values = local(parameter).detach().cpu()
        as_it_is = values.dtype in (torch.float32, compute_dtype(record.schema))
        return record.rank_part(self.index, (values if as_it_is else values.float()).contiguous())

    def field_in(self, record: Record) -> tuple[str, torch.dtype]:
        """Return the field of its record, and the type, that its values are read from."""
        computes = self.dtype == compute_dtype(record.schema)
        return ("hi", self.dtype) if computes else ("master", torch.float32)

    @property
    def lies_in_files(self) -> bool:
        """Whether it was evicted to a record that lies in a checkpoint's files."""
        return self.record is not None and self.record.in_files is not None

    def leave_record(self) -> Record | None:
        """Belong to no record, until the parameter, which is real, is evicted anew; return what it left."""
        left, self.record = self.record, None
        return left

    def take(self, parameter: nn.Parameter, asked: torch.dtype | None, schema: RecordSchema) -> None:
        """Follow `p.data = ...`: note the dtype, and forget a record of another shape or schema.

        asked: the type that it is to compute in now, in a record of this schema.
        """
        if parameter.dtype not in KEPT:
            raise UnsupportedError(wrong_dtype(self.module(), self.name, parameter))
        self.dtype = parameter.dtype
        if self.record is not None and (
            self.record.schema is not schema
            or self.record.shard.segments[self.index].shape != tuple(local(parameter).shape)
        ):
            self.record = None
        self.asked = asked

    @property
    def has_views(self) -> bool:
        """Whether other tensors share the memory of the parameter, which is real."""
        parameter = self.parameter()
        return parameter is not None and sharers(local(parameter)) > _ALONE

    @property
    def nbytes(self) -> int:
        """Bytes while real."""
        parameter = self.parameter()
        return 0 if parameter is None or self.is_mapped else local(parameter).numel() * self.dtype.itemsize


_ALONE = sharers(nn.Parameter(torch.zeros(1, device="cpu")))
