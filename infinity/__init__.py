"""Infinity: train models larger than GPU and host memory, by streaming their state between NVMe, host memory
and the device.
"""

from typing import Any

from infinity import zero
from infinity.accumulation import no_sync
from infinity.checkpoint import load, save
from infinity.config import Config
from infinity.deepspeed_engine import DeepSpeedEngine
from infinity.deepspeed_initialize import initialize
from infinity.deepspeed_launch import add_config_arguments, init_distributed
from infinity.elementwise import Elementwise
from infinity.errors import (
    ConfigError,
    CorruptionError,
    EngineFailedError,
    HostMemoryError,
    InfinityError,
    NotResidentError,
    RanksError,
    UnsupportedError,
)
from infinity.export import save_pretrained
from infinity.gather import gathered
from infinity.imported import load_deepspeed
from infinity.init import Init
from infinity.manifest import CheckpointError
from infinity.optim import OffloadedOptimizer
from infinity.optimizers import SGD, Adagrad, Adam, AdamW, Lion
from infinity.resume import commit, resume
from infinity.snapshot import Snapshot, snapshot
from infinity.stats import Stats, stats
from infinity.tensorfile import TensorFileError


def __getattr__(name: str) -> Any:
    """Import what needs transformers when it is asked for."""
    if name == "TrainerCallback":
        from infinity.trainer_callback import TrainerCallback

        return TrainerCallback
    raise AttributeError(f"module 'infinity' has no attribute {name!r}")


__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CheckpointError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "DeepSpeedEngine",
    "Elementwise",
    "EngineFailedError",
    "HostMemoryError",
    "InfinityError",
    "Init",
    "Lion",
    "NotResidentError",
    "OffloadedOptimizer",
    "RanksError",
    "Snapshot",
    "Stats",
    "TensorFileError",
    "UnsupportedError",
    "add_config_arguments",
    "commit",
    "gathered",
    "init_distributed",
    "initialize",
    "load",
    "load_deepspeed",
    "no_sync",
    "resume",
    "save",
    "save_pretrained",
    "snapshot",
    "stats",
    "zero",
]
