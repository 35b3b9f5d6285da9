"""`python3 dev.py faults`: every request of a small training with every kind of fault, kills and power cuts.

Prints a table; ends with 1 where a result was wrong, a process hung, or something leaked.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import trials
from children import Child
from infinity.aio import faults
from trials import STEPS

KINDS = {
    "EIO": -errno.EIO,
    "ENOSPC": -errno.ENOSPC,
    "EAGAIN": -errno.EAGAIN,
    "EINTR": -errno.EINTR,
    "short, inside a block": 512,
    "short, one block": 4096,
    "delayed, others first": faults.DELAY,
    "one bit flipped": faults.FLIP,
    "torn write or read": faults.TORN,
    "lost write or read": faults.LOST,
    "no answer": faults.HANG,
}
TRANSIENT = {"EAGAIN", "EINTR", "short, inside a block", "short, one block", "delayed, others first"}
LIES = {"torn write or read", "lost write or read"}
GENERATED = ("EIO", "EAGAIN", "short, one block", "delayed, others first", "one bit flipped")
"""Faults that meet a training which generates between its steps."""
NOT_SAVED = {"delayed updates"}
"""Kinds whose state a checkpoint does not have in the middle of a training."""
RANKS = 2
LEAST_MEMORY = {"fp32": "128KiB", "int8": "256KiB"}
"""By the type of moments: with more, fewer units' updates are made ahead in a durable run."""
UNDECIDED_S = 0.01
"""Behind a backward, for which its updates are written, or some are."""
DISTURBED = 3
"""Steps of a training with a fault."""
COLUMNS = ("tried", "same bits", "named error, then resumed", "both generations damaged, named", "WRONG")


class Bench:
    """Runs trials, a few at a time, and counts how they end."""

    def __init__(self, place, jobs, seed):
        self.place, self.jobs, self.seed = Path(place), jobs, seed
        self.counts = {}
        self.complaints = []
        self.killed = Counter()
        """By what was going on."""
        self._plain = {}
        self._seconds = {}
        """What an undisturbed run takes beside others, by its kind, so that kills fall into all of it."""

    def folder(self):
        return Path(tempfile.mkdtemp(prefix="trial-", dir=self.place))

    def plain(self, settings, steps=STEPS):
        """What an undisturbed run of these settings gives."""
        key = (*trials.settings_key(settings), settings.get("blocks"), steps)
        if key not in self._plain:
            folder, began = self.folder(), time.monotonic()
            self._plain[key] = trials.plain({**settings, "durable": True}, str(folder), steps)
            shutil.rmtree(folder)
            self._seconds.setdefault(settings.get("kind", ""), 1.5 * (time.monotonic() - began))
        return self._plain[key]

    def run(self, name, waiting):
        """Run generators, each of which yields children and returns how it ended."""
        counts = self.counts.setdefault(name, Counter())
        active = []
        waiting = iter(waiting)
        while True:
            while len(active) < self.jobs and (one := next(waiting, None)) is not None:
                active.append([one, next(one)])
            if not active:
                return
            for slot in list(active):
                if not slot[1].over():
                    continue
                try:
                    slot[1] = slot[0].send(slot[1])
                except StopIteration as stop:
                    active.remove(slot)
                    outcome, complaint = stop.value
                    counts["tried"] += 1
                    counts[outcome] += 1
                    if complaint:
                        self.complaints.append(f"{name}: {complaint}")
                        print(f"  {name}: {complaint}"[:600], flush=True)
            time.sleep(0.001)

    def finish(self, folder, settings, at_least, said, steps=STEPS):
        """Resume in another child, to the end; return what is wrong with it, None for nothing."""
        expected = self.plain(settings, steps)
        child = yield Child(lambda say: trials.train(say, str(folder), steps, **settings))
        lines = [*said, *child.said]
        return _complaint(expected, lines, child, at_least, steps)

    def finish_after_a_lie(self, folder, settings, at_least, said):
        """The same where the disk has lied: damage that is named is the older generation's turn."""
        complaint = yield from self.finish(folder, settings, at_least, said, DISTURBED + 1)
        if complaint is None or not complaint.startswith("CorruptionError"):
            return complaint, "same bits" if at_least == DISTURBED else "named error, then resumed"
        older = {**settings, "resume": {"older": True}}
        complaint = yield from self.finish(folder, older, 0, said, DISTURBED + 1)
        if complaint is not None and complaint.startswith(("CorruptionError", "CheckpointError")):
            return None, "both generations damaged, named"
        return complaint, "named error, then resumed"

    # The sweeps

    def fault(self, kind, nth, settings):
        """One fault at one piece."""
        folder = self.folder()
        try:
            child = yield Child(trials.with_fault(nth, KINDS[kind], str(folder), settings))
            said = child.last
            where = f"{kind} at piece {nth} of {settings}"
            if "end" not in said:
                return "WRONG", f"{where}: {child.said[-1:]} status {child.status}"
            if said.get("leaked"):
                return "WRONG", f"{where}: leaked {said['counts']}"
            if said["end"] != "done" and kind in TRANSIENT:
                return "WRONG", f"{where}: {said['message']}"
            at_least = said["committed"] or 0
            if kind in LIES:
                complaint, outcome = yield from self.finish_after_a_lie(
                    folder, settings, at_least, child.said
                )
            else:
                complaint = yield from self.finish(folder, settings, at_least, child.said, DISTURBED + 1)
                outcome = "same bits" if said["end"] == "done" else "named error, then resumed"
            return ("WRONG", f"{where}: {complaint}") if complaint else (outcome, None)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def kill(self, number, kind=""):
        """Kill at random moments, up to three times, in whatever is going on. kind: of fragile_kinds."""
        rng = trials.rng_of(f"{self.seed} kill {number}")
        settings = {**trials.choose(rng), "kind": kind}
        self.plain(settings)
        folder, said, at_least = self.folder(), [], 0
        save = str(folder / "saved") if rng.random() < 0.3 and kind not in NOT_SAVED else None
        try:
            for turn in range(rng.randint(1, 3)):
                child = Child(lambda say: trials.train(say, str(folder), save=save, **settings))
                child.end_s = time.monotonic() + rng.random() * self._seconds[kind]
                over = child.over
                child.over = lambda over=over, child=child: _over_or_killed(over, child)
                child = yield child
                said += child.said
                if child.status == signal.SIGKILL:
                    now = [line["now"] for line in child.said if "now" in line]
                    self.killed[now[-1] if now else "resume" if turn else "Init"] += 1
                at_least = max([at_least, *(line.get("committed") or 0 for line in child.said)])
            complaint = yield from self.finish(folder, settings, at_least, said)
            return (
                ("WRONG", f"seed {self.seed}, kill {number}, {settings}: {complaint}")
                if complaint
                else ("same bits", None)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def kill_undecided(self, number):
        """Kill between the backward, which makes updates, and step(), which decides them."""
        rng = trials.rng_of(f"{self.seed} undecided {number}")
        settings = {**trials.choose(rng), "kind": "speculation"}
        settings["host_memory"] = LEAST_MEMORY[settings["state_dtype"]]
        self.plain(settings)
        folder, moment = self.folder(), (rng.randint(1, STEPS), rng.random() * UNDECIDED_S)
        where = f"seed {self.seed}, undecided {number} at {moment}, {settings}"
        try:
            child = yield Child(lambda say: trials.train(say, str(folder), undecided=moment, **settings))
            if child.status != signal.SIGKILL:
                return "WRONG", f"{where}: {child.said[-1:]} status {child.status}, expected to be killed"
            made = child.last["undecided"]
            self.killed["before step(), updates made" if made else "before step(), none made"] += 1
            complaint = yield from self.finish(folder, settings, child.last.get("committed") or 0, child.said)
            return ("WRONG", f"{where}: {complaint}") if complaint else ("same bits", None)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def kill_ranks(self, number, **more):
        """Kill one rank, and at once or later the others too, up to three times."""
        rng = trials.rng_of(f"{self.seed} ranks {number}")
        update = rng.choice(["forward", "backward", "auto"])
        settings = {"update": update, "shared_memory": False, **more}
        expected = yield from self.plain_ranks(settings)
        folder, at_least = self.folder(), 0
        try:
            for _ in range(rng.randint(1, 3)):
                team = trials.together(str(folder), RANKS, **settings)
                moment = time.monotonic() + rng.random() * expected.seconds
                for child in rng.sample(team.children, RANKS):
                    child.end_s, over = moment, child.over
                    child.over = lambda over=over, child=child: _over_or_killed(over, child)
                    moment += rng.choice([0, rng.random() / 5, 10])  # as torchrun ends the others
                yield team
                self.killed["training with ranks"] += sum(
                    one.status == signal.SIGKILL for one in team.children
                )
                at_least = max([at_least, *(one.get("committed") or 0 for one in team.last)])
            where = f"seed {self.seed}, ranks {number}, {settings}"
            return (yield from self.finish_ranks(folder, settings, at_least, where))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def cut_ranks(self, number, **more):
        """Cut the power of a machine's ranks, of all at a random event of one's store."""
        rng = trials.rng_of(f"{self.seed} cut of ranks {number}")
        update, which = rng.choice(["forward", "backward", "auto"]), rng.randrange(RANKS)
        settings = {"update": update, "shared_memory": False, **more}
        expected = yield from self.plain_ranks(settings)
        folder = self.folder()
        journals = [folder / f"journal-{rank}" for rank in range(RANKS)]
        nth = rng.randint(1, int(expected.last[which]["pieces"] * 1.2))
        try:
            before = trials.cut_off_together(nth, which, journals)
            team = yield trials.together(str(folder), RANKS, before, **settings)
            at_least = max([0, *(one.get("committed") or 0 for one in team.last)])
            for journal in journals:
                trials.lose_power(journal, rng)
            where = f"seed {self.seed}, cut of ranks {number} at {nth} of {which}, {settings}"
            return (yield from self.finish_ranks(folder, settings, at_least, where))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def finish_ranks(self, folder, settings, at_least, where):
        """Resume ranks, to the end; return how that ended, and what is wrong with it."""
        expected = yield from self.plain_ranks(settings)
        team = yield trials.together(str(folder), RANKS, **settings)
        for child, losses, plain in zip(team.children, team.losses, expected.losses, strict=True):
            if child.status or child.last["first"] < at_least or losses.items() - plain.items():
                return "WRONG", f"{where}: {child.said}"
        same = [one["digest"] for one in team.last] == [one["digest"] for one in expected.last]
        return ("same bits", None) if same else ("WRONG", f"{where}: other bits")

    def plain_ranks(self, settings):
        """What undisturbed ranks give."""
        key = "ranks", *settings.items()
        if key not in self._plain:
            folder, began = self.folder(), time.monotonic()
            team = self._plain[key] = yield trials.together(str(folder), RANKS, **settings)
            team.seconds = time.monotonic() - began
            shutil.rmtree(folder)
        return self._plain[key]

    def cut(self, number, kind=""):
        """Cut the power at a random event of the store. kind: of fragile_kinds."""
        rng = trials.rng_of(f"{self.seed} cut {number}")
        settings = {**trials.choose(rng), "kind": kind}
        expected = self.plain(settings)
        folder = self.folder()
        nth = rng.randint(1, int(expected["pieces"] * 1.2))
        try:
            child = yield Child(trials.cut_off(nth, str(folder), str(folder / "journal"), settings))
            at_least = max([0, *(line.get("committed") or 0 for line in child.said)])
            trials.lose_power(folder / "journal", rng)
            complaint = yield from self.finish(folder, settings, at_least, child.said)
            return (
                ("WRONG", f"seed {self.seed}, cut {number} at {nth}, {settings}: {complaint}")
                if complaint
                else ("same bits", None)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def undecided(self, kills):
        """Kill so many trainings right before step() decides updates that they have made."""
        made = "before step(), updates made"
        numbers = itertools.takewhile(lambda _: self.killed[made] < kills, itertools.count())
        self.run("kill -9 before step() decides", map(self.kill_undecided, numbers))

    def others(self, each):
        """Kill, cut off, and disturb each of the other kinds of training so many times."""
        import fragile_kinds  # and with it transformers, before any child is forked

        fragile_kinds.warm_up()
        try:
            for kind in fragile_kinds.KINDS:
                self.run(f"kill -9: {kind}", (self.kill(number, kind) for number in range(each)))
                self.run(f"power cut: {kind}", (self.cut(number, kind) for number in range(each)))
            settings = {"update": "forward", "state_dtype": "fp32", "kind": "generation"}
            pieces = self.plain(settings, DISTURBED)["pieces"]
            rng = trials.rng_of(f"{self.seed} generation")
            drawn = [(rng.choice(GENERATED), rng.randint(1, pieces), settings) for _ in range(each)]
            self.run("a fault: generation", itertools.starmap(self.fault, drawn))
            self.run(
                "kill -9: ranks that share memory",
                (self.kill_ranks(number, shared_memory=True) for number in range(each)),
            )
            self.run(
                "power cut: ranks that share memory",
                (self.cut_ranks(number, shared_memory=True) for number in range(each)),
            )
        finally:
            fragile_kinds.clean_up()

    def measure(self):
        """How long an undisturbed run takes beside others, so that kills fall into all of it."""
        folders = [self.folder() for _ in range(self.jobs)]
        began = time.monotonic()
        children = [Child(lambda say, folder=folder: trials.train(say, str(folder))) for folder in folders]
        while children:
            children = [child for child in children if not child.over()]
            time.sleep(0.001)
        self._seconds[""] = 1.1 * (time.monotonic() - began)
        for folder in folders:
            shutil.rmtree(folder)


def _over_or_killed(over, child):
    if time.monotonic() >= child.end_s and child.status is None:
        os.kill(child.pid, signal.SIGKILL)
    return over()


def _complaint(expected, lines, child, at_least, steps):
    """Say what is wrong with a run that was resumed to its end, by all that its processes said."""
    last = {key: value for line in child.said for key, value in line.items()}
    if "hang" in last or "crash" in last or child.status:
        return f"{last.get('crash', 'hang' if 'hang' in last else 'no end')} (status {child.status})"
    if last["first"] < at_least:
        return f"resumed at step {last['first']}, but step {at_least} was committed"
    for line in lines:
        if "loss" in line and line["loss"] != expected["losses"][line["step"] - 1]:
            there = expected["losses"][line["step"] - 1]
            return f"the loss of step {line['step']} is {line['loss']}, expected {there}"
    if last["digest"] != expected["digest"] or last["committed"] != steps:
        return f"other bits in the end, or not committed: {last}"
    return None


def table(counts):
    """Lay the counts out."""
    width = max(map(len, counts))
    lines = [" " * width + "  " + "  ".join(COLUMNS)]
    for name, row in counts.items():
        cells = "  ".join(f"{row[column] or '':>{len(column)}}" for column in COLUMNS)
        lines.append(f"{name:<{width}}  {cells}")
    return "\n".join(lines)


def main(arguments):
    """Run all sweeps."""
    parser = argparse.ArgumentParser(prog="dev.py faults", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=60, help="runs of two ranks, one or both killed")
    parser.add_argument("--cuts", type=int, default=300)
    undecided = "kills where updates are made and step() has not decided them"
    parser.add_argument("--undecided", type=int, default=60, help=undecided)
    others = "kills, and power cuts, of each other kind of training: experts, foreign files, generation, ..."
    parser.add_argument("--each", type=int, default=5, help=others)
    parser.add_argument("--every", type=int, default=1, help="disturb every so many requests (1: all)")
    parser.add_argument("--seed", type=int, default=2104)
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="trials at once")
    parser.add_argument("--place", default=None, help="a folder on the disk to use")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="infinity-faults-", dir=options.place) as place:
        bench = Bench(place, options.jobs, options.seed)
        warm = bench.folder()
        trials.warm_up(str(warm))
        shutil.rmtree(warm)
        bench.measure()
        settings = {"update": "forward", "host_memory": "256KiB", "state_dtype": "fp32", "blocks": 1}
        pieces = bench.plain(settings, DISTURBED)["pieces"]
        print(f"seed {options.seed}; {pieces} requests in {DISTURBED} steps; {place}", flush=True)
        for kind in KINDS:
            numbers = range(1, pieces + 1, options.every)
            bench.run(kind, (bench.fault(kind, nth, settings) for nth in numbers))
            print(f"{time.monotonic() - began:6.0f} s  {kind}", flush=True)
        numbers = itertools.takewhile(lambda _: bench.killed.total() < options.kills, itertools.count())
        bench.run("kill -9, up to three times", map(bench.kill, numbers))
        print(f"{time.monotonic() - began:6.0f} s  kills", flush=True)
        bench.run("kill -9 of one rank or two", map(bench.kill_ranks, range(options.ranks)))
        print(f"{time.monotonic() - began:6.0f} s  kills of ranks", flush=True)
        bench.run("power cut", (bench.cut(number) for number in range(options.cuts)))
        print(f"{time.monotonic() - began:6.0f} s  power cuts", flush=True)
        bench.undecided(options.undecided)
        print(f"{time.monotonic() - began:6.0f} s  kills before step()", flush=True)
        if options.each:
            bench.others(options.each)
    print(f"{time.monotonic() - began:6.0f} s\n\n{table(bench.counts)}")
    where = ", ".join(f"{what} {times}" for what, times in bench.killed.most_common())
    print(f"{bench.killed.total()} kills: {where}")
    return 1 if bench.complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
