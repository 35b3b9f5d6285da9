"""Infinity: train models larger than GPU and host memory, by streaming their state between NVMe, host memory
and the device.
"""

from infinity.accumulation import no_sync
from infinity.checkpoint import load, save
from infinity.config import Config
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
from infinity.optim import AdamW
from infinity.resume import commit, resume
from infinity.snapshot import Snapshot, snapshot
from infinity.stats import Stats, stats
from infinity.tensorfile import TensorFileError

__all__ = [
    "AdamW",
    "CheckpointError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "EngineFailedError",
    "HostMemoryError",
    "InfinityError",
    "Init",
    "NotResidentError",
    "RanksError",
    "Snapshot",
    "Stats",
    "TensorFileError",
    "UnsupportedError",
    "commit",
    "gathered",
    "load",
    "load_deepspeed",
    "no_sync",
    "resume",
    "save",
    "save_pretrained",
    "snapshot",
    "stats",
]
