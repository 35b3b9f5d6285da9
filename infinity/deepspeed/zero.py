"""deepspeed.zero: Init, GatheredParameters, and what changes nothing here."""

from typing import Any

from torch import nn

from infinity.deepspeed.calls import missing
from infinity.deepspeed.zero_init import GatheredParameters, Init


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Change nothing: a parameter of another module is fetched when it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Change nothing; see register_external_parameter."""


def __getattr__(name: str) -> Any:
    """Say what to do instead."""
    raise AttributeError(missing("zero", name))


__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]
