"""Commits of a durable run's steps: when a step's state is complete, and how it gets to disk.

[Note: phases of a commit]
closed    step() has decided step k: the states of generators and of the data loader are captured
marked    the next forward begins: all else that belongs to k, such as a scheduler's state, is captured
applied   all updates of k are applied and written; fields in host memory are written now
captured  sides and hashes of all records are captured: from here on step k+1 may write
flushed   the files, then the commit itself, are on disk: the state of k-1 may be overwritten

From `marked` on, a commit runs on a thread of its own, during the next forward and backward. What changes a
record for k+1 waits until k is captured; with update="forward" that is long before. Only a write to a range
whose two sides are both named by commits waits for the flush (see generations): a whole step later.

[Note: several ranks]
Each rank has its own folder, files and commits. When a rank's commit is on disk, it waits until all ranks
have theirs, before `flushed` frees the older generation. So a rank is ahead by one commit at most, and still
has the one before. A run resumes from the last step that all ranks have committed; ranks that are ahead drop
their newest commit first.
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

from infinity.durable.commit import Commit, FieldAt, PlainTensor, RecordAt
from infinity.durable.folder import RunFolder, state_name, wiping
from infinity.durable.homes import Homes, write_out
from infinity.durable.recovery import find, in_common
from infinity.errors import UnsupportedError
from infinity.lane.base import Pass
from infinity.lane.lane import StreamLane
from infinity.ranks.group import ALONE, Channel, Ranks
from infinity.storage.checkpoint_store import CheckpointStore
from infinity.storage.generations import TwinStore
from infinity.storage.manifest import CheckpointError
from infinity.storage.nvme import Opening
from infinity.storage.store import Extent
from infinity.storage.stripes import open_nvme
from infinity.units.unit import Unit

_LAST_S = 10.0
"""Seconds that the end of a run waits for the other ranks to commit the last step."""
Said = tuple[Mapping[str, Any], Mapping[str, PlainTensor]]


class TrainingStateSource(Protocol):
    """The source of a step's state outside the records; see checkpoint/training_state.py."""

    def at_step(self) -> Mapping[str, Any]:
        """Return, in step(), the state that belongs to the step just decided, as plain values."""

    def at_forward(self, said: Mapping[str, Any], *, begun: bool) -> Said:
        """Return `said`, the result of at_step, with all other state of the step. begun: the next forward has
        begun, which draws from the generators.
        """

    def restore_at_forward(self) -> None:
        """Restore the generators as the first forward after a resume begins."""

    def succeed(self, earlier: Any, later: Any) -> None:
        """Replace an optimizer by a later one that has taken its parameters over."""


@dataclass(eq=False)
class _Job:
    """A commit in progress."""

    step: int
    said: Mapping[str, Any]
    tensors: Mapping[str, PlainTensor]
    captured: bool = False
    flushed: bool = False


class Durable:
    """The commits of one engine; see [Note: phases of a commit]."""

    def __init__(
        self,
        folders: Sequence[str],
        engine_kind: str | None,
        every: int,
        *,
        wipe: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Lock the run's folders and open its files, or create them if no step was ever committed. All ranks
        call this.

        every: steps from one commit to the next. wipe: remove a committed run first.

        Raises: ConfigError for folders that cannot be used; CheckpointError for a run that cannot be read;
        RanksError where another rank failed.
        """
        self.every = every
        self.step = 0
        """The number of steps that the optimizer has closed, including those before a resume."""
        self.committed_step: int | None = None
        """The last step that is on disk on every rank."""
        self._source: Callable[[], TrainingStateSource | None] = lambda: None
        self.found: tuple[Commit, ...] = ()
        """Commits of an earlier process, the newest first, until the run is resumed."""
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
            self._channel = ranks.channel(tells=False)  # disks differ in speed
            ranks.closing.append(partial(self._join, _LAST_S))  # no longer: another rank may have ended
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
        """Open the run's files, or create those of a new run."""
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
        """The source that `follow` was given; None before that. See infinity.resume."""
        return self._source()

    # The files of an earlier process

    def _openings(self) -> Iterator[Opening]:
        for number, folder in enumerate(self.folders):
            opening = folder.open_state if self.found else folder.create_state
            yield partial(opening, name=state_name(self.run, number))

    def _claim(self) -> None:
        """Reserve the places that the found commits name, so that they are not allocated."""
        what = f"the commit in {self.folders[0].path}"
        try:
            for commit in self.found:
                for record in commit.records:
                    for at in record.fields:
                        for place in at.sides if at.in_files is None else ():
                            if place is not None and repr(place) not in self._places:
                                self._places[repr(place)] = self.nvme.claim(place, at.nbytes, what)
            self.nvme.open_gaps()
        except ValueError as error:
            raise CheckpointError(f"{error}. {wiping(self.folders)} removes the run.") from error

    def extent_of(self, at: FieldAt) -> Extent:
        """Return the extent of a committed field; its committed bytes stay until the next commit."""
        sides = [None if place is None else self._places[repr(place)] for place in at.sides]
        return self.store.take_over(at.nbytes, sides, at.runs)

    # Called by the training

    def open(
        self, units: Sequence[Unit], lane: StreamLane, flush: Callable[[Unit], None], cut: tuple[int, str]
    ) -> None:
        """Set what is committed: these units' records. flush: applies a unit's pending updates. cut: elements
        per tile and name of the format, which a later process has to have too.
        """
        self._units, self._lane, self._cut = units, lane, cut
        self._flush = weakref.WeakMethod(
            flush
        )  # the commit's thread may wait for ever: see the note in engine/ending

    def follow(self, source: TrainingStateSource, step: int, *, resumed: bool) -> None:
        """Start to commit, after `step` steps. The caller has to keep `source`, and with it the model."""
        self._source, self.step = weakref.ref(source), step
        self.committed_step = step if resumed else None
        self.store.be_at(step)
        self.found = ()

    def before_change(self) -> None:
        """Wait, before records are changed, until the marked step is captured."""
        job = self._job
        if job is None or job.captured:
            return
        for unit in self._units:
            if unit.pending and (flush := self._flush()) is not None:
                flush(unit)
        self._wait(lambda: job.captured)

    def before_step(self) -> None:
        """Wait, before the optimizer decides a step, until the marked step is captured.

        Raises: UnsupportedError if infinity.resume was not called.
        """
        if self.source is None:
            state = f"holds a run committed at step {self.found[0].step}" if self.found else "is new"
            raise UnsupportedError(
                f"durable: {self.folders[0].path} {state}. Call infinity.resume(model, optimizer) once "
                "before training: it resumes the run in the folder, or begins a new one."
            )
        self.before_change()

    def step_closed(self) -> None:
        """Count a step that the optimizer has decided, and capture what belongs to it."""
        self.step += 1
        self._said_at_step = None
        if self.source is not None and self.step % self.every == 0 and not self._held:
            self._said_at_step = self.source.at_step()

    def forward_began(self, _module: object) -> None:
        """Mark the last closed step, as the next forward of the training begins."""
        if self.source is not None:
            self.source.restore_at_forward()
            self._mark(begun=True)

    def _mark(self, *, begun: bool) -> None:
        said, self._said_at_step = self._said_at_step, None
        if said is None or self.source is None or self._held:
            return
        job = _Job(self.step, *self.source.at_forward(said, begun=begun))
        self._wait_for_last()
        for unit in self._units:
            unit.pending  # noqa: B018 - tells slices what they have missed: the commit waits for that, too
        self._job = job
        self._join()
        self._thread = threading.Thread(target=self._commit, args=(job,), name="infinity-commit", daemon=True)
        self._thread.start()

    def commit_now(self) -> None:
        """Commit the last step, if that is not done yet, and return when it is on disk.

        Raises: the error that made the commit fail.
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
        """Commit the last step now, and no other until `release`, so that the commit's data stays."""
        self.commit_now()
        while self._last is None:  # resumed, and no step since
            self.committed_step = None
            self.commit_now()
        self._held = True
        return self._last

    def release(self) -> None:
        """Commit steps again, after `hold`."""
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
        """Drop the newest of two commits, since the run resumes from the older one."""
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
        except BaseException as error:  # noqa: BLE001 - raised by the next wait for the lane
            self.ranks.post_failure(f"a step could not be committed: {error}")
            self._lane.fail(error, raised=False)  # first: the lane may wait in the store for this commit
            self.store.fail(error)
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _settle(self) -> None:
        """Wait until all updates decided so far are applied and written."""
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
        """Return the commit, once every field is written: while some are, others may move to host memory."""
        while True:
            with self._lane.lock:
                passes = self.homes.passes(self._units)
                if not passes:
                    return self._capture(job)
            write_out(self._lane, passes)

    def _capture(self, job: _Job) -> Commit:
        """Return the commit: the places and hashes of all fields as they are now."""
        named: list[Extent] = []
        records = []
        for unit in self._units:
            record, fields = unit.record, []
            for name in record.fields:
                extent, hashes = self.homes.home(record, name)
                nbytes = extent.nbytes
                if isinstance(extent.store, CheckpointStore):
                    place = extent.store.describe(extent)
                    fields.append(FieldAt(name, nbytes, (place, None), ((nbytes, 0),), hashes.tobytes()))
                    continue
                sides, runs = self.store.describe(extent)
                fields.append(FieldAt(name, nbytes, tuple(sides), runs, hashes.tobytes()))
                named.append(extent)
            segments = tuple((one.name, one.shape) for one in unit.layout.segments)
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
        if (
            self._thread is not None and self._thread is not threading.current_thread()
        ):  # which may run finalizers
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Finish the commit in progress and unlock the folders; a run without a commit leaves no files."""
        self._join()
        with self._changed:
            while self._held:
                self._changed.wait(0.1)
        self.nvme.close()
        if self._new:
            for folder in self.folders:
                with contextlib.suppress(OSError):
                    folder.wipe()
        for folder in self.folders if not self.nvme.hung else ():  # else a late write could hit another run
            folder.close()
