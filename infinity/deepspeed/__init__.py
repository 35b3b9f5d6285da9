"""DeepSpeed's names: `import infinity.deepspeed as deepspeed` is the line that a script changes.

docs/deepspeed.md says of DeepSpeed's public calls which work, which change nothing here, and what to do
instead of the others.
"""

from typing import Any

from infinity.checkpoint.deepspeed_files import load_deepspeed
from infinity.deepspeed import accelerator, comm, utils, zero
from infinity.deepspeed.accelerator import get_accelerator
from infinity.deepspeed.calls import missing
from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.deepspeed.initialize import initialize
from infinity.deepspeed.launch import add_config_arguments, init_distributed
from infinity.errors import ConfigError as DeepSpeedConfigError


def __getattr__(name: str) -> Any:
    """Say what to do instead."""
    raise AttributeError(missing("", name))


__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "load_deepspeed",
    "utils",
    "zero",
]
