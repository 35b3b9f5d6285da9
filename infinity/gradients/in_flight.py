"""How many gradients, and values that updates start from, are on their way from an accelerator at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from infinity.units.unit import Unit


def at_once(units: Sequence[Unit], outgoing_nbytes: int) -> dict[int, int]:
    """Return, by their bytes, how many gradients may be on their way at once, each unit's with its values:
    those of one unit, and of as many more as the outgoing share holds.
    """
    sizes = []
    for unit in units:
        width = unit.flat.dtype.itemsize
        whole = width * unit.record.shard.numel  # the values that an update in the backward starts from
        sizes.append(Counter([whole, *(segment.numel * width for segment in unit.layout.segments)]))
    largest = max((sum(size * count for size, count in one.items()) for one in sizes), default=0)
    rounds = 1 + outgoing_nbytes // max(largest, 1)
    total = sum(sizes, Counter[int]())
    return {size: min(total[size], rounds * max(one[size] for one in sizes)) for size in total}
