"""Which types were asked for while a model is built: by `dtype=`, by `.float()` and the like.

[Note: types that are asked for]
Inside Init parameters are drawn in torch's default type, and compute in Config's. A parameter that a script
asks for in a type of its own keeps it; and it may look like any other, where that is torch's default type. So
a function mode looks at torch's calls. A tensor made with `dtype=`, and what a parameter's conversion
returns, is *asked for*, and so is every tensor that shares its storage, and its copies (copy.deepcopy). What
is computed from it is not.

These do not count as asking:
- torch.set_default_dtype, which from_pretrained uses for a checkpoint's type;
- a type read off a parameter in the same expression (`dtype=old.weight.dtype`): it means "as that one";
- what PEFT converts: it takes types off the base's weights, as they are drawn.

A parameter that replaces another (from_pretrained, load_state_dict(assign=True)) takes over what was asked
for that.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

_MAKES = frozenset(
    {f"{how}{what}" for how in ("", "new_") for what in ("empty", "full", "ones", "tensor", "zeros")}
    | {f"{what}_like" for what in ("empty", "full", "ones", "rand", "randn", "zeros")}
    | {"arange", "as_tensor", "asarray", "empty_strided", "eye", "linspace", "logspace", "normal", "rand"}
    | {"randn", "scalar_tensor"}
)
_CONVERTS: dict[str, torch.dtype | None] = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "to": None,
    "type": None,
}
"""Methods that convert, and to what; None: the arguments say it."""
_COPIES = frozenset({"clone", "contiguous", "cpu", "cuda", "to"})
_ASIDE = frozenset(
    {"_has_compatible_shallow_copy_type", "_parse_to", "_set_grad_enabled", "dim", "is_complex"}
    | {"is_floating_point", "numel", "size"}
)
"""Calls between a conversion and the use of its result, as in nn.Module.to, that change nothing."""
KEPT = (torch.float32, torch.bfloat16, torch.float16)
"""Types in which a parameter may be asked for."""

_FOLLOWING = "peft"
_DEEP = 8
"""Frames that a property like `model.dtype` may have between the code that asks and the parameter."""

_Like = tuple[torch.dtype | None, dict[int, int]]
"""What was asked for a parameter whose dtype was read, and where: the last instruction of each frame."""


class Asked(TorchFunctionMode):
    """Looks at the calls of torch while it is entered; see [Note: types that are asked for]."""

    def __init__(self, converted: Callable[[nn.Parameter], None]) -> None:
        """converted: called with a parameter that was converted to the type that it has already."""
        super().__init__()
        self._converted = converted
        self._of: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self._quiet = 0
        self._same: tuple[int, torch.dtype] | None = None
        """The storage that a conversion has just returned as it was."""
        self._data: int | None = None
        """The storage of the parameter whose `.data` was taken last."""
        self._like: _Like | None = None
        self._site: tuple[tuple[int, int], torch.dtype | None] | None = None
        """Where something was last made like another, and what had been asked for that."""

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Overlook calls inside the `with`: they are Infinity's own."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def of(self, tensor: torch.Tensor) -> torch.dtype | None:
        """Return the type that was asked for a tensor, None for none."""
        found = self._of.get(_storage(tensor))
        return found[1] if found is not None else None

    def note(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Let a tensor, and what shares its storage, be asked for in this type; None and types that
        no record computes in change nothing.
        """
        storage = _storage(tensor)
        if dtype in KEPT and storage:
            with torch._C.DisableTorchFunction():
                # Its number is not given to another as long as this refers to it.
                self._of[storage] = StorageWeakRef(tensor.untyped_storage()), dtype

    def registered(self, parameter: nn.Parameter) -> None:
        """Look at a parameter that a module gets: it may be what a conversion returned."""
        same, self._same = self._same, None
        if same is not None and same[0] == _storage(parameter):
            self.note(parameter, same[1])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the call, and note the type that it asks for."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._quiet:
            name = getattr(func, "__name__", "")
            if name in ("__get__", "__set__"):
                self._attribute(name, getattr(func.__self__, "__name__", ""), args, result)  # type: ignore[attr-defined]
            elif name not in _ASIDE:
                self._call(name, args, kwargs, result)
                self._like = self._data = None
        return result

    def _attribute(self, access: str, name: str, args: tuple[Any, ...], result: Any) -> None:
        if not isinstance(args[0], nn.Parameter):
            return
        if (access, name) == ("__get__", "dtype"):
            self._like = self.of(args[0]), _places()
        elif (access, name) == ("__get__", "data"):
            self._data = _storage(result)
        elif (access, name) == ("__set__", "data"):
            same, self._same = self._same, None
            if same is not None and same[0] == _storage(args[1]):
                self.note(args[0], same[1])
                self._converted(args[0])

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._same = None
        if not isinstance(result, torch.Tensor):
            return
        dtype = _requested(name, args, kwargs)
        if name in _MAKES and dtype is not None:
            self.note(result, self._wish(dtype))
        elif name in _CONVERTS and dtype is not None:
            known = self._data is not None and self._data == _storage(args[0])
            wish = self._wish(dtype) if known or isinstance(args[0], nn.Parameter) else None
            if wish is not None and _storage(result) == _storage(args[0]):
                self._same = _storage(result), wish  # in passing, perhaps
            else:
                self.note(result, wish)
        elif name in _COPIES:
            self.note(result, self.of(args[0]))
        elif name == "view_as_real":
            self.note(result, result.dtype)  # no other can be viewed as complex again

    def _wish(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the type that is asked for by one that is given here."""
        frame = _caller()
        if frame is None or str(frame.f_globals.get("__name__")).split(".")[0] == _FOLLOWING:
            return None
        site = id(frame), frame.f_lasti
        if self._like is not None and _is_argument(frame, self._like[1].get(id(frame))):
            self._site = site, self._like[0]
        if self._site is not None and self._site[0] == site:
            return self._site[1]
        return dtype


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage; 0 where it has none, as a sparse tensor."""
    with torch._C.DisableTorchFunction():
        try:
            return int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return 0


def _requested(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the type that a call names."""
    if name in _MAKES:
        dtype = kwargs.get("dtype")
        return dtype if isinstance(dtype, torch.dtype) else None
    given = (_CONVERTS.get(name), *args[1:], *kwargs.values())
    return next((one for one in given if isinstance(one, torch.dtype)), None)


def _frames() -> Iterator[FrameType]:
    """Return the frames that lead here, without this file's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is not globals():
            yield frame
        frame = frame.f_back


def _caller() -> FrameType | None:
    """Return the frame of the code that called torch."""
    return next(
        (one for one in _frames() if str(one.f_globals.get("__name__")).split(".")[0] != "torch"), None
    )


def _places() -> dict[int, int]:
    return {id(frame): frame.f_lasti for frame in itertools.islice(_frames(), _DEEP)}


def _is_argument(frame: FrameType, read_at: int | None) -> bool:
    """Whether the instruction `read_at` is part of the call that a frame is making now."""
    if read_at is None:
        return False
    if sys.version_info < (3, 11):
        return read_at <= frame.f_lasti
    positions = list(frame.f_code.co_positions())
    (line, end_line, column, end_column), read = positions[frame.f_lasti // 2], positions[read_at // 2]
    if None in (line, end_line, column, end_column, *read):
        return read_at <= frame.f_lasti
    return (line, column) <= (read[0], read[2]) and (read[1], read[3]) <= (end_line, end_column)
