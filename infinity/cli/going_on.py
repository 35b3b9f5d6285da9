"""`infinity train --durable`, with and without `--resume`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from infinity.checkpoint.resume import durable_of, resume
from infinity.errors import ConfigError
from infinity.optim.base import OffloadedOptimizer


def go_on(
    model: nn.Module,
    optimizer: OffloadedOptimizer,
    tracked: Mapping[str, Any],
    *,
    resuming: bool,
) -> int:
    """Begin a durable run, or, `resuming`, go on with the one in its folder, where there is one: so that one
    command does for every start. Return the steps that are done. tracked: what `optimizer.track` takes.

    Raises: ConfigError where there is a run, and it was not asked for.
    """
    durable = durable_of(model)
    if durable.found and not resuming:
        path, step = durable.folders[0].path, durable.found[0].step
        raise ConfigError(
            f"--durable: {path} holds a run committed at step {step}. Go on with it by --resume, or name "
            "another folder with --nvme."
        )
    optimizer.track(**tracked)
    return resume(model, optimizer)


def outset(model: nn.Module) -> str:
    """Say where `go_on`, resuming, begins; to be asked before it."""
    durable = durable_of(model)
    path = durable.folders[0].path
    if durable.found:
        return f"--resume: goes on after step {durable.found[0].step}, committed in {path}"
    return f"--resume: {path} holds no committed step; a new run begins there"
