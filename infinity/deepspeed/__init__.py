"""DeepSpeed's names: a script changes one line, to `import infinity.deepspeed as deepspeed`.

docs/deepspeed.md lists DeepSpeed's public calls: which work, which have no effect here, and what replaces the
others.
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
    """Raise an error that names the replacement."""
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
