"""Snapshots: copies of a durable run's last step, taken while the training goes on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import nn

from infinity.checkpoint.atomic import Older, new_folder, sync
from infinity.checkpoint.resume import durable_of
from infinity.checkpoint.sharedfolder import shared_folder
from infinity.durable.commit import Commit
from infinity.durable.committer import Durable
from infinity.durable.folder import RUN, run_files, state_name
from infinity.errors import UnsupportedError

_FICLONE = 0x40049409  # linux/fs.h
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)
_COPIED_NBYTES = 4 << 20
_KIND = "an older snapshot, or a run that no process has open"


class Snapshot:
    """A snapshot in progress.

    Attributes:
        folder: the folder of the snapshot.
        step: the committed step that it holds.
        cloned: whether the file system shares the blocks (reflink), which takes no time and no space.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step, self.cloned = folder, step, False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, copy: Callable[[], None]) -> None:
        """Call `copy` on a thread; `wait` raises its error."""

        def run() -> None:
            try:
                copy()
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                self._error = error

        self._thread = threading.Thread(target=run, name="infinity-snapshot")
        self._thread.start()

    def wait(self) -> None:
        """Return when the folder is complete and on disk.

        Raises: the error that made it fail; then there is no folder.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def snapshot(model: nn.Module, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Snapshot:
    """Copy the last step of a durable run to a new folder, from which it can be resumed like the run itself.

    The step is committed first. If the file system can (reflink: xfs, btrfs), the copy shares the run's
    blocks; otherwise a thread copies what the commit names. Training goes on meanwhile, but no further step
    is committed. The folder appears when everything is on disk, or not at all. To resume from it, set
    nvme=FOLDER, or for a striped run nvme=[FOLDER/path0, FOLDER/path1, ...]. overwrite: an older snapshot
    there, or a run that no process has open, is replaced in one step once the new one is complete.

    All ranks call this, with the same folder, on a file system that they share. Several ranks copy their
    files before this returns: they commit together, so none can train on while another copies. As many ranks
    have to resume from the snapshot as the run has.

    Raises: FileExistsError for a folder that may not be replaced; ConfigError without `durable`, or if the
    ranks do not share the folder; UnsupportedError for several ranks with striped state; OSError; RanksError
    if another rank failed.
    """
    durable = durable_of(model)
    at = Path(folder).absolute()
    older = Older(_KIND, run_files, overwrite)
    if durable.ranks.size > 1:
        return _of_ranks(durable, at, older)
    filling = contextlib.ExitStack()
    commit = durable.hold()
    taken = Snapshot(at, commit.step)
    try:
        place = filling.enter_context(new_folder(at, older))
        copying = _Copying(durable, commit, place)
        taken.cloned = copying.cloned
    except BaseException as error:
        durable.release()
        filling.__exit__(type(error), error, None)
        raise

    def copy() -> None:
        try:
            with filling:
                copying.finish()
        finally:
            durable.release()

    taken.start(copy)
    if taken.cloned:
        taken.wait()
    return taken


def _of_ranks(durable: Durable, at: Path, older: Older) -> Snapshot:
    """Copy every rank's files, all at the same step."""
    ranks = durable.ranks
    with ranks.together(f"looking at what a snapshot in {at} holds"):
        if (count := len(durable.folders)) > 1:
            raise UnsupportedError(
                f"snapshot: rank {ranks.rank} of {ranks.size} has its state in {count} folders, which "
                "a snapshot of several ranks cannot hold. Give nvme at most as many folders as a machine has "
                "ranks; or use infinity.save."
            )
    try:
        with ranks.together(f"committing the step that a snapshot in {at} holds"):
            commit = durable.hold()
        taken = Snapshot(at, commit.step)
        with shared_folder(ranks, at, older) as place, ranks.together(f"copying to {at}"):
            copying = _Copying(durable, commit, place)
            taken.cloned = copying.cloned
            copying.finish()
    finally:
        durable.release()
    return taken


class _Copying:
    """The copy of one rank's files: created, and cloned if the file system can."""

    def __init__(self, durable: Durable, commit: Commit, place: Path) -> None:
        self._commit, self._place = commit, place
        self._files: list[tuple[int, int]] = []
        try:
            for pair in _files(durable, commit, place):
                self._files.append(pair)
            self.cloned = all(_clone(source, target) for source, target in self._files)
        except BaseException:
            self._close()
            raise

    def finish(self) -> None:
        """Copy the files that are not cloned, and return when everything is on disk."""
        try:
            for path, (source, target) in enumerate(self._files):
                if not self.cloned:
                    _copy(source, target, sorted(set(_ranges(self._commit, path))))
                os.fsync(target)
            _write_commit(self._place, self._commit)
        finally:
            self._close()

    def _close(self) -> None:
        for pair in self._files:
            for fd in pair:
                os.close(fd)


def _place(folder: Path, commit: Commit, path: int) -> Path:
    above = folder if commit.paths == 1 else folder / f"path{path}"
    return above / RUN / f"rank{commit.rank}"


def _files(durable: Durable, commit: Commit, folder: Path) -> Iterator[tuple[int, int]]:
    """Create the files of the copy; yield the descriptors of each file and of its copy."""
    for path, source in enumerate(durable.nvme.descriptors()):
        place = _place(folder, commit, path)
        for one in reversed([place, *place.parents]):
            if one.is_relative_to(folder) and one != folder:
                one.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(place / state_name(commit.run, path), flags, 0o600)
        yield os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC), target


def _clone(source: int, target: int) -> bool:
    """Clone a file, so that both share all blocks; return False if the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _NO_CLONE:
            raise
        return False
    return True


def _copy(source: int, target: int, ranges: list[tuple[int, int]]) -> None:
    """Copy byte ranges to a preallocated file, dropping the source from the page cache."""
    os.posix_fallocate(target, 0, os.fstat(source).st_size)
    for start, stop in ranges:
        for at in range(start, stop, _COPIED_NBYTES):
            data = os.pread(source, min(_COPIED_NBYTES, stop - at), at)
            os.pwrite(target, data, at)
            os.posix_fadvise(source, at, len(data), os.POSIX_FADV_DONTNEED)


def _ranges(commit: Commit, path: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of one path's file that hold what a commit names."""
    for record in commit.records:
        for field in record.fields:
            if field.in_files is not None:
                continue  # the snapshot's commit names the checkpoint's files as well
            for side in {side for _, side in field.runs}:
                place = field.sides[side]
                if place is None:
                    continue
                part = place if commit.paths == 1 else place[1].get(str(path))
                if part is not None:
                    yield part[0], part[0] + part[1]


def _write_commit(folder: Path, commit: Commit) -> None:
    """Write the commit, and in further folders of a striped run the mark of which run they belong to."""
    first = _place(folder, commit, 0)
    for path in range(commit.paths):
        name = f"commit-{commit.sequence % 2}" if path == 0 else "part-of"
        data = commit.to_bytes() if path == 0 else f"{commit.run} {first}\n".encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        place = _place(folder, commit, path)
        fd = os.open(place / name, flags, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        for one in [place, *place.parents]:
            if one.is_relative_to(folder):
                sync(one)
