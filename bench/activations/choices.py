"""Steps by budget of activations, in turns: from all blocks recomputed to all kept.

    python -m infinity.bench.activations.choices --nvme DIR --json choices.json

The same model trains on the same batch in each contestant, all state in host memory, in one process: without
Config(activation_memory=...) with checkpoints and without, and with budgets from the smallest that works to
the one that keeps all. Contestants take turns, step by step. At the ends each is compared with what the
others took in the same round, since a machine drifts by more than what is looked for; between, the fastest
steps are compared, since of neighbours that differ by one block each, noise is larger than what they differ
by.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import infinity
from infinity.activations.by_budget import Decision
from infinity.bench.activations.long_worker import CHECKPOINTING
from infinity.bench.arguments import positive
from infinity.bench.engine.runs import SHAPES, block_parameters
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.bench.targets import Target, mark
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError
from infinity.planning.recomputation import KEEP
from infinity.sizes import format_size

_NONE, _ALL = "all recomputed", "all kept"
_PLENTY = 1 << 40
_STATE = 28
"""Bytes a parameter: 16 of state and gradients, and what host_memory keeps free."""
_ENDS = Target("≤", 1.05, "times as long")
_BETWEEN = Target("≤", 1.02, "times as long, of which 0.02 are noise")


@dataclass
class _InTurn:
    """One contestant."""

    name: str
    model: Any
    optimizer: Any
    budget: int | None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, ids: torch.Tensor) -> float:
        began = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        return time.perf_counter() - began

    @property
    def kept(self) -> int:
        """Blocks that are kept; those of plain contestants by their name."""
        if self.budget is None:
            return self.model.config.num_hidden_layers if self.name == _ALL else 0
        return [*_decision(self.model).places.values()].count(KEEP)


def _decision(model: Any) -> Decision:
    activations = engine_of_model(model).activations
    if activations is None:
        raise ConfigError("the model was built without activation_memory")
    return activations.decisions[-1]


def _build(name: str, options: argparse.Namespace, budget: int | None = None) -> _InTurn:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {**SHAPES[options.model], "vocab_size": 256, "use_cache": False}
    room = _STATE * (block_parameters(shape) * shape["num_hidden_layers"] + 512 * shape["hidden_size"])
    with infinity.Init(host_memory=room + (64 << 20), activation_memory=budget):
        model: Any = LlamaForCausalLM(LlamaConfig(**shape)).train()
    if name == _NONE and hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=CHECKPOINTING)
    elif name == _NONE:  # before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
    return _InTurn(name, model, infinity.AdamW(model.parameters(), lr=1e-4), budget)


def _ends(options: argparse.Namespace, ids: torch.Tensor) -> tuple[int, int]:
    """Return the smallest budget that works, and the smallest that keeps all."""
    most = _build("probe", options, _PLENTY)
    most.step(ids)
    least = _build("probe", options, 1)
    try:
        least.step(ids)
    except ConfigError as error:
        found = re.search(r"smallest that works is activation_memory=(\d+)", str(error))
        if found is None:
            raise
        return int(found[1]), _decision(most.model).plan.peak_nbytes
    raise ConfigError("activation_memory=1 was enough")


def _measure(options: argparse.Namespace, _folder: Path, console: Console) -> Findings:
    ids = torch.randint(0, 256, (options.rows, options.tokens), generator=torch.Generator().manual_seed(1))
    with console.status("looking for the smallest budget"):
        least, most = _ends(options, ids)
    trained = [_build(name, options) for name in (_NONE, _ALL)]
    for number in range(options.budgets):
        budget = least + (most - least) * number // max(options.budgets - 1, 1)
        trained.append(_build(format_size(budget), options, budget))
    for number in range(options.settling + options.rounds):
        order = trained if number % 2 else trained[::-1]
        with console.status(f"round {number + 1}"):
            for one in order:
                seconds = one.step(ids)
                if number >= options.settling:
                    one.seconds.append(seconds)
    if any(one.losses != trained[0].losses for one in trained):
        raise ConfigError("the losses of the contestants differ: choices changed bits")
    rows = [
        {
            "who": one.name,
            "budget": one.budget,
            "kept": one.kept,
            "seconds": statistics.median(one.seconds),
            "fastest": min(one.seconds),
            "of_none": _ratio(one, trained[0]),
            "all_seconds": one.seconds,
        }
        for one in trained
    ]
    small, large = trained[2], trained[-1]
    steps = [min(one.seconds) / min(before.seconds) for before, one in itertools.pairwise(trained[2:])]
    first = _ratio(small, trained[0])
    last = statistics.median(
        mine / min(none, kept)
        for mine, none, kept in zip(large.seconds, trained[0].seconds, trained[1].seconds, strict=True)
    )
    return Findings(
        title=f"Llama {options.model}, {options.rows} x {options.tokens} tokens, {options.rounds} rounds",
        rows=rows,
        columns=[
            Column("who", "activation_memory"),
            Column("kept", "blocks kept"),
            Column("seconds", "seconds a step", lambda value: f"{value:.3f}"),
            Column("fastest", "fastest", lambda value: f"{value:.3f}"),
            Column("of_none", "of all recomputed", lambda value: f"{value:.3f}"),
        ],
        verdicts=[
            _said("the smallest budget beside all recomputed", _ENDS, [first]),
            _said("the largest beside the better of all recomputed and all kept", _ENDS, [last]),
            _said("the fastest of each budget beside the next smaller one's", _BETWEEN, steps),
            "losses are equal, bit for bit",
        ],
        options=asked(options),
    )


def _said(what: str, target: Target, values: Sequence[float]) -> str:
    figures = ", ".join(f"{one:.3f}" for one in values)
    reached = mark(met=all(target.met(one) for one in values))
    return f"{what}: {figures} ({target.sign} {target.limit:g} {target.what}) {reached}"


def _ratio(one: _InTurn, other: _InTurn) -> float:
    """Return the median, over rounds, of the seconds of one over those of another."""
    return statistics.median(mine / theirs for mine, theirs in zip(one.seconds, other.seconds, strict=True))


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show."""
    parser = command("activations.choices", "steps by budget of activations, in turns")
    add = parser.add_argument
    add("--model", choices=tuple(SHAPES), default="25m", help="a shape of Llama (25m)")
    add("--rows", type=positive, default=2, metavar="N", help="sequences of a batch (2)")
    add("--tokens", type=positive, default=256, metavar="N", help="of a sequence (256)")
    add("--budgets", type=positive, default=5, metavar="N", help="from the smallest to what keeps all (5)")
    add("--rounds", type=positive, default=9, metavar="N", help="measured (9)")
    add("--settling", type=positive, default=3, metavar="N", help="rounds before them (3)")
    run_command(parser, arguments, _measure)


if __name__ == "__main__":
    main()
