"""Measures how fast this machine computes a model's blocks, for `infinity plan`; see cores for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from infinity.bench.planning.cores import best
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
