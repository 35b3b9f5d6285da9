"""A DeepSpeed script's arguments, ranks, device and configuration, before it has a model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from infinity.config.deepspeed_json import DeepSpeedSettings as SettingsOf
from infinity.config.deepspeed_json import translate
from infinity.config.settings import Config
from infinity.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config FILE to a script's arguments, as DeepSpeed does."""
    group = parser.add_argument_group("DeepSpeed", "read by infinity.deepspeed.initialize")
    group.add_argument("--deepspeed", action="store_true", help="for the script itself; no effect here")
    group.add_argument("--deepspeed_config", metavar="FILE", help="DeepSpeed's JSON")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create torch's process group, unless it exists: of torchrun's ranks, or of this process alone.

    dist_backend: "nccl" or "gloo"; None for the device's. timeout, init_method, rank,
    world_size: as torch.distributed.init_process_group. The other arguments are for DeepSpeed's launcher,
    and have no effect.

    Raises: what torch.distributed.init_process_group raises.
    """
    if distributed.is_initialized() or dist_init_required is False:
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if "RANK" in os.environ or init_method is not None:
        distributed.init_process_group(backend, init_method, rank=rank, world_size=world_size, **options)
    else:
        store = distributed.HashStore()  # type: ignore[attr-defined] # torch has it there
        distributed.init_process_group(backend, store=store, rank=0, world_size=1, **options)


def ranks() -> int:
    """Return the number of ranks."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """Return this process's rank."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def local_rank() -> int:
    """Return this process's rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


Settings = SettingsOf[Config]


def read(source: str | Path | Mapping[str, Any], **options: Any) -> Settings:
    """Return all that a DeepSpeed JSON says; see config.deepspeed_json.translate."""
    return translate(source, Config, **options)


def settings_of(
    source: str | Path | Mapping[str, Any] | Settings | None,
    *,
    strict: bool = True,
    data_ranks: int | None = None,
    sequences: int | None = None,
) -> Settings:
    """Read a script's configuration. Its device is this rank's GPU, if there is one, unless it names another.

    strict: see config.deepspeed_json.translate. data_ranks: how many ranks have different data, or parts of
    sequences, where the script says it; None: all that do not divide layers. sequences: how many of them
    share a sequence, where the script says it. Under torchrun the process group is created, if need be.

    Raises: ConfigError, also where `source` was read for another number of ranks, or says another one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        init_distributed()
    if source is None:
        raise ConfigError(
            "no configuration: give initialize(config=...) a DeepSpeed JSON or its content, or the script "
            "--deepspeed_config FILE"
        )
    more = {} if sequences is None else {"infinity": {"sequence_parallel": sequences}}
    there = data_ranks or ranks()
    settings = (
        source if isinstance(source, SettingsOf) else read(source, strict=strict, world_size=there, **more)
    )
    said = [line.value for line in settings.report.lines if line.key == "sequence_parallel_size"]
    if sequences is not None and {settings.config.sequence_parallel, *said} - {sequences}:
        raise ConfigError(
            f"the script says that {sequences} ranks share a sequence, the configuration "
            f"{(said or [settings.config.sequence_parallel])[0]}; give one number"
        )
    read_for = settings.batches.ranks * settings.config.sequence_parallel * settings.tensor_parallel
    if read_for != there:
        raise ConfigError(
            f"the configuration was read for {read_for} ranks, there are {there}: read(..., world_size=...)"
        )
    named = any(line.key == "infinity.device" for line in settings.report.lines)
    if named or not torch.cuda.is_available():
        return settings
    return replace(settings, config=on_device(settings.config))


def on_device(config: Config) -> Config:
    """Return the configuration with this rank's GPU as its device."""
    return replace(config, device=f"cuda:{local_rank()}")
