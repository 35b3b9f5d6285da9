"""Infinity: train models larger than GPU and host memory, by streaming their state between NVMe, host memory
and the device.

A name is imported when it is first used, so that `import infinity.planning` and `infinity --help` do not
import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from infinity.deprecation import warn_deprecated

if TYPE_CHECKING:
    from infinity import deepspeed as deepspeed
    from infinity import huggingface as huggingface
    from infinity.checkpoint.distributed import CheckpointReader as CheckpointReader
    from infinity.checkpoint.distributed import load_dcp as load_dcp
    from infinity.checkpoint.export import save_pretrained as save_pretrained
    from infinity.checkpoint.merged import save_merged as save_merged
    from infinity.checkpoint.resume import commit as commit
    from infinity.checkpoint.resume import resume as resume
    from infinity.checkpoint.save_load import load as load
    from infinity.checkpoint.save_load import save as save
    from infinity.checkpoint.snapshot import Snapshot as Snapshot
    from infinity.checkpoint.snapshot import snapshot as snapshot
    from infinity.checkpoint.streamed import receive_weights as receive_weights
    from infinity.checkpoint.streamed import stream_weights as stream_weights
    from infinity.config.settings import Config as Config
    from infinity.durable.wiping import wipe as wipe
    from infinity.engine.gathered import gathered as gathered
    from infinity.engine.init import Init as Init
    from infinity.engine.no_sync import no_sync as no_sync
    from infinity.engine.sequences import sequence_parallel as sequence_parallel
    from infinity.engine.sleeping import sleep as sleep
    from infinity.engine.sleeping import wake as wake
    from infinity.engine.stats import Stats as Stats
    from infinity.engine.stats import stats as stats
    from infinity.errors import ConfigError as ConfigError
    from infinity.errors import CorruptionError as CorruptionError
    from infinity.errors import DeviceMemoryError as DeviceMemoryError
    from infinity.errors import EngineFailedError as EngineFailedError
    from infinity.errors import HostMemoryError as HostMemoryError
    from infinity.errors import InfinityError as InfinityError
    from infinity.errors import NotResidentError as NotResidentError
    from infinity.errors import RanksError as RanksError
    from infinity.errors import UnsupportedError as UnsupportedError
    from infinity.huggingface.batch_tiles import tile_generation_ as tile_generation_
    from infinity.huggingface.kv_cache import KVCache as KVCache
    from infinity.optim.base import OffloadedOptimizer as OffloadedOptimizer
    from infinity.optim.elementwise import wrap_optimizer as wrap_optimizer
    from infinity.optim.muon import Muon as Muon
    from infinity.optim.muon import muon_groups as muon_groups
    from infinity.optim.one_bit import OneBitAdam as OneBitAdam
    from infinity.optim.optimizers import SGD as SGD
    from infinity.optim.optimizers import Adagrad as Adagrad
    from infinity.optim.optimizers import Adam as Adam
    from infinity.optim.optimizers import AdamW as AdamW
    from infinity.optim.optimizers import Lion as Lion
    from infinity.sequences.loader import SequenceParallelLoader as SequenceParallelLoader
    from infinity.sequences.parallel import SequenceParallel as SequenceParallel
    from infinity.sequences.random_ltd import RandomLTD as RandomLTD
    from infinity.sequences.sparse_attention import SparseAttention as SparseAttention
    from infinity.sequences.warmup import SequenceWarmup as SequenceWarmup
    from infinity.storage.manifest import CheckpointError as CheckpointError
    from infinity.storage.safetensors_file import TensorFileError as TensorFileError

_MODULES = {
    "infinity.checkpoint.distributed": ("CheckpointReader", "load_dcp"),
    "infinity.checkpoint.export": ("save_pretrained",),
    "infinity.checkpoint.merged": ("save_merged",),
    "infinity.checkpoint.resume": ("commit", "resume"),
    "infinity.storage.safetensors_file": ("TensorFileError",),
    "infinity.checkpoint.save_load": ("load", "save"),
    "infinity.checkpoint.snapshot": ("Snapshot", "snapshot"),
    "infinity.checkpoint.streamed": ("receive_weights", "stream_weights"),
    "infinity.config.settings": ("Config",),
    "infinity.durable.wiping": ("wipe",),
    "infinity.engine.gathered": ("gathered",),
    "infinity.engine.init": ("Init",),
    "infinity.engine.no_sync": ("no_sync",),
    "infinity.engine.sequences": ("sequence_parallel",),
    "infinity.engine.sleeping": ("sleep", "wake"),
    "infinity.engine.stats": ("Stats", "stats"),
    "infinity.errors": (
        "ConfigError",
        "CorruptionError",
        "EngineFailedError",
        "DeviceMemoryError",
        "HostMemoryError",
        "InfinityError",
        "NotResidentError",
        "RanksError",
        "UnsupportedError",
    ),
    "infinity.huggingface.batch_tiles": ("tile_generation_",),
    "infinity.huggingface.kv_cache": ("KVCache",),
    "infinity.optim.base": ("OffloadedOptimizer",),
    "infinity.optim.elementwise": ("wrap_optimizer",),
    "infinity.optim.muon": ("Muon", "muon_groups"),
    "infinity.optim.one_bit": ("OneBitAdam",),
    "infinity.optim.optimizers": ("Adagrad", "Adam", "AdamW", "Lion", "SGD"),
    "infinity.sequences.loader": ("SequenceParallelLoader",),
    "infinity.sequences.parallel": ("SequenceParallel",),
    "infinity.sequences.random_ltd": ("RandomLTD",),
    "infinity.sequences.sparse_attention": ("SparseAttention",),
    "infinity.sequences.warmup": ("SequenceWarmup",),
    "infinity.storage.manifest": ("CheckpointError",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

_PACKAGES = ("deepspeed", "huggingface")
"""Packages that `import infinity` is enough to use."""

_OLD = {
    **{
        name: ("infinity.deepspeed", name, f"infinity.deepspeed.{name}")
        for name in (
            "DeepSpeedEngine",
            "add_config_arguments",
            "init_distributed",
            "initialize",
            "load_deepspeed",
            "zero",
        )
    },
    "TrainerCallback": ("infinity.huggingface", "TrainerCallback", "infinity.huggingface.TrainerCallback"),
    "Elementwise": ("infinity.optim.elementwise", "Elementwise", "infinity.wrap_optimizer"),
}
"""Deprecated names: the module and the name there that each stands for, and what to write instead."""

_INSTEAD = {
    "OnebitAdam": "infinity.OneBitAdam",
    "ZeroOneAdam": "DeepSpeed has removed it, too: infinity.OneBitAdam sends one bit after freeze_step",
    "OnebitLamb": "a norm of each layer comes too late for a stream: infinity.OneBitAdam",
    "OneBitLamb": "a norm of each layer comes too late for a stream: infinity.OneBitAdam",
    "Lamb": "a norm of each layer comes too late for a stream: infinity.AdamW",
}
"""What to use instead of optimizers that are not there."""

__all__ = [name for name in _MODULE_OF if name != "OffloadedOptimizer"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use; a deprecated one warns, once."""
    if name in _PACKAGES:
        found: Any = importlib.import_module(f"infinity.{name}")
    elif name in _MODULE_OF:
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name == "__version__":
        found = importlib.import_module("importlib.metadata").version("zero-infinity")
    elif name in _OLD:
        module, there, now = _OLD[name]
        warn_deprecated(f"infinity.{name}", f"use {now}")
        found = getattr(importlib.import_module(module), there)
    else:
        instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"module 'infinity' has no attribute {name!r}{instead}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List the public names as well, whether or not they were imported yet."""
    return sorted({*globals(), *__all__})
