"""What a spill does with each gradient of a unit: decided here, carried out by `GradientStore.spill`.

A record has one field of spilled gradients at a time, grad16 or grad32. The pass that writes the outgoing
ones of a unit reads what it needs of the present field, and writes the field that replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Field = Literal["grad16", "grad32"]


@dataclass(frozen=True, slots=True)
class Outbound:
    """A gradient in host memory that is to be written."""

    fp32: bool
    adds: bool
    """Whether the same gradient has a part in the record already, to which this one is added."""


@dataclass(frozen=True, slots=True)
class Spill:
    """What the pass reads and writes. Sets are of the parameters' indices in the unit."""

    source: str | None
    """The field that gradients are read from; None if nothing in the record is needed."""
    target: Field
    adds: frozenset[int]
    """Outgoing gradients that are added to what the source has of them."""
    carried: frozenset[int]
    """Gradients that go from the source to the target as they are."""
    superseded: frozenset[int]
    """Gradients in the record that an outgoing one of the same parameter takes the place of."""


def plan_spill(outgoing: Mapping[int, Outbound], stored: Mapping[int, str]) -> Spill:
    """Decide a spill. stored: the field of each gradient in the record that somebody refers to.

    The target is grad32 if any value needs it: an outgoing gradient in fp32, a sum, or a field that is fp32
    already. Else it is grad16.
    """
    adds = frozenset(index for index, one in outgoing.items() if one.adds)
    carried = frozenset(stored.keys() - outgoing.keys())
    source = next((stored[index] for index in (*carried, *adds)), None)
    wide = bool(adds) or source == "grad32" or any(one.fp32 for one in outgoing.values())
    superseded = frozenset(stored.keys() & outgoing.keys()) - adds
    return Spill(source, "grad32" if wide else "grad16", adds, carried, superseded)
