"""Blocks of a model, and which of their modules share a unit: see [Note: units of blocks].

[Note: units of blocks]
A unit is a module's own parameters, unless Config(units=...) lets the modules in a small block share one. A
block is a member of a ModuleList, ModuleDict or Sequential, the outermost that is small enough (see
block_size in planning): a layer of a transformer, or a stage of a convolutional network. Its forward holds
the unit of all of them, and they are not followed one by one: see [Note: covered modules] in
autograd/hooks.py.

Modules share a unit only where nothing is lost by it. Parameters that compute in one type, that are
trained or frozen alike, and whose values lie in a checkpoint's files or not: so frozen weights get no
moments beside those that train, and stay in their files. A parameter that several modules have stays
with the module that has it first, alone, and so does what is cut into tiles or slices. A block whose
forward chooses among members of a list of its own, as among experts, is none: each of these members may
be one.

What a unit is decides which ranks work together, so all of this depends on the model, the settings and the
budgets alone, never on what was evicted while the model was built. A durable run goes on with the units it
began with, whatever the settings say: its commit names the parameters of each record.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from infinity.durable.commit import Commit
from infinity.engine.engine import Engine
from infinity.planning.block_size import block_limit, worth_sharing
from infinity.planning.layout import RecordSchema
from infinity.records.record import Record
from infinity.tensors import local
from infinity.tiling import Piece, Tiled
from infinity.units.unit import Unit

_LISTS = (nn.ModuleList, nn.ModuleDict)


class UnitKind(NamedTuple):
    """What the parameters of a unit of a block have in common."""

    schema: RecordSchema
    in_files: bool
    """Whether their values lie in a checkpoint's files, and stay there."""
    trained: bool


class Block(NamedTuple):
    """A module whose forward uses all modules of each of its groups."""

    name: str
    module: nn.Module
    groups: list[list[nn.Module]]
    """Modules with parameters that share a unit, two or more in each."""


class PossibleBlock(NamedTuple):
    """A module that would be a block, if it is small enough."""

    name: str
    nbytes: int
    """Of all its parameters, as they compute."""
    groups: list[list[nn.Module]]

    @property
    def saved_uses(self) -> int:
        """Uses of units that are not, each time that it is used as a block."""
        return sum(map(len, self.groups)) - len(self.groups)


Chooses = Callable[[PossibleBlock], bool]
"""Says which modules are blocks."""


def chooses(engine: Engine, named: Iterable[tuple[str, nn.Module]]) -> Chooses:
    """Return what chooses the blocks of an engine's models, whose modules are `named`: the run's commit, if
    it goes on with one, else its settings.
    """
    limit = block_limit(engine.budget.total_nbytes, engine.config.device_nbytes)
    most_nbytes = engine.ranks.least(limit, "size blocks")
    if engine.durable is not None and engine.durable.found:
        return by_commit(engine.durable.found[0], named)
    return by_settings(engine.config.units, most_nbytes, nvme=engine.nvme_store is not None)


def by_settings(units: str, most_nbytes: int, *, nvme: bool) -> Chooses:
    """Return what chooses blocks where units are to be `units`: see Config. most_nbytes: of a block. nvme:
    whether there is an NVMe tier.
    """
    if units == "auto":
        return lambda one: one.nbytes <= most_nbytes and worth_sharing(one.nbytes, one.saved_uses, nvme=nvme)
    return lambda one: units == "block" and one.nbytes <= most_nbytes


def by_commit(commit: Commit, named: Iterable[tuple[str, nn.Module]]) -> Chooses:
    """Return what chooses the blocks of a durable run: those whose parameters share records of their name in
    its commit; a module around such a block, too large to be one, may have the same groups. named: modules
    with their names.
    """
    records = {(one.name, frozenset(name for name, _ in one.segments)) for one in commit.records}
    names: dict[int, str] = {}
    for name, module in named:
        names.setdefault(id(module), f"{name}." if name else "")

    def are_records(block: PossibleBlock) -> bool:
        return all(
            (unit, frozenset(names[id(part)] + name for part in group for name in _names(part))) in records
            for unit, group in zip(_unit_names(block.name), block.groups, strict=False)
        )

    return are_records


def own(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's own parameters."""
    return [one for one in module._parameters.values() if one is not None]


def blocks_of(
    named: Sequence[tuple[str, nn.Module]],
    kind_of: Callable[[nn.Parameter], UnitKind | None],
    chosen: Chooses,
) -> list[Block]:
    """Return the blocks of models. named: their modules, with their names, parents first. kind_of: says what
    a parameter has in common with those that it may share a unit with; None where it may share none.
    """
    users = Counter(id(one) for _, module in named for one in own(module))
    within: set[int] = set()
    found = []
    for prefix, parent in named:
        for name, child in parent.named_children() if isinstance(parent, (*_LISTS, nn.Sequential)) else ():
            parts = list(child.modules())
            owners = {id(one) for one in parts if own(one)}  # a part without any may be in several blocks
            if not within.isdisjoint(owners) or not _is_block(parts):
                continue
            kinds = {one: kind_of(one) for one in child.parameters()}
            groups = _groups(parts, kinds, users)
            full, nbytes = f"{prefix}.{name}" if prefix else name, sum(_nbytes(*one) for one in kinds.items())
            if groups and chosen(PossibleBlock(full, nbytes, groups)):
                within.update(owners)
                found.append(Block(full, child, groups))
    return found


def _unit_names(block: str) -> Iterator[str]:
    """Yield the names of a block's units, one for each of its groups."""
    yield block
    yield from (f"{block} no. {number}" for number in itertools.count(2))


def _names(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters."""
    return [name for name, one in module._parameters.items() if one is not None]


def _nbytes(parameter: nn.Parameter, kind: UnitKind | None) -> int:
    width = parameter.element_size() if kind is None else kind.schema.width
    return int(width * local(parameter).numel())


def _is_block(parts: Sequence[nn.Module]) -> bool:
    """Whether the forward of a module with these parts decides nothing about what it uses."""
    if isinstance(parts[0], _LISTS):
        return False  # it has none
    return not any(isinstance(part, Tiled) or _chooses(part) for part in parts)


def _chooses(module: nn.Module) -> bool:
    """Whether a module is a list of several others with parameters, of which its owner may choose some."""
    members = [one for one in module.children() if next(one.parameters(), None) is not None]
    return isinstance(module, _LISTS) and len(members) > 1


def _groups(
    parts: Sequence[nn.Module], kinds: Mapping[nn.Parameter, UnitKind | None], users: Counter[int]
) -> list[list[nn.Module]]:
    """Return the modules that share a unit with others, by the units."""
    groups: dict[UnitKind, list[nn.Module]] = {}
    for part in parts:
        found = {kinds[one] for one in own(part)}
        if len(found) > 1:  # a module's record lies in files only if all of it does, evicted by now or not
            found = {None if kind is None else kind._replace(in_files=False) for kind in found}
        kind = found.pop() if len(found) == 1 else None
        alone = isinstance(part, Piece) or any(users[id(one)] > 1 for one in own(part))
        if kind is not None and not alone:
            groups.setdefault(kind, []).append(part)
    return [group for group in groups.values() if len(group) > 1]


def name_blocks(
    blocks: Sequence[Block], records_of: Mapping[int, Sequence[Record]]
) -> dict[int, list[nn.Module]]:
    """Name the records of blocks; return, by the id() of each block, its modules that share units.
    records_of: the records that each module uses, by its id().
    """
    for block in blocks:
        for unit, group in zip(_unit_names(block.name), block.groups, strict=False):
            (record,) = dict.fromkeys(records_of[id(group[0])])
            record.name_unit(unit)
    return {id(block.module): [one for group in block.groups for one in group] for block in blocks}


def covered(
    module: nn.Module, used_of: Mapping[int, tuple[Sequence[Unit], Sequence[Unit]]]
) -> frozenset[int]:
    """Return the id() of each module in a block that uses no other units than the block. used_of: the units
    that a module uses itself, and those of all modules in it, by its id().
    """
    held = set(used_of[id(module)][0])
    parts = [one for one in module.modules() if one is not module and id(one) in used_of]
    return frozenset(id(one) for one in parts if held.issuperset(used_of[id(one)][0]))
