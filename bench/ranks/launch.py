"""A contestant on several ranks: processes that are started together, watched and measured."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from infinity.bench.engine import contestant
from infinity.bench.engine.runs import SHAPES, Environment, Model, RunError, counts
from infinity.bench.ports import free_port
from infinity.cli.interrupted import held_back
from infinity.ranks.machines import LOCAL_SIZE

LOOKS_S = 0.2
"""Seconds between two looks at the memory of the ranks, which cost a millisecond for each GiB."""


@dataclass(frozen=True, slots=True)
class RankRun:
    """One run of several ranks. The fields' names are the keys of the JSON."""

    parameters: int
    seconds: float
    """Per step: the median of the steady steps of the slowest rank in each."""
    sent_nbytes: float
    """By all ranks in a step: mean of the steady steps."""
    between_nbytes: float
    """Of that, what goes from one machine to another, where they are simulated."""
    moved_nbytes: float
    """Read from and written to the disk by all ranks, likewise."""
    collectives: int
    """Of a rank in a step."""
    peak_rank_nbytes: int
    """The most resident memory of a rank above its imports."""
    peak_machine_nbytes: int
    """The most that all ranks took together above their imports, shared pages counted once."""
    loss: float
    """Of the last step, mean of the ranks."""
    all_seconds: list[float]
    versions: dict[str, str]


def measure_ranks(
    environment: Environment,
    kind: str,
    ranks: int,
    model: Model,
    folder: Path,
    settings: dict[str, Any],
    local_size: int | None = None,
) -> RankRun:
    """Train a contestant on so many ranks of this machine, with its files in a temporary folder.

    local_size: so many neighbours count as a machine; by default all.

    Raises: RunError with the error's text, or with the last lines of the rank that failed first.
    """
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=folder))
        outs = [stack.enter_context(_nameless("result")) for _ in range(ranks)]
        said = [stack.enter_context(_nameless("said")) for _ in range(ranks)]
        spec = {"kind": kind, "shape": SHAPES[model.shape], "steps": model.steps, "tokens": model.tokens}
        spec |= {"nvme": name, "settings": settings}
        local_size = local_size or ranks
        group = _group(ranks, local_size)
        with _started(environment, spec, group, outs, said) as processes:
            peak, failed = _watch(processes)
        results = [_read_json(out) for out in outs]
        errors = [one["error"] for one in results if "error" in one]
        if errors:
            raise RunError(f"{kind} on {ranks} ranks, {model.shape}: {errors[0]}")
        for number in failed or [number for number, one in enumerate(results) if not one]:
            last = "\n".join(_text(said[number]).splitlines()[-15:])
            raise RunError(
                f"rank {number} of {ranks} of {kind} on {model.shape} ended with exit code "
                f"{processes[number].returncode}; its last lines:\n{last}"
            )
    return run_of(results, peak, local_size)


def run_of(results: Sequence[dict[str, Any]], peak_nbytes: int, local_size: int) -> RankRun:
    """Put what the ranks have measured together. peak_nbytes: of all, imports included. local_size: how many
    neighbours are on a machine.
    """
    last = len(results[0]["steps"]) - 1
    steady = [number for number in range(last + 1) if counts(number)] or [last]
    seconds = [max(one["steps"][number]["seconds"] for one in results) for number in range(last + 1)]

    def mean(*path: str) -> float:
        total = 0.0
        for result in results:
            for number in steady:
                value: Any = result["steps"][number]
                for key in path:
                    value = value[key]
                total += value
        return total / len(steady)

    sent = _sent(results, steady)
    return RankRun(
        parameters=results[0]["parameters"],
        seconds=float(statistics.median(seconds[number] for number in steady)),
        sent_nbytes=sum(sent.values()) / len(steady),
        between_nbytes=sum(
            nbytes for (one, other), nbytes in sent.items() if one // local_size != other // local_size
        )
        / len(steady),
        moved_nbytes=mean("traffic", "read") + mean("traffic", "written"),
        collectives=results[0]["collectives"],
        peak_rank_nbytes=max(max(one["peak_nbytes"], one["build_peak_nbytes"]) for one in results),
        peak_machine_nbytes=max(0, peak_nbytes - sum(one["baseline_pss_nbytes"] for one in results)),
        loss=statistics.fmean(one["steps"][-1]["loss"] for one in results),
        all_seconds=[round(one, 4) for one in seconds],
        versions=results[0]["versions"],
    )


def _sent(results: Sequence[dict[str, Any]], steps: Sequence[int]) -> Counter[tuple[int, int]]:
    """Return the bytes that each rank has sent to each other one in these steps."""
    by_ports: dict[str, tuple[int, int]] = {}
    for rank, result in enumerate(results):
        for number in steps:
            for ports, nbytes in result["steps"][number]["sent"].items():
                before = by_ports.get(ports, (rank, 0))[1]
                by_ports[ports] = rank, before + nbytes
    found: Counter[tuple[int, int]] = Counter()
    for ports, (rank, nbytes) in by_ports.items():
        here, there = ports.split("-")
        other, _ = by_ports.get(f"{there}-{here}", (rank, 0))  # that of a connection closed since: its own
        found[rank, other] += nbytes
    return found


def _nameless(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "w+b")  # the disk may be full


def _read_json(file: IO[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_text(file) or "{}")
    return found


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _group(ranks: int, local_size: int) -> dict[str, str]:
    """Return the environment of a group on this machine, but for the rank."""
    port = free_port()
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local_size)}
    if local_size < ranks:
        sizes[LOCAL_SIZE] = str(local_size)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return {**sizes, **address, "OMP_NUM_THREADS": "1"}


@contextmanager
def _started(
    environment: Environment,
    spec: dict[str, Any],
    group: dict[str, str],
    outs: Sequence[IO[bytes]],
    said: Sequence[IO[bytes]],
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks; at the end, also by an error or an interrupt, none of their processes is left."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, (out, text) in enumerate(zip(outs, said, strict=True)):
            own = json.dumps({**spec, "out": f"/proc/self/fd/{out.fileno()}"})
            numbers = {"RANK": str(number), "LOCAL_RANK": str(number % int(group["LOCAL_WORLD_SIZE"]))}
            with held_back():  # an interrupt inside Popen would leave an unknown process running
                processes.append(
                    subprocess.Popen(  # noqa: S603 (the caller's own Python)
                        [environment.python, *environment.options, str(contestant.__file__), own],
                        env={**os.environ, **environment.variables, **group, **numbers},
                        stdout=text,
                        stderr=subprocess.STDOUT,
                        pass_fds=[out.fileno()],
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _watch(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, list[int]]:
    """Wait until all ranks have ended, or one has failed; return the most memory that they took together, and
    the numbers of those that have failed.
    """
    peak = 0
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        peak = max(peak, sum(contestant.proportional(process.pid) for process in processes))
        time.sleep(LOOKS_S)
    if None in codes:
        time.sleep(5 * LOOKS_S)  # the others may have something to say of it
    return peak, [number for number, code in enumerate(codes) if code]
