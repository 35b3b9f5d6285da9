"""Whether ranks use the same modules in the same order: where they do not, an error names the first use that
differs, and each rank's by its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from infinity.planning.trace import Use
from infinity.ranks.group import Ranks


def agree_on_uses(ranks: Ranks, uses: Sequence[Use], name: Callable[[int], str]) -> None:
    """See that ranks have the same uses in a step. Every rank calls it. name: of a unit, by its index.

    Raises: RanksError naming the first use that differs.
    """
    longest = max(-ranks.least(-len(uses), "compare plans"), 1)
    for place in range(longest):
        use = f"{uses[place].phase.name.lower()} {name(uses[place].unit)}" if place < len(uses) else None
        ranks.agree(f"use {place + 1} of a step, {use or 'nothing more'}")


def compare_uses(ranks: Ranks, uses: Sequence[Use], name: Callable[[int], str]) -> None:
    """As agree_on_uses, by one small exchange where they are the same."""
    mine = xxhash.xxh3_64_intdigest(" ".join(map(str, uses)).encode()) >> 1
    if not ranks.same(mine, "compare what a step has used"):
        agree_on_uses(ranks, uses, name)
