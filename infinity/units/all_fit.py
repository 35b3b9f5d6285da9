"""Whether host memory holds all fields of all records, as is known before any use was counted.

Placed before the first step, fields stay in host memory from their first fetch on: no update is written to
NVMe, to be read from there in the steps that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.planning.placement import Move, Revision
from infinity.units.all_fields import AllFields
from infinity.units.unit import Unit

_GRADIENTS = 2
"""Times the bytes of weights that gradients may take: of two steps, or in fp32."""


def place_all(units: Sequence[Unit], fields: AllFields, free_nbytes: int) -> Revision | None:
    """Return how all fields come to host memory, if they fit there beside all gradients, and the next fetches
    and updates leave them there; else None. Where they do not fit, it depends on what is used how often.

    fields: of these units. free_nbytes: of host memory, for fields and gradients.
    """
    if not all(one.trainable and one.record.in_files is None for one in units):
        return None
    if any(one.residence.fetch is not None for one in units):
        return None  # a pass that is under way would not leave it there
    fields.look()
    gradients_nbytes = _GRADIENTS * sum(one.record.field_nbytes("hi") for one in units)
    if int(fields.nbytes.sum()) + gradients_nbytes > free_nbytes:
        return None
    rows = zip(fields.keys, fields.nbytes.tolist(), strict=True)
    moves = tuple(Move(*key, nbytes, "nvme", "host") for key, nbytes in rows)
    return Revision(dict.fromkeys(fields.keys, "host"), moves, f"{len(moves)} fields placed: all fit")
