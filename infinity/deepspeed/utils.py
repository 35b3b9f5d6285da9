"""deepspeed.utils: read and set a parameter's master, optimizer state and gradient, whole or a rank's part.

On several ranks every rank makes these calls, in the same order and with the same values, between a backward
and a step or between steps: a whole value consists of all ranks' parts, and a gradient can be set only after
the ranks have summed it. For parameters that are frozen or not offloaded they return None and set nothing, as
DeepSpeed's do. With fp16, gradients are multiplied by the loss scale, as they are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from infinity.deepspeed.calls import missing
from infinity.deepspeed.launch import rank
from infinity.engine.engine import Engine, engine_of
from infinity.errors import UnsupportedError
from infinity.gradients.grad_tensor import OffloadedGradient
from infinity.tensors import is_part

logger = logging.getLogger("infinity")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all ranks for none, or -1 among them."""
    if not ranks or -1 in ranks or rank() in ranks:
        logger.log(level, message)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master, with all updates applied."""
    return _read(param, None)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master, and so the weight that computes."""
    _set(param, None, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the optimizer's state in fp32, by torch's name ("exp_avg"), with all updates applied."""
    return _read(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the optimizer's state."""
    _set(param, optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient in fp32, or None. Raises: UnsupportedError where the backward has applied it."""
    return _gradient(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient, if there is one."""
    _set_gradient(param, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the master, flat. Records decide where parts are cut: one may be empty."""
    return _read(param, None, local=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master."""
    _set(param, None, value, local=True)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of the optimizer's state, flat."""
    return _read(param, optim_state_key, local=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of the optimizer's state."""
    _set(param, optim_state_key, value, local=True)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the gradient, flat."""
    return _gradient(param, local=True)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the gradient, if there is one."""
    _set_gradient(param, value, local=True)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Set every existing gradient to update_func(gradient, parameter)."""
    for param in param_list:
        gradient = _gradient(param)
        if gradient is not None:
            _set_gradient(param, update_func(gradient, param))


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[Any]) -> list[nn.Module]:
    """Do nothing: parameters are fetched when they are used. Returns the modules of these classes."""
    names = [one if isinstance(one, str) else one.__name__ for one in leaf_module_classes]
    return [one for one in model.modules() if type(one).__name__ in names]


unset_z3_leaf_modules = set_z3_leaf_modules


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Do nothing; see set_z3_leaf_modules."""


class RepeatingLoader:
    """Repeats a loader's batches without end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Begin with the loader's first batch."""
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        """Continue with the next batch."""
        return self

    def __next__(self) -> Any:
        """Return the next batch; after the last, the first."""
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


# Reading and setting


def _engine(parameter: nn.Parameter) -> Engine | None:
    """Return the engine of an offloaded parameter that trains; None for others."""
    return engine_of(parameter) if parameter.requires_grad else None


def _field(engine: Engine, parameter: nn.Parameter, key: str | None) -> str:
    """Return the record's field for an optimizer's name of it; the master's without a key."""
    if key is None:
        return "master"
    for optimizer in engine.optimizers:
        if id(parameter) in optimizer.mine:
            names = {name: field for field, name in optimizer.recipe_of(parameter).state.items()}
            if key in names:
                return str(names[key])
            raise ValueError(
                f"{engine.parameters.name_of(parameter)}: {type(optimizer).__name__} keeps no {key!r}, but "
                f"{', '.join(map(repr, names)) or 'nothing'}"
            )
    raise ValueError(f"{engine.parameters.name_of(parameter)} belongs to no optimizer, and has no {key!r}")


def _read(parameter: nn.Parameter, key: str | None, *, local: bool = False) -> torch.Tensor | None:
    """Return the fp32 master, or state `key` of the optimizer, with all updates applied.

    Raises: ValueError for a key that the optimizer does not know.
    """
    engine = _engine(parameter)
    if engine is None:
        return None
    name = _field(engine, parameter, key)
    if not local:
        return engine.parameters.read(parameter, [name])[0].to(parameter.device)
    return engine.parameters.read_part(parameter, name).to(parameter.device)


def _set(parameter: nn.Parameter, key: str | None, value: torch.Tensor, *, local: bool = False) -> None:
    """Set the fp32 master, and so the weight that computes, or state `key` of the optimizer.

    Raises: ValueError for a wrong number of elements; UnsupportedError in a forward or `gathered`.
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
    engine.parameters.write_part(parameter, values)


def _part(engine: Engine, parameter: nn.Parameter, value: torch.Tensor, *, local: bool) -> torch.Tensor:
    """Return this rank's part of a value, in fp32 on the host. local: `value` is that part already."""
    unit, index = engine.parameters.unit_of(parameter)
    expected = engine.parameters.part_numel(parameter) if local else parameter.numel()
    if value.numel() != expected:
        raise ValueError(
            f"{engine.parameters.name_of(parameter)}: a value of {value.numel()} elements; "
            f"{'this rank has a part of' if local else 'it has'} {expected}"
        )
    whole = value.detach().to("cpu", torch.float32).contiguous().reshape(-1)
    part = whole if local else unit.record.rank_part(index, whole)
    return part.clone() if is_part(part) or part.data_ptr() == value.data_ptr() else part


def _gradient(parameter: nn.Parameter, *, local: bool = False) -> torch.Tensor | None:
    """Return the gradient in fp32, or None.

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
    return unit.record.rank_part(grad.gradient.index, whole).clone()  # type: ignore[no-any-return]


def _set_gradient(parameter: nn.Parameter, value: torch.Tensor, *, local: bool = False) -> None:
    """Set an existing gradient, in fp32.

    Raises: UnsupportedError where the backward has applied it; ValueError for a wrong number of elements.
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


def __getattr__(name: str) -> Any:
    """Raise an error that names the replacement."""
    raise AttributeError(missing("utils", name))
