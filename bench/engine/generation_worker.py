"""One contestant of `infinity bench generate`, in a process of its own: it loads a folder's model, generates,
and writes what it measured as JSON. Libraries are imported before memory's baseline is taken.

This file also runs in DeepSpeed's environment, where infinity is not installed, so it imports a contestant's
library when it knows its kind.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

_PEAK_EVERY_S = 0.02
_SETTLE_TOKENS = 4

Spec = dict[str, Any]


def _nothing() -> None:
    pass


class Resident:
    """The most memory of this process that a thread has seen, above what it was at first."""

    def __init__(self) -> None:
        """Begin to look."""
        self._process = psutil.Process()
        self._baseline = self._now()
        self.peak_nbytes = 0
        threading.Thread(target=self._look, name="peak", daemon=True).start()

    def _now(self) -> int:
        """Bytes that are this process's alone: pages of mapped files are the system's."""
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    def _look(self) -> None:
        while True:
            self.peak_nbytes = max(self.peak_nbytes, self._now() - self._baseline)
            time.sleep(_PEAK_EVERY_S)


def _infinity(spec: Spec) -> tuple[Any, Callable[[], None]]:
    init: Any = importlib.import_module("infinity").Init
    with init(nvme=spec["scratch"], host_memory=spec["host_memory"], device="cpu", frozen=True):
        return AutoModelForCausalLM.from_pretrained(spec["model"]), _nothing


def _torch(spec: Spec) -> tuple[Any, Callable[[], None]]:
    return AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16), _nothing


def _accelerate(spec: Spec) -> tuple[Any, Callable[[], None]]:
    """Also returns what gives up the pages of the weights' files, once nothing maps them."""
    offload: Any = importlib.import_module("accelerate").disk_offload
    model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16)
    model = offload(model, spec["scratch"], execution_device=torch.device("cpu"), offload_buffers=True)

    def give_up() -> None:
        for path in Path(spec["scratch"]).iterdir():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())  # the kernel gives up clean pages alone
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    return model, give_up


def _deepspeed(spec: Spec) -> tuple[Any, Callable[[], None]]:
    """ZeRO-Inference: stage 3 without an optimizer, weights on NVMe, of which buffers hold a few."""
    engine: Any = importlib.import_module("deepspeed")
    known: Any = importlib.import_module("transformers.integrations").HfDeepSpeedConfig
    sizes = json.loads(Path(spec["model"], "config.json").read_text(encoding="utf-8"))
    widest = sizes["hidden_size"] * max(sizes["intermediate_size"], sizes["vocab_size"])
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 4 * widest,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 2 * widest,
            "offload_param": {
                "device": "nvme",
                "nvme_path": spec["scratch"],
                "buffer_count": 24,
                "buffer_size": widest + (1 << 18),
                "pin_memory": True,
                "max_in_cpu": 0,
            },
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "single_submit": False,
            "overlap_events": True,
            "intra_op_parallelism": 1,
        },
    }
    spec["kept"] = known(settings)  # from_pretrained looks at it for as long as it lives
    engine.init_distributed(dist_backend="gloo", verbose=False)
    model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16)
    return engine.initialize(model=model, config=settings)[0].module, _nothing


KINDS = {"infinity": _infinity, "torch": _torch, "accelerate": _accelerate, "deepspeed": _deepspeed}


def _import(kind: str) -> None:
    if kind == "deepspeed":
        for key, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 29573)):
            os.environ.setdefault(key, str(value))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    importlib.import_module(kind)


def main(spec: Spec) -> dict[str, Any]:
    """Measure: a generation that settles, then one that counts."""
    _import(spec["kind"])
    process, resident = psutil.Process(), Resident()
    began = time.perf_counter()
    model, give_up = KINDS[spec["kind"]](spec)
    model.eval()
    load_s, loaded = time.perf_counter() - began, process.io_counters()
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (spec["batch"], spec["prompt"]))
    came: list[float] = []

    def arrived(given: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        came.append(time.perf_counter())
        give_up()
        return torch.zeros(len(given), dtype=torch.bool)

    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "stopping_criteria": [arrived]}
    give_up()
    firsts = []
    for tokens in (_SETTLE_TOKENS, spec["tokens"]):
        came.clear()
        before, began = process.io_counters(), time.perf_counter()
        out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        seconds = time.perf_counter() - began
        firsts.append(came[0] - began)
    count = spec["tokens"] * spec["batch"]
    moved = process.io_counters()
    return {
        "contestant": spec["kind"],
        "host_memory": spec["host_memory"] if spec["kind"] == "infinity" else "",
        "batch": spec["batch"],
        "tokens_per_s": count / seconds,
        "load_s": load_s,
        "loading_written_nbytes": loaded.write_bytes,
        "first_s": load_s + firsts[0],
        "next_first_s": firsts[1],
        "read_nbytes": (moved.read_bytes - before.read_bytes) / count,
        "peak_nbytes": resident.peak_nbytes,
        "parameters": sum(int(getattr(one, "ds_numel", one.numel())) for one in model.parameters()),
        "digest": hash(tuple(out.flatten().tolist())),
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    Path(asked["answer"]).write_text(json.dumps(main(asked)), encoding="utf-8")
