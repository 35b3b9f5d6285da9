"""What one rank has of a model that tensor and pipeline parallelism divide, as an outline. Pure: no torch, no
I/O.

[Note: the heaviest rank]
Tensor parallelism cuts each matrix, and each attention's heads, evenly; vectors, such as norms, are copies,
and so are experts, which expert parallelism divides. A pipeline cuts the blocks into stages that are as equal
in parameters as they can be. Planned is the heaviest: the stage with the most parameters, with as many
micro-batches in flight as the first has, and the loss, which the last one computes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace

from infinity.errors import ConfigError
from infinity.planning.activations import Activations, KeptOfToken
from infinity.planning.outline import Outline, Stage, UnitOutline


def of_rank(outline: Outline, tensor: int, pipeline: int) -> Outline:
    """Return what the heaviest rank has, of `tensor` ranks that divide layers and `pipeline` stages.

    Raises: ConfigError for more stages than there are blocks.
    """
    return _cut(_stage(outline, pipeline), tensor)


def _cut(outline: Outline, ranks: int) -> Outline:
    """Return what a rank has of each matrix."""
    if ranks == 1:
        return outline
    parts = tuple(
        replace(one, shapes=_cut_shapes(one, ranks), attention=one.attention // ranks)
        for one in outline.parts
    )
    kept = outline.activations
    if kept is not None:
        kept = replace(kept, blocks=tuple(_kept(one, ranks) for one in kept.blocks))
    return replace(outline, parts=parts, activations=kept)


def _cut_shapes(part: UnitOutline, ranks: int) -> tuple[tuple[int, ...], ...]:
    if part.active < 1:
        return part.shapes  # experts
    return tuple((-(-one[0] // ranks), *one[1:]) if len(one) > 1 else one for one in part.shapes)


def _kept(one: KeptOfToken, ranks: int) -> KeptOfToken:
    """Return what a block keeps of a token where heads and inner layers are divided; of what else it keeps in
    the type that computes, as much as before.
    """
    return replace(
        one,
        narrow=one.narrow - one.mlp * (1 - 1 / ranks),
        mlp=one.mlp / ranks,
        pairs=one.pairs / ranks,
        wide_pairs=one.wide_pairs / ranks,
        pairs_on_cpu=one.pairs_on_cpu / ranks,
        pairs_beside=one.pairs_beside / ranks,
        gated=one.gated / ranks,
    )


def _stage(outline: Outline, count: int) -> Outline:
    """Return the heaviest of `count` stages of a pipeline."""
    if count == 1:
        return outline
    blocks = [number for number, one in enumerate(outline.stages) if one.recomputed]
    if len(blocks) < count:
        raise ConfigError(
            f"a pipeline of {count} stages: {outline.name} has {len(blocks)} blocks, and each stage needs one"
        )
    numels = [sum(outline.parts[unit].numel for unit in set(one.units)) for one in outline.stages]
    bounds = _bounds(numels, count)
    groups = [range(first, stop) for first, stop in itertools.pairwise(bounds)]
    heaviest = max(groups, key=lambda group: sum(numels[number] for number in group))
    return _only(outline, heaviest)


def _bounds(numels: Sequence[int], count: int) -> list[int]:
    """Return where to cut, so that the largest sum is as small as it can be; no group is empty."""

    def cut(most: int) -> list[int] | None:
        bounds = [0]
        sums = [0, *itertools.accumulate(numels)]
        while len(bounds) <= count:
            stop = bisect.bisect_right(sums, sums[bounds[-1]] + most) - 1
            stop = min(stop, len(numels) - (count - len(bounds)))
            if stop <= bounds[-1]:
                return None
            bounds.append(stop)
        return bounds if bounds[-1] == len(numels) else None

    least, most = max(numels), sum(numels)
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if cut(middle) else (middle + 1, most)
    found = cut(least)
    if found is None:
        raise AssertionError(f"{count} groups of {len(numels)} stages")
    return found


def _only(outline: Outline, group: range) -> Outline:
    """Return some consecutive stages of the forward as a model."""
    chosen = [outline.stages[number] for number in group]
    units = list(dict.fromkeys(unit for one in chosen for unit in one.units))
    place = {unit: number for number, unit in enumerate(units)}
    kept = outline.activations
    if kept is not None:
        kept = _blocks_of(outline, kept, group)
    return replace(
        outline,
        parts=tuple(outline.parts[unit] for unit in units),
        stages=tuple(Stage(tuple(place[unit] for unit in one.units), one.recomputed) for one in chosen),
        activations=kept,
    )


def _blocks_of(outline: Outline, kept: Activations, group: range) -> Activations | None:
    """Return what the blocks of these stages keep; None where it is not known of each."""
    blocks = [number for number, one in enumerate(outline.stages) if one.recomputed]
    if len(blocks) != len(kept.blocks):
        return None
    return replace(
        kept, blocks=tuple(one for number, one in zip(blocks, kept.blocks, strict=True) if number in group)
    )
