"""Short measurements of a machine with a CUDA device, one a process, which prints what it finds as a line of
JSON.

    python -m infinity.bench.device.probes facts
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from infinity import aio, kernels
from infinity.bench.device.copy import DOWN, UP, WAYS, CudaLink, rate
from infinity.bench.device.gpu import device_copies, timed
from infinity.device.cuda import CudaStreams
from infinity.device.device import open_device
from infinity.planning.budget import scratch_nbytes
from infinity.records import tensor_steps
from infinity.records.tensor_steps import Scratch
from infinity.records.update_rules import ADAMW, UpdateSpan
from infinity.records.weights import KERNEL_DTYPE
from infinity.storage.memory import Arena
from infinity.units import fused_updates

MIB = 1 << 20
_QUERY = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total"


def facts() -> dict[str, Any]:
    """Return what the machine is: GPU, driver, link, memory, cores, I/O engine."""
    free, total = torch.cuda.mem_get_info()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "device_free_nbytes": free,
        "device_total_nbytes": total,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "host_nbytes": psutil.virtual_memory().total,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
    }
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
        found["nvidia_smi"] = told.stdout.strip()
    with tempfile.TemporaryDirectory() as folder, aio.open_engine(folder) as engine:
        found["io_engine"] = engine.kind
    found["summary"] = f"{found['gpu']}, {free / 2**30:.0f} GiB free, io {found['io_engine']}"
    return found


def link() -> dict[str, Any]:
    """Return GB/s of pinned copies by size and way, and of Infinity's own uploads and downloads."""
    found: dict[str, Any] = {}
    for nbytes in (MIB, 8 * MIB, 64 * MIB, 256 * MIB):
        pinned = CudaLink(nbytes, pinned=True)
        for way, directions in WAYS.items():
            found[f"{way}, {nbytes // MIB} MiB"] = round(rate(pinned, directions, nbytes, 0.5) / 1e9, 2)
    device = open_device("cuda")
    own = device_copies(device)
    device.close()
    found |= {f"Infinity {way}": round(speed / 1e9, 2) for way, speed in own.items()}
    best = {way: found[f"{way}, 256 MiB"] for way in (UP, DOWN)}
    shares = ", ".join(f"{way} {best[way]} GB/s, ours {own[way] / 1e9 / best[way]:.0%}" for way in best)
    return {**found, "summary": shares}


def pinning() -> dict[str, Any]:
    """Return GB/s of page-locking memory, touched before and not, and of unlocking it."""
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    nbytes, found = 1 << 30, {}
    for kind in ("untouched", "touched"):
        arena = Arena(nbytes)
        if kind == "touched":
            arena.map[::4096] = b"\1" * (nbytes // 4096)
        began = time.perf_counter()
        refused = streams.lock(arena.address, nbytes)
        if refused:
            return {"refused": refused}
        locked = time.perf_counter()
        streams.unlock(arena.address)
        found[f"lock, {kind}"] = round(nbytes / (locked - began) / 1e9, 2)
        found[f"unlock, {kind}"] = round(nbytes / (time.perf_counter() - locked) / 1e9, 2)
    return {**found, "summary": {name: f"{speed} GB/s" for name, speed in found.items()}}


def updates() -> dict[str, Any]:
    """Return how many parameters AdamW updates in a second, on all cores: alone, and beside a busy GPU."""
    numel = 1 << 27  # more than caches hold
    fields = {"hi": 2, "lo": 2, "m": 4, "v": 4}
    arenas = {name: Arena(size * numel) for name, size in fields.items()}
    gradient = Arena(2 * numel)
    at = {name: arena.address for name, arena in arenas.items()}
    span = UpdateSpan(numel, at, gradient.address, KERNEL_DTYPE[torch.bfloat16], 0, 0)
    step = ADAMW.kernels["bf16", "fp32"]
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    scalars = ADAMW.scalars(defaults, 1, 1.0)

    def per_s() -> float:
        seconds = []
        for _ in range(6):
            began = time.perf_counter()
            step(span, scalars)
            seconds.append(time.perf_counter() - began)
        return numel / statistics.median(seconds[1:])

    alone = per_s()
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        square = (square @ square).clamp_(-1, 1)
    beside = per_s()
    torch.cuda.synchronize()
    found = {"alone": alone, "beside": beside, **device_updates()}
    return {
        "parameters_per_s": found,
        "threads": kernels.threads(),
        "summary": {name: f"{rate / 1e9:.2f} G/s" for name, rate in found.items()},
    }


def device_updates(numel: int = 1 << 27) -> dict[str, float]:
    """Return how many parameters AdamW updates in a second in the device's memory: in one kernel, by torch's
    operations, and, for comparison, torch's own fused AdamW of bf16 (fewer bytes: its moments are bf16).
    """
    at = {"hi": torch.zeros(numel, dtype=torch.bfloat16), "lo": torch.zeros(numel, dtype=torch.int16)}
    at |= {name: torch.zeros(numel) for name in ("m", "v")}
    at = {name: one.to("cuda") for name, one in at.items()}
    grad = torch.full((numel,), 1e-3, dtype=torch.bfloat16, device="cuda")
    scratch = Scratch(torch.empty(scratch_nbytes(1 << 36, 1 << 30), dtype=torch.uint8, device="cuda"))
    scalars = ADAMW.scalars({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, 1, 1.0)
    plain = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16, device="cuda"))
    plain.grad = grad
    optimizer = torch.optim.AdamW([plain], fused=True)

    def per_s(call: Callable[[], Any]) -> float:
        seconds = [timed(call) for _ in range(6)]
        return numel / statistics.median(seconds[1:])

    return {
        "one kernel": per_s(lambda: fused_updates.make_step(tensor_steps.adamw, at, grad, scalars, scratch)),
        "operations": per_s(lambda: tensor_steps.make_step(tensor_steps.adamw, at, grad, scalars, scratch)),
        "torch's": per_s(optimizer.step),
    }


def nccl() -> dict[str, Any]:
    """Return whether NCCL, with one rank, gathers and exchanges on a stream of its own as it should."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        values = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
        gathered, exchanged = torch.empty_like(values), torch.empty_like(values)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            dist.all_gather_into_tensor(gathered, values)
            dist.all_to_all_single(exchanged, values)
        torch.cuda.current_stream().wait_stream(stream)
        same = bool(torch.equal(gathered, values) and torch.equal(exchanged, values))
        dist.destroy_process_group()
    if not same:
        raise SystemExit("nccl: what came is not what was sent")
    return {"summary": f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}: one rank, the same bits"}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    one.__name__: one for one in (facts, link, pinning, updates, nccl)
}


def main() -> None:
    """Run one probe, and print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("probe", choices=PROBES)
    chosen = parser.parse_args().probe
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    sys.stdout.write(json.dumps(PROBES[chosen]()) + "\n")  # what the runner of stages reads


if __name__ == "__main__":
    main()
