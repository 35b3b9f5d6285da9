"""`infinity bench ranks`: steps of several ranks on this machine, beside DDP, FSDP2 and DeepSpeed ZeRO-3.

    infinity bench ranks --nvme DIR --ranks 2 4 --tokens 16 --peer ddp --peer fsdp2 --json ranks.json
    infinity bench ranks --nvme DIR --ranks 1 2 4 --shared-memory  # the machine's memory, beside one rank's
    infinity bench ranks --nvme DIR --ranks 4 --local-size 2 --peer ddp  # as if on two machines

Ranks are processes over gloo, one thread each, that share the machine's cores. Contestants run in turn, in
rounds; figures are medians of the rounds. Bytes sent are the kernel's count on each rank's TCP connections,
so that all contestants are counted alike. The machine's memory is the sum of the ranks' proportional set
sizes, which count shared pages once; it is looked up several times a second.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.arguments import positive
from infinity.bench.engine import rival
from infinity.bench.engine.cases import ALL, ROOM, STATE_AND_GRADIENTS
from infinity.bench.engine.runs import (
    OWN,
    SETTLING,
    SHAPES,
    UPDATES,
    Model,
    folder_on,
    parameter_count,
    settings_of,
)
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, report
from infinity.bench.ranks.launch import RankRun, measure_ranks
from infinity.errors import ConfigError
from infinity.sizes import format_size, parse_size

HELP = "steps of several ranks on this machine, beside DDP, FSDP2 and DeepSpeed ZeRO-3"
PEERS = {"ddp": "DDP, in memory", "fsdp2": "FSDP2, in memory", "deepspeed": "DeepSpeed ZeRO-3, NVMe"}
"""The choices of --peer; the kinds of contestant.py, with their names."""
WITHIN, EACH = 1.05, 100 << 20
"""What ranks with memory in common may take of their machine: so often what one takes, and so much each."""


@dataclass(frozen=True, slots=True)
class RankCase:
    """One line of the table."""

    kind: str
    """A key of contestant.KINDS."""
    ranks: int
    budget: str = ""
    """Infinity's, of the machine: a size as it was typed, or ALL."""
    shared: bool = False
    """Whether the ranks have memory in common: Config.shared_memory."""

    @property
    def name(self) -> str:
        """Its name, without the ranks."""
        shared = ", memory in common" * self.shared
        return PEERS.get(self.kind, f"Infinity, {self.budget}{shared}")

    def settings(self, model: str, update: str) -> dict[str, Any]:
        """Return the settings of its kind."""
        if self.kind == "deepspeed":
            return rival.settings(model)
        if self.kind != "infinity":
            return {}
        enough = STATE_AND_GRADIENTS * parameter_count(model) + self.ranks * ROOM
        settings = settings_of(enough if self.budget == ALL else self.budget, update)
        return settings | {"shared_memory": self.shared}


def cases(
    ranks: Sequence[int], budgets: Sequence[str], peers: Sequence[str], *, shared: bool = False
) -> list[RankCase]:
    """List all cases in the order of a round: for each number of ranks the peers, then Infinity; of one rank
    Infinity alone, which the memory of several is compared with. shared: each budget also with memory in
    common.
    """
    found = []
    for number in ranks:
        several = number > 1
        found += [RankCase(peer, number) for peer in PEERS if peer in peers and several]
        for budget in budgets:
            ways = (False, True) if shared and several else (False,)
            found += [RankCase("infinity", number, budget, shared=way) for way in ways]
    return list(dict.fromkeys(found))


def beside_one(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what a machine whose ranks have memory in common takes beside what one rank does, of the same
    budget, and whether that is within 5 % and 100 MiB for each rank.
    """
    alone = {row["budget"]: row["peak_machine_nbytes"] for row in rows if row["ranks"] == 1}
    said = []
    for row in rows:
        one = alone.get(row["budget"])
        if not row["shared_memory"] or not one:
            continue
        nbytes = row["peak_machine_nbytes"]
        most = WITHIN * one + row["ranks"] * EACH
        said.append(
            f"{row['ranks']} ranks, {row['contestant']}: {nbytes / one:.2f} times the memory of one rank, "
            f"{format_size(round(nbytes))}, {'within' if nbytes <= most else 'MORE than'} one rank's + 5 % "
            f"+ 100 MiB a rank, {format_size(round(most))}"
        )
    return said


def row_of(
    case: RankCase, model: Model, runs: Sequence[RankRun], peers: Mapping[str, float]
) -> dict[str, Any]:
    """Return a case's row: medians of its rounds, and the rounds. peers: seconds of a step, by kind."""

    def median(key: str) -> float:
        return float(statistics.median(getattr(run, key) for run in runs))

    seconds = median("seconds")
    return {
        "contestant": case.name,
        "kind": case.kind,
        "budget": case.budget,
        "shared_memory": case.shared,
        "ranks": case.ranks,
        "model": model.shape,
        "parameters": runs[0].parameters,
        "tokens": model.tokens,
        "seconds": seconds,
        "sent_nbytes": median("sent_nbytes"),
        "between_nbytes": median("between_nbytes"),
        "sent_per_parameter": median("sent_nbytes") / runs[0].parameters,
        "collectives": median("collectives"),
        "moved_nbytes": median("moved_nbytes"),
        "peak_rank_nbytes": median("peak_rank_nbytes"),
        "peak_machine_nbytes": median("peak_machine_nbytes"),
        "loss": runs[-1].loss,
        "times_as_fast": {kind: other / seconds for kind, other in peers.items() if kind != case.kind},
        "rounds": list(runs),
    }


def findings_of(
    found: Mapping[RankCase, Sequence[RankRun]], model: Model, options: argparse.Namespace
) -> Findings:
    """Show the rows, and how much faster than each peer Infinity is."""
    rows = []
    for case, runs in found.items():
        peers = {
            other.kind: statistics.median(run.seconds for run in theirs)
            for other, theirs in found.items()
            if other.ranks == case.ranks and other.kind in PEERS
        }
        rows.append(row_of(case, model, runs, peers))
    said = [
        f"{row['ranks']} ranks, {row['contestant']}: {times:.2f} times as fast as {PEERS[kind]}"
        for row in rows
        if row["kind"] == "infinity"
        for kind, times in row["times_as_fast"].items()
    ]
    return Findings(
        title=f"A step on several ranks, {model.tokens} tokens on each; medians of {options.rounds} rounds",
        rows=rows,
        columns=[
            Column("contestant", "contestant"),
            Column("ranks", "ranks"),
            Column("seconds", "seconds", "{:.2f}".format),
            Column("sent_nbytes", "sent by all", _format_mean),
            *(
                [Column("between_nbytes", "of it between machines", _format_mean)]
                if options.local_size
                else []
            ),
            Column("sent_per_parameter", "B per parameter", "{:.2f}".format),
            Column("collectives", "collectives", "{:.0f}".format),
            Column("moved_nbytes", "NVMe, all ranks", _format_mean),
            Column("peak_rank_nbytes", "peak of a rank", _format_mean),
            Column("peak_machine_nbytes", "of all, shared pages once", _format_mean),
            Column("loss", "loss", "{:.3f}".format),
        ],
        verdicts=[
            *said,
            *beside_one(rows),
            f"Llama of {rows[0]['parameters'] / 1e6:.1f} M parameters, bf16, recomputed",
            "peaks are above the imports",
        ],
        options=asked(options),
    )


def _format_mean(mean: float) -> str:
    return format_size(round(mean))


def _budget(text: str) -> str:
    if text != ALL:
        try:
            parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infinity bench ranks`."""
    add = parser.add_argument
    add("--nvme", type=Path, default=Path(), metavar="DIR", help="a folder on the disk (this one)")
    add(
        "--ranks", nargs="+", type=positive, default=[2], metavar="N", help="processes that train together; 2"
    )
    add("--model", choices=SHAPES, default="25m", metavar="NAME", help=f"{', '.join(SHAPES)}; 25m")
    budget = f'budgets of Infinity for the machine: sizes, "{ALL}"; 512MiB'
    add("--host-memory", nargs="+", type=_budget, default=["512MiB"], metavar="SIZE", help=budget)
    add("--shared-memory", action="store_true", help="each budget also with Config(shared_memory=True)")
    add("--update", choices=UPDATES, default="backward", help="when Infinity's weights change; backward")
    machines = "count each N neighbours as a machine, to see what machines send each other"
    add("--local-size", type=positive, metavar="N", help=machines)
    add("--tokens", type=positive, default=16, metavar="N", help="of the sequence of each rank; 16")
    peer = "run beside: ddp, fsdp2, deepspeed; may be repeated"
    add("--peer", action="append", choices=PEERS, default=[], help=peer)
    add("--venv", type=Path, metavar="DIR", help="the virtual environment that has DeepSpeed")
    steps = f"per run, of which the first {SETTLING} are not counted; 8"
    add("--steps", type=positive, default=8, metavar="N", help=steps)
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each, in turn; 3")
    add_outputs(parser, plots=False)


def run(options: argparse.Namespace, console: Console) -> int:
    """Check the options, run the contestants in turn, and report.

    Raises: ConfigError; RunError if a rank of a contestant fails; OSError, of a full disk for example.
    """
    check_outputs(options)
    if options.steps <= SETTLING:
        raise ConfigError(f"--steps {options.steps}: the first {SETTLING} are not counted. Ask for more.")
    if max(options.ranks) == 1:
        raise ConfigError("--ranks 1: one rank is what `infinity bench step` measures; name more beside it")
    uneven = [number for number in options.ranks if number % (options.local_size or 1)]
    if uneven:
        raise ConfigError(
            f"--ranks {uneven[0]} --local-size {options.local_size}: the machines would have different "
            "numbers of ranks; name a divisor of all --ranks"
        )
    entries = cases(options.ranks, options.host_memory, options.peer, shared=options.shared_memory)
    beside = "deepspeed" in options.peer
    environment = rival.environment_of(options.venv, console) if beside else OWN
    model = Model(options.model, options.tokens, options.steps)
    found: dict[RankCase, list[RankRun]] = {one: [] for one in entries}
    with folder_on(options.nvme) as folder:
        for number in range(options.rounds * len(entries)):
            case = entries[number % len(entries)]
            title = f"run {number + 1} of {options.rounds * len(entries)}: {case.name}, {case.ranks} ranks"
            own = environment if case.kind == "deepspeed" else OWN
            with console.status(title):
                settings = case.settings(options.model, options.update)
                one = measure_ranks(own, case.kind, case.ranks, model, folder, settings, options.local_size)
            found[case].append(one)
            console.print(f"{title}: {one.seconds:.2f} s per step", highlight=False, soft_wrap=True)
        report(findings_of(found, model, options), options, console, folder)
    return 0
