"""One contestant of a comparison: trains in its own process, measures itself, and writes the figures as JSON.

    python contestant.py '{"kind": "plain", "shape": {...}, "steps": 6, "tokens": 256, ...}'

Started by infinity.bench.engine.runs, for the benches that parse arguments. All kinds use the same loop and
the same measurements. This file also runs in DeepSpeed's environment, where infinity is not installed, so it
imports only torch and transformers until it knows its kind.

[Note: what is measured]
Memory: the kernel's high-water mark of the resident set, reset after all imports, minus the resident set at
that moment. Bytes: /proc/self/io, which counts all threads of the process, and the whole device's count
beside it.
Seconds: the wall clock of forward, backward and step.
Ranks: where the environment names several (RANK, WORLD_SIZE, as torchrun sets them), each joins the group
over gloo, and trains on tokens of its own. Bytes sent: what the kernel has sent on the TCP connections
of the process, which are gloo's. Collectives: c10d's operations in one more step, by torch's
profiler.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

BETAS, EPS, WEIGHT_DECAY, LR = (0.9, 0.999), 1e-8, 0.01, 1e-4
RATES: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
SECTOR = 512
"""Bytes: the unit of /sys/block/*/stat on every device."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to train, and how."""

    kind: str
    shape: dict[str, int]
    steps: int
    tokens: int
    nvme: str
    out: str
    seed: int = 0
    micro_batches: int = 1
    """Sequences in a step, one micro-batch each."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the kind: budget and update of infinity, buffers and groups of DeepSpeed."""
    turn: int = 0
    """Steps of a turn, after which it waits for a byte from the descriptor `baton`; 0: no turns."""
    baton: int = -1


@dataclass(frozen=True, slots=True)
class TrafficCounters:
    """Bytes since the process, or the machine, started."""

    read: int
    written: int
    device_read: int
    device_written: int
    engine_read: int = 0
    """By the contestant's own count, if it has one: the kernel counts nothing on a tmpfs."""
    engine_written: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step. The fields' names are the keys of the JSON."""

    seconds: float
    forward_s: float
    backward_s: float
    step_s: float
    loss: float
    traffic: TrafficCounters
    """During the step."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes to other ranks, by connection; see `sent_by_connection`."""


@dataclass(slots=True)
class RunResult:
    """The figures of one run."""

    kind: str
    parameters: int
    versions: dict[str, str]
    threads: int
    baseline_nbytes: int
    build_s: float
    build_peak_nbytes: int
    """Above the baseline, like all peaks here."""
    peak_nbytes: int = 0
    first_loss: float = 0.0
    steps: list[MeasuredStep] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    """The contestant's report at the end, such as figures of infinity.stats."""
    collectives: int = 0
    """In a step, on several ranks."""
    baseline_pss_nbytes: int = 0
    """As the baseline, but with pages that several ranks share divided among them."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model and the two calls that differ between kinds."""

    model: nn.Module
    parameters: int
    backward: Callable[[Tensor], None]
    step: Callable[[], None]
    report: Callable[[], dict[str, Any]] = dict
    moved: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns the bytes read from and written to NVMe so far, by its own count."""
    rows: int = 1
    """Micro-batches that it takes in one forward."""
    counting: bool = False
    """Whether its step is called after each micro-batch, and it averages their losses itself."""


# Measuring


def resident(key: str = "VmRSS") -> int:
    """Return bytes of this process's memory: resident now (VmRSS) or its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: measuring works on Linux only")


def proportional(pid: int | str = "self") -> int:
    """Return bytes of a process's memory, pages that several share divided among them; 0 at its end."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Reset the high-water mark to the memory resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def traffic(folder: str, moved: tuple[int, int]) -> TrafficCounters:
    """Count what this process, and the device behind `folder`, have read and written so far.

    moved: the contestant's own count.
    """
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    counts = {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}
    number = os.stat(folder).st_dev
    stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    fields = stat.read_text(encoding="utf-8").split() if stat.exists() else ["0"] * 11
    device = int(fields[2]) * SECTOR, int(fields[6]) * SECTOR
    return TrafficCounters(counts["read_bytes"], counts["write_bytes"], *device, *moved)


def between(before: TrafficCounters, after: TrafficCounters) -> TrafficCounters:
    """Return the difference of two counts."""
    old, new = asdict(before), asdict(after)
    return TrafficCounters(**{key: new[key] - old[key] for key in new})


# Several ranks

TCP_INFO_BYTES_SENT = 200
"""Where struct tcp_info of Linux (since 4.19) has two 64-bit counts: bytes sent, and those sent again."""


def ranks() -> int:
    """Return how many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join() -> int:
    """Join the group that the environment names, if there are several ranks; return this one's number."""
    if ranks() == 1:
        return 0
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank()


def sent_by_connection() -> dict[str, int]:
    """Return the bytes that this process has sent on each TCP connection that is open now, by its ports, this
    end's first: "40001-40002". The process at its other end knows it as "40002-40001".
    """
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or a socket of another kind
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_SENT + 16)
                ports = f"{one.getsockname()[1]}-{one.getpeername()[1]}"
            sent, again = struct.unpack_from("QQ", info, TCP_INFO_BYTES_SENT)
            found[ports] = sent - again
    return found


def collectives_of(work: Callable[[], object]) -> int:
    """Return how many collectives a call makes, on any thread of this process."""
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001 - no other way
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, experimental_config=threads) as profiled:
        work()
    events = profiled.key_averages()
    return sum(one.count for one in events if one.key.startswith("c10d::") and one.key != "c10d::barrier")


# The kinds


def llama(spec: Spec) -> nn.Module:
    """Build the model; each kind calls this in its own context."""
    torch.manual_seed(spec.seed)
    settings: dict[str, Any] = {
        **spec.shape,
        "num_key_value_heads": spec.shape["num_attention_heads"],
        "max_position_embeddings": max(2048, spec.tokens),
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings))
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    """Enable gradient checkpointing, as users with little memory do."""
    model.train()
    kwargs = {"use_reentrant": False}
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=kwargs)
    else:  # before transformers 5.24
        enable = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs=kwargs)
    return model


def count(model: nn.Module) -> int:
    """Return the elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def forward_backward(spec: Spec) -> Contestant:
    """Forward and backward alone, in bf16 in memory: the time of computing."""
    model = checkpointed(llama(spec).bfloat16())
    return Contestant(model, count(model), torch.Tensor.backward, model.zero_grad)


def beside_updates(spec: Spec) -> Contestant:
    """Forward and backward alone while updates run; reports the updates' speed and Python's overhead."""
    from infinity.bench.engine.beside import LaneWork

    contestant, work = forward_backward(spec), LaneWork()
    alone = work.rate(seconds=1.0)
    work.start()

    def report() -> dict[str, Any]:
        working, tolls = work.stop() / alone, importlib.import_module("infinity.bench.engine.overhead").tolls
        return {"working": working, **tolls(spec.nvme, lambda: one_step(contestant, spec, 0))}

    return replace(contestant, report=report)


def plain(spec: Spec) -> Contestant:
    """Plain PyTorch in memory: bf16 weights and gradients, fp32 masters in torch's fused AdamW."""
    model = checkpointed(llama(spec))
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.bfloat16()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, **RATES, fused=True)

    @torch.no_grad()
    def step() -> None:
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.copy_(master)
            master.grad = None

    return Contestant(model, count(model), torch.Tensor.backward, step)


def ddp(spec: Spec) -> Contestant:
    """Plain PyTorch in memory on several ranks: DistributedDataParallel over bf16 gradients."""
    contestant = plain(spec)
    wrapped = nn.parallel.DistributedDataParallel(contestant.model)
    return replace(contestant, model=wrapped)


def fsdp2(spec: Spec) -> Contestant:
    """FSDP2 (fully_shard) on several ranks, in memory: fp32 shards, bf16 computing, sums in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model: Any = checkpointed(llama(spec))
    total = count(model)
    chosen: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (ranks(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for layer in model.model.layers:
        fully_shard(layer, **chosen)
    fully_shard(model, **chosen)
    optimizer = torch.optim.AdamW(model.parameters(), **RATES, foreach=True)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(model, total, torch.Tensor.backward, step)


def plain_kernels(spec: Spec) -> Contestant:
    """Plain PyTorch in memory with Infinity's split masters and kernel; buffers stay fp32."""
    from infinity.bench.kernels.split_masters import adamw

    model = llama(spec)
    step = adamw(model, **RATES)
    return Contestant(checkpointed(model), count(model), torch.Tensor.backward, step)


def infinity(spec: Spec) -> Contestant:
    """Infinity; settings: of its Config, other than the defaults, and of the optimizer."""
    import infinity as engine

    of_optimizer = ("update", "max_norm", "speculate")
    chosen = {key: value for key, value in spec.settings.items() if key not in of_optimizer}
    with engine.Init(nvme=spec.nvme, device="cpu", **chosen):
        model = llama(spec)
    asked = {key: value for key, value in spec.settings.items() if key in of_optimizer}
    optimizer = engine.AdamW(model.parameters(), **RATES, **asked)
    if "durable" in chosen:
        engine.resume(model, optimizer)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def report() -> dict[str, Any]:
        stats = engine.stats(model)
        held = ("host_nbytes", "nvme_nbytes", "budget_nbytes")
        counted = ("hits", "misses", "divergences", "stall_s", "io_engine")
        return {key: getattr(stats, key) for key in (*held, *counted)}

    def moved() -> tuple[int, int]:
        stats = engine.stats(model)
        return stats.nvme_read_nbytes, stats.nvme_written_nbytes

    if spec.micro_batches > 1:
        engine.tiling.tile_batch_(model.train(), 1)
        engine.tiling.tile_loss_(model)
    else:
        checkpointed(model)
    rows = spec.micro_batches
    return Contestant(model, count(model), torch.Tensor.backward, step, report, moved, rows)


def deepspeed(spec: Spec) -> Contestant:
    """DeepSpeed ZeRO-3, parameters and optimizer on NVMe; settings: its configuration without paths."""
    engine = importlib.import_module("deepspeed")
    zero = spec.settings["zero_optimization"]
    for part in ("offload_param", "offload_optimizer"):
        if zero[part]["device"] == "nvme":
            zero[part]["nvme_path"] = spec.nvme
    engine.init_distributed(dist_backend="gloo", verbose=False)
    with engine.zero.Init(config_dict_or_path=spec.settings):
        model = checkpointed(llama(spec))
    parameters = sum(int(getattr(parameter, "ds_numel", 0)) for parameter in model.parameters())
    optimizer = engine.ops.adam.DeepSpeedCPUAdam(model.parameters(), **RATES, adamw_mode=True)
    runner, *_ = engine.initialize(model=model, optimizer=optimizer, config=spec.settings)
    return Contestant(runner, parameters, runner.backward, runner.step, counting=True)


KINDS = {
    "plain": plain,
    "plain_kernels": plain_kernels,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "forward_backward": forward_backward,
    "beside_updates": beside_updates,
    "infinity": infinity,
    "deepspeed": deepspeed,
}


# A run


def alone() -> None:
    """Set the variables that make this process the whole process group, which DeepSpeed needs."""
    for key, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 29571)):
        os.environ.setdefault(key, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def import_kind(kind: str) -> dict[str, str]:
    """Import the libraries of a kind, before the baseline of memory is taken; return versions."""
    versions = {"torch": str(torch.__version__), "transformers": sys.modules["transformers"].__version__}
    if kind == "deepspeed":
        alone()
        versions["deepspeed"] = importlib.import_module("deepspeed").__version__
        importlib.import_module("deepspeed.ops.adam")
    elif kind in ("infinity", "plain_kernels", "beside_updates"):
        importlib.import_module("infinity")
    return versions


def one_step(contestant: Contestant, spec: Spec, number: int) -> MeasuredStep:
    """Train one step on random tokens that depend only on the seed and the step."""
    generator = torch.Generator().manual_seed(1000 * (spec.seed + join()) + number)
    shape = spec.micro_batches, spec.tokens
    batches = torch.randint(0, spec.shape["vocab_size"], shape, generator=generator).split(contestant.rows)
    sent_before = sent_by_connection()
    before, marks, total = traffic(spec.nvme, contestant.moved()), [time.perf_counter()], 0.0
    for number_of_batch, ids in enumerate(batches, 1):
        loss = contestant.model(input_ids=ids, labels=ids).loss
        marks.append(time.perf_counter())
        contestant.backward(loss if contestant.counting else loss / len(batches))
        marks.append(time.perf_counter())
        if contestant.counting or number_of_batch == len(batches):
            contestant.step()
        marks.append(time.perf_counter())
        total += float(loss.detach())
    moved = between(before, traffic(spec.nvme, contestant.moved()))
    seconds = [end - begin for begin, end in itertools.pairwise(marks)]
    forward_s, backward_s, step_s = (float(sum(seconds[part::3])) for part in range(3))
    took = marks[-1] - marks[0]
    sent = {ports: nbytes - sent_before.get(ports, 0) for ports, nbytes in sent_by_connection().items()}
    return MeasuredStep(took, forward_s, backward_s, step_s, total / len(batches), moved, sent)


def take_turn(spec: Spec, number: int) -> None:
    """Before step `number`, if a turn ends or begins there: report the end, and wait for the next turn."""
    if spec.turn and number % spec.turn == 0:
        if number:
            os.write(spec.baton, b".")
        if number < spec.steps and not os.read(spec.baton, 1):
            raise RuntimeError("the race ended before this contestant's last turn")


def run(spec: Spec) -> RunResult:
    """Build the model, train it, and measure."""
    take_turn(spec, 0)
    versions = import_kind(spec.kind)
    join()
    gc.collect()
    reset_peak()
    if ranks() > 1:
        torch.distributed.barrier()  # all have imported what they share
    baseline, baseline_pss, start = resident(), proportional(), time.perf_counter()
    contestant = KINDS[spec.kind](spec)
    result = RunResult(
        spec.kind,
        contestant.parameters,
        versions,
        torch.get_num_threads(),
        baseline,
        time.perf_counter() - start,
        resident("VmHWM") - baseline,
        baseline_pss_nbytes=baseline_pss,
    )
    reset_peak()
    for number in range(spec.steps):
        result.steps.append(one_step(contestant, spec, number))
        take_turn(spec, number + 1)
    result.peak_nbytes = resident("VmHWM") - baseline
    if ranks() > 1:
        result.collectives = collectives_of(lambda: one_step(contestant, spec, spec.steps))
    result.engine = contestant.report()
    return result


def main() -> None:
    """Run the spec in the only argument; an error is written too, as {"error": its text}."""
    spec = Spec(**json.loads(sys.argv[1]))
    out = Path(spec.out)
    try:
        found = asdict(run(spec))
    except Exception as error:
        out.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}), encoding="utf-8")
        raise
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
