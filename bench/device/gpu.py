"""A Llama's step on a GPU with its state on the device, in host memory and on NVMe, beside plain PyTorch
and, where it is asked for, DeepSpeed's ZeRO-3 offload; and the speed of its copies between host and device,
beside a plain pinned copy in the same run.

    python -m infinity.bench.device.gpu --out bench/results
    python -m infinity.bench.device.gpu --only "in host memory" "DeepSpeed in host memory"
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table

import infinity
from infinity import reference
from infinity.bench.device import rival
from infinity.bench.device.copy import DOWN, UP, CudaLink, rate
from infinity.bench.engine.contestant import traffic
from infinity.bench.engine.runs import SETTLING, SHAPES, block_parameters, here, machine, save
from infinity.cli.presets import recompute_blocks
from infinity.device.device import AcceleratorDevice, Device, open_device
from infinity.engine.engine import engine_of_model
from infinity.storage.memory import Arena, Ledger
from infinity.timeline import write_chrome_trace

STEPS = 6
TILE_NUMEL = 1 << 22
"""Elements of a tile of the lane that is uploaded from host memory alone."""

CASES = ("on the device", "in host memory", "on NVMe")
"""Where weights, masters and moments are. On the device they are updated, too."""
PLAIN = "plain PyTorch"


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call, including the work that it queues."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


# The link


def link(nbytes: int = 1 << 28) -> dict[str, float]:
    """Measure plain copies from and to pinned memory, each alone: bytes per second by direction."""
    copies = CudaLink(nbytes, pinned=True)
    return {direction: rate(copies, [direction], nbytes, seconds=0.5) for direction in (UP, DOWN)}


def device_copies(device: Device, nbytes: int = 1 << 28) -> dict[str, float]:
    """Measure Infinity's own copies, tile by tile: bytes per second by direction, best of five."""
    arena = Arena(nbytes)
    device.pin(arena.address, nbytes)
    device.room_for_downloads(Ledger(2 * nbytes))
    flat = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    parts = flat.split(TILE_NUMEL)

    def upload() -> None:
        device.allocated(flat)
        for number, part in enumerate(parts):
            start = number * TILE_NUMEL
            device.upload(flat, start, arena.address + 2 * start, part.numel())
        device.arrived(flat)

    def download() -> None:
        for one in [device.download(part) for part in parts]:
            one.wait()

    found = {UP: upload, DOWN: download}
    rates = {name: nbytes / min(timed(call) for _ in range(5)) for name, call in found.items()}
    device.unpin(arena.address)
    return rates


# What a step copies


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of one direction in a profile."""

    nbytes: int
    seconds: float
    """The time in which copies ran."""
    beside_s: float
    """The part of it in which a kernel ran as well."""
    pageable_nbytes: int
    """Bytes from or to memory that was not pinned."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second while copying; 0 if nothing was copied."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (start, stop) spans in order, with touching ones merged."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Return the total length of the overlap of two lists of merged spans."""
    total, one, other = 0.0, 0, 0
    while one < len(first) and other < len(second):
        total += max(0.0, min(first[one][1], second[other][1]) - max(first[one][0], second[other][0]))
        if first[one][1] < second[other][1]:
            one += 1
        else:
            other += 1
    return total


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile of a call shows."""

    seconds: float
    """The call's, under the profiler."""
    kernels_s: float
    """The part of it in which a kernel ran."""
    copies: dict[str, Copies]
    """By direction."""


def profile_of(events: Iterable[dict[str, Any]], seconds: float = 0.0) -> Profile:
    """Return the copies and kernels of a trace that torch.profiler has exported (its "traceEvents")."""
    spans: dict[str, list[dict[str, Any]]] = {"kernel": [], "HtoD": [], "DtoH": []}
    for event in events:
        kind = {"kernel": "kernel", "gpu_memcpy": event.get("name", "")[7:11]}.get(event.get("cat", ""))
        if kind in spans:
            spans[kind].append(event)
    times = {
        kind: merged((one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in found)
        for kind, found in spans.items()
    }
    copies = {
        direction: Copies(
            sum(one["args"]["bytes"] for one in spans[kind]),
            sum(stop - start for start, stop in times[kind]),
            common(times[kind], times["kernel"]),
            sum(one["args"]["bytes"] for one in spans[kind] if "Pageable" in one["name"]),
        )
        for direction, kind in ((UP, "HtoD"), (DOWN, "DtoH"))
    }
    return Profile(seconds, sum(stop - start for start, stop in times["kernel"]), copies)


def profiled(call: Callable[[], Any], trace: Path | None = None) -> Profile:
    """Profile a call. trace: a file (.json.gz) to write besides, for chrome://tracing."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Profiler clears events")
        with torch.profiler.profile(activities=activities) as profile:
            seconds = timed(call)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        text = Path(file.name).read_bytes()
    if trace is not None:
        trace.write_bytes(gzip.compress(text, compresslevel=6))
    return profile_of(json.loads(text)["traceEvents"], seconds)


# Steps


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The figures of one case."""

    seconds: float
    """Per step: the median of the steady steps."""
    device_nbytes: int
    """Peak memory on the device; DeepSpeed's from when it is initialised."""
    host_nbytes: int
    """Of the host's memory, after the last step, beside what was in use before the model was built. Of the
    whole machine: what CUDA page-locks is in no count of a process.
    """
    loss: float
    """Of the last timed step."""
    profile: Profile
    """Of one further step."""
    nvme_nbytes: float
    """Bytes read and written per step, in the steps that are timed."""
    buffers: int
    """Host buffers allocated for gradients after the first steps."""
    pageable_reason: str


def settings_of(name: str, sizes: Mapping[str, int], folder: str) -> dict[str, Any]:
    """Return the settings that put a Llama's state where a case wants it: the device has room for all of it,
    or for two or three blocks and largest layers with their gradients.
    """
    block, ends = block_parameters(sizes), sizes["vocab_size"] * sizes["hidden_size"]
    total, window = sizes["num_hidden_layers"] * block + 2 * ends, 4 * (block + ends)
    if name == "on NVMe":
        return {"nvme": folder, "host_memory": 2 << 30, "device_memory": 2 * window}
    device = window + 16 * total if name == "on the device" else 3 * window
    return {"nvme": None, "host_memory": 18 * total + (2 << 30), "device_memory": device}


def build(
    name: str, sizes: Mapping[str, int], folder: str, units: str = "module"
) -> tuple[Any, Callable[[torch.Tensor], Any], Callable[[], Any]]:
    """Return a Llama, its backward and its update. units: as Config's."""
    config = transformers.LlamaConfig(**dict[str, Any](sizes))
    if name in rival.CASES:
        with repeated_weights():
            engine, *calls = rival.initialized(
                lambda: transformers.LlamaForCausalLM(config), name, sizes, folder
            )
        recompute_blocks(engine.module)
        torch.cuda.reset_peak_memory_stats()
        return engine, *calls
    model, optimizer = _with_optimizer(name, config, sizes, folder, units)
    recompute_blocks(model)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return model, torch.Tensor.backward, update


def _with_optimizer(name: str, config: Any, sizes: Mapping[str, int], folder: str, units: str) -> Any:
    if name == PLAIN:
        with repeated_weights():
            model: Any = reference.prepare(transformers.LlamaForCausalLM(config))
        model.cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with infinity.Init(device="cuda", units=units, **settings_of(name, sizes, folder)), repeated_weights():
        model = transformers.LlamaForCausalLM(config)
    model.to(device="cuda")  # moves the buffers; parameters become resident when they are used
    return model, infinity.AdamW(model.parameters(), lr=1e-4, update="backward")


@contextlib.contextmanager
def repeated_weights(numel: int = 1 << 20) -> Iterator[None]:
    """Let a Llama's matrices be repetitions of one random block of `numel` elements: drawing billions takes
    longer than all steps.
    """
    block = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 0.02

    @torch.no_grad()
    def fill(_model: Any, module: torch.nn.Module) -> None:
        for one in module.parameters(recurse=False):
            if one.dim() == 2:
                count = -(-one.numel() // numel)
                one.copy_(block.repeat(count)[: one.numel()].view(one.shape))

    llama = transformers.models.llama.modeling_llama.LlamaPreTrainedModel
    with contextlib.ExitStack() as stack:
        for kind in (torch.nn.Linear, torch.nn.Embedding):
            stack.enter_context(mock.patch.object(kind, "reset_parameters"))
        stack.enter_context(mock.patch.object(llama, "_init_weights", fill))
        yield


def measure(
    name: str,
    sizes: Mapping[str, int],
    tokens: int,
    folder: str,
    trace: Path | None = None,
    units: str = "module",
) -> TrainingResult:
    """Train, and free everything. trace: a folder for the trace of a step, and for the engine's timeline of
    those before. units: as Config's.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = psutil.virtual_memory().available
    model, backward, update = build(name, sizes, folder, units)
    model.train()
    engine = engine_of_model(model) if name in CASES else None
    device = engine.device if engine else None
    memory = device.memory if isinstance(device, AcceleratorDevice) else None
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, sizes["vocab_size"], (1, tokens), device="cuda", generator=generator)
    losses: list[torch.Tensor] = []
    seconds, made, moved = [], 0, 0

    def step() -> None:
        if engine:
            engine.timeline.mark_step(time.perf_counter())
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        update()
        losses.append(loss.detach())

    for number in range(STEPS):
        if number == SETTLING:
            made, moved = memory.made if memory else 0, _on_nvme(model, engine, folder)
        if number == SETTLING and engine and trace:
            engine.timeline.start()
        seconds.append(timed(step))
    peak, host = torch.cuda.max_memory_allocated(), before - psutil.virtual_memory().available
    nvme_nbytes, buffers = (_on_nvme(model, engine, folder) - moved) / (STEPS - SETTLING), 0
    if engine and trace:
        engine.timeline.stop()
        write_chrome_trace(engine.timeline, trace / f"{name.replace(' ', '-')}-timeline.json")
    if memory:  # before the profile, which takes a step more
        buffers = memory.made - made
    result = TrainingResult(
        statistics.median(seconds[SETTLING:]),
        peak,
        host,
        losses[-1].item(),
        profiled(step, trace / f"{name.replace(' ', '-')}.json.gz" if trace else None),
        nvme_nbytes,
        buffers,
        device.pageable_reason if device else "",
    )
    if engine:
        sys.stdout.write(f"{name}: {[round(one, 3) for one in seconds]}\n{infinity.stats(model)}\n")
        engine.close()
    return result


def _on_nvme(model: Any, engine: Any, folder: str) -> int:
    """Bytes read and written so far: by Infinity's count, else by the kernel's of this process."""
    if engine is None:
        counted = traffic(folder, (0, 0))
        return counted.read + counted.written
    now = infinity.stats(model)
    return now.nvme_read_nbytes + now.nvme_written_nbytes


def figures(result: TrainingResult, speeds: dict[str, float]) -> list[str]:
    """Return the table cells of a result: seconds, the share of a profiled step in which kernels ran, memory,
    and each direction's bytes, speed and overlap.
    """
    busy = result.profile.kernels_s / result.profile.seconds
    cells = [f"{result.seconds:.3f} s", f"{busy:.0%}", f"{result.device_nbytes / 2**20:.0f} MiB"]
    for direction, one in result.profile.copies.items():
        share = one.beside_s / one.seconds if one.seconds else 0.0
        cells.append(
            f"{one.nbytes / 1e9:.2f} GB at {one.bytes_per_s / speeds[direction]:.0%} of the link, "
            f"{share:.0%} beside kernels"
        )
    return [
        *cells,
        f"{result.nvme_nbytes / 1e9:.1f} GB, {result.nvme_nbytes / result.seconds / 1e9:.1f} GB/s",
    ]


def found_in(results: Mapping[str, TrainingResult], tokens: int) -> dict[str, Any]:
    """Return what cases that were measured say to the runner of stages."""
    return {
        "tokens": tokens,
        "seconds": {name: one.seconds for name, one in results.items()},
        "kernels_s": {name: one.profile.kernels_s for name, one in results.items()},
        "nvme_nbytes": {name: one.nvme_nbytes for name, one in results.items()},
        "device_nbytes": {name: one.device_nbytes for name, one in results.items()},
        "host_nbytes": {name: one.host_nbytes for name, one in results.items()},
        "losses": {name: one.loss for name, one in results.items()},
        "summary": {name: f"{one.seconds:.3f} s" for name, one in results.items()},
    }


def main() -> None:
    """Measure, print tables, and write gpu.json if --out is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="folder for gpu.json")
    parser.add_argument("--trace", type=Path, help="folder for a trace of a step of each case")
    parser.add_argument("--nvme", help="folder on the NVMe device; a temporary one by default")
    parser.add_argument("--model", choices=SHAPES, default="269m")
    parser.add_argument("--layers", type=int, help="of the model; all by default")
    parser.add_argument("--tokens", type=int, default=1024)
    names, ours = (PLAIN, *CASES, *rival.CASES), (PLAIN, *CASES)
    only = f"of {names}; those of DeepSpeed, which has to be installed in this Python, only if they are named"
    parser.add_argument("--only", nargs="+", choices=names, default=ours, metavar="CASE", help=only)
    parser.add_argument("--units", choices=("module", "block"), default="module", help="as Config's")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    console = Console()
    device = open_device("cuda")
    speeds, own = link(), device_copies(device)
    device.close()
    for direction, speed in speeds.items():
        console.print(
            f"{direction}: {speed / 1e9:.1f} GB/s pinned, Infinity {own[direction] / speed:.0%} of that"
        )
    table = Table("state", "step", "kernels ran", "peak on the device", UP, DOWN, "NVMe")
    table.title, results = torch.cuda.get_device_name(), {}
    sizes = {**SHAPES[arguments.model]}
    sizes["num_hidden_layers"] = arguments.layers or sizes["num_hidden_layers"]
    with tempfile.TemporaryDirectory(dir=arguments.nvme) as folder:
        facts = {**here(), **machine(Path(folder))}
        for name in arguments.only:
            with console.status(name):
                place, units = arguments.trace, arguments.units
                results[name] = measure(name, sizes, arguments.tokens, folder, place, units)
            table.add_row(name, *figures(results[name], speeds))
            found = json.dumps(found_in(results, arguments.tokens))
            sys.stdout.write(f"{found}\n")  # what the runner of stages reads, though it is cut off later
            sys.stdout.flush()
    console.print(table)
    if arguments.out:
        record = {
            "machine": {**facts, "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda},
            "settings": {
                "model": arguments.model,
                "tokens": arguments.tokens,
                "layers": sizes["num_hidden_layers"],
                "units": arguments.units,
                "steps": STEPS,
            },
            "link_bytes_per_s": speeds,
            "infinity_bytes_per_s": own,
            "steps": results,
        }
        save(arguments.out / "gpu.json", record)


if __name__ == "__main__":
    main()
