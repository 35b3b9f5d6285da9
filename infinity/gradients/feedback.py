"""What coding leaves out of a rank's gradients, added to those that it sends next.

[Note: errors of codes]
With Config(error_feedback=True) a rank's record of a unit has, beside its fields of a share, the errors of
what this rank has sent of the unit's gradients: a field `rJ` for the part that goes to the J-th of the ranks
that share it, as long as a share. What is coded is the gradient and that error, in fp32, and what the codes
leave out is the error from then on. It is known before anything is sent: codes depend on the values alone.
The thread that computes waits for the passes over these fields before the exchange is queued, as for
momenta: see [Note: workers] in one_bit.py. They lie where the record lies, are committed with it, and hashed.

Of several machines, what the second hop leaves out of the sums of a machine is not fed back: the sums are
made on the lane's thread, where nothing waits for a pass.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from infinity.gradients.coding import Coding
from infinity.lane.feedback import FeedbackPass
from infinity.lane.lane import StreamLane
from infinity.records.record import Record
from infinity.units.unit import Unit


def error_fields(record: Record) -> tuple[str, ...]:
    """Return the names of the fields of a record's errors; none where no other rank has a share of it."""
    size = len(record.holders.members)
    return tuple(f"r{place}" for place in range(size)) if size > 1 else ()


def feed_back(
    unit: Unit, indices: Collection[int], rows: torch.Tensor, coding: Coding, lane: StreamLane
) -> None:
    """Add a unit's errors to its gradients, of the parameters with these indices, and note the new ones.
    Where no optimizer has its parameters yet, there are none. rows: the gradients in fp32, of each part
    that goes to a rank; changed in place.
    """
    holders = unit.record.holders
    if any(name not in unit.record for name in error_fields(unit.record)):
        return
    for name, member, row in zip(error_fields(unit.record), holders.members, rows, strict=True):
        share = holders.shard_of(unit.layout, member)
        job = FeedbackPass(unit.record, name, share, row, indices, coding.as_sent)
        lane.submit(job, urgent=True)
        lane.wait(job)
