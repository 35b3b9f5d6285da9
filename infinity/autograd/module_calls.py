"""How torch calls modules: the hooks that follow a forward, and callers that would go around them.

The hooks are objects, not functions: torch.save and copy.deepcopy come to them first in a module, and they
refuse to be pickled or copied, with a text that says why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from infinity.errors import NotResidentError, UnsupportedError
from infinity.tiling import postpones, runs_in_slices
from infinity.units import advice
from infinity.units.released import Guarded
from infinity.units.unit import Unit

_transform = torch._C._functorch.peek_interpreter_stack
_tracing, _eval_frame_callback = (
    torch._C._get_tracing_state,
    torch._C._dynamo.eval_frame.get_eval_frame_callback,
)
"""Named once: each call of a module asks for them."""


class Follower(Protocol):
    """What follows forwards: infinity.autograd.hooks.Hooks."""

    def enter(
        self,
        module: nn.Module,
        units: list[Unit],
        inputs: Any,
        *,
        saves: bool = True,
        below: Sequence[Unit] = (),
        covers: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a module's forward; without `saves` the graph that is built takes no hooks. below: the units
        of all modules in it, if they are known. covers: the id() of each module in it that uses none but
        `units`.
        """

    def leave(self, module: nn.Module, output: Any) -> None:
        """End a module's forward, also one that raised."""

    def is_covered(self, module: nn.Module) -> bool:
        """Whether there is nothing to do where `module` begins or ends."""


class _Hook:
    """What both hooks have in common: they cannot be copied away from their module."""

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled or copied with the module."""
        instead = (
            advice.for_caller()
            or f"Save model.state_dict(), which holds plain tensors. {advice.SECOND_MODEL}"
        )
        raise NotResidentError(
            "a model built in Init cannot be pickled or copied: its parameters are in host memory or on "
            f"NVMe. {instead}"
        )

    @property
    def __name__(self) -> str:
        """No name; but TorchScript, which compiles hooks by their names, gets an error of its own."""
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith(f"{torch.jit.__name__}."):
            raise UnsupportedError(advice.export("torch.jit.script"))
        raise AttributeError("a hook of Infinity has no __name__")


class Entering(_Hook):
    """The hook that begins a module's forward; it keeps `owner`, the engine, alive."""

    def __init__(
        self,
        owner: object,
        hooks: Follower,
        units: list[Unit],
        below: list[Unit],
        covers: frozenset[int] = frozenset(),
    ) -> None:
        """Fetch `units`, or all those `below` where one call of the module calls each child many times.
        covers: see [Note: covered modules] in hooks.
        """
        self._owner, self._hooks = owner, hooks
        self._units, self._below, self._covers = units, below, covers

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """As torch calls it; returns other arguments where `_would_repeat_weight`."""
        hooks = self._hooks
        if _transform() is not None:
            self._enter_transformed(module, self._used_by(module, args, kwargs), (args, kwargs))
        elif not hooks.is_covered(module):
            units = self._used_by(module, args, kwargs) if "forward" in module.__dict__ else self._units
            hooks.enter(module, units, (args, kwargs), below=self._below, covers=self._covers)
        if isinstance(module, nn.Linear) and args and _would_repeat_weight(module, args[0]):
            return (args[0].contiguous(), *args[1:]), kwargs
        return None

    def _used_by(self, module: nn.Module, args: Any, kwargs: Any) -> list[Unit]:
        """Return the units that a call uses; where the forward is the class's, none of tiling's, its own."""
        if postpones(module, kwargs):
            return []
        return self._below if runs_in_slices(module, (args, kwargs)) else self._units

    def _enter_transformed(self, module: nn.Module, units: list[Unit], inputs: Any) -> None:
        """Begin a forward under a transform of torch.func, in which every tensor that is made is wrapped."""
        refuse(module)
        recorded = differentiates()
        refuse_placeholders(module)
        if recorded:
            used = {id(parameter) for parameter in module.parameters()}  # functional_call puts others there
            units = [unit for unit in units if any(id(parameter) in used for parameter in unit.parameters)]
            refuse_transform(units)
        with temporarily_clear_interpreter_stack():
            self._hooks.enter(module, units, inputs, saves=not recorded)


def _would_repeat_weight(linear: nn.Linear, given: Any) -> bool:
    """Whether torch would multiply a strided input, as the last tokens of each sequence are, with as many
    copies of the weight as there are sequences. It does so where neither of them asks for gradients.
    """
    if not isinstance(given, torch.Tensor) or given.requires_grad or given.is_contiguous():
        return False
    return given.dim() > 2 and not linear.weight.requires_grad


class Leaving(_Hook):
    """The hook that ends a module's forward."""

    def __init__(self, hooks: Follower) -> None:
        """Release what `Entering` fetched."""
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """As torch calls it."""
        if _transform() is None:
            if not self._hooks.is_covered(module):
                self._hooks.leave(module, output)
        else:
            with temporarily_clear_interpreter_stack():
                self._hooks.leave(module, pytree.tree_map_only(torch.Tensor, _unwrapped, output))


def refuse(module: nn.Module) -> None:
    """Refuse calls of a module that would go around the hooks.

    Raises: UnsupportedError.
    """
    if module.__dict__.get("_is_replica"):  # asked of a module, what it lacks takes a microsecond
        raise UnsupportedError(
            "nn.DataParallel copies parameters that are not resident. "
            "Use torchrun with one process per device."
        )
    if _tracing() is not None:
        raise UnsupportedError(advice.for_caller() or advice.export("torch.jit.trace"))
    if (
        torch.compiler.is_compiling()
        or getattr(module, "_compiled_call_impl", None) is not None
        or _inside_compile()
    ):
        raise UnsupportedError(
            advice.for_caller()
            or "torch.compile cannot trace fetching and releasing parameters. Run the model without it."
        )


def differentiates() -> bool:
    """Whether torch.func.grad, vjp, jacrev or hessian runs, whose graphs take no hooks on saved tensors."""
    levels: Any = torch._C._functorch.get_interpreter_stack()  # None outside of torch.func
    return levels is not None and any(
        level.key() == torch._C._functorch.TransformType.Grad for level in levels
    )


def refuse_transform(units: Iterable[Unit]) -> None:
    """Refuse weights that are not attached: a transform uses them again when they are released.

    Raises: UnsupportedError.
    """
    for unit in units:
        if not unit.attached:
            raise UnsupportedError(
                f"{unit.name}: torch.func.grad, vjp, jacrev and hessian use weights after the forward that "
                "fetches and releases them. Call them inside "
                "`with torch.no_grad(), infinity.gathered(model):`, or give torch.func.functional_call plain "
                "tensors for all parameters, as model.state_dict() has them."
            )


def refuse_placeholders(module: nn.Module) -> None:
    """Refuse a transform of the model's own parameters, as model.named_parameters() has them: it wraps their
    placeholders, which are NaN.

    Raises: UnsupportedError.
    """
    for name, parameter in module.named_parameters(recurse=False):
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(parameter)
        if wrapped and isinstance(_unwrapped(parameter), Guarded):
            raise UnsupportedError(
                f"{name} of {type(module).__name__}: a transform of torch.func was given this parameter "
                "while its values are in host memory or on NVMe. Give torch.func.functional_call plain "
                "tensors for all parameters, as model.state_dict() has them, or call it inside "
                "`with torch.no_grad(), infinity.gathered(model):`."
            )


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _inside_compile() -> bool:
    callback = _eval_frame_callback()
    return callback is not None and callback is not False


def runs_in_itself(module: nn.Module) -> bool:
    """Whether a forward of `module` is under way in which this one, of the same module, begins."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None and calls < 2:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls == 2
