"""Checkpoints with DeepSpeed's names: a folder per tag, and a file `latest` with the newest tag.

The folder of a tag is a checkpoint of infinity.save.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import nn

from infinity.checkpoint.atomic import sync
from infinity.checkpoint.save_load import load, save
from infinity.config.loss_scale import LossScale
from infinity.deepspeed.launch import rank
from infinity.engine.engine import engine_of_model
from infinity.sequences.warmup import SequenceWarmup
from infinity.storage.manifest import CheckpointError

LATEST = "latest"


class Trained(Protocol):
    """The part of a DeepSpeedEngine that is saved and loaded."""

    module: nn.Module
    optimizer: Any
    lr_scheduler: Any
    scaling: LossScale | None
    warmup: SequenceWarmup | None
    global_steps: int
    micro_steps: int

    @property
    def step_counts(self) -> dict[str, int]:
        """Steps and samples so far."""

    def set_step_counts(self, counts: dict[str, int]) -> None:
        """Go on from the counts of a checkpoint."""

    def gradient_accumulation_steps(self) -> int:
        """Return the backwards per update."""


def save_tagged(
    engine: Trained,
    folder: str | os.PathLike[str],
    tag: object,
    client_state: dict[str, Any],
    *,
    save_latest: bool,
) -> None:
    """Save to folder/tag; see DeepSpeedEngine.save_checkpoint."""
    name = _name(f"global_step{engine.global_steps}" if tag is None else tag)
    Path(folder).mkdir(parents=True, exist_ok=True)
    waiting = engine.micro_steps % engine.gradient_accumulation_steps()
    if waiting:
        warnings.warn(
            f"save_checkpoint after {waiting} of {engine.gradient_accumulation_steps()} backwards of an "
            "update: gradients are not saved",
            stacklevel=3,
        )
    extra: dict[str, Any] = {"client_state": client_state}
    extra["counts"] = engine.step_counts
    if engine.scaling is not None:
        extra["loss_scale"] = engine.scaling.state_dict()
    if engine.warmup is not None:
        extra["length"] = engine.warmup.length
    save(
        engine.module,
        engine.optimizer,
        Path(folder) / name,
        scheduler=engine.lr_scheduler,
        extra=extra,
        overwrite=True,
    )
    with engine_of_model(engine.module).stages.all_ranks().together(f"naming {name} the latest"):
        if save_latest and rank() == 0:
            _replace(Path(folder) / LATEST, lambda file: file.write(name.encode()))


def load_tagged(
    engine: Trained,
    folder: str | os.PathLike[str],
    tag: object,
    *,
    optimizer: bool,
    scheduler: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load from folder/tag; see DeepSpeedEngine.load_checkpoint."""
    latest = Path(folder) / LATEST
    if tag is None:
        if not latest.is_file():
            warnings.warn(f"load_checkpoint: {latest} does not exist; nothing was loaded", stacklevel=3)
            return None, None
        tag = latest.read_text().strip()
    path = Path(folder) / _name(tag)
    if any(path.glob("*model_states.pt")):
        raise CheckpointError(
            f"{path} was saved by DeepSpeed: infinity.deepspeed.load_deepspeed(engine.module, "
            f"engine.optimizer, {str(folder)!r}, tag={str(tag)!r}) loads its weights and moments"
        )
    extra = load(
        engine.module,
        engine.optimizer if optimizer else None,
        path,
        scheduler=engine.lr_scheduler if scheduler else None,
    )
    if not isinstance(extra, dict) or extra.keys() - {"loss_scale", "length"} != {"client_state", "counts"}:
        raise CheckpointError(f"{path} was not saved by save_checkpoint; infinity.load has loaded it")
    if optimizer:
        engine.set_step_counts(extra["counts"])
        if engine.scaling is not None and "loss_scale" in extra:
            engine.scaling.load_state_dict(extra["loss_scale"])
        if engine.warmup is not None:  # as in DeepSpeed, also after steps without a curriculum
            within = engine.micro_steps % engine.gradient_accumulation_steps()
            engine.warmup.seek(engine.global_steps, within, extra.get("length"))
    return str(path), extra["client_state"]


def save_weights(model: nn.Module, folder: str | os.PathLike[str], name: str) -> None:
    """Save the 16-bit weights as one file; see DeepSpeedEngine.save_16bit_model."""
    weights = model.state_dict()  # a collective of all ranks
    if rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _replace(Path(folder) / name, lambda file: torch.save(weights, file))


def _name(tag: object) -> str:
    name = str(tag)
    if name in ("", ".", "..", LATEST) or "/" in name or "\0" in name:
        raise ValueError(f"tag={tag!r}: expected the name of a folder")
    return name


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically and durably."""
    filling = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with filling.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        filling.replace(path)
    finally:
        filling.unlink(missing_ok=True)
    sync(path.parent)
