"""How to change what host memory keeps of many slices, by arrays: what `placement.revise` decides where there
is no device, to the bit. Pure: no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from infinity.planning.densest import (
    GRADIENT_DENSITY,
    FieldColumns,
    Integers,
    Rest,
    densest,
    leave_none_out,
)
from infinity.planning.placement import (
    HORIZON_STEPS,
    Key,
    Move,
    Placement,
    PlacementBudget,
    Revision,
    decided,
)


def revise_in_host(
    old: Placement,
    keys: Sequence[Key],
    columns: FieldColumns,
    budget: PlacementBudget,
    horizon_steps: int = HORIZON_STEPS,
) -> Revision:
    """Return how to change a placement. keys: of each row of `columns`, of which those that are placed are in
    host memory.
    """
    rows = densest(columns, budget.host_nbytes, budget.gradient_nbytes, horizon_steps)
    return _revised(old, keys, columns, rows, budget, horizon_steps)


def revise_by_likely(
    old: Placement,
    keys: Sequence[Key],
    columns: FieldColumns,
    rest: Rest,
    budget: PlacementBudget,
    horizon_steps: int = HORIZON_STEPS,
) -> Revision | None:
    """Return the same from `columns` of some fields alone: of all that are placed, and those that are denser
    than the `rest`. None where the rest may matter.
    """
    room = budget.host_nbytes, budget.gradient_nbytes, horizon_steps
    rows = densest(columns, *room)
    if not leave_none_out(columns, rows, rest, *room):
        return None
    return _revised(old, keys, columns, rows, budget, horizon_steps)


def _revised(
    old: Placement,
    keys: Sequence[Key],
    columns: FieldColumns,
    rows: Integers,
    budget: PlacementBudget,
    horizon_steps: int,
) -> Revision:
    """Return how a placement becomes that of these rows, if that pays."""
    of_row = {keys[row]: row for row in rows.tolist()}
    new: Placement = MappingProxyType(dict.fromkeys(of_row, "host"))
    before = np.flatnonzero(columns.placed)
    gone = {keys[row]: row for row in np.setdiff1d(before, rows).tolist()}
    sizes = columns.nbytes
    moves = [Move(key[0], key[1], int(sizes[gone[key]]), "host", "nvme") for key in old if key in gone]
    coming = ((*key, int(sizes[row])) for key, row in of_row.items() if key not in old)
    moves += [Move(unit, field, nbytes, "nvme", "host") for unit, field, nbytes in coming]
    gain = _saved(columns, np.sort(rows), budget) - _saved(columns, before, budget)
    fits = int(sizes[before].sum()) <= budget.host_nbytes
    return decided(old, new, tuple(moves), gain, horizon_steps, fits=fits)


def _saved(columns: FieldColumns, rows: Integers, budget: PlacementBudget) -> float:
    """NVMe bytes that rows save in a step, in host memory; gradients without room cost theirs. Added up one
    after the other, as Python adds.
    """
    saved = np.cumsum(columns.nbytes[rows] * columns.density[rows])
    free = max(0, budget.host_nbytes - int(columns.nbytes[rows].sum()))
    total = float(saved[-1]) if len(saved) else 0.0
    return total - GRADIENT_DENSITY * max(0, budget.gradient_nbytes - free)
