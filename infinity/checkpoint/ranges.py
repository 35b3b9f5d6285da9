"""Ranges of a unit in the form in which they are stored, out of its record and into it.

Moments leave and enter as their bytes are, whatever their type; weights as the fp32 master, in whatever
fields it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from infinity.lane.passes import CopyOutPass, field_nbytes
from infinity.planning.layout import STATE_BLOCK, pieces, tiles
from infinity.records.record import Record
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


def buffers(record: Record, fields: Sequence[str], numel: int) -> dict[str, torch.Tensor]:
    """Return zeroed bytes for `numel` elements of each field."""
    return {field: torch.zeros(field_nbytes(record, field, numel), dtype=torch.uint8) for field in fields}


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
