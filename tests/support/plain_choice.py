"""What is kept in host memory, one field after the other: what `planning/densest.py` does by arrays."""

from collections import defaultdict

from infinity.planning.placement import GRADIENT_DENSITY, HORIZON_STEPS, spread


def choose(candidates, room_nbytes, gradient_nbytes, placed=(), horizon_steps=HORIZON_STEPS):
    """Do what `placement.choose` does."""
    chosen, left = [], room_nbytes
    for candidate in _ranked(candidates, placed, horizon_steps):
        useful = candidate.density > 0 or candidate.key in placed
        available = left if candidate.density > GRADIENT_DENSITY else left - gradient_nbytes
        if useful and candidate.nbytes <= available:
            chosen.append(candidate.key)
            left -= candidate.nbytes
    return chosen


def _ranked(candidates, placed, horizon_steps):
    equals = defaultdict(list)
    for candidate in candidates:
        bonus = 2 / horizon_steps if candidate.key in placed else 0.0
        equals[round(candidate.density + bonus, 2), candidate.field].append(candidate)
    for density_field in sorted(equals, key=lambda density_field: -density_field[0]):
        group = sorted(equals[density_field], key=lambda candidate: candidate.unit)
        for index in spread(len(group)):
            yield group[index]
