"""The command `infinity`, and `python -m infinity`: the command line and its measurements.

Each measurement is imported only when it is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from infinity.cli import main as line
from infinity.cli.main import Command
from infinity.planning.outline import Outline


def _io() -> Command:
    from infinity.bench.aio import io

    return io


def _adam() -> Command:
    from infinity.bench.kernels import adam

    return adam


def _step() -> Command:
    from infinity.bench.engine import step

    return step


def _large() -> Command:
    from infinity.bench.engine import large

    return large


def _generation() -> Command:
    from infinity.bench.engine import generation

    return generation


def _lora() -> Command:
    from infinity.bench.engine import lora

    return lora


def _ranks() -> Command:
    from infinity.bench.ranks import ranks

    return ranks


def _tiles() -> Command:
    from infinity.bench.tiling import tiles

    return tiles


def _long() -> Command:
    from infinity.bench.activations import long

    return long


def _copy() -> Command:
    from infinity.bench.device import copy

    return copy


def _experts() -> Command:
    from infinity.bench.planning import experts

    return experts


def _plan() -> Command:
    from infinity.bench.planning import plan as planning

    return planning


def _outline_of(model: str) -> Outline:
    from infinity.bench.planning.sketch import outline_of

    return outline_of(model)


BENCHES = {
    "io": (
        _io,
        "read, write and mixed bandwidth and latency of a folder's disk, by engine, block size and depth",
    ),
    "adam": (_adam, "parameters per second of the update's kernels beside the memory's speed and torch's"),
    "step": (_step, "whole training steps beside their floor, DeepSpeed and plain PyTorch"),
    "large": (_large, "a model many times larger than its memory, beside what was planned of it"),
    "generate": (_generation, "generation from disk, beside accelerate, DeepSpeed and plain PyTorch"),
    "ranks": (_ranks, "steps of several ranks on this machine, beside DDP, FSDP2 and DeepSpeed ZeRO-3"),
    "lora": (_lora, "the bytes and the memory of a LoRA step on an offloaded base, beside their limits"),
    "long": (_long, "the longest sequence within a budget of memory, beside plain PyTorch's"),
    "tiles": (_tiles, "peak memory and time of operators in tiles, beside the whole ones and DeepSpeed's"),
    "experts": (
        _experts,
        "which experts stay in memory, beside LRU, LFU and Belady's optimum; the bytes of a small Mixtral",
    ),
    "copy": (_copy, "copies between host and CUDA device, both ways at once and beside NVMe"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return line.main(arguments, BENCHES, _plan, _outline_of)


if __name__ == "__main__":
    sys.exit(main())
