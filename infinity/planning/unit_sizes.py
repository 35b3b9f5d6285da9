"""How many bytes a model's units take on one rank, by what they are for. Pure: no torch, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from infinity.planning.budget import Budget
from infinity.planning.exchange import Exchanges
from infinity.planning.layout import RecordSchema, lay_out
from infinity.planning.outline import Outline, UnitOutline
from infinity.planning.setting import Setting
from infinity.sizes import DEVICE_BLOCK, round_up


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of a model's units on one rank."""

    schema: RecordSchema
    numels: tuple[int, ...]
    """Elements of this rank's share of each unit, padded."""
    resident: tuple[int, ...]
    """Bytes of whole units while resident."""
    gradient_numels: tuple[int, ...]
    """Elements of this rank's share of gradients; 0 of what is frozen."""
    gradients: tuple[int, ...]
    """Bytes of these at the end of a step, as kept in host memory."""
    staying: tuple[int, ...]
    """Bytes of these where they stay on a device."""
    shares: tuple[float, ...]
    """Of the steps, that use each unit."""
    holders: tuple[int, ...]
    """Ranks that have shares of each unit."""
    second: tuple[int, ...]
    """Bytes of this rank's second part of each unit, in host memory."""
    stored: tuple[int, ...]
    """Likewise, of those on NVMe."""
    workers: tuple[int, ...]
    """Bytes that this rank has of each unit, beside its state, of what it sends: momenta and errors."""

    def field(self, unit: int, name: str, tile_numel: int) -> int:
        """Bytes of a field in its extent."""
        return self.schema.stored_nbytes(name, self.numels[unit], self.schema.span(name, tile_numel))

    def fields(self, names: Sequence[str], tile_numel: int) -> int:
        """Bytes of some fields of all units."""
        return sum(self.field(unit, name, tile_numel) for unit in range(len(self.numels)) for name in names)


def unit_sizes(outline: Outline, setting: Setting) -> UnitSizes:
    """Return them, second parts all in host memory."""
    schema = setting.schema
    align, wide = schema.align_numel, 4 if setting.micro_batches > 1 else schema.width
    moves = [part.trainable and not part.idle for part in outline.parts]
    holders = tuple(setting.holders(part) for part in outline.parts)
    numels = tuple(
        -(-part.numel // count) if moving else 0
        for part, moving, count in zip(outline.parts, moves, holders, strict=True)
    )
    wholes = [lay_out([("", shape) for shape in part.shapes], align).numel for part in outline.parts]
    resident = [0 if part.idle else whole for part, whole in zip(outline.parts, wholes, strict=True)]
    here = [0 if part.elsewhere else whole for part, whole in zip(outline.parts, wholes, strict=True)]
    shares = tuple(round_up(-(-whole // count), align) for whole, count in zip(here, holders, strict=True))
    nbytes = tuple(schema.width * whole for whole in resident)
    ranks = [Exchanges(setting, schema.width, count) for count in holders]
    workers = [share if moving else 0 for share, moving in zip(shares, moves, strict=True)]
    return UnitSizes(
        schema,
        shares,
        nbytes,
        numels,
        tuple(wide * numel for numel in numels),
        tuple(
            _staying_nbytes(part, wide) if numel else 0
            for part, numel in zip(outline.parts, numels, strict=True)
        ),
        tuple(part.share for part in outline.parts),
        holders,
        tuple(of.second_nbytes(one) for of, one in zip(ranks, nbytes, strict=True)),
        (0,) * len(nbytes),
        tuple(of.worker_nbytes(one) for of, one in zip(ranks, workers, strict=True)),
    )


def _staying_nbytes(part: UnitOutline, wide: int) -> int:
    """Return the bytes of a unit's gradients on a device, each in memory of its own."""
    return sum(round_up(wide * math.prod(shape), DEVICE_BLOCK) for shape in part.shapes)


def with_stored(sizes: UnitSizes, budget: Budget) -> UnitSizes:
    """Return the sizes with those second parts on NVMe that host memory has no room for, the last ones."""
    fit = sum(total <= budget.kept_nbytes for total in accumulate(sizes.second))
    nothing = (0,) * len(sizes.second)
    return replace(
        sizes,
        second=sizes.second[:fit] + nothing[fit:],
        stored=nothing[:fit] + sizes.second[fit:],
    )
