"""The blocks of an outline whose units a run makes one, as engine/blocks.py does of modules: see block_size.
Pure: no torch, no I/O.

A block of an outline is a stage that the backward may recompute: a layer of a transformer. What is frozen
shares no unit with what trains, nor does what another stage uses, too. A block with experts is none, and none
is one of which a step leaves a part idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from infinity.planning.block_size import block_limit, worth_sharing
from infinity.planning.outline import Outline, Stage, UnitOutline
from infinity.planning.setting import Setting


def in_shared_units(outline: Outline, setting: Setting) -> Outline:
    """Return the outline with one unit for those of each small block that may share one; the same outline
    where none may.
    """
    users = Counter(unit for stage in outline.stages for unit in stage.units)
    leaders: dict[int, int] = {}
    for stage in outline.stages:
        groups = _groups(outline.parts, stage, users)
        if groups and _is_small([outline.parts[unit] for unit in stage.units], groups, setting):
            leaders.update((unit, group[0]) for group in groups for unit in group)
    return _joined(outline, leaders) if leaders else outline


def _groups(parts: Sequence[UnitOutline], stage: Stage, users: Mapping[int, int]) -> list[list[int]]:
    """Return the units of a stage that may share one, two or more in each."""
    if not stage.recomputed or any(_is_chosen(parts[unit]) for unit in stage.units):
        return []
    groups: dict[bool, list[int]] = {}
    for unit in sorted(stage.units):
        if users[unit] == 1:
            groups.setdefault(parts[unit].trainable, []).append(unit)
    return [group for group in groups.values() if len(group) > 1]


def _is_chosen(part: UnitOutline) -> bool:
    """Whether it is up to a step's data what of it is used, or it is a piece of a larger layer."""
    return part.active < 1 or part.share < 1 or part.idle or part.divided or part.in_tiles


def _is_small(parts: Sequence[UnitOutline], groups: Sequence[Sequence[int]], setting: Setting) -> bool:
    nbytes = setting.schema.width * sum(part.numel for part in parts)
    saved_uses = sum(map(len, groups)) - len(groups)
    if setting.units == "module" or nbytes > block_limit(setting.rank_host_nbytes, setting.device_nbytes):
        return False
    return setting.units == "block" or worth_sharing(nbytes, saved_uses, nvme=setting.nvme)


def _joined(outline: Outline, leaders: Mapping[int, int]) -> Outline:
    """Join units. leaders: for each that is joined the first of its group, which stands for all."""
    members: dict[int, list[UnitOutline]] = {}
    for unit, part in enumerate(outline.parts):
        members.setdefault(leaders.get(unit, unit), []).append(part)
    place = {unit: number for number, unit in enumerate(members)}
    at = {unit: place[leaders.get(unit, unit)] for unit in range(len(outline.parts))}
    stages = tuple(
        replace(stage, units=tuple(dict.fromkeys(at[unit] for unit in stage.units)))
        for stage in outline.stages
    )
    return replace(outline, parts=tuple(map(_one_unit, members.values())), stages=stages)


def _one_unit(parts: Sequence[UnitOutline]) -> UnitOutline:
    if len(parts) == 1:
        return parts[0]
    words = [part.name.split(".") for part in parts]
    common = [first for first, *others in zip(*words, strict=False) if all(one == first for one in others)]
    return UnitOutline(
        ".".join(common) or parts[0].name,
        tuple(shape for part in parts for shape in part.shapes),
        attention=sum(part.attention for part in parts),
        trainable=parts[0].trainable,
    )
