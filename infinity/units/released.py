"""Parameters whose values are elsewhere: their placeholders, and the guard that keeps those from being used.

[Note: released parameters]
A released parameter is the same Parameter object, with `.data` a placeholder of the true shape (one NaN,
stride 0) and `__class__` set to `Released`. Metadata (shape, dtype, device, numel, grad, ...) is answered as
ever, and so is what follows from it alone (stride(), new_zeros(), torch.zeros_like()); any other use goes to
the owner, which brings the values back (inside a forward, or while a model is built) or raises
NotResidentError. A storage of size 0 alone would not do: reading it through torch is a segmentation fault.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import NotResidentError, UnsupportedError
from infinity.tensors import local, spread_as
from infinity.units import advice, pipelines
from infinity.units.aside import Aside
from infinity.units.attached import call

if TYPE_CHECKING:
    _Base = nn.Parameter
else:
    _Base = torch.Tensor  # a DTensor that is a parameter is no nn.Parameter by its class
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that hand out its values; every other attribute is metadata."""

_METADATA = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "storage_offset",
        "is_floating_point",
        "is_complex",
        "get_device",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "is_same_size",
        "is_shared",
        "is_inference",
        "is_conj",
        "is_neg",
        "is_signed",
        "retain_grad",
        "__hash__",
        "__len__",
        "has_names",
        "_is_view",
        "_has_compatible_shallow_copy_type",
        "dense_dim",
        "is_set_to",
        "result_type",
        "sparse_dim",
    ]
)
_ASSIGNED = {"grad": "grad", "requires_grad": "requires_grad", "requires_grad_": "requires_grad"}
"""Attributes that steps depend on, by what assigns them."""
_LAYOUT = frozenset({"stride", "is_contiguous", "is_non_overlapping_and_dense", "dim_order"})
"""Questions of how the values lie; a placeholder, whose strides are 0, would answer them wrongly."""
_LIKE = frozenset(
    f"{what}_like" for what in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
) | {f"new_{what}" for what in ("empty", "empty_strided", "full", "ones", "tensor", "zeros")}
"""Functions that make a tensor by the shape, dtype and device of their first argument alone."""
_AS = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""Functions that use no more than that of their second argument."""
_BY_SHAPE = _LIKE | _LAYOUT | {"new"}
CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "half", "double", "bfloat16", "type"})


class Owner(Protocol):
    """Keeps the values of released parameters: their engine."""

    def touch(self, parameters: Sequence[nn.Parameter], operation: str, args: Sequence[Any]) -> object:
        """Make the values of `parameters` present for `operation(*args)`, or raise NotResidentError.

        Returns a value to answer the operation with; None to let it run on the parameters, now present; or
        what holds them aside for it.
        """

    def assigned(self, parameter: nn.Parameter, name: str, *, by_pipeline: bool) -> None:
        """Hear that "grad", or "requires_grad", of `parameter` was assigned. by_pipeline: it is a gradient
        that torch's pipelining has assigned, to be taken in.
        """


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def owner_of(parameter: torch.Tensor) -> Owner | None:
    """Return the owner of `parameter`; None for one that was not built in Init, or whose owner is gone."""
    reference = _owners.get(parameter)
    owner: Owner | None = reference() if reference is not None else None
    return owner


def set_owner(parameter: nn.Parameter, owner: Owner) -> None:
    """Register the owner of `parameter`. Held weakly on both sides."""
    _owners[parameter] = weakref.ref(owner)


_replacing: weakref.WeakSet[Owner] = weakref.WeakSet()


def expect_optimizers_of_torch(owner: Owner) -> None:
    """Allow optimizers of torch over the parameters of `owner`: infinity.deepspeed.initialize replaces them
    by ours.
    """
    _replacing.add(owner)


class Guarded(_Base):
    """What the classes of released parameters have in common; see [Note: released parameters]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata; take everything else to the owner."""
        kwargs = kwargs or {}
        if _is_metadata(func, args) or pipelines.looks_for_node(sys._getframe(1)):
            with torch._C.DisableTorchFunctionSubclass():
                caller = sys._getframe(1)
                if caller.f_code is advice.ADDING:
                    _see_optimizer(args[0], caller.f_locals["self"])
                answer = func(*args, **kwargs)
            if len(args) > 1 or kwargs:
                _tell_assigned(func, args, caller)
            return answer
        parameters = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Guarded)]
        operation = _name(func)
        first = args[0] if args else kwargs.get("input")
        if operation in _BY_SHAPE and len(parameters) == 1 and parameters[0] is first and not _empties():
            return _by_shape(func, operation, parameters[0], args[1:], kwargs)
        if operation in CONVERSIONS:
            return _convert(parameters[0], operation, func, args, kwargs)
        owner = owner_of(parameters[0])
        if owner is None:
            shape = tuple(parameters[0].shape)
            raise NotResidentError(
                f"a parameter of shape {shape} is used by {operation}(), but its engine is gone"
            )
        answer = owner.touch(parameters, operation, (*args, *kwargs.values()))
        if isinstance(answer, Aside):
            answer = answer.answer(parameters, partial(func, *args, **kwargs))
        elif answer is None:
            answer = call(func, operation, args, kwargs)
            if operation == "detach" and _caller().f_code is nn.Parameter.__new__.__code__:
                answer.__class__ = type(
                    parameters[0]
                )  # nn.Parameter(p) wants the type back that p has by now
        return answer

    def as_subclass(self, cls: type[torch.Tensor]) -> Any:
        """As ever, which torch does not ask `__torch_function__` about."""
        return type(self).__torch_function__(torch.Tensor.as_subclass, (), (self, cls))

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; this, too, torch does not ask `__torch_function__` about."""
        return type(self).__torch_function__(torch.Tensor.set_, (), (self, *args), kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        """Show what is known without the values."""
        where = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}"
        return f"Parameter (released; see infinity.gathered), {where}, requires_grad={self.requires_grad}"

    def __format__(self, spec: str) -> str:
        """As `repr`."""
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled as a placeholder."""
        raise not_resident(self, "pickle")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copy the values where the owner brings them back: while a model is built."""
        copy: nn.Parameter = brought(self, "deepcopy").__deepcopy__(memo)
        return copy


class Released(Guarded, nn.Parameter):
    """The class of an ordinary parameter while it is released."""


_NO_WRAPPER = (
    " If it was DistributedDataParallel, leave that out, the ranks exchange gradients without it; before "
    "Accelerate's prepare call `model = accelerator.prepare_model(model, evaluation_mode=True)`."
)


def _see_optimizer(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is given a parameter which it cannot step."""
    owner = owner_of(parameter)
    if owner is None or owner in _replacing or not parameter.requires_grad:
        return
    if advice.is_foreign(optimizer):
        shape = tuple(parameter.shape)
        raise UnsupportedError(f"a parameter of shape {shape}: {advice.in_place_of(optimizer)}")


def _tell_assigned(func: Callable[..., Any], args: tuple[Any, ...], caller: FrameType) -> None:
    """Tell a parameter's owner of a call that is over, if it assigned a gradient, or may have frozen it."""
    name = _ASSIGNED.get(_name(func))
    owner = None if name is None or not args else owner_of(args[0])
    if owner is not None and name is not None and args[-1] is not None:
        by_pipeline = name == "grad" and pipelines.brings_gradients(caller)
        with torch._C.DisableTorchFunctionSubclass():
            owner.assigned(args[0], name, by_pipeline=by_pipeline)


def brought(parameter: Guarded, operation: str) -> Any:
    """Return the parameter once its owner has brought the values back.

    Raises: NotResidentError where it does not.
    """
    owner = owner_of(parameter)
    guarded = owner is None or owner.touch([parameter], operation, ()) is not None
    if guarded or Guarded in type(parameter).__mro__:
        raise not_resident(parameter, operation)
    return parameter


def not_resident(parameter: nn.Parameter, operation: str, name: str | None = None) -> NotResidentError:
    """Return the error for a use of `parameter` while it is released."""
    what = f"parameter {name!r}" if name else f"a parameter of shape {tuple(parameter.shape)}"
    wrapped = operation == "detach" and torch.distributed.is_initialized()
    return NotResidentError(
        f"{what} is not resident (its values are in host memory or on NVMe) and was used by "
        f"{operation}() outside forward and backward. {advice.for_caller() or _wrap(parameter, operation)}"
        f"{_NO_WRAPPER if wrapped else ''}"
    )


def _wrap(parameter: nn.Parameter, operation: str) -> str:
    if operation == "deepcopy":
        return f"To copy a parameter, do so inside {advice.GATHERED}. {advice.SECOND_MODEL}"
    backward = torch.is_grad_enabled() and parameter.requires_grad
    return f"Wrap the code{', and a backward through what it computes,' * backward} in {advice.GATHERED}."


def not_converted(name: str, operation: str, where: str) -> UnsupportedError:
    """Return the error for a conversion of the parameter `name`, or of its model, from `where` it is."""
    return UnsupportedError(
        f"{name}: a model built in Init stays on {where}: {operation}() is refused. Set "
        "Config(device=..., dtype=...) instead; a parameter gives a converted copy inside "
        "`with infinity.gathered(parameter):`."
    )


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of `shape` that takes the memory of one element, a NaN."""
    one = torch.full((1,) * len(shape), float("nan"), dtype=dtype, device=device)
    return one.expand(tuple(shape))


def _caller() -> FrameType:
    """Return the frame that called torch, through whatever function modes are entered."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def _is_metadata(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    kind = getattr(func, "__name__", "")
    name = _name(func)
    if kind == "__get__":
        return name not in _VALUES
    if kind == "__set__":
        # module.to() of the same device and dtype sets `.data` to the parameter itself
        return name != "data" or args[0] is args[1]
    return name in _METADATA or (name in _AS and bool(args) and not isinstance(args[0], Guarded))


def _by_shape(
    func: Callable[..., Any],
    operation: str,
    parameter: nn.Parameter,
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Answer a call that needs no values by a tensor without any, which is contiguous, as the values are."""
    kwargs = {name: one for name, one in kwargs.items() if one is not parameter}
    if operation == "new":
        return func(torch.empty(0, dtype=parameter.dtype, device=parameter.device), *rest, **kwargs)
    if operation in _LIKE and kwargs.get("device") is None:
        kwargs["device"] = parameter.device
    like = torch.empty(local(parameter).shape, dtype=parameter.dtype, device="meta")
    return func(spread_as(parameter, like), *rest, **kwargs)


def _empties() -> bool:
    """Whether module.to_empty() asks, for parameters to put in the place of ours."""
    return sys._getframe(2).f_globals.get("__name__") == nn.Module.__module__


def _convert(
    parameter: nn.Parameter,
    operation: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Answer `.to()` and its kin: the parameter itself where nothing would change, else as any other use."""
    probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if args and args[0] is parameter:
        result = func(probe, *args[1:], **kwargs)
        if isinstance(result, str):  # p.type()
            return result
        if result is probe or (result.dtype, result.device) == (probe.dtype, probe.device):
            return parameter
    owner = owner_of(parameter)
    if owner is None:
        raise not_resident(parameter, operation)
    answer = owner.touch([parameter], operation, args)
    if isinstance(answer, Aside):
        return answer.answer([parameter], partial(func, *args, **kwargs))
    return answer if answer is not None else func(*args, **kwargs)
