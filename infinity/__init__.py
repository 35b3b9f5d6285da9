"""Infinity: train models larger than GPU and host memory, by streaming their state between NVMe, host memory
and the device.

A name is imported when it is first used: `infinity.planning` needs no torch, and `infinity --help` does not
wait for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.checkpoint.deepspeed_files import load_deepspeed as load_deepspeed
    from infinity.checkpoint.export import save_pretrained as save_pretrained
    from infinity.checkpoint.resume import commit as commit
    from infinity.checkpoint.resume import resume as resume
    from infinity.checkpoint.safetensors_file import TensorFileError as TensorFileError
    from infinity.checkpoint.save_load import load as load
    from infinity.checkpoint.save_load import save as save
    from infinity.checkpoint.snapshot import Snapshot as Snapshot
    from infinity.checkpoint.snapshot import snapshot as snapshot
    from infinity.config.settings import Config as Config
    from infinity.deepspeed import zero_init as zero
    from infinity.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
    from infinity.deepspeed.initialize import initialize as initialize
    from infinity.deepspeed.launch import add_config_arguments as add_config_arguments
    from infinity.deepspeed.launch import init_distributed as init_distributed
    from infinity.engine.gathered import gathered as gathered
    from infinity.engine.init import Init as Init
    from infinity.engine.no_sync import no_sync as no_sync
    from infinity.engine.stats import Stats as Stats
    from infinity.engine.stats import stats as stats
    from infinity.errors import ConfigError as ConfigError
    from infinity.errors import CorruptionError as CorruptionError
    from infinity.errors import EngineFailedError as EngineFailedError
    from infinity.errors import HostMemoryError as HostMemoryError
    from infinity.errors import InfinityError as InfinityError
    from infinity.errors import NotResidentError as NotResidentError
    from infinity.errors import RanksError as RanksError
    from infinity.errors import UnsupportedError as UnsupportedError
    from infinity.huggingface.trainer import TrainerCallback as TrainerCallback
    from infinity.optim.base import OffloadedOptimizer as OffloadedOptimizer
    from infinity.optim.elementwise import Elementwise as Elementwise
    from infinity.optim.optimizers import SGD as SGD
    from infinity.optim.optimizers import Adagrad as Adagrad
    from infinity.optim.optimizers import Adam as Adam
    from infinity.optim.optimizers import AdamW as AdamW
    from infinity.optim.optimizers import Lion as Lion
    from infinity.storage.manifest import CheckpointError as CheckpointError

_MODULES = {
    "infinity.checkpoint.deepspeed_files": ("load_deepspeed",),
    "infinity.checkpoint.export": ("save_pretrained",),
    "infinity.checkpoint.resume": (
        "commit",
        "resume",
    ),
    "infinity.checkpoint.safetensors_file": ("TensorFileError",),
    "infinity.checkpoint.save_load": (
        "load",
        "save",
    ),
    "infinity.checkpoint.snapshot": (
        "Snapshot",
        "snapshot",
    ),
    "infinity.config.settings": ("Config",),
    "infinity.deepspeed.engine": ("DeepSpeedEngine",),
    "infinity.deepspeed.initialize": ("initialize",),
    "infinity.deepspeed.launch": (
        "add_config_arguments",
        "init_distributed",
    ),
    "infinity.engine.gathered": ("gathered",),
    "infinity.engine.init": ("Init",),
    "infinity.engine.no_sync": ("no_sync",),
    "infinity.engine.stats": (
        "Stats",
        "stats",
    ),
    "infinity.errors": (
        "ConfigError",
        "CorruptionError",
        "EngineFailedError",
        "HostMemoryError",
        "InfinityError",
        "NotResidentError",
        "RanksError",
        "UnsupportedError",
    ),
    "infinity.huggingface.trainer": ("TrainerCallback",),
    "infinity.optim.base": ("OffloadedOptimizer",),
    "infinity.optim.elementwise": ("Elementwise",),
    "infinity.optim.optimizers": (
        "Adagrad",
        "Adam",
        "AdamW",
        "Lion",
        "SGD",
    ),
    "infinity.storage.manifest": ("CheckpointError",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    """Import what has this name."""
    if name == "zero":
        found: Any = importlib.import_module("infinity.deepspeed.zero_init")
    elif name in _MODULE_OF:
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names, too."""
    return sorted({*globals(), *__all__})
