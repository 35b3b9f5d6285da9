"""Infinity: train models larger than GPU and host memory, by streaming their state between NVMe, host memory
and the device.
"""

from infinity.config import Config
from infinity.errors import (
    ConfigError,
    CorruptionError,
    EngineFailedError,
    HostMemoryError,
    InfinityError,
    NotResidentError,
    UnsupportedError,
)
from infinity.gather import gathered
from infinity.init import Init
from infinity.optim import AdamW
from infinity.stats import Stats, stats

__all__ = [
    "AdamW",
    "Config",
    "ConfigError",
    "CorruptionError",
    "EngineFailedError",
    "HostMemoryError",
    "InfinityError",
    "Init",
    "NotResidentError",
    "Stats",
    "UnsupportedError",
    "gathered",
    "stats",
]
