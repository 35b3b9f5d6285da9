"""What an engine keeps of one parameter, looked at and set: master, optimizer's state, gradient. Whole, or
this rank's part, flat.

[Note: every rank]
Whole values are the parts of all ranks, and a gradient can be set only when the ranks have summed it: so
every rank makes these calls, in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infinity.engine.engine import Engine, engine_of
from infinity.errors import UnsupportedError
from infinity.gradients.grad_tensor import OffloadedGradient
from infinity.tensors import is_part


def _engine(parameter: nn.Parameter) -> Engine | None:
    """Return who keeps a parameter that trains; None for others."""
    return engine_of(parameter) if parameter.requires_grad else None


def _field(engine: Engine, parameter: nn.Parameter, key: str | None) -> str:
    """Return the field of the record: of the master without a key, else what an optimizer calls `key`."""
    if key is None:
        return "master"
    for optimizer in engine.optimizers:
        if id(parameter) in optimizer.mine:
            names = {name: field for field, name in optimizer.recipe.state.items()}
            if key in names:
                return str(names[key])
            raise ValueError(
                f"{engine.parameters.name_of(parameter)}: {type(optimizer).__name__} keeps no {key!r}, but "
                f"{', '.join(map(repr, names)) or 'nothing'}"
            )
    raise ValueError(f"{engine.parameters.name_of(parameter)} belongs to no optimizer, and has no {key!r}")


def field(parameter: nn.Parameter, key: str | None, *, local: bool = False) -> torch.Tensor | None:
    """Return the fp32 master, or state `key` of the optimizer, updates applied; None of a parameter that is
    not offloaded, or frozen.

    Raises: ValueError for a key that the optimizer does not know.
    """
    engine = _engine(parameter)
    if engine is None:
        return None
    name = _field(engine, parameter, key)
    if not local:
        return engine.parameters.read(parameter, [name])[0].to(parameter.device)
    return engine.parameters.read_part(parameter, name).to(parameter.device)


def set_field(parameter: nn.Parameter, key: str | None, value: torch.Tensor, *, local: bool = False) -> None:
    """Set the fp32 master, and so the weight that computes, or state `key` of the optimizer.

    Raises: ValueError for as many elements as do not fit; UnsupportedError in a forward or `gathered`.
    """
    engine = _engine(parameter)
    if engine is None:
        return
    name = _field(engine, parameter, key)
    unit, _ = engine.parameters.unit_of(parameter)
    if unit.residence.users:
        raise UnsupportedError(
            f"{engine.parameters.name_of(parameter)} is set inside a forward, a backward or "
            "`with infinity.gathered(...)`: set it between steps"
        )
    values = {name: _part(engine, parameter, value, local=local)}
    if unit.record.form.state_dtype == "int8" and key is not None:  # both moments have one scale's blocks
        for other in {"m", "v"} - {name}:
            values[other] = engine.parameters.read_part(parameter, other)
    engine.parameters.write_part(parameter, values)


def _part(engine: Engine, parameter: nn.Parameter, value: torch.Tensor, *, local: bool) -> torch.Tensor:
    """Return this rank's part of a value, or `value`, which is that, in fp32 on the host."""
    unit, index = engine.parameters.unit_of(parameter)
    expected = engine.parameters.part_numel(parameter) if local else parameter.numel()
    if value.numel() != expected:
        raise ValueError(
            f"{engine.parameters.name_of(parameter)}: a value of {value.numel()} elements; "
            f"{'this rank has a part of' if local else 'it has'} {expected}"
        )
    whole = value.detach().to("cpu", torch.float32).contiguous().reshape(-1)
    part = whole if local else unit.record.part(index, whole)
    return part.clone() if is_part(part) or part.data_ptr() == value.data_ptr() else part


def gradient(parameter: nn.Parameter, *, local: bool = False) -> torch.Tensor | None:
    """Return the gradient, in fp32; None where there is none. With fp16 it is multiplied by the loss scale.

    Raises: UnsupportedError where the backward has applied it.
    """
    grad = parameter.grad
    if grad is None:
        return None
    if not isinstance(grad, OffloadedGradient):
        return grad.detach().clone()
    whole = grad.store.dense(grad.gradient, torch.float32)
    if not local:
        return whole
    unit: Any = grad.gradient.unit
    return unit.record.part(grad.gradient.index, whole).clone()  # type: ignore[no-any-return]


def set_gradient(parameter: nn.Parameter, value: torch.Tensor, *, local: bool = False) -> None:
    """Set a gradient that is there, in fp32.

    Raises: UnsupportedError where the backward has applied it; ValueError for as many elements as do not fit.
    """
    grad = parameter.grad
    if grad is None:
        return
    engine = engine_of(parameter)
    if engine is None or not isinstance(grad, OffloadedGradient):
        grad.copy_(value)
        return
    store, old = grad.store, grad.gradient
    old.check("setting a gradient")
    part = _part(engine, parameter, value, local=local)
    store.settle_ranks([old.unit])
    grad.replace(part)
