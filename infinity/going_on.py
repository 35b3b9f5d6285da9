"""`infinity train --durable`, with and without `--resume`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from infinity.engine import engine_of_model
from infinity.errors import ConfigError
from infinity.optim import OffloadedOptimizer
from infinity.resume import resume


def go_on(
    model: nn.Module,
    optimizer: OffloadedOptimizer,
    tracked: Mapping[str, Any],
    *,
    resuming: bool,
) -> int:
    """Begin a durable run, or, `resuming`, go on with the one in its folder; return the steps that are done.
    tracked: what `optimizer.track` takes.

    Raises: ConfigError where there is a run and it was not asked for, and the other way round.
    """
    durable = engine_of_model(model).durable
    if durable is not None and bool(durable.found) != resuming:
        path = durable.folders[0].path
        if resuming:
            raise ConfigError(f"--resume: {path} holds no committed step. Leave --resume out to begin there.")
        raise ConfigError(
            f"--durable: {path} holds a run committed at step {durable.found[0].step}. Go on with it by "
            "--resume, or name another folder with --nvme."
        )
    optimizer.track(**tracked)
    return resume(model, optimizer)
