"""Embeddings of an outline in the blocks of rows that a run cuts them into, of which a step moves those that
it looks up. Pure: no torch, no I/O.

Which rows a step looks up is up to its data. Planned is the mean for ids that are drawn evenly: of real text,
whose words are not equally frequent, fewer blocks are used, so that a step moves less than was planned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from infinity.planning.budget import divide, least_budget
from infinity.planning.demand import Setting
from infinity.planning.layout import RecordSchema
from infinity.planning.outline import Outline, UnitOutline
from infinity.planning.tile_size import rows_of_block


def in_blocks_of_rows(outline: Outline, setting: Setting) -> Outline:
    """Return the outline as Init would cut it at this setting: large embeddings whose weight nothing else
    uses in blocks, and those blocks idle that no token of a step looks up. It is the same outline where Init
    cuts nothing; see [Note: blocks of rows] in tile_size.
    """
    if not is_cut(outline, setting):
        return outline
    width = RecordSchema(setting.state_dtype, setting.dtype).width
    users = Counter(unit for stage in outline.stages for unit in stage.units)
    tokens = setting.method.tokens * setting.micro_batches * setting.ranks
    parts: list[UnitOutline] = []
    at: list[tuple[int, ...]] = []
    for unit, part in enumerate(outline.parts):
        pieces = _blocks(part, width, tokens) if users[unit] == 1 else [part]
        at.append(tuple(len(parts) + number for number, one in enumerate(pieces) if not one.idle))
        parts += pieces
    stages = [
        replace(one, units=tuple(new for unit in one.units for new in at[unit])) for one in outline.stages
    ]
    return replace(outline, parts=tuple(parts), stages=tuple(stages))


def is_cut(outline: Outline, setting: Setting) -> bool:
    """Whether Init cuts large embeddings at this setting: with moments in fp32, and where host_memory does
    not hold the whole model.
    """
    schema = RecordSchema(setting.state_dtype, setting.dtype)
    if not setting.nvme or setting.state_dtype != "fp32" or setting.rank_host_nbytes < least_budget(schema):
        return False
    kept = divide(
        setting.rank_host_nbytes, schema=schema, on_device=setting.device_nbytes is not None
    ).kept_nbytes
    return outline.parameters * schema.slot_nbytes > kept


def used_blocks(blocks: int, tokens: int) -> int:
    """Return in how many of so many blocks so many ids are, drawn evenly: the mean, rounded up."""
    return min(blocks, tokens, math.ceil(blocks * (1 - (1 - 1 / blocks) ** tokens)))


def _blocks(part: UnitOutline, width: int, tokens: int) -> Sequence[UnitOutline]:
    """Return an embedding in blocks, those that are not used as one and last; itself where it stays whole."""
    if not part.looked_up or part.in_tiles or len(part.shapes) != 1 or len(part.shapes[0]) != 2:
        return [part]
    rows, columns = part.shapes[0]
    together = rows_of_block(rows, columns * width)
    if together is None:
        return [part]
    blocks = -(-rows // together)
    used = used_blocks(blocks, tokens)
    left = max(0, rows - used * together)
    sizes = [min(together, rows - number * together) for number in range(used)]
    block = replace(part, share=used / blocks, in_tiles=True)
    pieces = [
        replace(block, name=f"{part.name}.tiles.{number}", shapes=((size, columns),))
        for number, size in enumerate(sizes)
    ]
    if left:
        idle = f"{part.name}.idle rows"
        pieces.append(replace(block, name=idle, shapes=((left, columns),), idle=True))
    return pieces
