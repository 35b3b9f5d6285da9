"""Puts parameters into their forms: plain, attached to their values, or released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from infinity.tensors import is_distributed
from infinity.units.attached import DATA, Attached
from infinity.units.released import Released

FormName = Literal["plain", "attached", "released"]
_KINDS: dict[str, type[nn.Parameter]] = {"plain": nn.Parameter, "attached": Attached, "released": Released}
_set_data = DATA.__set__


def become(parameter: nn.Parameter, kind: FormName, values: torch.Tensor | None = None) -> None:
    """Let a parameter have the class of this form, and, unless they are None, `values`, local ones of a
    DTensor.
    """
    if is_distributed(parameter):
        from infinity.units import sharded

        parameter.__class__ = sharded.KINDS[kind]
        if values is not None:
            sharded.set_local(parameter, values)
        return
    if values is None:
        parameter.__class__ = _KINDS[kind]
        return
    parameter.__class__ = nn.Parameter
    _set_data(parameter, values)
    parameter.__class__ = _KINDS[kind]


def become_all(
    parameters: Sequence[nn.Parameter], kind: FormName, values: Sequence[torch.Tensor] | None = None
) -> None:
    """Let parameters have the classes of this form, and values, each its own."""
    for index, parameter in enumerate(parameters):
        become(parameter, kind, None if values is None else values[index])


def release(parameter: nn.Parameter, placeholder: torch.Tensor) -> None:
    """Put `placeholder` in the place of the parameter's values, and the guard on."""
    become(parameter, "released", placeholder)


def restore(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Take the guard off and let the parameter be `values`."""
    become(parameter, "plain", values)
