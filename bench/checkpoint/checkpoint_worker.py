"""One process of `python -m infinity.bench.checkpoint.checkpoints`: does one step with a checkpoint, alone or
as a rank under torchrun, and writes its memory and time to FOLDER/taken-RANK.json.

    python -m infinity.bench.checkpoint.checkpoint_worker '{"what": "save", "folder": ..., ...}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.bench.engine.contestant import checkpointed, reset_peak, resident
from infinity.checkpoint.export import export_checkpoint
from infinity.engine.engine import engine_of_model

SAVED, HUB, EXPORTED = "saved", "hub", "exported"
_TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def read_nbytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


class CheckpointMeasurements:
    """The steps to measure; each method is one, and resets the peak of memory before it begins."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._folder = Path(spec["folder"])
        self._sizes = spec["sizes"]
        self._config = infinity.Config(nvme=str(self._folder), host_memory=spec["host_memory"])
        self._dtype = getattr(torch, spec.get("dtype", "float32"))

    def _build(self) -> tuple[Any, infinity.AdamW]:
        with infinity.Init(self._config):
            model = LlamaForCausalLM(LlamaConfig(**self._sizes))
        return model, infinity.AdamW(model.parameters(), lr=1e-3, update="backward")

    def save(self) -> Any:
        """Save after a training step, so that moments exist."""
        model, optimizer = self._build()
        checkpointed(model)
        ids = torch.arange(16)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reset_peak()
        infinity.save(model, optimizer, self._folder / SAVED)
        return model

    def load(self) -> Any:
        """Load the saved checkpoint."""
        model, optimizer = self._build()
        reset_peak()
        infinity.load(model, optimizer, self._folder / SAVED)
        return model

    def save_pretrained(self) -> Any:
        """Write shards in Hugging Face's format."""
        model, _ = self._build()
        reset_peak()
        infinity.save_pretrained(model, self._folder / HUB, torch.float32, "300MB")
        return model

    def from_pretrained(self) -> Any:
        """Load these shards."""
        reset_peak()
        with infinity.Init(self._config):
            return LlamaForCausalLM.from_pretrained(self._folder / HUB, dtype=self._dtype)

    def export(self) -> Any:
        """Write a checkpoint's weights in Hugging Face's format, without a model."""
        reset_peak()
        export_checkpoint(self._folder / SAVED, self._folder / EXPORTED)
        return None


def main(spec: dict[str, Any]) -> None:
    """Run the step, and write the figures."""
    ids = torch.arange(16)[None]  # torch's memory for its first use does not count
    tiny = LlamaForCausalLM(LlamaConfig(**_TINY, vocab_size=64)).bfloat16()
    tiny(input_ids=ids, labels=ids).loss.backward()
    base, read, began_s = resident(), read_nbytes(), time.perf_counter()
    model = getattr(CheckpointMeasurements(spec), spec["what"])()
    engine = engine_of_model(model) if model is not None else None
    units = engine.units if engine else ()
    of_records = sum(engine.traffic.read.values()) if engine else 0
    figures = {
        "peak_nbytes": resident("VmHWM") - base,
        "unit_nbytes": max((unit.resident_nbytes for unit in units), default=0),
        "read_nbytes": read_nbytes() - read - of_records,
        "parameters": sum(one.numel for unit in units for one in unit.layout.segments),
        "seconds": time.perf_counter() - began_s,
    }
    path = Path(spec["folder"], f"taken-{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
