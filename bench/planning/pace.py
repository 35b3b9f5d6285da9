"""Measures this machine's speed for `infinity plan`: computing a model's blocks, updates, hashes and copies.
Each takes well under a second, except computing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash
from torch import nn

from infinity import kernels
from infinity.bench.planning.meta import first_line, from_config, outline_of_model
from infinity.bench.planning.planned import flops
from infinity.cli.presets import PRESETS, llama, recompute_blocks
from infinity.errors import ConfigError
from infinity.planning.outline import Outline
from infinity.sizes import format_size

LAYERS = 2
"""Blocks of the model that is timed."""

_FLOPS_MOST = 1e11
"""The largest forward and backward to time: some seconds on a few cores."""
_TOKENS_LEAST = 32
"""With fewer tokens a matrix product is bound by memory, and does not scale to more tokens."""

_GIVE = "Give --compute TFLOPS (per rank, as reached in training), or --compute-seconds."
_ELEMENTS = 1 << 22
_REPEATS = 5


def compute_seconds(name: str, outline: Outline, tokens: int, sequence: int) -> float:
    """Time forward and backward of the model with `LAYERS` blocks in memory, in bf16, with recomputation, and
    scale the seconds to the whole model by operations. If all tokens would take long, fewer are timed.

    name: a preset, or the path of a config.json.

    Raises: ConfigError if that is too large for this machine, or fails; ImportError without transformers.
    """
    try:
        model, width = _shallow(name, sequence)
    except ConfigError as error:
        raise ConfigError(
            f"{outline.name}: cannot be built with {LAYERS} blocks, to time it ({first_line(error)}) {_GIVE}"
        ) from error
    small = outline_of_model(model, width)
    share = min(1.0, _FLOPS_MOST / flops(small, tokens, sequence))
    timed = tokens if share == 1 else max(int(tokens * share), min(tokens, _TOKENS_LEAST))
    length = min(sequence, timed)
    timed -= timed % length
    operations, nbytes = flops(small, timed, length), 4 * small.parameters
    if operations > 4 * _FLOPS_MOST or nbytes > psutil.virtual_memory().available // 2:
        raise ConfigError(
            f"{outline.name}: {LAYERS} of its blocks and its head take {operations / 1e12:,.1f} TFLOP and "
            f"{format_size(nbytes)}, too much to time on this machine. {_GIVE}"
        )
    ids = torch.zeros(timed // length, length, dtype=torch.long)
    try:
        real = _real(model)

        def step() -> None:
            real(input_ids=ids, labels=ids).loss.backward()
            real.zero_grad(set_to_none=True)

        step()
    except Exception as error:
        raise ConfigError(
            f"{outline.name}: {LAYERS} of its blocks do not train here ({first_line(error)}). {_GIVE}"
        ) from error
    return best(step, repeats=2) * flops(outline, tokens, sequence) / operations


def _shallow(name: str, sequence: int) -> tuple[nn.Module, int]:
    """Return the model with `LAYERS` blocks on the meta device, and the width of its attention."""
    if name in PRESETS:
        preset = PRESETS[name]
        few = type(preset)(LAYERS, preset.hidden, preset.intermediate, preset.heads)
        with torch.device("meta"):
            return llama(few, sequence), preset.hidden
    path = Path(name)
    return from_config(path / "config.json" if path.is_dir() else path, num_hidden_layers=LAYERS)


def _real(model: nn.Module) -> Any:
    """Give a meta model memory with ordinary numbers; their values do not matter for timing."""
    real = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            tensor.fill_(0.01 if tensor.is_floating_point() else 0)
    real.train()
    recompute_blocks(real)
    return real


def best(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the seconds of the fastest of some calls: other processes can only slow a call down."""
    fastest = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


@dataclass(frozen=True, slots=True)
class Cores:
    """The speed of this machine's cores beside computing; see simulator.Rates."""

    update: float
    checked: float
    copied: float
    shared: bool
    computing: float = 0.5
    working: float = 0.5
    request_s: float = 0.0
    asking: float = 0.5
    computing_asked: float = 0.5
    use_s: float = 0.0


def cores(state_dtype: str) -> Cores:
    """Measure the cores for a dtype of moments, with the threads of training; takes a second."""
    return Cores(update_rate(state_dtype), hash_rate(), copy_rate(), shares_cores())


def update_rate(state_dtype: str) -> float:
    """Return the elements per second of the update's kernel."""
    n = _ELEMENTS
    widths = {"fp32": 4, "bf16": 2, "int8": 1}
    half = [torch.full((n,), 0.5, dtype=torch.bfloat16) for _ in range(3)]  # subnormal numbers take longer
    moments = [torch.zeros(n * widths[state_dtype], dtype=torch.int8) for _ in range(2)]
    scales = torch.zeros(2 * n // kernels.STATE_BLOCK)
    hi, lo, gradient = (one.data_ptr() for one in half)
    m, v = (one.data_ptr() for one in moments)
    scalars = kernels.AdamWScalars(1e-4, 0.9, 0.999, 1e-8, 0.01, 1)

    def step() -> None:
        if state_dtype == "fp32":
            kernels.adamw(n, hi, lo, m, v, gradient, "bf16", scalars)
        elif state_dtype == "bf16":
            kernels.adamw_bf16(n, hi, lo, m, v, gradient, "bf16", scalars, 0, 0)
        else:
            kernels.adamw_int8(n, hi, lo, m, v, scales.data_ptr(), gradient, "bf16", scalars, 0, 0)

    return n / best(step)


def hash_rate() -> float:
    """Return the bytes per second of hashing records."""
    content = torch.ones(16 * _ELEMENTS, dtype=torch.int8).numpy().data  # larger than any cache
    return content.nbytes / best(lambda: xxhash.xxh3_64_intdigest(content))


def copy_rate() -> float:
    """Return the bytes per second of copying in memory."""
    source, target = (torch.ones(4 * _ELEMENTS, dtype=torch.int8) for _ in range(2))
    return source.numel() / best(lambda: kernels.copy(source.numel(), target.data_ptr(), source.data_ptr()))


def shares_cores() -> bool:
    """Whether updates run on the cores that compute, because torch's threads leave none free."""
    return torch.get_num_threads() >= len(os.sched_getaffinity(0))
