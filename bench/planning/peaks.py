"""Plans beside measured peaks: host memory and activations of five real steps of small models.

    python -m infinity.bench.planning.peaks --nvme DIR --json bench/results/peaks.json

Each case trains in a fresh process; see peak_worker. Host memory is the peak of the resident set beyond a
process that has imported everything and computed one step of a tiny model, as process.py measures it, beside
all that the plan counts but that process. Activations are counted tensor by tensor in plain PyTorch; where
they are offloaded, the resident set alone is compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.engine.runs import OWN, RunError
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.planning.planned import Planned, Question, answer
from infinity.bench.planning.sketch import outline_of_content
from infinity.bench.targets import mark
from infinity.planning.activations import Method
from infinity.planning.capacity import HOST_MEMORY, Capacity
from infinity.planning.setting import Setting
from infinity.sizes import format_size, parse_size

LIMIT = 0.1
"""Of a measured figure: how far a plan may be off."""

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 16_000,
}
_GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 6, "n_head": 8, "vocab_size": 16_000}
_MIXTRAL = {
    **_LLAMA,
    "model_type": "mixtral",
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True, slots=True)
class PeakCase:
    """One training."""

    name: str
    content: Mapping[str, Any]
    """Of its config.json."""
    host_memory: str = "128MiB"
    nvme: bool = True
    dtype: str = "fp32"
    update: str = "forward"
    tokens: tuple[int, int] = (2, 240)
    """Not as many as a model is wide: tensors with the shape of a weight are taken for its gradient."""
    method: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Method: checkpointing, offload, batch_tile, loss_tiles."""

    @property
    def setting(self) -> Setting:
        """As it is planned."""
        rows, sequence = self.tokens
        method = replace(Method(rows * sequence, sequence), **self.method)
        host_nbytes = parse_size(self.host_memory)
        return Setting(host_nbytes, nvme=self.nvme, dtype=self.dtype, update=self.update, method=method)

    def spec(self, folder: Path, *, plain: bool = False, malloc: str = "lean") -> dict[str, Any]:
        """Return what the worker is told. malloc: as INFINITY_MALLOC."""
        method = self.setting.method
        settings: dict[str, Any] = {"host_memory": self.host_memory, "dtype": self.dtype}
        if method.offload is not None:
            settings["offload_activations"] = method.offload
        return {
            "config": dict(self.content),
            "nvme": str(folder) if self.nvme else None,
            "settings": settings,
            "update": self.update,
            "tokens": list(self.tokens),
            "checkpointing": method.checkpointing,
            "batch_tile": method.batch_tile,
            "loss_tiles": method.loss_tiles,
            "plain": plain,
            "malloc": malloc,
        }


_WHOLE = {"checkpointing": False}
CASES = (
    PeakCase("Llama", _LLAMA),
    PeakCase("Llama, bf16", _LLAMA, dtype="bf16"),
    PeakCase("Llama, small budget", _LLAMA, host_memory="32MiB"),
    PeakCase("Llama, large budget", _LLAMA, host_memory="320MiB"),
    PeakCase("Llama, update in the backward", _LLAMA, update="backward"),
    PeakCase("Llama, no NVMe", _LLAMA, host_memory="1GiB", nvme=False),
    PeakCase("Llama, no checkpointing", _LLAMA, method=_WHOLE),
    PeakCase("Llama, offloaded to host", _LLAMA, host_memory="256MiB", method={"offload": "host"}),
    PeakCase("Llama, offloaded to NVMe", _LLAMA, method={"offload": "nvme"}),
    PeakCase("Llama, tiles", _LLAMA, host_memory="256MiB", method={"batch_tile": 1, "loss_tiles": True}),
    PeakCase("GPT-2", _GPT2),
    PeakCase("GPT-2, no checkpointing", _GPT2, method=_WHOLE),
    PeakCase("Mixtral", _MIXTRAL),
    PeakCase("Mixtral, no checkpointing", _MIXTRAL, method=_WHOLE),
)


def planned(case: PeakCase) -> Planned:
    """Plan a case, without what malloc holds free."""
    machine = Capacity(lean_malloc=True)
    return answer(Question(outline_of_content(case.name, case.content), case.setting, machine))


def row_of(case: PeakCase, rss_nbytes: int, activations_nbytes: int | None) -> dict[str, Any]:
    """Return what was measured beside what is planned."""
    plan = planned(case)
    memory = next(need for need in plan.needs if need.what == HOST_MEMORY)
    used = plan.demand.activations if plan.demand is not None else None
    row: dict[str, Any] = {
        "case": case.name,
        "rss_nbytes": rss_nbytes,
        "planned_nbytes": memory.nbytes,
        "ratio": memory.nbytes / rss_nbytes,
        "parts": dict(memory.parts),
    }
    if activations_nbytes is not None and used is not None:
        row |= {"activations_nbytes": activations_nbytes, "planned_activations_nbytes": used.peak_nbytes}
        row["activations_ratio"] = used.peak_nbytes / activations_nbytes
    row["met"] = all(abs(row.get(key, 1.0) - 1.0) <= LIMIT for key in ("ratio", "activations_ratio"))
    return row


def rows_of(
    cases: tuple[PeakCase, ...], folder: Path, console: Console, *, held: bool = False
) -> Iterator[dict[str, Any]]:
    """Train each case in fresh processes. held: once more, for what malloc holds free by default."""
    for case in cases:
        with console.status(f"{case.name}: five steps"):
            rss_nbytes = _run(case.spec(folder))["rss_nbytes"]
            counts = case.setting.method.offload is None
            activations = _run(case.spec(folder, plain=True))["activations_nbytes"] if counts else None
        row = row_of(case, rss_nbytes, activations)
        if held:
            row["held_nbytes"] = _run(case.spec(folder, malloc="keep"))["rss_nbytes"] - rss_nbytes
        told = f"{case.name}: {format_size(rss_nbytes)} resident, {row['ratio']:.2f} of it planned"
        console.print(told, highlight=False, markup=False)
        yield row


def _run(spec: Mapping[str, Any]) -> dict[str, int]:
    arguments = ["-m", "infinity.bench.planning.peak_worker", json.dumps(spec)]
    code, said = OWN.run(arguments)
    if code:
        last = "\n".join(said.splitlines()[-15:])
        raise RunError(f"{spec} ended with exit code {code}; its last lines:\n{last}")
    found: dict[str, int] = json.loads(said.splitlines()[-1])
    return found


def findings_of(rows: list[dict[str, Any]], options: argparse.Namespace) -> Findings:
    """Show both figures and their ratio."""
    good = sum(row["met"] for row in rows)
    return Findings(
        title="Planned peaks beside those of five steps",
        rows=rows,
        columns=[
            Column("case", "case"),
            Column("rss_nbytes", "resident", format_size),
            Column("planned_nbytes", "planned", format_size),
            Column("ratio", "ratio", "{:.2f}".format),
            Column("activations_nbytes", "activations", format_size),
            Column("planned_activations_nbytes", "planned", format_size),
            Column("activations_ratio", "ratio", "{:.2f}".format),
            Column("held_nbytes", "malloc holds", format_size),
            Column("met", "", lambda met: mark(met=met)),
        ],
        verdicts=[f"{good} of {len(rows)} within {LIMIT:.0%} of what was measured"],
        options=asked(options),
    )


def measure_all(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    """Measure the cases whose name holds --only."""
    chosen = tuple(case for case in CASES if options.only.lower() in case.name.lower())
    return findings_of(list(rows_of(chosen, folder, console, held=options.held)), options)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and show; return 1 where a plan is off by more than LIMIT."""
    parser = command("planning.peaks", "Planned peaks of memory beside measured ones")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name holds it (all)")
    held = "train each case once more, with malloc as it is by default, and tell what it holds free"
    parser.add_argument("--held", action="store_true", help=held)
    findings = run_command(parser, arguments, measure_all)
    return 0 if all(row["met"] for row in findings.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
