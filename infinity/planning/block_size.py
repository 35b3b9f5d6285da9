"""How large a block may be whose modules share one unit: from the budgets, and from what moving it takes.
Pure.

[Note: the size of a block]
A use of a unit takes the computing thread about as long whatever its size, so modules that are small cost
more to follow than to move. Those of one block are used one right after the other, and may share a unit:
one fetch, one record, one sum over ranks. That saves the less the larger they are, and takes memory: all of
the block is resident while any of it computes, and its gradients wait until the last of them has come. So a
block has at most LEAST_NBYTES of tile_size, the size from which on a weight is worth cutting, and at most a
sixteenth of each budget: half of what gradients on their way have at least (see budget), so that those of
one block leave while the next block's come.

With units="auto" a block is one only if, besides, its fetch takes no longer than the uses that it saves. One
use takes about 100 µs of the computing thread (infinity.bench.engine.overhead), in which a drive of 2.6 GB/s
reads 256 KiB; where there is no NVMe tier weights come from host memory, at 20 GB/s or more. These are
constants and no drive's own speed: ranks, and a run that goes on on another machine, are to have the same
units.
"""

from __future__ import annotations

from infinity.planning.tile_size import LEAST_NBYTES

_READ_NBYTES, _UPLOADED_NBYTES = 256 << 10, 2 << 20
"""That are read from NVMe, and that come from host memory, while one use of a unit keeps the computing thread
busy.
"""
_SHARE = 16
"""One part in so many of each budget."""


def block_limit(host_nbytes: int, device_nbytes: int | None = None) -> int:
    """Return the most bytes, as they compute, of a block whose modules share a unit."""
    budgets = [host_nbytes] if device_nbytes is None else [host_nbytes, device_nbytes]
    return min(LEAST_NBYTES, *(nbytes // _SHARE for nbytes in budgets))


def worth_sharing(nbytes: int, saved_uses: int, *, nvme: bool) -> bool:
    """Whether a block of `nbytes`, as it computes, is fetched in no more time than its modules' uses, of
    which one unit for several saves `saved_uses` each time, take. nvme: whether there is an NVMe tier.
    """
    return nbytes <= saved_uses * (_READ_NBYTES if nvme else _UPLOADED_NBYTES)
