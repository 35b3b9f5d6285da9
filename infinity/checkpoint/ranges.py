"""Copies of ranges of a unit, out of its record and into it.

Moments are copied as they are stored, whatever their dtype; weights as the fp32 master, in whatever fields
the record keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from infinity.checkpoint.kinds import KINDS, first_of
from infinity.lane.passes import CopyOutPass, field_nbytes
from infinity.planning.layout import STATE_BLOCK, pieces, tiles
from infinity.records.record import Record
from infinity.storage.manifest import MASTER
from infinity.tensors import as_bytes
from infinity.units.unit import Unit

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

CHUNK_NUMEL = 1 << 21
"""Elements that are copied at a time; checkpoints and exports hold a few such ranges in memory."""


def chunks(record: Record) -> Iterator[tuple[int, int]]:
    """Split a unit into element ranges of whole tiles."""
    tile_numel = record.tile_numel
    return tiles(record.shard.numel, max(tile_numel, CHUNK_NUMEL // tile_numel * tile_numel))


def buffers(record: Record, fields: Sequence[str], numel: int) -> dict[str, torch.Tensor]:
    """Return a zeroed byte buffer for `numel` elements of each field."""
    return {
        field: torch.zeros(field_nbytes(record, field, numel), dtype=torch.uint8, device="cpu")
        for field in fields
    }


@dataclass(frozen=True, slots=True)
class RangePart:
    """A field's bytes of one parameter's part of a range."""

    index: int  # of the parameter in its unit
    field: str
    first: int
    """The element of the field's tensor, as it is saved, at which the part begins."""
    values: memoryview


def parts(record: Record, start: int, stop: int, values: Mapping[str, torch.Tensor]) -> Iterator[RangePart]:
    """Split the values of elements [start, stop) by parameter, without padding."""
    views = {field: as_bytes(one) for field, one in values.items()}
    for piece in pieces(record.shard, start, stop):
        for field, whole in views.items():
            first = field_nbytes(record, field, piece.start - start)
            # There are scales for whole blocks, even if the last one is not full.
            numel = -(-piece.numel // STATE_BLOCK) * STATE_BLOCK if field == "scale" else piece.numel
            element = first_of(KINDS.get(field, MASTER), piece.element)
            yield RangePart(
                piece.index, field, element, whole[first : first + field_nbytes(record, field, numel)]
            )


def copied_out(
    wanted: Iterable[tuple[Engine, Unit, Sequence[str]]],
) -> Iterator[tuple[Unit, CopyOutPass]]:
    """Copy fields of units out, with updates applied, range by range; the next is read ahead."""
    ahead: tuple[Engine, Unit, CopyOutPass] | None = None
    for engine, unit, fields in wanted:
        engine.residency.flush(unit)
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
