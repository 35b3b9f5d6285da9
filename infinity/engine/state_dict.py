"""state_dict and load_state_dict of a model whose parameters are offloaded: plain CPU copies out, masters
written in.

torch's own code runs unchanged: it calls `parameter.detach()` and `parameter.copy_(value)` on each parameter
of a module between the hooks registered here, and the guard on released parameters asks `answer` what those
mean.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from infinity.engine.parameters import Parameters
from infinity.errors import UnsupportedError
from infinity.ranks.machine_memory import check_available
from infinity.tensors import is_distributed, local

logger = logging.getLogger("infinity")


class Exchange:
    """Answers what state_dict and load_state_dict ask of one engine's released parameters."""

    def __init__(self, parameters: Parameters, frozen_dtype: str | None = None) -> None:
        """Read and write `parameters`. frozen_dtype: what Init quantised frozen weights to; None for none."""
        self._parameters, self._frozen_dtype = parameters, frozen_dtype
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

    def say_approximated(self, what: str) -> None:
        """Warn, once, where `what` takes weights that frozen_dtype made approximations of."""
        count = self._parameters.packed_count() if self._frozen_dtype is not None else 0
        if count:
            logger.warning(
                "%s: the weights of %d layers are approximations in %s (frozen_dtype), and so is what is "
                "taken of them. To merge adapters, save them, and merge them into the 16-bit checkpoint: "
                "`infinity merge BASE ADAPTER FOLDER`, or infinity.save_merged of a model that was loaded "
                "without frozen_dtype",
                what,
                count,
                self._frozen_dtype,
            )
            self._frozen_dtype = None

    def _begin(self, module: nn.Module) -> None:
        if not self._depth:
            if not hasattr(module, "peft_config"):  # whose save_pretrained takes the adapters alone of it
                self.say_approximated("state_dict, as in model.save_pretrained")
            self._copies = {}
            needed = sum(local(one).numel() * one.element_size() for one in module.parameters())
            cure = "Take the state_dict of one submodule at a time."
            check_available(needed, "state_dict: plain copies of the parameters", cure)
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
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if parameter is None or not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
                continue
            if self._parameters.keeps(parameter) and self._parameters.unit_of(parameter)[0].attached:
                state[prefix + name] = value.clone()

    def answer(self, parameter: nn.Parameter, operation: str, args: Sequence[Any]) -> object:
        """Return the answer to `detach` or `copy_` while its module is saved or loaded; None for anything
        else.
        """
        module = self._module() if self._module is not None else None
        if module is None or not any(parameter is one for one in module._parameters.values()):
            return None
        if operation == "detach":
            if id(parameter) not in self._copies:
                self._copies[id(parameter)] = self._parameters.read(parameter, ["hi"])[0]
            return self._copies[id(parameter)]
        if operation == "copy_":
            given = args[1] if is_distributed(parameter) else args[1].expand(parameter.shape)
            self._parameters.write(parameter, {"master": given})
            return parameter
        return None
