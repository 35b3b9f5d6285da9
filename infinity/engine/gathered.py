"""Full, ordinary access to parameters for the length of a `with`."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from infinity.engine.engine import Engine, engine_of
from infinity.errors import DeviceMemoryError, NotResidentError, UnsupportedError
from infinity.ranks.machine_memory import check_available
from infinity.sizes import format_size
from infinity.tensors import digest, local
from infinity.tiling import Whole
from infinity.tiling.in_one import Opening, in_one_piece
from infinity.tiling.whole import all_joining
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")

_warned: weakref.WeakSet[Engine] = weakref.WeakSet()

_OUTLIVES = (
    "{}: a tensor that shares memory with its {} outlives `with infinity.gathered(...)`, where "
    "that memory is given back. Keep a copy instead, p.detach().clone(); where a graph holds "
    "it, run its backward inside, too, or make none: torch.no_grad()."
)


@contextlib.contextmanager
def gathered(
    what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False
) -> Iterator[None]:
    """Give full, ordinary access to parameters inside the `with`; with `write`, changes are kept, masters
    included.

    what: a module, whose ordinary parameters stay as they are, a parameter, or several. Elements that are
    changed get masters equal to their new 16-bit values; the others keep theirs. Keep no views of the values
    beyond the `with`: clone what you need. A forked child does not inherit the values.

    Inside a `with` without `write`, and in a forward or backward, any change is an error: in place, through
    `.data`, or of a NumPy array that shares the memory.

    Raises: HostMemoryError, with the numbers, where the values do not fit memory; ValueError for parameters
    that were not built in Init; UnsupportedError, and nothing is written, where parameters were changed
    without `write`, or have other shapes or types than before; RanksError where that is so on another rank.
    """
    units = _units_of(what)
    needed = sum(unit.resident_nbytes for unit, engine in units.items() if engine.device.is_host)
    check_available(needed, "gathered: the values", "Gather fewer parameters at a time.")
    for engine in dict.fromkeys(units.values()):
        _check_device(engine, [unit for unit, its in units.items() if its is engine])
    held: list[Unit] = []
    try:
        for unit, engine in units.items():
            _hold(engine, unit, write=write)
            held.append(unit)
        shares = {unit: unit.shares() for unit in units}
        with _in_one_piece(units) as opening:
            yield
        for engine in dict.fromkeys(units.values()):
            with engine.ranks.together("gathered"):
                engine.residency.refusals.check()
                (_check_forms if write else _refuse_changes)(units)
        if write:
            for unit, engine in units.items():
                _write_back(engine, unit)
                unit.changes.mark()
        _refuse_views(shares, opening)
        _warn_of_graphs(units)
    finally:
        for unit in held:
            if not write:
                unit.changes.begin_edit()  # a change in here has been reported by now
            units[unit].residency.drop(unit)
            unit.changes.end_edit()


def _in_one_piece(units: dict[Unit, Engine]) -> contextlib.AbstractContextManager[Opening]:
    """Let embeddings in blocks of rows, and stacks of experts, be used in one piece of memory if all their
    blocks are in `units`; it is allocated at the first such use.
    """
    wholes = all_joining([one for unit in units for one in unit.parameters])

    def make(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        engine, nbytes = next(iter(units.values())), shape.numel() * dtype.itemsize
        what = "gathered: a weight in blocks of rows (an embedding, a stack of experts) as a whole"
        if engine.device.is_host:
            check_available(nbytes, what, 'Keep it whole with infinity.Init(experts="whole").')
        room = engine.device.room
        if room is not None and room.nbytes(nbytes) > room.ledger.free_nbytes:
            raise DeviceMemoryError(
                f"{what} takes {format_size(nbytes)} on the device, and device_memory="
                f"{format_size(room.ledger.limit_nbytes)} has {format_size(room.ledger.free_nbytes)} beside "
                'what is in use. Keep it whole with infinity.Init(experts="whole").'
            )
        return torch.empty(shape, dtype=dtype, device=wholes[0].device)

    return in_one_piece([one.pieces() for one in wholes], make)


def _check_device(engine: Engine, units: Iterable[Unit]) -> None:
    """See that the values fit an accelerator's budget beside what is in use there.

    Raises: DeviceMemoryError with both numbers.
    """
    room = engine.device.room
    if room is None:
        return
    waiting = [one for one in engine.units if one.residence.waits and not one.on_device]
    gives_way = sum(room.nbytes(one.resident_nbytes) for one in waiting)
    left = room.ledger.free_nbytes + gives_way
    needed = sum(room.nbytes(one.resident_nbytes) for one in units if not one.residence.users)
    if needed > left and engine.pins is not None:
        left += engine.pins.records_leave(needed - left)
    if needed > left:
        raise DeviceMemoryError(
            f"gathered: the values take {format_size(needed)} on the device, and device_memory="
            f"{format_size(room.ledger.limit_nbytes)} has {format_size(left)} beside what is in use. Gather "
            "fewer parameters at a time."
        )


def _hold(engine: Engine, unit: Unit, *, write: bool) -> None:
    """Attach a unit to its values, and, without `write`, remember what they are.

    Raises: UnsupportedError, with `write`, where a forward or backward uses the unit.
    """
    if write and unit.attached and not unit.aside:
        raise UnsupportedError(
            f"{unit.name}: gathered(..., write=True) inside a forward that uses it, or its backward. "
            "Change parameters between steps, or open it around the call of the model."
        )
    engine.residency.hold_aside(unit)
    if write:
        unit.changes.begin_edit()
    if write and (engine.ranks.size == 1 or unit.distributed):  # several ranks raise together, at the end
        unit.guard()
    unit.changes.watch_all()


def _refuse_changes(units: Iterable[Unit]) -> None:
    changed = [name for unit in units if unit.residence.users == 1 and (name := unit.changes.found())]
    if changed:
        raise UnsupportedError(
            f"{changed[0]} was changed inside `with infinity.gathered(...)`, and the change is lost: "
            "use gathered(..., write=True)"
        )


def _refuse_views(shares: dict[Unit, int], opening: Opening) -> None:
    """See that no tensor shares memory with the parameters yet.

    shares: how many did for each unit when its values came. Raises: NotResidentError.
    """
    for unit, before in shares.items():
        if unit.shares() > before and unit.residence.users == 1:
            raise NotResidentError(_OUTLIVES.format(unit.name, "parameters"))
    if opening.outlived:
        raise NotResidentError(_OUTLIVES.format("an embedding, or a stack of experts", "weight"))


def _check_forms(units: Iterable[Unit]) -> None:
    """See that every parameter still has the shape and type of its record."""
    for unit in units:
        unit.changes.check_forms()


def _warn_of_graphs(units: dict[Unit, Engine]) -> None:
    """Warn, once, of graphs whose backward fails after the `with`."""
    for unit, engine in units.items():
        if unit.residence.users > 1 or engine in _warned:
            continue
        held = unit.saved()
        if held:
            _warned.add(engine)
            logger.warning(
                "%s: a graph made inside `with infinity.gathered(...)` outlives it. Its backward has to run "
                'inside, too; after it torch says that "one of the variables [...] has been modified". '
                "Where no backward follows, make no graph: torch.no_grad().",
                unit.layout.segments[held[0]].name,
            )


def _units_of(what: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> dict[Unit, Engine]:
    if isinstance(what, nn.Module):
        parameters = list(what.parameters())
        parameters = [one for one in parameters if engine_of(one) is not None] or parameters
    else:
        given = [what] if isinstance(what, nn.Parameter) else list(what)
        parameters = [one for each in given for one in (each.pieces() if isinstance(each, Whole) else [each])]
    units: dict[Unit, Engine] = {}
    for parameter in parameters:
        engine = engine_of(parameter)
        if engine is None:
            shape = tuple(parameter.shape)
            raise ValueError(
                f"gathered: a parameter of shape {shape} was not built inside `with infinity.Init(...)`"
            )
        units[engine.parameters.unit_of(parameter)[0]] = engine
    return units


def _check_same(engine: Engine, unit: Unit, whole: list[torch.Tensor]) -> None:
    """See that every rank writes the same.

    Raises: UnsupportedError, on every rank.
    """
    what, mesh = f"write {unit.name}", engine.stages.mesh
    same = engine.ranks.size == 1 or engine.ranks.same(digest(*whole), what)
    if not mesh.same_copies(whole, unit.parameters, f"{what} over the mesh") or not same:
        raise UnsupportedError(
            f"{unit.name}: inside `with infinity.gathered(..., write=True)` the ranks have made different "
            "values of it; nothing is written. Let every rank do the same (torch.distributed.broadcast what "
            "one of them draws)."
        )


def _write_back(engine: Engine, unit: Unit) -> None:
    whole = [local(parameter).detach().to("cpu").contiguous() for parameter in unit.parameters]
    _check_same(engine, unit, whole)
    values = {index: {"master": unit.record.rank_part(index, one)} for index, one in enumerate(whole)}
    engine.parameters.before_change()
    engine.residency.flush(unit)
    unit.values_changed()
    engine.parameters.write_record(unit.record, values, rewrite=True)
