"""Embeddings of an outline in the blocks of rows that a run cuts them into, of which a step moves those that
it looks up. Pure: no torch, no I/O.

Which rows a step looks up is up to its data. Planned is the mean for ids that are drawn evenly: of real text,
whose words are not equally frequent, fewer blocks are used, so that a step moves less than was planned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from infinity.planning.budget import divide, least_budget
from infinity.planning.outline import Outline, UnitOutline
from infinity.planning.setting import Setting
from infinity.planning.tile_size import rows_of_block


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """How an embedding is cut."""

    rows: int
    """Of a block; the last may have fewer."""
    blocks: int
    used: int
    """Blocks that a step looks up."""


def row_blocks(outline: Outline, setting: Setting) -> Mapping[int, RowBlocks]:
    """Return which units Init would cut at this setting, and how: large embeddings whose weight nothing else
    uses. None of them is cut with moments of 16 or 8 bits, without NVMe, and where host_memory holds the
    whole model; see [Note: blocks of rows] in tile_size.
    """
    schema = setting.schema
    if not setting.nvme or not schema.is_exact or setting.rank_host_nbytes < least_budget(schema):
        return {}
    on_device = setting.device_nbytes is not None
    kept_nbytes = divide(setting.rank_host_nbytes, schema=schema, on_device=on_device).kept_nbytes
    if outline.parameters * schema.slot_nbytes <= kept_nbytes:
        return {}
    users = Counter(unit for stage in outline.stages for unit in stage.units)
    tokens = setting.method.tokens * setting.micro_batches * setting.data_ranks
    found = {}
    for unit, part in enumerate(outline.parts):
        plain = part.looked_up and not part.in_tiles and [len(shape) for shape in part.shapes] == [2]
        if plain and users[unit] == 1:
            rows, columns = part.shapes[0]
            together = rows_of_block(rows, columns * schema.width)
            if together is not None:
                blocks = -(-rows // together)
                found[unit] = RowBlocks(together, blocks, used_blocks(blocks, tokens))
    return found


def used_blocks(blocks: int, tokens: int) -> int:
    """Return in how many of so many blocks so many ids are, drawn evenly: the mean, rounded up."""
    return min(blocks, tokens, math.ceil(blocks * (1 - (1 - 1 / blocks) ** tokens)))


def in_blocks_of_rows(outline: Outline, setting: Setting) -> Outline:
    """Return the outline with its embeddings as `row_blocks` has them; blocks that no token looks up are one
    unit, and idle. It is the same outline where nothing is cut.
    """
    cuts = row_blocks(outline, setting)
    if not cuts:
        return outline
    parts: list[UnitOutline] = []
    at: list[tuple[int, ...]] = []
    for unit, part in enumerate(outline.parts):
        pieces = _pieces(part, cuts[unit]) if unit in cuts else [part]
        at.append(tuple(len(parts) + number for number, one in enumerate(pieces) if not one.idle))
        parts += pieces
    stages = [
        replace(one, units=tuple(new for unit in one.units for new in at[unit])) for one in outline.stages
    ]
    return replace(outline, parts=tuple(parts), stages=tuple(stages))


def _pieces(part: UnitOutline, cut: RowBlocks) -> Sequence[UnitOutline]:
    rows, columns = part.shapes[0]
    block = replace(part, share=cut.used / cut.blocks, in_tiles=True)
    sizes = [min(cut.rows, rows - number * cut.rows) for number in range(cut.used)]
    pieces = [
        replace(block, name=f"{part.name}.tiles.{number}", shapes=((size, columns),))
        for number, size in enumerate(sizes)
    ]
    if left := rows - sum(sizes):
        pieces.append(replace(block, name=f"{part.name}.idle rows", shapes=((left, columns),), idle=True))
    return pieces
