"""Outlines of models as they are built: in weight tiles, as Config(tile_above=...) cuts them, and with
experts one by one; for `infinity plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console

from infinity.bench.arguments import size_of
from infinity.config.sequence_ranks import check_experts
from infinity.errors import ConfigError
from infinity.planning.outline import Outline, UnitOutline
from infinity.planning.tile_size import LEAST_SLICE_NBYTES, tile_choice
from infinity.sizes import format_size

_ITEMSIZE = 2
_TOLD = 3
_TOGETHER = 16


def add_argument(add: Callable[..., object]) -> None:
    """Add --tile-above to a command."""
    what = 'cut layers above SIZE into tiles, as Config(tile_above=...); "auto": chosen by the budgets'
    add("--tile-above", type=_above, metavar="SIZE", help=what)


def _above(text: str) -> int | str:
    return text if text == "auto" else size_of(text)


def tiled(
    outline: Outline, above: int | str | None, host_nbytes: int, device_nbytes: int | None, console: Console
) -> Outline:
    """Return the outline in tiles of --tile-above; print the cuts, and the reason of an automatic size."""
    if above is None:
        return outline
    lines = []
    if isinstance(above, str):
        choice = tile_choice(host_nbytes, device_nbytes)
        above = choice.nbytes
        lines.append(f"tile_above: {choice.reason}")
    cut, told = in_tiles(outline, above)
    lines += told[:_TOLD] or ["no layer is cut"]
    if len(told) > _TOLD:
        lines.append(f"... and {len(told) - _TOLD} more")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    return cut


def sliced(outline: Outline, tokens: int, console: Console, ranks: int = 1) -> Outline:
    """Return the outline with experts one by one, as `in_slices`; print how many a step uses."""
    cut, told = in_slices(outline, tokens, ranks)
    if told:
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    return cut


def in_slices(outline: Outline, tokens: int, ranks: int = 1) -> tuple[Outline, str]:
    """Return the outline with the experts of each layer by themselves, of which a step of so many tokens, of
    all ranks together, uses as many as chance would; and a line about them, "" where there are none.

    Experts that are used stand together in at most `_TOGETHER` units, since a plan of each would take long.
    ranks: that divide the experts among them (expert_parallel).

    Raises: ConfigError where that is several, and a model has no experts, or not a multiple of so many.
    """
    parts: list[UnitOutline] = []
    at: list[tuple[int, ...]] = []
    told = ""
    for part in outline.parts:
        pieces = _slices(part, tokens, ranks)
        at.append(tuple(len(parts) + number for number, one in enumerate(pieces) if not one.idle))
        parts += pieces
        if pieces[0] is not part and not told:
            experts, used = part.shapes[0][0], sum(one.shapes[0][0] for one in pieces if not one.idle)
            each = format_size(_ITEMSIZE * part.numel // experts)
            here = f"{experts // ranks} of a layer's {experts}, {each} each, on every rank"
            what = here if ranks > 1 else f"{experts} of {each} in a layer"
            told = (
                f"experts: {what}, one by one; {tokens:,} tokens use {used} of them, if none is preferred; "
                f"in memory are one and a window, not a layer's {format_size(_ITEMSIZE * part.numel)}"
            )
    if ranks > 1 and not told:
        raise ConfigError(
            f"expert_parallel={ranks}: {outline.name} has no experts in stacks, and nothing would be "
            "divided. Leave it out"
        )
    stages = [
        replace(one, units=tuple(new for unit in one.units for new in at[unit])) for one in outline.stages
    ]
    return replace(outline, parts=tuple(parts), stages=tuple(stages)), told


def _slices(part: UnitOutline, tokens: int, ranks: int) -> Sequence[UnitOutline]:
    """Cut stacks of experts, as Config(experts="slices") does; those that are not used are idle, and last.
    ranks: that divide them; tokens of all ranks come to each.
    """
    experts = part.shapes[0][0]
    stacks = all(len(shape) > 1 and shape[0] == experts for shape in part.shapes)
    if not stacks or part.active >= 1:
        return [part]
    if ranks > 1:
        check_experts(experts, ranks, part.name)
    elif _ITEMSIZE * math.prod(part.shapes[0]) <= LEAST_SLICE_NBYTES:
        return [part]
    here = experts // ranks
    used = min(math.ceil(here * (1 - (1 - part.active) ** tokens)), here)
    units = min(used, _TOGETHER)
    sizes = [used * (number + 1) // units - used * number // units for number in range(units)]
    active = part.active * experts / used  # above 1 where each computes for tokens of several ranks
    part = replace(part, divided=ranks > 1)
    shared = replace(part, share=used / here)
    slices = [
        _some(shared, f"experts.{number}", size, active if ranks > 1 else min(active, 1.0))
        for number, size in enumerate(sizes)
    ]
    if used < here:
        slices.append(replace(_some(part, "idle experts", here - used, 0.0), idle=True))
    if here < experts:
        others = _some(part, "experts of other ranks", experts - here, 0.0)
        slices.append(replace(others, idle=True, elsewhere=True))
    return slices


def _some(part: UnitOutline, what: str, experts: int, active: float) -> UnitOutline:
    shapes = tuple((experts, *shape[1:]) for shape in part.shapes)
    return replace(part, name=f"{part.name}.{what}", shapes=shapes, active=active)


def in_tiles(outline: Outline, above_nbytes: int) -> tuple[Outline, list[str]]:
    """Return the outline with every matrix above `above_nbytes`, in 16 bits, cut into tiles, and a line for
    each cut.
    """
    parts: list[UnitOutline] = []
    told: list[str] = []
    at: list[tuple[int, ...]] = []
    for part in outline.parts:
        pieces = _pieces(part, above_nbytes)
        at.append(tuple(range(len(parts), len(parts) + len(pieces))))
        parts += pieces
        if len(pieces) > 1:
            nbytes = _ITEMSIZE * math.prod(part.shapes[0])
            largest = max(_ITEMSIZE * math.prod(one.shapes[0]) for one in pieces)
            shape = " x ".join(map(str, part.shapes[0]))
            tiles = f"{len(pieces)} tiles of {format_size(largest)}"
            told.append(f"{part.name}: {shape}, {format_size(nbytes)}, in {tiles}")
    stages = [
        replace(one, units=tuple(new for unit in one.units for new in at[unit])) for one in outline.stages
    ]
    return replace(outline, parts=tuple(parts), stages=tuple(stages)), told


def _pieces(part: UnitOutline, above_nbytes: int) -> Sequence[UnitOutline]:
    """Cut a part as tiling.tile_ would cut its module: only a matrix, with or without a bias."""
    if len(part.shapes) > 2 or len(part.shapes[0]) != 2 or any(len(shape) != 1 for shape in part.shapes[1:]):
        return [part]
    rows, columns = part.shapes[0]
    if _ITEMSIZE * rows * columns <= above_nbytes:
        return [part]
    from infinity.tiling.grid import Grid, cut_to, tiles_of  # with tiling comes torch

    grid = tiles_of(rows, columns, _ITEMSIZE, above_nbytes)
    if part.looked_up:
        grid = Grid(cut_to(rows, max(above_nbytes // (_ITEMSIZE * columns), 1)), (columns,))
    pieces = []
    for number, (high, wide) in enumerate(grid.slices()):
        shapes: tuple[tuple[int, ...], ...] = ((high.stop - high.start, wide.stop - wide.start),)
        if len(part.shapes) > 1 and wide.start == 0:
            shapes += ((high.stop - high.start,),)
        attention = part.attention if number == 0 else 0
        name = f"{part.name}.tiles.{number}"
        pieces.append(replace(part, name=name, shapes=shapes, attention=attention, in_tiles=True))
    return pieces
