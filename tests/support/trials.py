"""Trials of a durable run in forked children: with a fault at one request, killed, or cut off from power.

Each child trains tests/fragile's model for a few steps, and tells its parent, line by line, what it did.
What it leaves behind is then resumed in another child, and has to end with the bits of a run that nothing
disturbed.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import struct
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # warmed up for the children: what makes a torch Optimizer imports it
import xxhash

import fragile
import infinity
from children import Child, ended
from infinity import CheckpointError, CorruptionError, EngineFailedError, HostMemoryError
from infinity import aio as product_aio
from infinity.aio import faults
from infinity.bench.ports import free_port
from infinity.durable.folder import RunFolder
from infinity.storage import nvme
from infinity.storage.nvme import NvmeStore
from infinity.tensors import as_bytes

STEPS = 6
NAMED = (product_aio.IoError, product_aio.IoTimeoutError, product_aio.StorageFullError, CorruptionError)
NAMED += (EngineFailedError, CheckpointError, HostMemoryError)


def warm_up(folder):
    """Train once in the parent, so that what loads once is loaded before any child is forked."""
    torch.set_num_threads(1)
    os.environ["INFINITY_MEASURE"] = "0"
    for _ in range(2):
        run = fragile.Run(folder, blocks=1)
        run.train(2)
        infinity.commit(run.model)
        digest(run)
        run.kill()
        del run
    gc.collect()
    gc.freeze()  # else each child walks, and copies, all that torch has made


def begin(folder, *, kind="", **settings):
    """Begin, or resume, fragile's training, or one of fragile_kinds'."""
    if not kind:
        return fragile.Run(folder, **settings)
    import fragile_kinds  # and with it transformers

    return fragile_kinds.begin(folder, kind=kind, **settings)


def digest(run):
    """One number for every bit that counts."""
    found = xxhash.xxh3_128()
    for name, tensors in run.state().items():
        found.update(name.encode())
        for tensor in tensors:
            found.update(as_bytes(tensor))
    return found.hexdigest()


def kill_undecided(say, run, step, delay_s):
    """Kill this process so long behind the backward of a step, before step() decides its updates; say how
    many units have some that are made.
    """

    def kill(*_):
        if run.done == step:
            time.sleep(delay_s)
            say(undecided=len(run.engine.speculation._of))
            os.kill(os.getpid(), signal.SIGKILL)

    run.optimizer.register_step_pre_hook(kill)


def train(say, folder, steps=STEPS, save=None, copy=None, undecided=None, **settings):
    """Begin or go on, to the end; say each loss, what is committed, and the digest in the end. After the
    third step save, or copy the run. undecided: arguments of kill_undecided.
    """
    torch.set_num_threads(1)
    run = begin(folder, **settings)
    if undecided is not None:
        kill_undecided(say, run, *undecided)
    say(first=run.first, now="training")
    while run.done < steps:
        loss = run.step()
        say(step=run.done, loss=loss, committed=run.committed)
        if save is not None and run.done == 3:
            say(now="save")
            infinity.save(run.model, run.optimizer, save, overwrite=True)
            say(now="training")
        if copy is not None and run.done == 3:
            say(copied=infinity.snapshot(run.model, copy).step)
    infinity.commit(run.model)
    say(committed=run.committed)
    say(digest=digest(run), now="the end", pieces=run.engine.nvme_store.engine.statistics().pieces)
    run.kill()


def plain(settings, folder, steps=STEPS):
    """Return what an undisturbed run says: its losses, its digest, the pieces that its requests make."""

    def work(say):
        torch.set_num_threads(1)
        run = begin(folder, **settings)
        losses = run.train(steps)
        infinity.commit(run.model)
        say(losses=list(losses.values()), digest=digest(run))
        say(pieces=run.engine.nvme_store.engine.statistics().pieces)
        run.kill()

    return ended(work)


class Team:
    """Children that train together, to be waited for as one."""

    def __init__(self, children):
        self.children, self._left = children, list(children)

    def over(self):
        """Whether all have ended."""
        self._left = [child for child in self._left if not child.over()]
        return not self._left

    @property
    def last(self):
        """What each said, by key."""
        return [child.last for child in self.children]

    @property
    def losses(self):
        """Each one's losses by step."""
        return [{line["step"]: line["loss"] for line in one.said if "loss" in line} for one in self.children]


def together(folder, ranks, before=lambda _rank: None, steps=STEPS, **settings):
    """Start ranks of one durable training; `before` is called in each first."""
    port = free_port()

    def rank(number):
        def work(say):
            os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where torch tells of each connection that is lost
            infinity.ranks.group._GRACE_S = 0.3  # one of the others was killed, and will not answer
            before(number)
            train(say, folder, steps, timeout_s=20, **settings)

        return work

    return Team([Child(rank(number)) for number in range(ranks)])


# A fault at the nth piece that is moved


def resources():
    """Count descriptors and threads."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208


def with_fault(nth, result, folder, settings, steps=3):
    """Return the work of a child that trains with a fault at its nth piece, and says how it ended."""

    def work(say):
        torch.set_num_threads(1)
        os.environ["INFINITY_IO_TIMEOUT"] = "0.4" if result == faults.HANG else "30"
        real = product_aio.open_engine

        def opened(*args, **kwargs):
            engine = real(*args, **kwargs)
            faults.inject(engine, nth, result)
            return engine

        before = resources()
        nvme.aio.open_engine = opened
        run = None
        try:
            try:
                run = begin(folder, **settings)
                nvme.aio.open_engine = real
                for _ in range(steps):
                    say(step=run.done + 1, loss=run.step())
                infinity.commit(run.model)
                say(end="done", committed=run.committed)
            except NAMED as error:
                committed = None if run is None else run.committed
                say(end=type(error).__name__, message=str(error), committed=committed)
                del error
            if run is not None:
                run.kill()
        finally:
            nvme.aio.open_engine = real
        del run
        if result != faults.HANG:
            after = resources()
            say(leaked=after[0] > before[0] or after[1] > before[1], counts=[before, after])

    return work


# A power cut


class PowerCut:
    """Notes what every write since the last flush has overwritten, and ends the process at the nth event, and
    before it those that `others` returns.
    """

    def __init__(self, journal, nth, others=lambda: ()):
        self.journal, self.nth, self.events = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND), nth, 0
        self._others = others
        self._lock = threading.Lock()
        self._entries = 0

    def event(self):
        self.events += 1
        if self.events == self.nth:
            for pid in (*self._others(), os.getpid()):
                os.kill(pid, signal.SIGKILL)
            time.sleep(60)

    def note(self, path, offset, old):
        with self._lock:
            head = json.dumps({"path": path, "offset": offset, "nbytes": len(old)}).encode()
            os.write(self.journal, struct.pack("<I", len(head)) + head + old)
            self._entries += 1
            return self._entries

    def flushed(self, first, last):
        head = json.dumps({"flushed": [first, last]}).encode()
        os.write(self.journal, struct.pack("<I", len(head)) + head)

    def watch(self):
        """Stand between the store and its disk."""
        write, sync, write_slot = NvmeStore.write, NvmeStore.sync, RunFolder.write_slot
        began = {}

        def noted_write(store, request):
            path = str(Path(f"/proc/self/fd/{store._file.fd}").readlink())
            offset = request.extent.offset + request.start
            self.note(path, offset, read_directly(path, offset, request.nbytes))
            self.event()
            transfer = write(store, request)
            self.event()
            return transfer

        def noted_sync(store):
            last, first = self._entries, began.get(store, 0)
            self.event()
            sync(store)
            self.flushed(first, last)
            began[store] = last
            self.event()

        def noted_slot(folder, number, data):
            path = Path(folder.path) / f"commit-{number}"
            entry = self.note(str(path), 0, path.read_bytes() if path.exists() else b"")
            real = os.fdatasync

            def torn(fd):
                os.fdatasync = real
                self.event()
                real(fd)

            os.fdatasync = torn
            try:
                write_slot(folder, number, data)
            finally:
                os.fdatasync = real
            self.flushed(entry - 1, entry)
            self.event()

        NvmeStore.write, NvmeStore.sync, RunFolder.write_slot = noted_write, noted_sync, noted_slot


def read_directly(path, offset, nbytes):
    """Read blocks past the page cache: a page there that a direct write cannot drop makes the next flush
    fail, as if the drive had.
    """
    with mmap.mmap(-1, nbytes) as memory:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            got = os.preadv(file, [memory], offset)
        finally:
            os.close(file)
        return memory[:got]


def lose_power(journal, rng):
    """Take back what was not flushed when the power went: each write whole, in part, or not at all."""
    data, at, entries = Path(journal).read_bytes(), 0, {}
    number = 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        head = json.loads(data[at + 4 : at + 4 + length])
        at += 4 + length
        if "flushed" in head:
            first, last = head["flushed"]
            for one in range(first + 1, last + 1):
                entries.pop(one, None)
            continue
        number += 1
        entries[number] = head["path"], head["offset"], data[at : at + head["nbytes"]]
        at += head["nbytes"]
    share = rng.random()
    for path, offset, old in reversed(entries.values()):
        if rng.random() > share:
            continue
        first = rng.randrange(0, len(old) + 1, 512) if rng.random() < 0.5 else 0
        last = len(old) if rng.random() < 0.5 else rng.randrange(first, len(old) + 1)
        with open(path, "r+b", buffering=0) as file:  # noqa: PTH123
            os.pwrite(file.fileno(), old[first:last], offset + first)
            if not old:
                os.ftruncate(file.fileno(), rng.randrange(0, os.fstat(file.fileno()).st_size + 1))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # as in read_directly
    return len(entries)


def cut_off(nth, folder, journal, settings):
    """Return the work of a child that trains until its power is cut."""

    def work(say):
        power = PowerCut(journal, nth)
        power.watch()
        train(say, folder, **settings)
        say(events=power.events)

    return work


def cut_off_together(nth, which, journals):
    """Return what is called in each rank first, so that the power of all is cut at the nth event of one.
    journals: of each rank, where its own is kept.
    """
    pids = mmap.mmap(-1, mmap.PAGESIZE)  # in common with what is forked

    def others():  # all have begun: nothing is written before the ranks have met
        return {*struct.unpack_from(f"{len(journals)}q", pids)} - {os.getpid()}

    def before(rank):
        struct.pack_into("q", pids, 8 * rank, os.getpid())
        PowerCut(str(journals[rank]), nth if rank == which else None, others).watch()

    return before


def choose(rng):
    """Draw the settings of a trial."""
    return {
        "update": rng.choice(["forward", "backward"]),
        "host_memory": rng.choice(["256KiB", "256KiB", "64MiB"]),
        "state_dtype": rng.choice(["fp32", "fp32", "int8"]),
        "durable": rng.choice([True, True, "every 2 steps"]),
    }


def settings_key(settings):
    """Name settings whose undisturbed runs are the same."""
    return settings.get("kind", ""), settings["update"], settings["state_dtype"]


def rng_of(seed):
    """Return a generator for one trial."""
    return random.Random(seed)
