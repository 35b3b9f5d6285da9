"""Updates that are made in the backward although step() has not decided them, since a norm may clip them.

[Note: speculative updates]
When all gradients of a unit have come, the optimizer says what its update will be if nothing unforeseen
happens (`Foreseer.foresee`), and a pass makes it: it reads the record, and writes beside it on NVMe, see
[Note: two generations of a record] in records/next_fields.py. The gradients stay as they are without it, and
parameters keep their values. step() decides as ever. Then each unit's updates are compared with those that
were made. Where they are the same, made from the same gradients, what was written takes the place of the
record's fields, and nothing is pending; else it is dropped, and the updates are pending as ever. So bits do
not depend on it, and nothing has to be known of norms, loss scaling or schedules.

Not every unit can have its updates made so: `refused` says how often which could not, and why.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from infinity.aio import StorageFullError
from infinity.device.device import Device
from infinity.errors import UnsupportedError
from infinity.gradients.grad_tensor import OffloadedGradient
from infinity.gradients.gradient import Form, Gradient
from infinity.gradients.unkept import UnkeptGradients
from infinity.lane.ahead import AheadPass
from infinity.lane.lane import StreamLane
from infinity.lane.moving import MoveHiPass
from infinity.lane.outgoing import Lease, OutgoingShare, end_all
from infinity.lane.told import ToldGradients
from infinity.planning.speculation import SpeculationHistory
from infinity.records.next_fields import NextFields
from infinity.records.record import Record
from infinity.records.update_rules import Recipe
from infinity.records.updates import Update
from infinity.sizes import BLOCK, format_size, round_up
from infinity.storage.full_disk import room_in
from infinity.storage.generations import TwinStore
from infinity.storage.nvme import NvmeStore
from infinity.storage.store import Extent, HostStore, Store
from infinity.storage.stripes import StripedStore
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")

_ROOMS = 2
"""How many times the bytes of the second generation have to be free, for speculate="auto"."""


def why_never(ranks: int, stage: int) -> str:
    """Return why an engine cannot make updates ahead, in words; empty where it may."""
    if ranks > 1:
        return "several ranks train"
    return "stages 1 and 2 keep parameters resident" if stage < 3 else ""


class Foreseer(Protocol):
    """An optimizer, which may say what it will probably decide."""

    speculation: SpeculationHistory

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is its own."""

    def foresee(self, gradient: Gradient) -> Update | None:
        """Return the update of a gradient's parameter that step() will probably decide; None where it cannot
        be told. Nothing is decided by that.
        """


class _Made(NamedTuple):
    """One parameter's update, as it was made, and what tells the gradient that it was made from."""

    scalars: Any
    key: int
    recipe: Recipe
    gradient: weakref.ref[Gradient]
    additions: int


class _Ahead:
    """One unit's updates that were made ahead. It leads to nothing but the record: a pass keeps it."""

    def __init__(
        self, fields: NextFields, spare: dict[str, Extent], lease: Lease | None, told: ToldGradients | None
    ) -> None:
        self._fields, self._spare, self._lease = fields, spare, lease
        self._told = None if told is None else weakref.ref(told)
        self._written = self._confirmed = self._replaced = False
        self._move: MoveHiPass | None = None

    @property
    def may_replace(self) -> bool:
        """Whether it may be confirmed."""
        return self._fields.may_replace

    def was_written(self) -> None:
        """The pass has worked on all of it, and has given the unit's memory back. Under the lane's lock."""
        end_all([self._lease])
        self._written = True
        self._replace()

    def queue_move(self, lane: StreamLane) -> None:
        """Queue the pass that moves `hi` when it is confirmed, which is to follow. Idempotent. Under the
        lane's lock.
        """
        moves, record = self._fields.moves, self._fields.record
        if moves is None or self._confirmed or (self._move in lane.unfinished(record)):
            return
        self._move = MoveHiPass(moves, record.tile_numel)
        lane.submit(self._move)

    def confirm(self) -> None:
        """Let it take the place of the record's fields, as soon as it is written. Idempotent. Under the
        lane's lock.
        """
        if self._fields.moves is not None:
            self._fields.moves.decide()
        self._confirmed = True
        self._fields.stop_watching()
        self._replace()

    def _replace(self) -> None:
        if self._written and self._confirmed and not self._replaced:
            self._spare.update(self._fields.replace())
            told = None if self._told is None else self._told()
            if told is not None:
                told.was_replaced()
            self._replaced = True

    def drop(self) -> None:
        """Never take that place. The extents are free for the next one, whose pass comes after this one's."""
        self._spare.update(self._fields.drop())

    def withdraw(self) -> None:
        """Be dropped before the pass has begun."""
        end_all([self._lease])
        self.drop()

    @property
    def nbytes(self) -> int:
        """Bytes of the extents that are written to."""
        return self._fields.nbytes


@dataclass(slots=True)
class _Speculated:
    """What is to be compared with what step() decides."""

    ahead: _Ahead
    job: AheadPass
    made: Mapping[int, _Made]
    version: int
    optimizer: weakref.ref[Any]


class Speculation:
    """Makes updates ahead for one engine's units: see [Note: speculative updates]. Called from the thread
    that computes.
    """

    def __init__(
        self,
        lane: StreamLane,
        device: Device,
        residency: UnitResidency,
        store: Store,
        outgoing_share: OutgoingShare,
        unkept: UnkeptGradients,
        never: str,
    ) -> None:
        """Make none so far. store: that of the records. outgoing_share: has room for units whose memory is
        lent to passes. unkept: knows which gradients need not be kept. never: why none can be made, in words;
        empty if some can.
        """
        self.never = never or ("there is no NVMe" if isinstance(store, HostStore) else "")
        self.confirmed = self.dropped = 0
        """Units' updates that were made ahead, and were right, or wrong."""
        self.refused: Counter[str] = Counter()
        """How often a unit's updates could not be made ahead, by the reason."""
        self._lane, self._device = lane, device
        self._residency, self._store = residency, store
        self._outgoing_share, self._unkept = outgoing_share, unkept
        self._spare: dict[Unit, dict[str, Extent]] = {}
        self._of: dict[Unit, _Speculated] = {}
        self._ends = False
        """Whether all that updates are written to is to be freed, once they are confirmed or dropped."""
        self._made_any = self._has_room = False
        """Whether the last step has confirmed any; whether it is known that the disk has room for all."""

    @property
    def counts(self) -> dict[str, int]:
        """How many units' updates were confirmed, dropped, or could not be made, by the reason, or were made
        with gradients that had to be kept.
        """
        refused = {**self.refused, **self._unkept.refused}
        return {"confirmed": self.confirmed, "dropped": self.dropped, **refused}

    @property
    def nbytes(self) -> int:
        """Bytes on NVMe beside the records; none in a durable run, which has them anyway."""
        with self._lane.lock:
            spare = sum(extent.nbytes for extents in self._spare.values() for extent in extents.values())
            return spare + sum(one.ahead.nbytes for one in self._of.values())

    @property
    def made_all(self) -> bool:
        """Whether the updates of the step that was decided last were all made ahead: no fetch has any to
        apply, as with update="backward", and what is used where it lies needs none.
        """
        return self._made_any and not any(unit.pending for unit in self._residency.units)

    def check_possible(self, kind: str) -> None:
        """See that some can be made, for an optimizer that was told to.

        Raises: UnsupportedError with the reason.
        """
        if self.never:
            raise UnsupportedError(
                f"{kind}(speculate=True): updates cannot be made before step() here, since {self.never}. "
                "Leave speculate out."
            )

    def may(self, unit: Unit) -> bool:
        """Whether a unit's record lies where its updates can be made ahead."""
        return not self.never and not self._lies_elsewhere(unit.record)

    def reserve(self, units: list[Unit]) -> None:
        """Allocate what the updates of these units are written to.

        Raises: aio.StorageFullError naming all that is needed; then nothing stays allocated.
        """
        for unit in units:  # of an optimizer that had these parameters before
            self._drop(unit)
        self._lane.drain()  # what is confirmed, and not yet written, leaves extents
        able = [unit for unit in units if unit.trainable and not self._lies_elsewhere(unit.record)]
        try:
            for unit in able if not isinstance(self._store, TwinStore) else ():
                self._extents(unit)
        except StorageFullError as full:
            needed = sum(one.record.field_nbytes(name) for one in able for name in one.record.fields)
            had = self.nbytes
            self._free_spare()
            raise StorageFullError(
                full.errno,
                f"{full.strerror}\n  for: the second generation of records, {format_size(needed)} in all, "
                "which speculative updates need. Leave speculate out, or give Config another folder.",
                full.filename,
            ).with_sizes(needed=needed - had, free=full.free) from None

    # In the backward

    def begin(self, unit: Unit, optimizer: Foreseer) -> bool:
        """Make a complete unit's updates, from now on or as soon as its last user is gone; False where that
        cannot be.
        """
        gradients = self._gradients_of(unit, optimizer)
        why = self.never or self._why_not(unit, gradients)
        made = [] if why else [(one, optimizer.foresee(one)) for one in gradients]
        updates = {one.index: update for one, update in made if update is not None}
        if not why and not self._makes_all(unit.record, updates):
            why = "some of its fields keep their values"
        if why:
            self.refused[why] += 1
            return False
        self._drop(unit)
        if not optimizer.speculation.is_forced and (lack := self._lack_of_room()):
            self._give_up(optimizer, lack)
            return False
        try:
            extents = self._extents(unit)
        except StorageFullError as full:
            if optimizer.speculation.is_forced:
                raise
            self._give_up(optimizer, str(full))
            return False
        if extents is None:
            self.refused["commits name both generations of its record"] += 1
            return False
        residence = unit.residence
        lends = self._device.is_host and not unit.in_place and residence.processed and residence.lent is None
        lease = (
            self._outgoing_share.lease(unit.resident_nbytes) if lends else None
        )  # a Ctrl-C may end its wait
        self._spare[unit] = {}
        fields = NextFields(unit.record, extents)
        unkept = self._unkept.prepare(unit, fields, gradients, updates, optimizer.speculation)
        ahead = _Ahead(fields, self._spare[unit], lease, unkept)
        job = AheadPass(unit, self._device, unit.record.tile_numel, updates, fields, unkept)
        job.call_when_done(ahead.was_written)
        told = {
            one.index: _Made(
                updates[one.index].scalars,
                updates[one.index].key,
                updates[one.index].recipe,
                weakref.ref(one),
                one.additions,
            )
            for one in gradients
        }
        self._of[unit] = _Speculated(ahead, job, told, unit.version, weakref.ref(optimizer))
        try:
            if lends:
                self._residency.lend_when_free(unit, job)
            else:
                self._lane.submit(job)
        except BaseException:  # interrupted: nobody knows whether it is queued
            residence.withdraw(job)
            self._unkept.forget(unit)
            del self._of[unit]
            ahead.withdraw()
            raise
        return True

    def rest(self) -> None:
        """Count a unit whose updates are not made ahead now: see [Note: when speculation pays]."""
        self.refused["the last steps were not as expected"] += 1

    def leave(self, why: str) -> None:
        """Count a unit whose updates are left to the next forward: see [Note: updates by turns]."""
        self.refused[why] += 1

    def must_have_begun(self, unit: Unit) -> None:
        """The last user of a unit should be gone. If others are left, the pass that waits for them is
        forgotten: the gradients that it has are about to be written, and their memory reused.
        """
        one = self._of[unit]
        if unit.residence.withdraw(one.job):
            self.refused["it is in use after its backward"] += 1
            self._unkept.forget(unit)
            del self._of[unit]
            one.ahead.withdraw()
        else:
            self._outgoing_share.sent(one.job)

    def _gradients_of(self, unit: Unit, optimizer: Foreseer) -> list[Gradient]:
        """Return the gradients of all of a unit's parameters, or fewer where some have none, or are another
        optimizer's.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            grads = [parameter.grad for parameter in unit.parameters]
        return [
            grad.gradient
            for index, (parameter, grad) in enumerate(zip(unit.parameters, grads, strict=True))
            if isinstance(grad, OffloadedGradient) and grad.is_of(unit, index) and optimizer.has(parameter)
        ]

    def _why_not(self, unit: Unit, gradients: list[Gradient]) -> str:
        record = unit.record
        if len(gradients) < len(unit.parameters):
            return "some of its parameters have no gradient, or another optimizer"
        if any(one.form not in (Form.HOST, Form.OUTGOING) or one.on_device for one in gradients):
            return "its gradients were added up in its record, or are on the device"
        if elsewhere := self._lies_elsewhere(record):
            return elsewhere
        fetch = unit.residence.fetch
        if fetch is not None and not fetch.done and not unit.pending:
            fetch.wait()  # for a use that does not need the values
        if unit.pending or not self._lane.settled(record):
            return "earlier passes over its record are not over"
        return ""

    def _lies_elsewhere(self, record: Record) -> str:
        """Return why a record's place does not allow it; empty if it does."""
        if record.on_device or record.in_files is not None or record.all_in_host:
            return "its record is not on NVMe"
        others = [name for name in record.fields if name != "hi"]
        if any(record.volatile(name) or name in record.targets for name in others):
            return "more of its record than hi lies in host memory"
        if isinstance(self._store, TwinStore) and (record.volatile("hi") or "hi" in record.targets):
            return "its hi lies in host memory in a durable run"
        return ""

    @staticmethod
    def _makes_all(record: Record, updates: Mapping[int, Update]) -> bool:
        """Whether updates write all of a record."""
        if len(updates) < len(record.shard.segments):
            return False
        for one in updates.values():
            written = {*record.schema.weights, *one.recipe.stepped(record.schema)}
            if one.recipe.matrices is not None or not written.issuperset(record.fields):
                return False
        return True

    def _extents(self, unit: Unit) -> dict[str, Extent] | None:
        """Return an extent for each field of a unit's record: those that are free for it, and new ones; in a
        durable run the other sides of its twins, None where these are not free.

        Raises: aio.StorageFullError.
        """
        spare, store = self._spare.setdefault(unit, {}), self._store
        if isinstance(store, TwinStore):
            twins = {name: unit.record.home(name)[0] for name in unit.record.fields}
            sides = {name: side for name, one in twins.items() if (side := store.other_side(one)) is not None}
            return sides if len(sides) == len(twins) else None
        for name in unit.record.fields:
            nbytes = round_up(max(unit.record.field_nbytes(name), 1), BLOCK)
            extent = spare.get(name)
            if extent is not None and extent.nbytes != nbytes:
                self._lane.drain()  # it may still be written to
                store.free(spare.pop(name))
                extent = None
            if extent is None:
                spare[name] = store.allocate(nbytes, f"{unit.name}.{name} (its second generation)")
        return {name: spare[name] for name in unit.record.fields}

    def _give_up(self, optimizer: Foreseer, why: str) -> None:
        logger.warning("no update is made before step() any more: %s", why)
        optimizer.speculation.give_up()
        self._ends = True

    def _lack_of_room(self) -> str:
        """Return why the disk has no room, in words, once that was looked at; empty if it has room for the
        second generation of all records, and for as much again: nobody has asked for it, and a checkpoint
        should not find the disk full.
        """
        store = self._store
        if self._has_room or not isinstance(store, NvmeStore | StripedStore):
            return ""  # a durable run has it anyway
        able = [unit for unit in self._residency.units if unit.trainable and self.may(unit)]
        needed = sum(one.record.field_nbytes(name) for one in able for name in one.record.fields)
        free, where = room_in(store.folders), ", ".join(store.folders)
        if free < _ROOMS * needed:
            return (
                f"a second generation of records would take {format_size(needed)} in {where}, and "
                f"{format_size(free)} are free, less than {_ROOMS} times that. Free space there for faster "
                "steps; AdamW(speculate=True) asks for the room alone, and False for none"
            )
        self._has_room = True
        logger.info(
            "updates are made before step() where that is faster: a second generation of records takes up to "
            "%s of %s that are free in %s",
            format_size(needed),
            format_size(free),
            where,
        )
        return ""

    # In step()

    def settle(self, optimizer: Foreseer) -> tuple[int, int]:
        """Confirm or drop what was made ahead for an optimizer, whose step is decided: what is confirmed is
        pending no more. Return how many units' updates were confirmed, and dropped.
        """
        right, dropped = [], 0
        for unit, one in sorted(
            self._of.items(), key=lambda made: made[0].index
        ):  # as the forward needs them
            maker = one.optimizer()
            if maker is not optimizer and maker is not None:
                continue
            if self._is_right(unit, one):
                self._settle_use(unit)
                right.append(unit)
            else:
                self._drop(unit)
                dropped += 1
        self._confirm(right)
        self.confirmed += len(right)
        self._made_any = bool(right)
        if self._ends:
            self._ends = False
            self._free_spare()
        return len(right), dropped

    def _free_spare(self) -> None:
        """Free all extents that no update is being made in, so that others have the room."""
        self._unkept.write_all()
        self._lane.drain()  # those that were dropped may still be written to, and confirmed ones leave some
        for spare in self._spare.values():
            while spare:
                self._store.free(spare.popitem()[1])

    def _is_right(self, unit: Unit, one: _Speculated) -> bool:
        """Whether the updates that were decided are those that were made."""
        if unit.version != one.version + len(one.made) or not one.ahead.may_replace:
            return False
        if unit.pending.keys() != one.made.keys():
            return False
        for index, update in unit.pending.items():
            made = one.made[index]
            gradient = made.gradient()
            if gradient is None or not gradient.is_current or gradient.additions != made.additions:
                return False
            if update.missed or update.after or update.recipe is not made.recipe:
                return False
            if (update.scalars, update.key) != (made.scalars, made.key):
                return False
        with self._lane.lock:  # a Ctrl-C may have kept it from the queue
            return one.job.done or one.job in self._lane.unfinished(unit.record)

    def _settle_use(self, unit: Unit) -> None:
        """See that nothing has the values of a unit from before its update, or waits for its moments."""
        self._unkept.settle(unit)
        residence = unit.residence
        if residence.lent is None and residence.fetch is not None:
            self._residency.evict(unit)

    def _confirm(self, units: list[Unit]) -> None:
        """Let what was made for these units count. The lock is taken once: else the lane's thread would begin
        with the first of their moves, and this one wait for it again and again.
        """
        with self._lane.lock:
            for unit in units:
                one = self._of[unit]
                try:
                    self._count(unit, one)
                except BaseException:  # a Ctrl-C in between: the update would be lost
                    self._count(unit, one)
                    raise

    def _count(self, unit: Unit, one: _Speculated) -> None:
        """Let what was made stand for what is pending. Idempotent. Under the lane's lock."""
        one.ahead.queue_move(self._lane)
        unit.pending.clear()
        one.ahead.confirm()
        self._of.pop(unit, None)

    def _drop(self, unit: Unit) -> None:
        self._unkept.write(unit)  # while both generations are there
        one = self._of.pop(unit, None)
        if one is not None:
            self.dropped += 1
            with self._lane.lock:
                one.ahead.drop()
