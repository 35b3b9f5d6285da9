"""Which records the modules of finished models use, and which of them are routed or chosen by the data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from infinity.engine.built_parameter import BuiltParameter
from infinity.errors import ConfigError, UnsupportedError
from infinity.records.record import Record
from infinity.records.weights import compute_dtype
from infinity.tiling import Routed
from infinity.units.released import placeholder
from infinity.units.unit import Unit


def alive_and_roots(
    references: Iterable[weakref.ref[nn.Module]],
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that are still there, and those of them that are in no other."""
    modules = [module for reference in references if (module := reference()) is not None]
    within = {id(child) for module in modules for child in module.children()}
    return modules, [module for module in modules if id(module) not in within]


def name_records(
    named: list[tuple[str, nn.Module]],
    entry_of: Callable[[nn.Parameter | None], BuiltParameter | None],
    dtype: str,
) -> tuple[dict[Record, list[nn.Parameter]], dict[int, list[Record]]]:
    """Name the records of the models; return the parameters in each, in the order of its segments, and the
    records that each module uses, by the module's id().

    entry_of: returns what is known of a parameter. dtype: what records compute in, unless their names say
    otherwise.
    """
    names: dict[int, str] = {}
    units: dict[Record, list[nn.Parameter]] = {}
    units_of: dict[int, list[Record]] = {}
    for prefix, module in named:
        for name, parameter in module._parameters.items():
            names.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
            entry = entry_of(parameter)
            if parameter is None or entry is None or entry.record is None:
                continue
            record = entry.record
            if record not in units:
                other = "" if record.schema.dtype == dtype else f" ({record.schema.dtype})"
                record.name_unit(f"{prefix or type(module).__name__}{other}")
                units[record] = _holes(record)
            units[record][entry.index] = parameter
            units_of.setdefault(id(module), []).append(record)
    for record, parameters in units.items():
        record.rename([names.get(id(parameter), "(replaced)") for parameter in parameters])
    return units, units_of


def routed_records(
    named: list[tuple[str, nn.Module]], units_of: dict[int, list[Record]]
) -> dict[Record, bool]:
    """Return the records that tiles of `Routed` modules use, and no other module; and whether a backward uses
    them again.
    """
    tiles = {
        id(tile): bool(tile.is_used_again)
        for _, module in named
        if isinstance(module, Routed)
        for tile in module.tiles
    }
    others = {one for module, records in units_of.items() if module not in tiles for one in records}
    again: dict[Record, bool] = {}
    for tile, is_used_again in tiles.items():
        for one in units_of.get(tile, ()):
            if one not in others:
                again[one] = again.get(one, False) or is_used_again
    return again


def used_units(
    named: list[tuple[str, nn.Module]],
    records_of: Mapping[int, Sequence[Record]],
    unit_of: Mapping[Record, Unit],
    joined: Mapping[int, Sequence[nn.Module]],
) -> dict[int, tuple[list[Unit], list[Unit]]]:
    """Return the units that each module with parameters uses itself, and those of all modules in it, by its
    id(). records_of: the records of its own parameters, likewise. joined: modules in it that share units.
    """

    def units(parts: Iterable[nn.Module]) -> list[Unit]:
        return list(dict.fromkeys(unit_of[one] for part in parts for one in records_of.get(id(part), ())))

    used = {}
    for _, module in named:
        if next(module.parameters(), None) is not None:
            # MultiheadAttention uses its child's weight itself, and its fast path only if it is there.
            whole = isinstance(module, nn.MultiheadAttention)
            itself = module.modules() if whole else (module, *joined.get(id(module), ()))
            used[id(module)] = units(itself), units(module.modules())
    return used


def check_divided(records: Iterable[Record], routed: Collection[Record], size: int) -> None:
    """See that there are experts that `size` ranks divide among them, and that no other module uses these.

    Raises: ConfigError where there are none; UnsupportedError naming one that has other users.
    """
    divided = [one for one in records if not one.holders.are_all]
    if not divided:
        raise ConfigError(
            f"expert_parallel={size}: no model that was built inside this Init has experts in stacks that "
            "transformers dispatches (Mixtral, Qwen3-MoE, DeepSeek, gpt-oss and others have); leave it out"
        )
    known = set(routed)
    for record in divided:
        if record not in known:
            raise UnsupportedError(
                f"{record.name}: another module uses this expert's weights, too, and {size} ranks divide the "
                "experts (expert_parallel): not all of them have it. Leave expert_parallel out"
            )


def chosen_records(named: list[tuple[str, nn.Module]], units_of: dict[int, list[Record]]) -> list[Record]:
    """Return the records of experts that are modules of their own: those below a ModuleList or ModuleDict
    that is called after experts, and used by no module elsewhere.
    """
    lists = [
        module
        for name, module in named
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "expert" in name.rpartition(".")[2].lower()
    ]
    below = {id(part) for module in lists if len(module) > 1 for part in module.modules()}
    others = {one for module, records in units_of.items() if module not in below for one in records}
    found = dict.fromkeys(one for module in below for one in units_of.get(module, ()))
    return [one for one in found if one not in others]


def _holes(record: Record) -> list[nn.Parameter]:
    """Return parameters, never trained, for those of a record that were replaced since."""
    return [
        nn.Parameter(placeholder(segment.shape, compute_dtype(record.schema), "cpu"), requires_grad=False)
        for segment in record.shard.segments
    ]


def named_modules(roots: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Return all modules with their names; the names of several models begin with the model's class."""
    for number, root in enumerate(roots):
        prefix = f"{type(root).__name__}{number}" if len(roots) > 1 else ""
        yield from root.named_modules(prefix=prefix)
