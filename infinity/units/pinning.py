"""Which fields of records lie in host memory: decided from how often units are used, and carried out.

A field moves up without a transfer of its own: it gets a target, and the next pass that has all of it in
memory leaves it there. It moves down by being written, between two steps, while no unit is in use.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from types import MappingProxyType

from infinity.lane.lane import StreamLane
from infinity.lane.passes import LeavePass
from infinity.planning.frequency import Frequencies
from infinity.planning.placement import Candidate, Move, Placement, PlacementBudget, revise
from infinity.storage.memory import Ledger
from infinity.storage.store import HostStore, Store
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")

_REVISED_EVERY = 8
"""Steps. Expectations change slowly; but where the pattern has changed each step counts: see frequency."""


class Pins:
    """Owns the placement of one engine's fields. Called between steps, from the thread that computes."""

    def __init__(
        self,
        units: Sequence[Unit],
        frequencies: Frequencies,
        lane: StreamLane,
        kept: Ledger,
        stores: tuple[HostStore, Store],
    ) -> None:
        """Place fields of `units` in the first of `stores` as far as `kept` has room; else in the second."""
        self.revisions = 0
        """How often the placement was changed."""
        self.reason = ""
        """Why the placement was decided as it was, as text for logs."""
        self._units = units
        self._frequencies = frequencies
        self._lane = lane
        self._kept = kept
        self._host, self._nvme = stores
        self._placement: Placement = MappingProxyType({})
        self._gradient_nbytes = 0
        self._to_host: deque[Move] = deque()
        self._steps = 0

    def close_step(self) -> None:
        """Decide anew from time to time, first after the first step: it shows what gradients take. After each
        step while what is used is changing.
        """
        self._steps += 1
        gradients = (
            self._kept.peak_nbytes if self._steps == 1 else self._kept.held_nbytes - self._host.held_nbytes
        )
        self._gradient_nbytes = max(self._gradient_nbytes, gradients)
        if self._steps % _REVISED_EVERY == 1 or self._frequencies.unsettled:
            self._revise()
        self._set_targets()

    def _revise(self) -> None:
        budget = PlacementBudget(0, self._kept.limit_nbytes, self._gradient_nbytes)
        revision = revise(self._placement, list(self._candidates()), budget)
        self.reason = revision.reason
        if not revision.moves:
            return
        logger.info("host memory: %s", revision.reason)
        self._leave([move for move in revision.moves if move.target == "nvme"])
        self.revisions += 1
        self._placement = revision.placement
        for move in revision.moves:
            if move.target == "host":
                self._kept.set_aside(self._held_nbytes(move))
                self._to_host.append(move)

    def _candidates(self) -> Iterator[Candidate]:
        """Every field, with what a step is expected to read and write of it."""
        for unit in self._units:
            fetches = self._frequencies.fetches(unit.index)
            updates = self._frequencies.updates(unit.index)
            for name in unit.record.fields:
                if self._nvme is self._host and unit.record.in_files is None:
                    continue  # it lies there for good
                anew = updates if name in unit.record.form.derived else 0.0
                reads = fetches - anew if name == "hi" else updates
                nbytes = unit.record.field_nbytes(name)
                yield Candidate(unit.index, name, nbytes, reads, updates)

    def _held_nbytes(self, move: Move) -> int:
        return self._units[move.unit].record.field_nbytes(move.field)

    def _set_targets(self) -> None:
        """Give fields their place in host memory, as far as this step's gradients leave room by now."""
        while self._to_host and self._held_nbytes(self._to_host[0]) <= self._kept.free_nbytes:
            move = self._to_host.popleft()
            nbytes = self._held_nbytes(move)
            self._units[move.unit].record.targets[move.field] = self._host.allocate_promised(nbytes)

    def _leave(self, moves: Sequence[Move]) -> None:
        """Move fields to NVMe; those that were still on their way up stay there."""
        jobs: list[tuple[Unit, LeavePass]] = []
        for move in moves:
            unit = self._units[move.unit]
            waiting = [one for one in self._to_host if (one.unit, one.field) == (move.unit, move.field)]
            if waiting:
                self._to_host.remove(waiting[0])
                self._kept.set_aside(-self._held_nbytes(move))
            elif move.field in unit.record.targets:
                self._lane.drain()  # a pass under way may adopt it
                if move.field in unit.record.targets:
                    self._host.free(unit.record.targets.pop(move.field))
            if not unit.record.in_host(move.field):
                continue
            if unit.record.in_files is not None and move.field == "hi":
                self._lane.drain()
                unit.record.leave_host()
                if unit.residence.fetch is None:
                    unit.unbind()
                continue
            extent = self._nvme.allocate(move.nbytes, f"{unit.name}.{move.field}")
            job = LeavePass(unit.record, move.field, extent, unit.record.tile_numel)
            self._lane.submit(job)
            jobs.append((unit, job))
        for unit, job in jobs:
            self._lane.wait(job, finished=True)
            if unit.residence.fetch is None:
                unit.unbind()
