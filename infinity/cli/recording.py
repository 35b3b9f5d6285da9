"""The files of `--timeline` and `--report`: checked first, recorded step by step, written last."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from infinity.cli.picture import SUFFIXES, Story, save
from infinity.engine.engine import Engine
from infinity.engine.stats import Stats
from infinity.errors import ConfigError
from infinity.timeline import Timeline, write_chrome_trace


class Recording:
    """A run's timeline, and the files to write it to; without files, nothing is recorded."""

    def __init__(self, trace: str | None, picture: str | None) -> None:
        """Check the files' names.

        Raises: ConfigError for an unknown suffix, a file that exists, a folder that does not, or a picture
        without matplotlib.
        """
        self._trace = None if trace is None else _new_file("timeline", trace, (".json",))
        self._picture = None if picture is None else _new_file("report", picture, SUFFIXES)
        if picture is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(f"report={picture!r} needs matplotlib: pip install matplotlib")
        self.timeline: Timeline | None = None
        self._engine: Engine | None = None
        self._before: Stats | None = None
        self._moved: list[dict[tuple[str, str], int]] = []

    def start(self, engine: Engine) -> None:
        """Start recording, if there is a file to write."""
        if self._trace is None and self._picture is None:
            return
        self._engine = engine
        self.timeline = engine.timeline
        self.timeline.start()
        self.timeline.sample_with(partial(memory_of, engine))

    def mark(self, when_s: float, now: Stats | None, process_nbytes: int) -> None:
        """Record the end of a step. process_nbytes: the process's memory above that of its imports."""
        if self.timeline is None or self._engine is None or now is None:
            return
        self.timeline.mark_step(when_s)
        for name, values in memory_of(self._engine).items():
            self.timeline.sample(name, when_s, values)
        self.timeline.sample("memory", when_s, {"nvme": now.nvme_nbytes, "process": process_nbytes})
        if self._before is not None:
            self._moved.append(moved(now.since(self._before)))
        self._before = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time inside the `with` as a phase of a step."""
        began = time.perf_counter()
        yield
        if self.timeline is not None:
            self.timeline.span("compute", name, began, time.perf_counter())

    def write(self, title: str, summary: Sequence[tuple[str, str]]) -> list[str]:
        """Stop, write the files, and return a line about each.

        Raises: OSError where a file cannot be written.
        """
        if self.timeline is None:
            return []
        self.timeline.stop()
        self.timeline.sample_with(None)
        lines = []
        if self._trace is not None:
            write_chrome_trace(self.timeline, self._trace)
            lines.append(f"timeline: {self._trace} (open it in ui.perfetto.dev)")
        if self._picture is not None:
            budget = None if self._before is None else self._before.budget_nbytes
            save(Story(title, self.timeline, self._moved, budget, summary), self._picture)
            lines.append(f"report: {self._picture}")
        if self.timeline.dropped:
            lines.append(
                f"the oldest {self.timeline.dropped:,} spans were dropped: the run was too long for them"
            )
        return lines


def memory_of(engine: Engine) -> dict[str, dict[str, int]]:
    """Return samples of an engine's bytes: "memory" by tier, and "host" by owner."""
    pinned = engine.host_store.held_nbytes
    host = {
        "slots": engine.budget.slots * engine.budget.slot_nbytes,
        "ahead": engine.residency.ahead_nbytes if engine.device.is_host else 0,
        "outgoing": engine.outgoing_share.held_nbytes,
        "gradients": max(0, engine.kept.held_nbytes - pinned),  # the lane may pin between the two
        "pinned": pinned,
    }
    room = engine.device.room
    here = (unit.resident_nbytes for unit in engine.units if unit.residence.processed)
    resident = sum(here) if room is None else room.ledger.held_nbytes
    return {"memory": {"device": resident, "host": sum(host.values())}, "host": host}


def moved(step: Stats) -> dict[tuple[str, str], int]:
    """Return the NVMe bytes of a step, by ("read" or "written", field)."""
    both = (("read", step.read_nbytes), ("written", step.written_nbytes))
    return {
        (verb, field): nbytes
        for verb, counted in both
        for (tier, field), nbytes in counted.items()
        if tier == "nvme" and nbytes
    }


def _new_file(what: str, name: str, suffixes: Sequence[str]) -> Path:
    path = Path(name)
    if path.suffix not in suffixes:
        raise ConfigError(f"{what}={name!r}: expected a name that ends in {' or '.join(suffixes)}")
    if path.exists():
        raise ConfigError(f"{what}={name!r} exists, and is never overwritten. Name another file.")
    if not path.parent.is_dir():
        raise ConfigError(f"{what}={name!r}: there is no folder {path.parent}. Make it, or name another one.")
    return path
