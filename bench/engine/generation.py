"""Generation from a model on disk, beside accelerate's disk_offload, DeepSpeed's ZeRO-Inference and plain
PyTorch: `infinity bench generate`.

Each contestant loads the same folder, in a process of its own, generates a few tokens that settle and then
those that count. Bytes read are the kernel's, by /proc/self/io. accelerate's memory-mapped weights stay in
the page cache, which no contestant's peak counts, as long as the system has room: so their pages are given up
after each token, as they are where memory does not hold the model.

The contestants of a round run one after the other, and their figures are compared within it; shown are
medians of all rounds. The disk's bound of a token is what was read for it, at the rate at which the model's
own file is read before and after that run; no bound is below what PyTorch in memory takes, if it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity import aio
from infinity.bench.arguments import positive
from infinity.bench.engine import rival
from infinity.bench.engine.lora import format_bytes
from infinity.bench.engine.runs import HERE, OWN, Environment, folder_on
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, gb_per_s, report
from infinity.bench.targets import Target
from infinity.errors import ConfigError, InfinityError
from infinity.sizes import format_size
from infinity.storage.memory import Arena

HELP = "Tokens per second, bytes per token and memory of a generation from disk, beside other libraries."
FASTER = {
    1: Target("≥", 3, "x accelerate's tokens/s, batch 1"),
    32: Target("≥", 10, "x accelerate's tokens/s, batch 32"),
}
IN_MEMORY = Target("≤", 1.15, "x the seconds of a token in plain PyTorch, where all fits")
STREAMED = Target("≤", 1.1, "x the disk's bound of a token")
_WHOLE = 0.01
"""The share of a weight's two bytes up to which all fits: what a first token may have read."""
_RATE_S, _RATE_NBYTES, _RATE_DEPTH = 0.5, 8 << 20, 4


class ContestantError(InfinityError, RuntimeError):
    """A contestant has ended without an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--nvme", type=Path, required=True, metavar="DIR", help="a folder on the disk, for model and scratch")
    add("--hidden", type=positive, default=1024, help="width of the Llama (1024)")
    add("--layers", type=positive, default=12, help="its layers (12)")
    add("--host-memory", nargs="+", default=["256MiB"], metavar="SIZE", help="budgets (256MiB)")
    add("--batch", nargs="+", type=positive, default=[1], metavar="N", help="sequences (1)")
    add("--prompt", type=positive, default=16, metavar="TOKENS", help="of each prompt (16)")
    add("--tokens", type=positive, default=16, help="generated for each sequence, counted (16)")
    add("--rounds", type=positive, default=1, help="runs of each contestant, in turns (1)")
    peers = ("accelerate", "deepspeed", "torch")
    add("--peer", action="append", choices=peers, default=[], help="may be repeated")
    add("--venv", type=Path, metavar="DIR", help="DeepSpeed's virtual environment, as of infinity bench step")
    add_outputs(parser, plots=False)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure all contestants. Raises: ConfigError; ContestantError with what a process has printed."""
    check_outputs(options)
    for needed in ("transformers", *(("accelerate",) if "accelerate" in options.peer else ())):
        if importlib.util.find_spec(needed) is None:
            raise ConfigError(f"infinity bench generate needs {needed}: pip install {needed}")
    environments = {"deepspeed": _environment(options)} if "deepspeed" in options.peer else {}
    with folder_on(options.nvme) as folder:
        with console.status("writing the model"):
            _write_model(options, folder / "model")
        runs: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
        for batch in options.batch:
            for number in range(options.rounds):
                for kind, host_memory in _contestants(options):
                    with console.status(f"{kind} {host_memory}, batch {batch}, round {number + 1}"):
                        environment = environments.get(kind, OWN)
                        one = _measured(options, folder, kind, host_memory, batch, environment)
                    runs.setdefault((batch, kind, host_memory), []).append(one)
        report(findings_of([Runs(one) for one in runs.values()], options), options, console, folder)
    return 0


def _environment(options: argparse.Namespace) -> Environment:
    """Return DeepSpeed's. Raises: ConfigError without one."""
    if options.venv is None:
        raise ConfigError("--peer deepspeed runs in an environment of its own: give --venv DIR")
    environment = Environment.of_venv(options.venv)
    rival.check(environment)
    return environment


def _contestants(options: argparse.Namespace) -> list[tuple[str, str]]:
    return [*(("infinity", one) for one in options.host_memory), *((one, "") for one in options.peer)]


def _write_model(options: argparse.Namespace, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        num_key_value_heads=max(1, options.hidden // 64),
        vocab_size=8192,
        dtype=torch.bfloat16,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def _measured(
    options: argparse.Namespace,
    folder: Path,
    kind: str,
    host_memory: str,
    batch: int,
    environment: Environment,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        answer = folder / "answer.json"
        spec = {
            "kind": kind,
            "model": str(folder / "model"),
            "scratch": scratch,
            "host_memory": host_memory,
            "batch": batch,
            "prompt": options.prompt,
            "tokens": options.tokens,
            "answer": str(answer),
        }
        answer.unlink(missing_ok=True)
        before = read_rate(folder / "model")
        code, said = environment.run([str(HERE / "generation_worker.py"), json.dumps(spec)])
        if code or not answer.exists():
            raise ContestantError(f"{kind}, batch {batch}, ended with {code}:\n{said[-2000:]}")
        measured: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return {**measured, "disk_bytes_per_s": (before + read_rate(folder / "model")) / 2}


def read_rate(model: Path) -> float:
    """Return the bytes per second at which the largest file of a folder is read, as Infinity reads it."""
    path = max(model.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    moved, under_way = 0, deque[tuple[int, aio.Completion]]()
    with aio.open_reader(depth=8) as engine:
        file = engine.open_to_read(path, direct=engine.direct)
        size = min(_RATE_NBYTES, path.stat().st_size // aio.BLOCK * aio.BLOCK)
        places = path.stat().st_size // size
        memory = Arena(_RATE_DEPTH * size)
        began = time.perf_counter()
        for number in itertools.count():
            if len(under_way) == _RATE_DEPTH:
                nbytes, first = under_way.popleft()
                first.wait()
                moved += nbytes
            if (passed := time.perf_counter() - began) > _RATE_S:
                break
            to = memory.address + number % _RATE_DEPTH * size
            read = engine.read(file, number % places * size, to, size, what="the disk's rate", owner=memory)
            under_way.append((size, read))
        for _, one in under_way:
            one.wait()
        file.close()
    return moved / passed


@dataclass(frozen=True)
class Runs:
    """The rounds of one contestant, of one batch."""

    rounds: Sequence[dict[str, Any]]
    row: dict[str, Any] = field(init=False)
    """Medians of what differs from round to round, for the table."""

    def __post_init__(self) -> None:
        """Take the medians."""
        medians = {
            key: statistics.median(one[key] for one in self.rounds)
            for key, value in self.rounds[0].items()
            if isinstance(value, float)
        }
        peak = max(one["peak_nbytes"] for one in self.rounds)
        object.__setattr__(self, "row", {**self.rounds[0], **medians, "peak_nbytes": peak})

    def is_of(self, kind: str, batch: int) -> bool:
        """Whether they are of this contestant, and batch."""
        return (self.row["contestant"], self.row["batch"]) == (kind, batch)

    @property
    def token_s(self) -> list[float]:
        """Seconds of a token, round by round."""
        return [1 / one["tokens_per_s"] for one in self.rounds]

    @property
    def disk_s(self) -> list[float]:
        """Seconds that the disk takes at least for a token, round by round."""
        return [one["read_nbytes"] / one["disk_bytes_per_s"] for one in self.rounds]

    @property
    def all_fits(self) -> bool:
        """Whether next to nothing was read."""
        read = self.row["read_nbytes"] * self.row["batch"]
        return bool(read <= _WHOLE * 2 * self.row["parameters"])


def _verdicts(runs: Sequence[Runs], batch: int) -> list[str]:
    """Compare what ran with one batch."""
    ours = [one for one in runs if one.is_of("infinity", batch)]
    plain = next((one.token_s for one in runs if one.is_of("torch", batch)), None)
    other = next((one.token_s for one in runs if one.is_of("accelerate", batch)), None)
    verdicts = []
    if ours and other and batch in FASTER:
        verdicts.append(FASTER[batch].verdict(_ratios(other, ours[0].token_s)))
    for one in ours:
        name = f"{one.row['host_memory']}, batch {batch}: "
        if not one.all_fits:
            bound = [max(pair) for pair in zip(one.disk_s, plain or one.disk_s, strict=True)]
            verdicts.append(name + STREAMED.verdict(_ratios(one.token_s, bound)))
        elif plain:
            verdicts.append(name + IN_MEMORY.verdict(_ratios(one.token_s, plain)))
    return verdicts


def _ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]


def findings_of(runs: Sequence[Runs], options: argparse.Namespace) -> Findings:
    """Show all contestants, how much faster than accelerate the first budget is, and each one's bound."""
    verdicts = [line for batch in options.batch for line in _verdicts(runs, batch)]
    rows = [one.row for one in runs]
    same = all(
        len({one["digest"] for of in runs if of.row["batch"] == batch for one in of.rounds}) == 1
        for batch in options.batch
    )
    verdicts.append(f"all contestants gave {'the same tokens' if same else 'tokens that DIFFER'}")
    return Findings(
        title=f"Generating {options.tokens} tokens from a Llama of {rows[0]['parameters'] / 1e6:.0f} M "
        "parameters",
        rows=rows,
        columns=[
            Column("contestant", "contestant"),
            Column("host_memory", "host_memory"),
            Column("batch", "batch"),
            Column("tokens_per_s", "tokens/s", "{:.2f}".format),
            Column("load_s", "loaded, s", "{:.2f}".format),
            Column("first_s", "first token, s", "{:.2f}".format),
            Column("read_nbytes", "read per token", format_bytes),
            Column("disk_bytes_per_s", "disk", gb_per_s),
            Column("peak_nbytes", "peak memory", format_size),
        ],
        verdicts=verdicts,
        options=asked(options),
    )
