"""state_dict and load_state_dict of a model whose parameters are elsewhere: plain CPU copies out, masters
written in.

torch's own code runs unchanged: it calls `parameter.detach()` and `parameter.copy_(value)` on each parameter
of a module between the hooks registered here, and the guard on released parameters asks `answer` what those
mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from infinity.errors import HostMemoryError, UnsupportedError
from infinity.ranks.machine_memory import available_nbytes
from infinity.sizes import format_size
from infinity.units.unit import Unit


class ParameterKeeper(Protocol):
    """What keeps the parameters that are asked for: an engine."""

    def keeps(self, parameter: nn.Parameter) -> bool:
        """Whether it keeps `parameter`."""

    def unit_of(self, parameter: nn.Parameter) -> tuple[Unit, int]:
        """Return a parameter's unit and its index there."""

    def read(self, parameter: nn.Parameter, fields: Sequence[str]) -> list[torch.Tensor]:
        """Return fields of a parameter."""

    def write(self, parameter: nn.Parameter, values: dict[str, torch.Tensor]) -> None:
        """Set fields of a parameter."""


class Exchange:
    """Answers what state_dict and load_state_dict ask of one engine's released parameters."""

    def __init__(self, engine: ParameterKeeper) -> None:
        """Serve `engine`, which owns this."""
        self._engine = weakref.ref(engine)
        self._module: weakref.ref[nn.Module] | None = None
        self._depth = 0
        self._copies: dict[int, torch.Tensor] = {}

    def hook(self, module: nn.Module) -> None:
        """Listen to a module's state_dict and load_state_dict."""
        exchange = self

        def before_save(module: nn.Module, *_rest: object) -> None:
            exchange._begin(module)

        def after_save(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            exchange._unshare(module, state, prefix)
            exchange._end()

        def before_load(
            module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_rest: object
        ) -> None:
            if metadata.get("assign_to_params_buffers"):
                raise UnsupportedError(
                    "load_state_dict(assign=True) would replace offloaded parameters; call it without assign"
                )
            exchange._module = weakref.ref(module)

        def after_load(_module: nn.Module, _keys: Any) -> None:
            exchange._module = None

        module.register_state_dict_pre_hook(before_save)
        module.register_state_dict_post_hook(after_save)
        module.register_load_state_dict_pre_hook(before_load)
        module.register_load_state_dict_post_hook(after_load)

    def _begin(self, module: nn.Module) -> None:
        if not self._depth:
            self._copies = {}
            _check_room(module)
        self._depth += 1
        self._module = weakref.ref(module)

    def _end(self) -> None:
        self._depth = max(0, self._depth - 1)
        self._module = None
        if not self._depth:
            self._copies = {}

    def _unshare(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Copy what a state_dict took from attached parameters (inside `gathered`): their memory will be
        given back.
        """
        engine = self._engine()
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if (
                engine is None
                or parameter is None
                or not isinstance(value, torch.Tensor)
                or isinstance(value, nn.Parameter)
            ):
                continue
            if engine.keeps(parameter) and engine.unit_of(parameter)[0].attached:
                state[prefix + name] = value.clone()

    def answer(self, parameter: nn.Parameter, operation: str, args: Sequence[Any]) -> object:
        """Return the answer to `detach` or `copy_` while its module is saved or loaded; None for anything
        else.
        """
        module = self._module() if self._module is not None else None
        engine = self._engine()
        if (
            module is None
            or engine is None
            or not any(parameter is one for one in module._parameters.values())
        ):
            return None
        if operation == "detach":
            if id(parameter) not in self._copies:
                self._copies[id(parameter)] = engine.read(parameter, ["hi"])[0]
            return self._copies[id(parameter)]
        if operation == "copy_":
            engine.write(parameter, {"master": args[1].expand(parameter.shape)})
            return parameter
        return None


def _check_room(module: nn.Module) -> None:
    needed = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    available = available_nbytes()
    if needed > available:
        raise HostMemoryError(
            f"state_dict: plain copies of the parameters take "
            f"{format_size(needed)}, {format_size(available)} "
            "of memory are available. Take the state_dict of one submodule at a time."
        )
