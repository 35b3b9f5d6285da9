"""Generation from a model on disk, beside accelerate's disk_offload, DeepSpeed's ZeRO-Inference and plain
PyTorch: `infinity bench generate`.

Each contestant loads the same folder, in a process of its own, generates a few tokens that settle and then
those that count. Bytes read are the kernel's, by /proc/self/io. accelerate's memory-mapped weights stay in
the page cache, which no contestant's peak counts, as long as the system has room: so their pages are given up
after each token, as they are where memory does not hold the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.bench.arguments import positive
from infinity.bench.engine import rival
from infinity.bench.engine.lora import format_bytes
from infinity.bench.engine.runs import HERE, OWN, Environment, folder_on
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, report
from infinity.bench.targets import Target
from infinity.errors import ConfigError, InfinityError
from infinity.sizes import format_size

HELP = "Tokens per second, bytes per token and memory of a generation from disk, beside other libraries."
FASTER = {
    1: Target("≥", 3, "x accelerate's tokens/s, batch 1"),
    32: Target("≥", 10, "x accelerate's tokens/s, batch 32"),
}


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
        rows = []
        for batch in options.batch:
            for kind, host_memory in _contestants(options):
                with console.status(f"{kind} {host_memory}, batch {batch}"):
                    environment = environments.get(kind, OWN)
                    rows.append(_measured(options, folder, kind, host_memory, batch, environment))
        report(findings_of(rows, options), options, console, folder)
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
        code, said = environment.run([str(HERE / "generation_worker.py"), json.dumps(spec)])
        if code or not answer.exists():
            raise ContestantError(f"{kind}, batch {batch}, ended with {code}:\n{said[-2000:]}")
        measured: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return measured


def findings_of(rows: list[dict[str, Any]], options: argparse.Namespace) -> Findings:
    """Show all contestants, and how much faster than accelerate the first budget is."""
    verdicts = []
    for batch, target in FASTER.items():
        speeds = {one["contestant"]: one["tokens_per_s"] for one in reversed(rows) if one["batch"] == batch}
        if {"infinity", "accelerate"} <= speeds.keys():
            verdicts.append(target.verdict([speeds["infinity"] / speeds["accelerate"]]))
    same = all(len({one["digest"] for one in rows if one["batch"] == batch}) == 1 for batch in options.batch)
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
            Column("peak_nbytes", "peak memory", format_size),
        ],
        verdicts=verdicts,
        options=asked(options),
    )
