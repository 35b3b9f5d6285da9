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
"""The largest forward and backward to time alone: half a second to some seconds on a few cores."""
_FLOPS_MORE = 4e11
"""Of the second one, where all tokens take more than `_FLOPS_ALL`."""
_FLOPS_ALL = 1e12
"""The largest that is timed with all tokens, in some seconds: 256 of a 7B model. They take 4 % more than a
line through 32 and 122 says, with the model of `infinity bench large` 2 % (CPU seconds, on two EPYC cores).
"""
_TOKENS_LEAST = 32
"""With fewer, the cores mostly wait for weights."""

_GIVE = "Give --compute TFLOPS (per rank, as reached in training), or --compute-seconds."


def compute_seconds(name: str, outline: Outline, tokens: int, sequence: int) -> float:
    """Time forward and backward of the model with `LAYERS` blocks in memory, in bf16, with recomputation, and
    scale the seconds to the whole model by operations. Where all tokens would take long, two smaller numbers
    of them are timed, and the line through both tells the rest: part of the seconds is for reading weights
    and making gradients, and the same for any number of tokens.

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
    asked = flops(small, tokens, sequence)
    few = _batch(tokens, sequence, _FLOPS_MOST / asked)
    operations, nbytes = flops(small, *few), 4 * small.parameters
    if operations > _FLOPS_MORE or nbytes > psutil.virtual_memory().available // 2:
        raise ConfigError(
            f"{outline.name}: {LAYERS} of its blocks and its head take {operations / 1e12:,.1f} TFLOP and "
            f"{format_size(nbytes)}, too much to time on this machine. {_GIVE}"
        )
    try:
        real = _real(model)
        _step(real, few)  # the first takes longer
        seconds = best(lambda: _step(real, few), repeats=2)
        more = _batch(tokens, sequence, 1.0 if asked <= _FLOPS_ALL else _FLOPS_MORE / asked)
        if flops(small, *more) >= 2 * operations:
            longer = best(lambda: _step(real, more), repeats=2)
            seconds = extrapolated((operations, seconds), (flops(small, *more), longer), asked)
            operations = asked
    except Exception as error:
        raise ConfigError(
            f"{outline.name}: {LAYERS} of its blocks do not train here ({first_line(error)}). {_GIVE}"
        ) from error
    return seconds * flops(outline, tokens, sequence) / operations


def extrapolated(few: tuple[float, float], more: tuple[float, float], operations: float) -> float:
    """Return the seconds of so many operations, by two pairs of operations and seconds: a constant, and so
    long for each. In proportion to those of `more` where that says less, or where `few` took no less time:
    something else has disturbed it.
    """
    each = (more[1] - few[1]) / (more[0] - few[0])
    in_proportion = more[1] * operations / more[0]
    return in_proportion if each <= 0 else min(in_proportion, more[1] + each * (operations - more[0]))


def _batch(tokens: int, sequence: int, share: float) -> tuple[int, int]:
    """Return so large a share of the tokens, in whole sequences, and their length."""
    few = tokens if share >= 1 else max(int(tokens * share), min(tokens, _TOKENS_LEAST))
    length = min(sequence, few)
    return few - few % length, length


def _step(model: Any, batch: tuple[int, int]) -> None:
    tokens, length = batch
    ids = torch.zeros(tokens // length, length, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)


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
