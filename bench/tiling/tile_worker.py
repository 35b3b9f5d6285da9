"""One contestant of `infinity bench tiles`: builds its case, and takes a step for each line that it reads.

It is started by its path, in the environment of the contestant's library, and imports infinity only for our
own contestant. It answers each line with a line of JSON: the seconds of a forward and backward, and how far
the process's memory rose during the step, as the kernel counts it.

A measured step follows another one, as in training: during the other contestants' turns the host of a virtual
machine reclaims unused memory, and the next step would pay milliseconds per huge page to map it again.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[], Any]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def linear(case: dict[str, Any]) -> Step:
    """A linear layer [4 * hidden, hidden], its weight in tiles along the outputs."""
    inputs, outputs, tiles = case["hidden"], 4 * case["hidden"], case["tiles"]
    dtype = DTYPES[case["dtype"]]
    layer: Any
    if case["who"] == "infinity":
        from infinity import tiling

        layer = tiling.TiledLinear(inputs, outputs, False, out_tiles=tiles, dtype=dtype)
    elif case["who"] == "deepspeed":
        from deepspeed.runtime.zero.tiling import TiledLinear

        layer = TiledLinear(inputs, outputs, bias=False, out_splits=tiles).to(dtype)
    else:
        layer = nn.Linear(inputs, outputs, False, dtype=dtype)
    for one in layer.parameters():  # as under an engine, which takes each gradient at once
        one.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    x = torch.randn(case["tokens"], inputs, dtype=dtype)
    upstream = torch.randn(case["tokens"], outputs, dtype=dtype)

    def step() -> None:
        layer(x.requires_grad_()).backward(upstream)
        x.grad = None

    return step


class MLP(nn.Module):
    """A Llama's."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, 4 * hidden, False) for _ in range(2))
        self.down_proj = nn.Linear(4 * hidden, hidden, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, sequence, hidden] to the same shape."""
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def mlp(case: dict[str, Any]) -> Step:
    """An MLP over slices of the sequence."""
    dtype = DTYPES[case["dtype"]]
    module: Any = MLP(case["hidden"]).to(dtype)
    x = torch.randn(1, case["tokens"], case["hidden"], dtype=dtype)
    call: Callable[[torch.Tensor], torch.Tensor] = module
    if case["who"] == "infinity":
        from infinity import tiling

        tiling.tile_sequence(module, case["tiles"])
    elif case["who"] == "deepspeed":
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        def call(x: torch.Tensor) -> torch.Tensor:
            parameters = list(module.parameters())
            y: torch.Tensor = TiledMLP.apply(lambda self, x: self(x), module, x, case["tiles"], parameters)
            return y

    upstream = torch.randn_like(x)

    def step() -> None:
        call(x.requires_grad_()).backward(upstream)
        x.grad = None
        module.zero_grad()

    return step


def loss(case: dict[str, Any]) -> Step:
    """Cross entropy over a vocabulary; DeepSpeed's with one shard of tokens per tile."""
    vocabulary, hidden = case["vocabulary"], case["hidden"]
    dtype = DTYPES[case["dtype"]]
    head: Any = nn.Linear(hidden, vocabulary, False, dtype=dtype)
    x = torch.randn(1, case["tokens"], hidden, dtype=dtype)
    y = torch.randint(vocabulary, (1, case["tokens"]))

    def plain(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(x).float().view(-1, vocabulary), y.view(-1))

    def value() -> torch.Tensor:
        if case["who"] == "plain":
            return plain(None, x, y)
        if case["who"] == "infinity":
            from infinity import tiling

            return tiling.cross_entropy(x, head.weight, y)
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        found: torch.Tensor = TiledFusedLogitsLoss.apply(
            plain, head, x, y, None, case["tiles"], [head.weight], "mean"
        )
        return found

    def step() -> None:
        x.requires_grad_()
        value().backward()
        x.grad = None
        head.zero_grad()

    return step


def batch(case: dict[str, Any]) -> Step:
    """Four blocks over micro-batches of one sequence; plain: over all sequences at once."""
    dtype = DTYPES[case["dtype"]]
    blocks = nn.Sequential(*(MLP(case["hidden"]) for _ in range(4))).to(dtype)
    if case["who"] == "infinity":
        from infinity import tiling

        tiling.tile_batch_(blocks, 1, blocks=MLP)
    x = torch.randn(case["tiles"], case["tokens"], case["hidden"], dtype=dtype)
    upstream = torch.randn_like(x)

    def step() -> None:
        blocks(x.requires_grad_()).backward(upstream)
        x.grad = None
        blocks.zero_grad()

    return step


KINDS = {"linear": linear, "mlp": mlp, "loss": loss, "batch": batch}


def status(name: str) -> int:
    """Return a value of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def main() -> None:
    """Build the case, and take a step per line of input."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    step = KINDS[case["kind"]](case)
    step()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        step()
        ctypes.CDLL(None).malloc_trim(0)  # free memory of earlier steps would hide this step's
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, began = status("VmRSS"), time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        found = {"seconds": seconds, "peak_nbytes": max(0, status("VmHWM") - before)}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
