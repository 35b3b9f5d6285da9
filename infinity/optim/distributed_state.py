"""State of a DTensor, as an optimizer shows it. Imported when there is a DTensor."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from infinity.optim.state_copy import Copied


class DistributedStateCopy(Copied, DTensor):
    """A copy of a DTensor's state in records, placed as the parameter is."""
