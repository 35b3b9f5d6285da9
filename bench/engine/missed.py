"""What an optimizer's step takes of the computing thread for slices that it does not use.

    python -m infinity.bench.engine.missed --nvme DIR

Models of experts with almost no bytes or arithmetic: tokens use a few hundred of their slices, whatever there
are. Measured are `optimizer.step()` and `zero_grad()`, by the computing thread's own seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

import infinity
from infinity.bench.arguments import positive
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.engine import construction
from infinity.engine.engine import engine_of_model
from infinity.tiling import TiledExperts

_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
_TOKENS = 4


def measured(slices: int, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the seconds of this thread that a step of a model with so many slices takes, and those of them
    that it uses.
    """
    import transformers

    config = transformers.MixtralConfig(
        **_SIZES, num_hidden_layers=options.layers, num_local_experts=max(1, slices // options.layers)
    )
    torch.manual_seed(0)
    as_slices = mock.patch.object(construction, "LEAST_SLICE_NBYTES", 1)  # each expert, however small
    with as_slices, infinity.Init(nvme=folder, host_memory=options.host_memory):
        model = transformers.MixtralForCausalLM(config)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
    tiles = [tile for one in model.modules() if isinstance(one, TiledExperts) for tile in one.tiles]
    engine, seconds = engine_of_model(model), []
    of_slices = {engine.parameters.unit_of(one)[0].index for tile in tiles for one in tile.parameters()}
    for number in range(options.steps + 2):
        random = torch.Generator().manual_seed(number)
        ids = torch.randint(_SIZES["vocab_size"], (1, _TOKENS), generator=random)
        model(input_ids=ids, labels=ids).loss.backward()
        began = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.thread_time() - began)
    used = sum(engine.residency.frequencies.uses(one) for one in of_slices) / 2
    return {"slices": len(of_slices), "used": used, "step": statistics.median(seconds[2:])}


def _measure(options: argparse.Namespace, folder: Path, console: Console) -> Findings:
    rows = []
    for slices in options.slices:
        with console.status(f"{slices:,} slices"), tempfile.TemporaryDirectory(dir=folder) as own:
            rows.append(measured(slices, options, own))
    first, lines = rows[0], []
    for row in rows[1:]:
        each = 1e6 * (row["step"] - first["step"]) / (row["slices"] - first["slices"])
        lines.append(f"{row['slices']:,} slices: {each:.2f} µs for each that is not used")
    return Findings(
        title="A step of the optimizer, by the slices of the model",
        rows=rows,
        columns=[
            Column("slices", "slices"),
            Column("used", "used", lambda count: f"{count:.0f}"),
            Column("step", "step", lambda seconds: f"{1e3 * seconds:.2f} ms"),
        ],
        verdicts=lines,
        options=asked(options),
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, and show."""
    parser = command("engine.missed", "what an optimizer's step takes for slices that are not used")
    add = parser.add_argument
    add("--slices", type=positive, nargs="+", default=[400, 10_000, 100_000], metavar="N", help="how many")
    add("--layers", type=positive, default=50, metavar="N", help="that have them; 50")
    add("--host-memory", default="64MiB", metavar="SIZE", help="of each model; 64MiB")
    add("--steps", type=positive, default=9, metavar="N", help="measured; 9")
    run_command(parser, arguments, _measure)


if __name__ == "__main__":
    main()
