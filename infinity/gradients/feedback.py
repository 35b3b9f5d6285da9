"""What coding leaves out of a rank's gradients, and of a machine's sums, added to those that are sent next.

[Note: errors of codes]
With Config(error_feedback=True) a rank's record of a unit has, beside its fields of a share, the errors of
what this rank has sent of the unit's gradients: a field `rJ` for the part that goes to the J-th of the ranks
that share it, as long as a share; and, of several machines, a field `sM` of what it has sent of its machine's
sums to the rank of its number on the M-th. What is coded is the gradient, or the sum, and that error, in
fp32, and what the codes leave out is the error from then on. It is known before anything is sent: codes
depend on the values alone. The thread that computes waits for the passes over these fields before the
exchange is queued, as for momenta: see [Note: workers] in one_bit.py, and for sums [Note: errors of sums] in
coded_hops.py. They lie where the record lies, are committed with it, and hashed. A checkpoint that is loaded
has none: they begin with zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from infinity.gradients.coding import Coding
from infinity.lane.feedback import FeedbackPass
from infinity.lane.lane import StreamLane
from infinity.lane.passes import CopyInPass
from infinity.planning.layout import tiles
from infinity.ranks.machines import RankGrid
from infinity.records.record import Record
from infinity.units.unit import Unit

_FORGOTTEN = 1 << 18
"""Elements that are set to zero at once, about."""


def error_fields(record: Record, grid: RankGrid | None) -> tuple[str, ...]:
    """Return the names of the fields of a record's errors; none where no other rank has a share of it. grid:
    how its ranks lie on several machines.
    """
    size = len(record.holders.members)
    own = tuple(f"r{place}" for place in range(size)) if size > 1 else ()
    return own + (tuple(f"s{machine}" for machine in range(grid.machines)) if own and grid else ())


def feed_back(
    unit: Unit,
    indices: Collection[int],
    rows: torch.Tensor,
    coding: Coding,
    lane: StreamLane,
) -> None:
    """Add a unit's errors to its gradients, of the parameters with these indices, and note the new ones.
    Where no optimizer has its parameters yet, there are none. rows: the gradients in fp32, of each part
    that goes to a rank; changed in place.
    """
    members = unit.record.holders.members
    names = [f"r{place}" for place in range(len(members))]
    _feed(unit, indices, names, members, rows, coding, lane)


def feed_back_sums(
    unit: Unit,
    indices: Collection[int],
    rows: torch.Tensor,
    coding: Coding,
    lane: StreamLane,
    grid: RankGrid,
    rank: int,
) -> None:
    """Likewise, the errors of its machine's sums. rows: of each machine, of the share of its rank that has
    the number of this one, `rank`.
    """
    members = range(rank % grid.ranks, grid.size, grid.ranks)
    names = [f"s{machine}" for machine in range(grid.machines)]
    _feed(unit, indices, names, members, rows, coding, lane)


def _feed(
    unit: Unit,
    indices: Collection[int],
    names: Sequence[str],
    members: Sequence[int],
    rows: torch.Tensor,
    coding: Coding,
    lane: StreamLane,
) -> None:
    holders = unit.record.holders
    if any(name not in unit.record for name in names):
        return
    for name, member, row in zip(names, members, rows, strict=True):
        share = holders.shard_of(unit.layout, member)
        job = FeedbackPass(unit.record, name, share, row, indices, coding.as_sent)
        lane.submit(job, urgent=True)
        lane.wait(job)


def forget_errors(record: Record, names: Sequence[str], lane: StreamLane) -> None:
    """Let the errors of a record be zeros, of the fields `names` that it has."""
    tile = record.tile_numel
    for start, stop in tiles(record.shard.numel, max(tile, _FORGOTTEN // tile * tile)):
        written = [
            name
            for name in names
            if name in record and any(record.written(name, one) for one in range(start, stop, tile))
        ]
        if written:
            zeros = {name: torch.zeros(stop - start, dtype=torch.float32, device="cpu") for name in written}
            job = CopyInPass(record, tile, start, stop, zeros)
            lane.submit(job, urgent=True)
            lane.wait(job)
