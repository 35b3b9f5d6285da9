"""Losses of two ranks that send fewer bits, beside those of ranks that send all: 25 million parameters.

    torchrun --nproc-per-node 2 -m infinity.bench.ranks.losses --json bench/results/rank-losses.json

Each curve has the same initial weights and batches: a chain of tokens in which each fifth strays, so that
there is something to learn, and something that nobody can. Rank 0 shows the table. Only losses matter: this
may run on a busy machine. At 300 steps it takes 7 to 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import infinity
from infinity.bench.arguments import positive
from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, report
from infinity.bench.targets import mark
from infinity.cli.presets import PRESETS, llama
from infinity.engine.engine import engine_of_model
from infinity.errors import InfinityError

VOCABULARY = 256
ROWS, TOKENS = 2, 32


@dataclass(frozen=True, slots=True)
class Curve:
    """One training: what is sent between ranks, and how far its loss may be from that of its exact twin."""

    name: str
    exact: str
    """The name of the twin; its own name in a twin."""
    optimizer: str
    options: dict[str, Any]
    """Arguments of the optimizer."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of `Config`."""
    limit: float = 0.0
    """The largest relative difference of the mean of the last losses; 0: none is stated."""


def curves(steps: int) -> list[Curve]:
    """List the curves, each after its twin. Limits are those that docs/ranks.md states."""
    clipped, free = {"lr": 5e-4, "max_norm": 1.0}, {"lr": 2e-4, "weight_decay": 0.01}
    both = {"quantized_weights": "int8", "quantized_gradients": "int8"}
    frozen = {**free, "freeze_step": max(1, steps // 5)}
    return [
        Curve("exact, clipped", "exact, clipped", "AdamW", clipped),
        Curve("int8", "exact, clipped", "AdamW", clipped, both, 0.01),
        Curve(
            "int8, gradients int4",
            "exact, clipped",
            "AdamW",
            clipped,
            both | {"quantized_gradients": "int4"},
            0.05,
        ),
        Curve("exact", "exact", "AdamW", free),
        Curve("1 bit after a fifth", "exact", "OneBitAdam", frozen, limit=0.02),
    ]


def chain(seed: int) -> torch.Tensor:
    """Return sequences of a chain of tokens, of which each fifth strays: (ROWS, TOKENS), int64."""
    follows = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))
    random, ids = torch.Generator().manual_seed(seed), [torch.zeros(ROWS, dtype=torch.long)]
    for _ in range(TOKENS - 1):
        strays = torch.rand(ROWS, generator=random) < 0.2
        strange = torch.randint(VOCABULARY, (ROWS,), generator=random)
        ids.append(torch.where(strays, strange, follows[ids[-1]]))
    return torch.stack(ids, dim=1)


def losses(curve: Curve, preset: str, steps: int) -> Iterator[float]:
    """Train; yield the mean of the ranks' losses in each step, in nats per token."""
    torch.manual_seed(0)
    with infinity.Init(host_memory="2GiB", device="cpu", **curve.fields):
        model = llama(PRESETS[preset], TOKENS).train()
    optimizer = getattr(infinity, curve.optimizer)(model.parameters(), **curve.options)
    for step in range(steps):
        ids = chain(1000 * step + dist.get_rank())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        yield float(mean) / dist.get_world_size()
    engine_of_model(model).close()


def row_of(curve: Curve, found: list[float], last: int, exact: float) -> dict[str, Any]:
    """Return a row: the first loss, the mean of the last, and that beside the twin's."""
    mean = sum(found[-last:]) / len(found[-last:])
    apart = mean / exact - 1 if exact else 0.0
    row = {"name": curve.name, "first": found[0], "last": mean, "apart": apart, "losses": found}
    return row | ({"met": abs(apart) <= curve.limit, "limit": curve.limit} if curve.limit else {})


def measure(options: argparse.Namespace) -> Findings:
    """Train all curves on these ranks."""
    rows: list[dict[str, Any]] = []
    for curve in curves(options.steps):
        found = list(losses(curve, options.preset, options.steps))
        twin = next((row["last"] for row in rows if row["name"] == curve.exact), 0.0)
        rows.append(row_of(curve, found, options.last, twin))
    return Findings(
        f"{options.preset}, {dist.get_world_size()} ranks, {options.steps} steps: losses by what is sent",
        rows,
        [
            Column("name", "what ranks send"),
            Column("first", "first loss", lambda loss: f"{loss:.4f}"),
            Column("last", f"mean of the last {options.last}", lambda loss: f"{loss:.4f}"),
            Column("apart", "beside the exact", lambda part: f"{100 * part:+.2f} %"),
            Column("limit", "limit", lambda part: f"{100 * part:.0f} %"),
            Column("met", "", lambda met: mark(met=met)),
        ],
        options=asked(options),
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure on the ranks that torchrun has started; return 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 2 -m infinity.bench.ranks.losses",
        description="Losses of ranks that send fewer bits",
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="25m", help="the model (25m)")
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="of each curve (300)")
    parser.add_argument("--last", type=positive, default=50, metavar="N", help="losses in the mean (50)")
    add_outputs(parser, plots=False)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    try:
        if dist.get_rank() == 0:
            check_outputs(options)
        findings = measure(options)
        if dist.get_rank() == 0:
            report(findings, options, Console())
    except InfinityError as error:
        raise SystemExit(str(error)) from error
    finally:
        dist.destroy_process_group()
    return 0 if all(row.get("met", True) for row in findings.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
