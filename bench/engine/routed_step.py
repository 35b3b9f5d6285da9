"""Steps of a Mixtral under skewed routing, its experts one by one beside its stacks whole.

    python -m infinity.bench.engine.routed_step --nvme DIR --json routed-step.json

Both train the same model on the same tokens, in one process, and take turns: a disk drifts by half within
minutes. Tokens are drawn by Zipf's law from the vocabulary, so that what a token is routed to decides how
often an expert is used. What is compared is the seconds of turns that followed each other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import infinity
from infinity.bench.arguments import positive, some_size
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import Target
from infinity.sizes import format_size

_HOW = ("slices", "whole")
_SETTLING = 4
"""Steps before the first turn: moments exist then, and fields have moved."""
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
}
_GOAL = Target("≥", 3.0, "times as fast as whole fetching, a step")


@dataclass
class _Trained:
    """One of the two models, and what its turns took."""

    model: Any
    optimizer: Any
    seconds: list[float]
    nbytes: list[float]
    losses: list[float]

    def step(self, ids: torch.Tensor) -> None:
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def turn(self, batches: list[torch.Tensor]) -> None:
        before, began = infinity.stats(self.model), time.perf_counter()
        for ids in batches:
            self.step(ids)
        self.seconds.append((time.perf_counter() - began) / len(batches))
        done = infinity.stats(self.model).since(before)
        moved = done.nvme_read_nbytes + done.nvme_written_nbytes
        self.nbytes.append(moved / done.parameters / len(batches))


def _built(how: str, folder: Path, host_nbytes: int) -> _Trained:
    import transformers

    (folder / how).mkdir()
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder / how), host_memory=host_nbytes, experts=how):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SIZES))
    return _Trained(model, infinity.AdamW(model.parameters(), lr=1e-4), [], [], [])


def _batches(options: argparse.Namespace, steps: int, random: torch.Generator) -> list[torch.Tensor]:
    popular = torch.arange(1, _SIZES["vocab_size"] + 1) ** -float(options.skew)
    return [torch.multinomial(popular, options.tokens, True, generator=random)[None] for _ in range(steps)]


def _measure(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    random = torch.Generator().manual_seed(0)
    with console.status("building"):
        trained = {how: _built(how, folder, options.host_memory) for how in _HOW}
    first = _batches(options, _SETTLING, random)
    with console.status("training"):
        for one in trained.values():
            for ids in first:
                one.step(ids)
        before = infinity.stats(trained["slices"].model)
        for number in range(options.rounds):
            batches = _batches(options, options.steps, random)
            for how in _HOW if number % 2 else reversed(_HOW):
                trained[how].turn(batches)
    done = infinity.stats(trained["slices"].model).since(before)
    if trained["slices"].losses != trained["whole"].losses:
        raise AssertionError(f"losses differ: {trained['slices'].losses}, {trained['whole'].losses}")
    used = sum(one.numel for one in done.units if one.uses) / sum(one.numel for one in done.units)
    ratios = [
        whole / slices
        for slices, whole in zip(trained["slices"].seconds, trained["whole"].seconds, strict=True)
    ]
    rows = [
        {
            "experts": how,
            "seconds": statistics.median(one.seconds),
            "all_seconds": one.seconds,
            "bytes": statistics.median(one.nbytes),
        }
        for how, one in trained.items()
    ]
    return Findings(
        title=f"Mixtral of {done.parameters / 1e6:.0f} M parameters, {format_size(options.host_memory)}",
        rows=[*rows, {"experts": "ratio", "ratios": ratios}],
        columns=[
            Column("experts", "experts"),
            Column("seconds", "a step", lambda taken: f"{taken:.2f} s"),
            Column("bytes", "NVMe, B per parameter", lambda nbytes: f"{nbytes:.2f}"),
        ],
        verdicts=[
            f"{_GOAL.verdict(ratios)} (rounds: {', '.join(f'{one:.2f}' for one in ratios)})",
            f"all steps together use {100 * used:.0f} % of the parameters; losses are equal, to the bit",
        ],
        options=asked(options),
    )


def main(arguments: list[str] | None = None) -> None:
    """Train both in turns, and show how long steps take."""
    parser = command("engine.routed_step", "steps with experts one by one, and with whole stacks")
    add = parser.add_argument
    add("--host-memory", type=some_size, default=512 << 20, metavar="SIZE", help="of each; 512MiB")
    add("--tokens", type=positive, default=16, metavar="N", help="of a step; 16")
    add("--skew", type=float, default=1.2, help="of Zipf's law, by which tokens are drawn; 1.2")
    add("--steps", type=positive, default=3, metavar="N", help="of a turn; 3")
    add("--rounds", type=positive, default=4, metavar="N", help="turns of each; 4")
    run_command(parser, arguments, _measure)


if __name__ == "__main__":
    main()
