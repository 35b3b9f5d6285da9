"""deepspeed.utils: looking at and setting what an engine keeps of a parameter, whole or this rank's part.

On several ranks every rank calls them, between a backward and a step or between steps, with the same values.
Of parameters that are not offloaded, or frozen, they return None and set nothing, as DeepSpeed's do.
Gradients are as they are stored: with fp16 multiplied by the loss scale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from infinity.deepspeed import fragments
from infinity.deepspeed.calls import missing
from infinity.deepspeed.launch import rank

logger = logging.getLogger("infinity")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; on all without any, or with -1 among them."""
    if not ranks or -1 in ranks or rank() in ranks:
        logger.log(level, message)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master, updates applied."""
    return fragments.field(param, None)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master, and with it the weight that computes."""
    fragments.set_field(param, None, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return state of the optimizer in fp32, by torch's name ("exp_avg"), updates applied."""
    return fragments.field(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set state of the optimizer."""
    fragments.set_field(param, optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient in fp32; None where there is none. Raises: UnsupportedError where it is applied."""
    return fragments.gradient(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient, where there is one."""
    fragments.set_gradient(param, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the master, flat. Parts are cut where records are: they may be of any
    length, also none.
    """
    return fragments.field(param, None, local=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master."""
    fragments.set_field(param, None, value, local=True)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of state of the optimizer, flat."""
    return fragments.field(param, optim_state_key, local=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of state of the optimizer."""
    fragments.set_field(param, optim_state_key, value, local=True)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the gradient, flat."""
    return fragments.gradient(param, local=True)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the gradient, where there is one."""
    fragments.set_gradient(param, value, local=True)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Set every gradient that there is to update_func(gradient, parameter)."""
    for param in param_list:
        gradient = fragments.gradient(param)
        if gradient is not None:
            fragments.set_gradient(param, update_func(gradient, param))


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[Any]) -> list[nn.Module]:
    """Change nothing: what a module uses is fetched when it is used. Returns the modules of these classes."""
    names = [one if isinstance(one, str) else one.__name__ for one in leaf_module_classes]
    return [one for one in model.modules() if type(one).__name__ in names]


unset_z3_leaf_modules = set_z3_leaf_modules


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Change nothing; see set_z3_leaf_modules."""


class RepeatingLoader:
    """Gives a loader's batches over and over."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Begin with its first batch."""
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        """Go on where it stands."""
        return self

    def __next__(self) -> Any:
        """Return the next batch; after the last, the first."""
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def __getattr__(name: str) -> Any:
    """Say what to do instead."""
    raise AttributeError(missing("utils", name))
