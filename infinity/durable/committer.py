"""Commits: when a step's state is whole, where it is written, and who waits for whom.

[Note: the way of a commit]
closed    step() has decided step k: generators and the data's position are taken down
marked    the first forward after it begins: all else that belongs to k, a scheduler's state among it
applied   every update of k was applied and written; fields that lie in host memory are written now
captured  sides and hashes of all records are taken down: from here on k+1 may be written
flushed   the files, then the commit itself, are on the drive: what k-1 was is free to be overwritten

From `marked` on it happens on a thread of its own, behind the next forward and backward. Whoever is about to
change a record for k+1 waits until k is captured; with update="forward" that is long over by then. Nothing
waits for the flush but a write to a range whose both sides are named (see generations), a whole step later.

[Note: several ranks]
Each rank has its own folder, files and commits. When its commit is on its drive, it waits until all ranks
have theirs, before `flushed` frees the older generation. So a rank is ahead by one commit at most, and has
the one before whole: a run goes on at the last step that all have, and who is ahead forgets his newest first.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from infinity import aio
from infinity.durable.commit import Commit, FieldAt, PlainTensor, RecordAt
from infinity.durable.folder import RunFolder, state_name, wiping
from infinity.durable.homes import Homes, write_out
from infinity.durable.recovery import find, in_common
from infinity.errors import UnsupportedError
from infinity.lane.base import Pass
from infinity.lane.lane import StreamLane
from infinity.ranks.group import ALONE, Channel, Ranks
from infinity.storage.generations import TwinStore
from infinity.storage.manifest import CheckpointError
from infinity.storage.nvme import Opening
from infinity.storage.store import Extent
from infinity.storage.stripes import open_nvme
from infinity.units.unit import Unit

_LAST_S = 10.0
"""Seconds that the end of a run waits for the other ranks' commit of its last step."""
Said = tuple[Mapping[str, Any], Mapping[str, PlainTensor]]


class TrainingStateSource(Protocol):
    """What knows the training beside its records: see tracking."""

    def at_step(self) -> Mapping[str, Any]:
        """Return what belongs to a step that was just decided, as plain values."""

    def at_forward(self, said: Mapping[str, Any], *, begun: bool) -> Said:
        """Return that and all else, before the next step's forward, which has `begun` or not, changes it."""

    def restore_at_forward(self) -> None:
        """The first forward after a resume begins."""

    def succeed(self, earlier: Any, later: Any) -> None:
        """An optimizer takes the place of another."""


@dataclass(eq=False)
class _Job:
    """One commit under way."""

    step: int
    said: Mapping[str, Any]
    tensors: Mapping[str, PlainTensor]
    captured: bool = False
    flushed: bool = False


class Durable:
    """The commits of one engine; see [Note: the way of a commit]."""

    def __init__(
        self,
        folders: Sequence[str],
        engine_kind: str | None,
        every: int,
        *,
        wipe: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Lock the run's folders, and open its files, or new ones where no step was ever committed. Every
        rank does so.

        every: steps from one commit to the next. wipe: remove a committed run first.

        Raises: ConfigError for folders that cannot be used; CheckpointError for a run that cannot be read;
        RanksError where another rank failed.
        """
        self.every = every
        self.step = 0
        """Steps that the optimizer has closed, those before a resume counted."""
        self.committed_step: int | None = None
        """The last one on disk, on every rank."""
        self._source: Callable[[], TrainingStateSource | None] = lambda: None
        self.found: tuple[Commit, ...] = ()
        """Commits of an earlier process, the newest first, until one of them is taken up."""
        self._places: dict[str, Extent] = {}
        self._thread: threading.Thread | None = None
        self._said_at_step: Mapping[str, Any] | None = None
        self._job: _Job | None = None
        self._last: Commit | None = None
        self._held = False
        self._changed = threading.Condition()
        self.ranks = ranks
        self._channel: Channel | None = None
        if ranks.size > 1:
            self._channel = ranks.channel(tells=False)  # one disk may take longer than another
            ranks.closing.append(partial(self._join, _LAST_S))  # not longer: a rank may be gone
        self.folders: list[RunFolder] = []
        with contextlib.ExitStack() as opened:
            with ranks.together("locking the durable run"):
                for base in folders:
                    self.folders.append(RunFolder(base, ranks.rank))
                    opened.callback(self.folders[-1].close)
                here = () if wipe else find(self.folders)
            self.found = in_common(here, ranks)
            name = secrets.token_hex(8).encode()
            self.run = self.found[0].run if self.found else ranks.first(name, "name the run").decode()
            with ranks.together("opening the durable run"):
                for one in here if self.found else ():
                    if one not in self.found:
                        self._forget(one)
                self._open(folders, engine_kind, opened)
            opened.pop_all()

    def _open(self, folders: Sequence[str], engine_kind: str | None, opened: contextlib.ExitStack) -> None:
        """Open the files."""
        if not self.found:
            for folder in self.folders:
                folder.wipe()
        self._new = not self.found
        self._sequence = self.found[0].sequence if self.found else 0
        self.nvme = open_nvme(folders, engine_kind, openings=list(self._openings()))
        opened.callback(self.nvme.close)
        self.store = TwinStore(self.nvme, lazy=bool(self.found))
        self.store.be_at(self.found[0].step if self.found else 0)
        self.homes = Homes(self.store)
        self._claim()
        for folder in self.folders:
            folder.remove_states(but=self.run)

    @property
    def source(self) -> TrainingStateSource | None:
        """What `follow` was given, None before that: see infinity.resume."""
        return self._source()

    # What is there

    def _openings(self) -> Iterator[Opening]:
        for number, folder in enumerate(self.folders):
            opening = folder.open_state if self.found else folder.create_state
            yield partial(_open, opening, state_name(self.run, number))

    def _claim(self) -> None:
        """Keep what the commits name out of reach of allocation."""
        what = f"the commit in {self.folders[0].path}"
        try:
            for commit in self.found:
                for record in commit.records:
                    for at in record.fields:
                        for place in at.sides:
                            if place is not None and repr(place) not in self._places:
                                self._places[repr(place)] = self.nvme.claim(place, at.nbytes, what)
            self.nvme.open_gaps()
        except ValueError as error:
            raise CheckpointError(f"{error}. {wiping(self.folders)} removes the run.") from error

    def extent_of(self, at: FieldAt) -> Extent:
        """Return a committed field's place; what it names stays as it is until the next commit."""
        sides = [None if place is None else self._places[repr(place)] for place in at.sides]
        return self.store.take_over(at.nbytes, sides, at.runs)

    # What the training calls

    def open(
        self, units: Sequence[Unit], lane: StreamLane, flush: Callable[[Unit], None], cut: tuple[int, str]
    ) -> None:
        """Commit these units' records from now on; `flush` applies what is pending for one, `cut` is the
        elements of a tile and the name of the format, as the run's Config has them.
        """
        self._units, self._lane, self._cut = units, lane, cut
        self._flush = weakref.WeakMethod(flush)  # a thread of a commit may wait for ever: see ending's note

    def follow(self, source: TrainingStateSource, step: int, *, resumed: bool) -> None:
        """Begin to commit: after `step` steps. `source`, and with it the model, is the caller's to keep."""
        self._source, self.step = weakref.ref(source), step
        self.committed_step = step if resumed else None
        self.store.be_at(step)
        self.found = ()

    def before_change(self) -> None:
        """Somebody is about to change records: what was marked before is captured first."""
        job = self._job
        if job is None or job.captured:
            return
        for unit in self._units:
            if unit.pending and (flush := self._flush()) is not None:
                flush(unit)
        self._wait(lambda: job.captured)

    def before_step(self) -> None:
        """The optimizer is about to decide a step.

        Raises: UnsupportedError where it is not known whether the run is new or goes on.
        """
        if self.source is None:
            state = f"holds a run committed at step {self.found[0].step}" if self.found else "is new"
            raise UnsupportedError(
                f"durable: {self.folders[0].path} {state}. Call infinity.resume(model, optimizer) once "
                "before training: it goes on with the run in the folder, or begins one."
            )
        self.before_change()

    def step_closed(self) -> None:
        """The optimizer has decided a step."""
        self.step += 1
        self._said_at_step = None
        if self.source is not None and self.step % self.every == 0 and not self._held:
            self._said_at_step = self.source.at_step()

    def forward_began(self, _module: object) -> None:
        """A forward of the training begins: the step before it is marked, if it was only closed so far."""
        if self.source is not None:
            self.source.restore_at_forward()
            self._mark(begun=True)

    def _mark(self, *, begun: bool) -> None:
        said, self._said_at_step = self._said_at_step, None
        if said is None or self.source is None or self._held:
            return
        job = _Job(self.step, *self.source.at_forward(said, begun=begun))
        self._wait_for_last()
        self._job = job
        self._join()
        self._thread = threading.Thread(target=self._commit, args=(job,), name="infinity-commit", daemon=True)
        self._thread.start()

    def commit_now(self) -> None:
        """Commit the last step, whole, and return when it is on disk. Nothing to do where that is so.

        Raises: what made it fail.
        """
        self._wait(lambda: not self._held)
        if self.source is None:
            self.before_step()
        elif self.committed_step != self.step:
            if self._said_at_step is None and (self._job is None or self._job.step != self.step):
                self._said_at_step = self.source.at_step()
            self._mark(begun=False)
            self.before_change()
        self._wait_for_last()

    def hold(self) -> Commit:
        """Commit the last step now, and no other before `let_go`: what the commit names stays as it is."""
        self.commit_now()
        while self._last is None:  # resumed, and no step since
            self.committed_step = None
            self.commit_now()
        self._held = True
        return self._last

    def let_go(self) -> None:
        """Commit steps again."""
        self._held = False
        self._notify()

    def _wait_for_last(self) -> None:
        job = self._job
        if job is not None:
            self._wait(lambda: job.flushed)

    def _wait(self, over: Callable[[], bool]) -> None:
        with self._changed:
            while not over():
                self._lane.check_open()
                self._changed.wait(0.1)

    def forget_newest(self) -> None:
        """The run goes on from the older of two commits: the newest is no commit any more."""
        self._sequence = self.found[0].sequence - 1
        self._forget(self.found[0])

    def _forget(self, commit: Commit) -> None:
        self.folders[0].write_slot(commit.sequence % 2, bytes(64))

    # The thread of one commit

    def _commit(self, job: _Job) -> None:
        try:
            self._settle()
            commit = self._captured(job)
            self._new = False
            job.captured = True
            self._notify()
            self.nvme.sync()
            for folder in self.folders[1:] if commit.sequence == 1 else ():
                folder.write_part(self.run, self.folders[0].path)
            self.folders[0].write_slot(commit.sequence % 2, commit.to_bytes())
            if self._channel is not None:
                self._channel.agree(f"commit step {job.step}")
            self.store.end_commit(job.step)
            self.committed_step, self._last = job.step, commit
            job.flushed = True
            self._notify()
        except BaseException as error:  # noqa: BLE001 - who waits for the lane raises it
            self.ranks.put_down(f"a step could not be committed: {error}")
            self._lane.fail(error, raised=False)  # first: the lane may wait in the store for this commit
            self.store.fail(error)
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _settle(self) -> None:
        """Wait until every update decided so far is applied and written."""
        left = list(self._units)
        jobs: list[Pass] = []
        with self._lane.lock:
            while left or jobs:
                while left and not left[-1].pending and not left[-1].residence.has_deferred:
                    jobs += self._lane.unfinished(left.pop().record)
                while jobs and jobs[-1].finished:
                    jobs.pop()
                if left or jobs:
                    self._lane.check_open()
                    self._lane.changed.wait(0.5)

    def _captured(self, job: _Job) -> Commit:
        """Take everything down, once all of it is on NVMe: meanwhile a field may move to host memory."""
        while True:
            with self._lane.lock:
                passes = self.homes.passes(self._units)
                if not passes:
                    return self._capture(job)
            write_out(self._lane, passes)

    def _capture(self, job: _Job) -> Commit:
        """Take down where everything lies."""
        named: list[Extent] = []
        records = []
        for unit in self._units:
            record, fields = unit.record, []
            for name in record.fields:
                extent, hashes = self.homes.place(record, name)
                sides, runs = self.store.describe(extent)
                fields.append(FieldAt(name, extent.nbytes, tuple(sides), runs, hashes.tobytes()))
                named.append(extent)
            segments = tuple((one.name, one.shape) for one in unit.shard.segments)
            records.append(RecordAt(record.name, segments, tuple(fields)))
        self.store.begin_commit(named)
        self._sequence += 1
        return Commit(
            self.run,
            self._sequence,
            job.step,
            *self._cut,
            len(self.folders),
            tuple(records),
            job.said,
            job.tensors,
            self.ranks.rank,
            self.ranks.size,
        )

    # The end

    def _join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():  # which may collect
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Let the commit under way end, and let go of the folder; a run without commit leaves nothing."""
        self._join()
        with self._changed:
            while self._held:
                self._changed.wait(0.1)
        self.nvme.close()
        if self._new:
            for folder in self.folders:
                with contextlib.suppress(OSError):
                    folder.wipe()
        for folder in self.folders if not self.nvme.hung else ():  # else a late write may meet another run
            folder.close()


def _open(opening: Callable[[aio.IoEngine, str], aio.File], name: str, engine: aio.IoEngine) -> aio.File:
    return opening(engine, name)
