"""Which gradients are not kept, since moments tell them, and when these have to be written after all: see
[Note: told gradients] in lane/told.py.

A gradient of which that is so has the form "in its unit's record", and is not there yet. It is put there
before anybody reads it there, before anything else of the record changes, and before the place of either
generation is used for something else: `write`. Where `step()` decides the update that was made, nobody needs
it, and nothing of it is ever moved.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from infinity import kernels
from infinity.device.device import Device
from infinity.gradients.gradient import Form, Gradient
from infinity.lane.lane import StreamLane
from infinity.lane.told import MomentHome, RecoverPass, ToldGradients, most_exceptions
from infinity.planning.speculation import SpeculationHistory
from infinity.records.next_fields import NextFields
from infinity.records.update_rules import tells
from infinity.records.updates import Update
from infinity.storage.memory import Ledger
from infinity.units.unit import Unit


class UnkeptGradients:
    """Those of one engine's units. Called from the thread that computes."""

    def __init__(self, lane: StreamLane, device: Device, kept: Ledger) -> None:
        """There are none. kept: pays for exceptions."""
        self.refused: Counter[str] = Counter()
        """How often a unit's gradients were kept although its update was made ahead, by the reason."""
        self._lane, self._device, self._kept = lane, device, kept
        self._prepared: dict[Unit, ToldGradients] = {}
        """Of units whose update was just begun."""
        self._of: WeakValueDictionary[Unit, ToldGradients] = WeakValueDictionary()
        """Not written yet."""
        self._tellers: WeakKeyDictionary[Gradient, ToldGradients] = WeakKeyDictionary()
        """What tells a gradient goes with the last one that it tells."""
        self._read: set[Unit] = set()
        """Units whose gradients the program has read: theirs are kept."""
        self._expected: set[Unit] = set()
        """Units whose gradients were told last."""

    def prepare(
        self,
        unit: Unit,
        fields: NextFields,
        gradients: Sequence[Gradient],
        updates: Mapping[int, Update],
        history: SpeculationHistory,
    ) -> ToldGradients | None:
        """Return what is to tell those of a unit's gradients that find no room in host memory, when the
        update that is written to `fields` is made; None where they are kept.
        """
        outgoing = [one for one in gradients if one.form is Form.OUTGOING]
        self.forget(unit)
        self._expected.discard(unit)
        if not outgoing or not history.is_likely:
            return None
        if why := self._why_not(unit, outgoing, updates):
            self.refused[f"its gradients were kept: {why}"] += 1
            return None
        segments = unit.record.shard.segments
        of = {
            one.index: kernels.ToldGradient(
                updates[one.index].scalars, most_exceptions(segments[one.index].numel)
            )
            for one in outgoing
        }
        moments = MomentHome(*unit.record.home("m")), MomentHome(*fields.home("m"))
        self._prepared[unit] = told = ToldGradients(*moments, of, self._kept, self.refused)
        return told

    def _why_not(self, unit: Unit, gradients: Sequence[Gradient], updates: Mapping[int, Update]) -> str:
        record = unit.record
        if not self._device.is_host:
            return "an accelerator computes"
        if not all(tells(one.recipe, record.schema) for one in updates.values()):
            return "moments of this optimizer, or of this type, do not tell them"
        if any(one.in_memory.dtype != torch.bfloat16 for one in gradients):
            return "they are not of one backward"
        if record.packed or any(one.numel > kernels.MOST_TOLD for one in record.shard.segments):
            return "its record is too small, or too large"
        if unit in self._read:
            return "the program reads them"
        return ""

    def teller(self, gradient: Gradient) -> ToldGradients | None:
        """Return what tells a gradient, which an update has to keep; None where it is kept itself."""
        return self._tellers.get(gradient)

    def expects(self, unit: Unit) -> bool:
        """Whether a unit's gradients will probably not be kept, so that none is to take host memory."""
        return unit in self._expected

    def forget(self, unit: Unit) -> None:
        """Keep a unit's gradients: its update is not made."""
        self._prepared.pop(unit, None)

    def prepared(self, unit: Unit) -> ToldGradients | None:
        """Return, once, what is to tell a unit's gradients, whose update has been begun."""
        return self._prepared.pop(unit, None)

    def leave(self, unit: Unit, told: ToldGradients, gradients: Mapping[int, Gradient]) -> None:
        """Do not keep these gradients, by parameter, of which `told` tells each."""
        for one in gradients.values():
            self._tellers[one] = told
        self._of[unit] = told
        self._expected.add(unit)
        told.watch(unit.record.watchers, partial(_changes, weakref.ref(self), weakref.ref(unit)))

    def write(self, unit: Unit, *, read: bool = False) -> None:
        """Have a unit's gradients written that are not kept, if anybody refers to them, by a pass that is
        queued now. read: since the program wants to read them.
        """
        told = self._of.get(unit)
        if told is None:
            return
        if read:
            self._read.add(unit)
        record = unit.record
        self._lane.submit(RecoverPass(record, record.tile_numel, told))
        del self._of[unit]  # last: after a Ctrl-C they are written again
        told.stop_watching()

    def write_all(self) -> None:
        """Have all of them written."""
        for unit in list(self._of):
            self.write(unit)

    def change(self, unit: Unit) -> None:
        """Have a unit's gradients written before its record changes."""
        self.write(unit)
        self.settle(unit)

    def settle(self, unit: Unit) -> None:
        """Return when the moments of a unit may lie elsewhere: no pass recovers gradients from them."""
        with self._lane.lock:
            jobs = [one for one in self._lane.unfinished(unit.record) if isinstance(one, RecoverPass)]
        for job in jobs:
            self._lane.wait(job, finished=True)


def _changes(unkept: weakref.ref[UnkeptGradients], unit: weakref.ref[Unit]) -> None:
    """Write the gradients of a unit whose record is about to change."""
    found, of = unkept(), unit()
    if found is not None and of is not None:
        found.change(of)
