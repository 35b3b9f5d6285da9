"""One contestant of `infinity bench generate`, in a process of its own: it loads a folder's model, generates,
and writes what it measured as JSON. Imports are at the top, so that they count towards the memory baseline.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

import infinity

_PEAK_EVERY_S = 0.02


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


def _infinity(spec: dict[str, Any]) -> tuple[Any, Callable[[], int]]:
    with infinity.Init(nvme=spec["scratch"], host_memory=spec["host_memory"], device="cpu", frozen=True):
        model = AutoModelForCausalLM.from_pretrained(spec["model"])

    def read() -> int:
        done = infinity.stats(model)
        return done.nvme_read_nbytes + done.checkpoint_read_nbytes

    return model, read


def _torch(spec: dict[str, Any]) -> tuple[Any, Callable[[], int]]:
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16)
    return model, lambda: 0


def _accelerate(spec: dict[str, Any]) -> tuple[Any, Callable[[], int]]:
    from accelerate import disk_offload

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16)
    model = disk_offload(model, spec["scratch"], execution_device=torch.device("cpu"), offload_buffers=True)
    process = psutil.Process()
    return model, lambda: int(process.io_counters().read_bytes)


KINDS = {"infinity": _infinity, "torch": _torch, "accelerate": _accelerate}


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure: a generation that settles, then one that counts."""
    resident = Resident()
    model, read = KINDS[spec["kind"]](spec)
    model.eval()
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (spec["batch"], spec["prompt"]))
    came: list[float] = []

    def arrived(given: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        came.append(time.perf_counter())
        return torch.zeros(len(given), dtype=torch.bool)

    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "stopping_criteria": [arrived]}
    for tokens in (4, spec["tokens"]):
        came.clear()
        before, began = read(), time.perf_counter()
        out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        seconds = time.perf_counter() - began
    count = spec["tokens"] * spec["batch"]
    return {
        "contestant": spec["kind"],
        "host_memory": spec["host_memory"] if spec["kind"] == "infinity" else "",
        "batch": spec["batch"],
        "tokens_per_s": count / seconds,
        "first_s": came[0] - began,
        "read_nbytes": (read() - before) / count,
        "peak_nbytes": resident.peak_nbytes,
        "parameters": sum(one.numel() for one in model.parameters()),
        "digest": hash(tuple(out.flatten().tolist())),
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    Path(asked["answer"]).write_text(json.dumps(main(asked)), encoding="utf-8")
