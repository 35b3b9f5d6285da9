"""Ranges of a unit in the form in which they are stored, out of its record and into it.

Moments leave and enter as their bytes are, whatever their type; weights as the fp32 master, in whatever
fields it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from infinity import kernels
from infinity.lane.base import Pass
from infinity.lane.passes import clear
from infinity.planning.layout import STATE_BLOCK, pieces, tiles
from infinity.records.record import Record
from infinity.records.weights import WEIGHTS
from infinity.tensors import as_bytes
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

CHUNK_NUMEL = 1 << 21
"""Elements that are moved at once: what checkpoints and exports hold in memory is a few of these."""


def chunks(record: Record) -> Iterator[tuple[int, int]]:
    """Cut a unit into element ranges of whole tiles."""
    tile_numel = record.tile_numel
    return tiles(record.shard.numel, max(tile_numel, CHUNK_NUMEL // tile_numel * tile_numel))


def field_nbytes(record: Record, field: str, numel: int) -> int:
    """Bytes of `numel` elements of a field, "master" included."""
    return 4 * numel if field == "master" else record.form.nbytes(field, numel)


def buffers(record: Record, fields: Sequence[str], numel: int) -> dict[str, torch.Tensor]:
    """Return zeroed bytes for `numel` elements of each field."""
    return {field: torch.zeros(field_nbytes(record, field, numel), dtype=torch.uint8) for field in fields}


class _RangePass(Pass):
    """Moves elements [start, stop) between a record and buffers."""

    def __init__(
        self, record: Record, tile_numel: int, start: int, stop: int, values: Mapping[str, torch.Tensor]
    ) -> None:
        """values: bytes by field: "master", "hi" and the names of moments; see `buffers`."""
        super().__init__(record)
        self.start, self.stop = start, stop
        self.values = dict(values)
        self._tile_numel = tile_numel
        self._weights = WEIGHTS[record.form.dtype]
        self._names: tuple[str, ...] = tuple(
            dict.fromkeys(
                name for field in values for name in (self._of_master if field == "master" else (field,))
            )
        )

    @property
    def _of_master(self) -> Sequence[str]:
        """The fields to move for a master."""
        return self.record.form.master

    def tiles(self) -> Iterator[tuple[int, int]]:
        """The range's tiles."""
        for start, stop in tiles(self.stop - self.start, self._tile_numel):
            yield self.start + start, self.start + stop

    def _address(self, field: str, start: int) -> int:
        """Return where element `start` of a field is among the values."""
        return self.values[field].data_ptr() + field_nbytes(self.record, field, start - self.start)


class CopyOutPass(_RangePass):
    """Copies a range of a record into buffers; what was never written is left zero."""

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """What was ever written."""
        return tuple(name for name in self._names if self.record.written(name, start)), ()

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Copy, or join."""
        numel = stop - start
        for field in self.values:
            to = self._address(field, start)
            if field == "master" and all(name in at for name in self._of_master):
                self._weights.read_master(numel, at, to)
            elif field in at:
                kernels.copy(self.record.form.nbytes(field, numel), to, at[field])


class CopyInPass(_RangePass):
    """Replaces a range of a record by what buffers hold."""

    @property
    def _of_master(self) -> Sequence[str]:
        """All weights follow their master."""
        return self.record.form.weights

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Everything is replaced, padding included."""
        return (), self._names

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Copy, or split."""
        numel = stop - start
        for name in self._names:
            clear(self.record, at, name, numel)
        for field in self.values:
            source = self._address(field, start)
            if field == "master":
                self._weights.write_master(numel, source, at)
            else:
                kernels.copy(self.record.form.nbytes(field, numel), at[field], source)

    def done_processing(self) -> None:
        """Let go of the buffers."""
        self.values = {}


@dataclass(frozen=True, slots=True)
class RangePart:
    """A field's bytes of one parameter's part of a range."""

    index: int  # of the parameter in its unit
    field: str
    first: int
    """The element of the field's tensor, as it is saved, with which the part begins."""
    values: memoryview


def parts(record: Record, start: int, stop: int, values: Mapping[str, torch.Tensor]) -> Iterator[RangePart]:
    """Cut the values of elements [start, stop) into their parameters' parts, padding left out."""
    views = {field: as_bytes(one) for field, one in values.items()}
    for piece in pieces(record.shard, start, stop):
        for field, whole in views.items():
            first = field_nbytes(record, field, piece.start - start)
            # Scales are there for whole blocks, the last one too.
            numel = -(-piece.numel // STATE_BLOCK) * STATE_BLOCK if field == "scale" else piece.numel
            element = 2 * (piece.element // STATE_BLOCK) if field == "scale" else piece.element
            yield RangePart(
                piece.index, field, element, whole[first : first + field_nbytes(record, field, numel)]
            )


def copied_out(
    wanted: Iterable[tuple[Engine, Unit, Sequence[str]]],
) -> Iterator[tuple[Unit, CopyOutPass]]:
    """Copy fields of units out, updates applied, chunk by chunk; the next is read while one is worked on."""
    ahead: tuple[Engine, Unit, CopyOutPass] | None = None
    for engine, unit, fields in wanted:
        engine.executor.flush(unit)
        for start, stop in chunks(unit.record):
            values = buffers(unit.record, fields, stop - start)
            job = CopyOutPass(unit.record, unit.record.tile_numel, start, stop, values)
            engine.lane.submit(job, urgent=True)
            if ahead is not None:
                ahead[0].lane.wait(ahead[2])
                yield ahead[1:]
            ahead = engine, unit, job
    if ahead is not None:
        ahead[0].lane.wait(ahead[2])
        yield ahead[1:]
