"""The GPU's share: a step of a Llama on CUDA, offloaded and in memory, and what the copies reach.

python -m infinity.bench.gpu --out bench/results
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import infinity
from infinity import reference

STEPS = 6
SETTLING = 2
"""Steps that are not counted: the first is traced, the second still pins."""


def copies(nbytes: int = 1 << 28) -> dict[str, float]:
    """Measure host-device copies: GB/s by direction and kind of host memory, best of five."""
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    found = {}
    for kind in ("pinned", "pageable"):
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        for direction, to, source in (("to device", device, host), ("to host", host, device)):
            seconds = min(_timed(partial(to.copy_, source)) for _ in range(5))
            found[f"{kind}, {direction}"] = nbytes / seconds / 1e9
    return found


def _timed(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _steps(model: Any, optimizer: Any, tokens: int) -> tuple[float, float]:
    """Return the median seconds of a step, and the last loss."""
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, 8192, (1, tokens), device="cuda", generator=generator)
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = [_timed(step) for _ in range(STEPS)]
    return statistics.median(seconds[SETTLING:]), loss.item()


def measure(folder: str, tokens: int, host_memory: str) -> dict[str, dict[str, float]]:
    """Train one model in memory and offloaded; seconds per step, peak device memory in bytes, last loss."""
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=20,
        num_attention_heads=16,
    )
    results = {}
    for name in ("in memory", "offloaded"):
        torch.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        if name == "in memory":
            plain: Any = transformers.LlamaForCausalLM(config)
            model: Any = reference.prepare(plain).cuda()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        else:
            with infinity.Init(nvme=folder, host_memory=host_memory, device="cuda"):
                model = transformers.LlamaForCausalLM(config)
            model.to(device="cuda")  # the buffers; parameters are there when they are used
            optimizer = infinity.AdamW(model.parameters(), lr=1e-4, update="backward")
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        seconds, loss = _steps(model, optimizer, tokens)
        results[name] = {"seconds": seconds, "device_nbytes": torch.cuda.max_memory_allocated(), "loss": loss}
        del model, optimizer
        torch.cuda.empty_cache()
    return results


def main() -> None:
    """Measure, print a table, and write gpu.json where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for gpu.json")
    parser.add_argument("--nvme", help="folder on the NVMe device; a temporary one by default")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--host-memory", default="2GiB")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    console = Console()
    with tempfile.TemporaryDirectory(dir=arguments.nvme) as folder:
        found: dict[str, Any] = {
            "machine": {
                "gpu": torch.cuda.get_device_name(),
                "kernel": platform.release(),
                "torch": torch.__version__,
            },
            "copies_gb_per_s": copies(),
            "steps": measure(folder, arguments.tokens, arguments.host_memory),
        }
    table = Table("what", "figure", title=f"{found['machine']['gpu']}, torch {torch.__version__}")
    for name, speed in found["copies_gb_per_s"].items():
        table.add_row(f"copy, {name}", f"{speed:.1f} GB/s")
    for name, result in found["steps"].items():
        table.add_row(
            f"step, {name}",
            f"{result['seconds']:.3f} s, {result['device_nbytes'] / 2**20:.0f} MiB on the device",
        )
    console.print(table)
    if arguments.out:
        (arguments.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
