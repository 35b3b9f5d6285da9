"""What of a test runs by default: combinations in which each pair of values meets, fewer drawn examples."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Values = Sequence[Any] | Mapping[str, Any]
"""An axis: its values, or its values by the names that they have in a test's name."""


def matrix(
    *,
    together: int = 2,
    in_all: int | None = None,
    possible: Callable[..., bool] = lambda **_: True,
    **axes: Values,
) -> tuple[str, list[Any]]:
    """Return parametrize's arguments for combinations of the axes' values.

    A combination that adds no new pair of values is marked slow: most faults that combinations show, two
    values show (D. R. Kuhn et al., Software fault interactions, IEEE TSE 30(6), 2004). `together`: how many
    values have to meet by default, where not two; with 1, each value runs once. `in_all`: how many have to
    meet with --all, where not all: other combinations are left out, of tests so long that these prove too
    little for their time. `possible` tells, of one value per axis by the axis's name, whether that
    combination exists.
    """
    named = [_named(values) for values in axes.values()]
    combinations = [
        tuple(names)
        for names in itertools.product(*named)
        if possible(**{axis: of[name] for axis, of, name in zip(axes, named, names, strict=True)})
    ]
    first = _cover(combinations, together)
    if in_all is not None:
        kept = first | _cover(combinations, in_all)
        combinations = [names for names in combinations if names in kept]
    return ",".join(axes), [
        pytest.param(
            *(of[name] for of, name in zip(named, names, strict=True)),
            id="-".join(names),
            marks=[] if names in first else [pytest.mark.slow],
        )
        for names in combinations
    ]


def examples(by_default: int, with_all: int) -> int:
    """Return how many examples hypothesis draws, or how many there are of something else: so many by default,
    and so many with --all.
    """
    return with_all if os.environ.get("INFINITY_TEST_ALL") else by_default


def _named(values: Values) -> dict[str, Any]:
    if isinstance(values, Mapping):
        return dict(values)
    named = {str(getattr(value, "__name__", value)): value for value in values}
    if len(named) != len(values):
        raise ValueError(f"{len(values)} values have {len(named)} names: {list(named)}; give a dict of them")
    return named


def _met(names: tuple[str, ...], together: int) -> set[Any]:
    """Return the pairs of values in a combination, or so many values together; never more than it has."""
    return set(itertools.combinations(enumerate(names), min(together, len(names))))


def _cover(combinations: list[tuple[str, ...]], together: int) -> set[tuple[str, ...]]:
    """Choose combinations that have every pair that any has: the one with most new pairs, again and again.
    Where values do not have to meet, those of a short axis come by turns.
    """
    missing = set().union(*(_met(names, together) for names in combinations))
    chosen: set[tuple[str, ...]] = set()
    had: Counter[tuple[int, str]] = Counter()

    def worth(names: tuple[str, ...]) -> tuple[int, int]:
        seldom = -sum(had[value] for value in enumerate(names)) if together == 1 else 0
        return len(_met(names, together) & missing), seldom

    while missing:
        best = max(combinations, key=worth)
        chosen.add(best)
        had.update(enumerate(best))
        missing -= _met(best, together)
    return chosen
