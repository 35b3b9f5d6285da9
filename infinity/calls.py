"""How torch calls modules: the hooks that follow a forward, and the callers that would go around them.

Torch's hooks are objects here, not functions: what torch.save and copy.deepcopy meet
first in a module, and refuse by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from infinity.errors import NotResidentError, UnsupportedError
from infinity.tiling import postpones, runs_in_slices
from infinity.unit import Unit


class Follower(Protocol):
    """Whoever follows forwards: infinity.hooks.Hooks."""

    def enter(self, module: nn.Module, units: list[Unit], inputs: Any) -> None:
        """Begin a module's forward."""

    def leave(self, module: nn.Module, output: Any) -> None:
        """End a module's forward, also one that raised."""


class Entering:
    """The hook that begins a module's forward; it keeps `owner`, the engine, alive."""

    def __init__(
        self,
        owner: object,
        hooks: Follower,
        units: list[Unit],
        below: list[Unit],
        watch: Callable[[Any, Any], object] | None = None,
    ) -> None:
        """Fetch `units`, and where one call is many of each child, all `below`; show `watch` the arguments,
        positional and by name.
        """
        self._owner, self._hooks, self._watch = owner, hooks, watch
        self._units, self._below = units, below

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """As torch calls it."""
        units = self._below if runs_in_slices(module) else self._units
        self._hooks.enter(module, [] if postpones(module, kwargs) else units, (args, kwargs))
        if self._watch is not None:
            self._watch(args, kwargs)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled or copied with the module."""
        raise _not_copied()


class Leaving:
    """The hook that ends a module's forward."""

    def __init__(self, hooks: Follower) -> None:
        """Release what `Entering` fetched."""
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """As torch calls it."""
        self._hooks.leave(module, output)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled or copied with the module."""
        raise _not_copied()


def _not_copied() -> NotResidentError:
    return NotResidentError(
        "a model built in Init cannot be pickled or copied: its parameters are in host memory or on NVMe. "
        "Save model.state_dict(), which holds plain tensors, or build another model."
    )


def refuse(module: nn.Module) -> None:
    """Refuse what would run around the hooks."""
    if getattr(module, "_is_replica", False):
        raise UnsupportedError(
            "nn.DataParallel copies parameters that are not resident. "
            "Use torchrun with one process per device."
        )
    if (
        torch.compiler.is_compiling()
        or getattr(module, "_compiled_call_impl", None) is not None
        or _inside_compile()
    ):
        raise UnsupportedError(
            "torch.compile cannot trace fetching and releasing parameters. Run the model without it."
        )


def _inside_compile() -> bool:
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback not in (None, False)


def runs_in_itself(module: nn.Module) -> bool:
    """Whether a forward of `module` is under way further up the stack than the one that begins."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None and calls < 2:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls == 2
