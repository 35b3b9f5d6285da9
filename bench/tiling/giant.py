"""Trains one linear layer that is larger than memory within a hard budget, with memory as the kernel counts
it.

    python -m infinity.bench.tiling.giant --nvme DIR                  # 65,536 x 16,384: 12.9 GB of state
    python -m infinity.bench.tiling.giant --nvme DIR --inputs 65536   # 51.5 GB
    python -m infinity.bench.tiling.giant --nvme DIR --outputs 8192 --inputs 8192 --host-memory 32MiB

Shows the process's memory above that before Init: the budget, one tile in use with its gradient, and
activations.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch
from rich.console import Console
from torch import nn

from infinity import AdamW, Init, stats
from infinity.bench.tiling.tile_worker import status
from infinity.cli.main import describe
from infinity.errors import InfinityError
from infinity.sizes import format_size


def main(arguments: list[str] | None = None) -> int:
    """Train, and print time and memory; returns 1 on an error, or if the loss is not finite."""
    parser = argparse.ArgumentParser(prog="python -m infinity.bench.tiling.giant", description=__doc__)
    parser.add_argument("--nvme", required=True, metavar="DIR", help="a folder on the disk")
    parser.add_argument("--outputs", type=int, default=65536, metavar="N", help="of the layer (65536)")
    parser.add_argument("--inputs", type=int, default=16384, metavar="N", help="of the layer (16384)")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="in the batch (16)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="updates (1)")
    parser.add_argument("--host-memory", default="512MiB", metavar="SIZE", help="hard budget (512MiB)")
    options = parser.parse_args(arguments)
    try:
        return _train(options, Console(highlight=False, soft_wrap=True))
    except KeyboardInterrupt:
        return 130
    except (InfinityError, OSError) as error:
        sys.stderr.write(f"giant: {describe(error)}\n")
        return 1


def _train(options: argparse.Namespace, console: Console) -> int:
    before, began = status("VmRSS"), time.perf_counter()
    with Init(nvme=options.nvme, host_memory=options.host_memory, device="cpu", tile_above="auto"):
        model = nn.Sequential(nn.Linear(options.inputs, options.outputs, bias=False))
    optimizer = AdamW(model.parameters(), lr=1e-3, update="backward")
    built = time.perf_counter()
    x = torch.randn(options.tokens, options.inputs).bfloat16()
    loss = torch.zeros(())
    for _ in range(options.steps):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ended = time.perf_counter()
    now = stats(model)
    moved = sum(now.read_nbytes.values()) + sum(now.written_nbytes.values())
    numel = options.outputs * options.inputs
    tiles, peak = len(now.units), max(0, status("VmHWM") - before)
    value = float(loss.detach())
    console.print(
        f"{options.outputs} x {options.inputs}: {numel / 1e9:.2f}e9 parameters, {format_size(12 * numel)} of "
        f"state, in {tiles} tiles; host_memory {options.host_memory}\n"
        f"built in {built - began:.0f} s, {options.steps} steps in {ended - built:.0f} s; loss {value:.6f}\n"
        f"peak memory above what it was before: {format_size(peak)}; of the budget held "
        f"{format_size(now.budget_held_nbytes)}; {moved / numel:.1f} bytes moved per parameter in all"
    )
    return 0 if math.isfinite(value) else 1


if __name__ == "__main__":
    sys.exit(main())
