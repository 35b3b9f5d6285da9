"""The tiled loss for Hugging Face causal language models, without changes to their code.

[Note: lazy logits]
`model(..., labels=...)` calls `self.lm_head(hidden)` and passes the result to `self.loss_function`, which
transformers lets users replace. When labels are given, our head therefore returns `Logits`: a tensor with the
shape and dtype of the logits that refers to the hidden states, but has no values. Our loss function computes
the cross entropy from those hidden states. A model that does anything else with its logits before the loss
(scales or caps them) gets an error at that operation; or, where `where` chose, they are computed there and
kept, so that what changes them in place, or a view of them, changes what the loss gets. After the loss,
`output.logits` is computed when it is used.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from infinity.tiling.linear import TiledLinear
from infinity.tiling.loss import cross_entropy
from infinity.tiling.whole import METADATA

logger = logging.getLogger("infinity")

_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_NOT_IN_PLACE = ("__index__", "__int__", "__invert__", "__iter__")
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


_updates: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of output layers' parameters that logits were asked of: how often they were changed in a backward since,
see `count_update`.
"""


def count_update(parameter: torch.Tensor) -> None:
    """Say that a backward updates a parameter: torch must not count that, as graphs of it are still used."""
    if _updates and parameter in _updates:
        _updates[parameter] += 1


class Head:
    """Replaces the forward of a model's output layer, on that one instance."""

    def __init__(self, module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        self.module = module
        self.forward = forward
        self.asked = False
        """Whether tile_loss_ was called: no loss makes logits then."""
        self.where: Callable[[int], bool] | None = None
        """Says it of a loss of so many labels, by Config(loss_tiles=...); None: never."""
        self.must = False
        """Whether what `where` says is no choice."""
        self.loss_follows = False
        """Whether the model's forward is running with labels, and a loss that makes no logits."""
        self.hooks: tuple[RemovableHandle, ...] = ()
        """Around the model's forward."""

    def __call__(self, hidden: torch.Tensor, loss: dict[str, Any] | None = None) -> torch.Tensor:
        """Return logits, real or lazy; or, given the options of cross_entropy as `loss`, the loss."""
        if loss is not None:
            if isinstance(self.module, TiledLinear):
                return cross_entropy(hidden, self.module, **loss)
            return cross_entropy(hidden, self.module.weight, bias=self.module.bias, **loss)  # type: ignore[arg-type]
        return Logits.of(self, hidden) if self.loss_follows else self.forward(hidden)

    def versions(self) -> tuple[int, ...]:
        """Return how often each of the layer's weights was changed."""
        return tuple(one._version + _updates.setdefault(one, 0) for one in self.module.parameters())

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record whether the model's forward is asked for a loss."""
        given = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        labels = {**given, **kwargs}.get("labels")
        chosen = isinstance(labels, torch.Tensor) and self.where is not None and self.where(labels.numel())
        self.loss_follows = labels is not None and (self.asked or chosen)

    def after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """Record that the model's forward is over."""
        self.loss_follows = False

    def stand_in(self, model: nn.Module) -> None:
        """Take the place of the output layer's forward, and see the model's begin and end."""
        self.module.forward = self
        self.hooks = (
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, always_call=True),
        )

    def give_up(self, operation: str) -> None:
        """Let this and all further forwards make logits, as the model uses them before its loss.

        Raises: LogitsUsedError where tile_loss_ was asked for.
        """
        if self.asked or self.must:
            raise LogitsUsedError(
                f"the model applies {operation}() to its logits before the loss (scaling, capping?), and a "
                "loss computed without logits cannot include that: this model cannot be used with "
                "tile_loss_, nor with loss_tiles"
            )
        self.where, self.loss_follows = None, False
        logger.warning(
            'loss_tiles="auto": the model applies %s() to its logits before the loss: its losses make them',
            operation,
        )

    def undo(self) -> None:
        """Give the output layer its forward back."""
        for hook in self.hooks:
            hook.remove()
        del self.module.forward
        if self.forward != self.module.forward:  # the instance had a forward of its own before
            self.module.forward = self.forward


class LogitsUsedError(RuntimeError):
    """A model's own forward uses its logits before the loss, which is computed without them."""


class Logits(torch.Tensor):
    """Stands for logits that have not been computed; see [Note: lazy logits]."""

    head: Head
    hidden: torch.Tensor
    versions: tuple[int, ...]
    """Of the output layer's weights when the logits were asked for."""
    made: torch.Tensor | None
    """The logits, where the model uses them before its loss."""

    @staticmethod
    def of(head: Head, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> Logits:
        """Stand for the logits of `hidden`."""
        shape = (*hidden.shape[:-1], head.module.out_features)
        if dtype is None:
            kind = hidden.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        logits = torch.Tensor._make_subclass(  # noqa: SLF001 - as nn.Parameter does
            Logits, torch.empty(shape, dtype=dtype, device="meta")
        )
        logits.head, logits.hidden, logits.versions, logits.made = head, hidden, head.versions(), None
        return logits

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata and casts without values; compute the logits for all else, after the loss."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func))
        if name == "__get__":
            name = str(getattr(getattr(func, "__self__", None), "__name__", name))
            if name in ("device", "is_meta", "is_cuda", "is_cpu", "requires_grad"):
                return getattr(args[0].hidden, name)
            if name not in _VALUES:
                name = "size"
        # untyped_storage: callers compare it with the weights' storage, and this one is empty.
        if name in METADATA or name == "untyped_storage":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        dtype = _CASTS.get(name, args[1] if name == "to" and len(args) == 2 and not kwargs else None)
        if isinstance(dtype, torch.dtype):
            return args[0].cast(dtype)
        args, kwargs = pytree.tree_map_only(Logits, lambda one: one.formed(name), (args, kwargs))
        return func(*args, **kwargs)

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        """Stand for the same logits in another type."""
        if self.made is not None:
            return self.made.to(dtype)
        with torch._C.DisableTorchFunctionSubclass():
            if dtype == self.dtype:
                return self
        other = Logits.of(self.head, self.hidden, dtype)
        other.versions = self.versions
        return other

    def formed(self, operation: str) -> torch.Tensor:
        """Compute the logits.

        Raises:
            LogitsUsedError: the model's own forward uses them before its loss (see `Head.give_up`), they
                would be changed in place, or the output layer's weights have changed since.
        """
        if self.made is not None:
            return self.made
        if self.head.loss_follows:
            self.head.give_up(operation)
            self.made = self._make()
            return self.made
        if _changes(operation):
            raise LogitsUsedError(
                f"{operation}() on logits that a loss without logits did not make: the change would be lost. "
                "Change a copy, as output.logits.clone() makes one"
            )
        if self.versions != self.head.versions():
            raise LogitsUsedError(
                "the logits of a loss without logits (tile_loss_, loss_tiles) are made when they are used, "
                "and the output layer's weights have changed since their forward. Use them before the step, "
                "or call the model again"
            )
        return self._make()

    def _make(self) -> torch.Tensor:
        module: Callable[..., torch.Tensor] = self.head.module
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.dtype
        return module(self.hidden).to(dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        """Show shape and dtype; computes nothing."""
        return f"Logits({tuple(self.shape)}, {self.dtype}, not computed)"


def _changes(operation: str) -> bool:
    """Whether an operation of this name changes its tensor in place."""
    if operation.startswith("__") and operation.endswith("__"):
        return operation == "__setitem__" or (operation[:3] == "__i" and operation not in _NOT_IN_PLACE)
    return operation.endswith("_")


class Loss:
    """Replaces ForCausalLMLoss as the model's loss function."""

    def __init__(self, original: Callable[..., torch.Tensor], z_loss: float) -> None:
        self.original = original
        self.z_loss = z_loss

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        """Return the loss that ForCausalLMLoss returns for the same arguments.

        Raises:
            ValueError: the model's vocabulary size differs from the output layer's.
        """
        if isinstance(logits, Logits) and logits.made is not None:
            logits = logits.made
        if not isinstance(logits, Logits):
            return self.original(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **rest
            )
        if vocab_size != logits.shape[-1]:
            raise ValueError(f"vocab_size={vocab_size}, but the output layer has {logits.shape[-1]} outputs")
        options = {
            "labels": labels if shift_labels is None else shift_labels.view(logits.shape[:-1]),
            "shift": shift_labels is None,
            "ignore_index": ignore_index,
            "count": num_items_in_batch,
            "z_loss": self.z_loss,
        }
        module: Callable[..., torch.Tensor] = logits.head.module
        return module(logits.hidden, loss=options)  # a module call, so that hooks can fetch its parameters


def postpones(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether this call of `module` returns lazy logits only, and so needs no parameters yet."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, Head) and forward.loss_follows and kwargs.get("loss") is None


def tile_loss_(model: nn.Module, z_loss: float = 0.0) -> nn.Module:
    """Make a Hugging Face causal language model compute its loss without logits, in place; returns the model.

    `model(..., labels=...)` and `.loss.backward()` work as before, with shifted labels, ignored labels and
    `num_items_in_batch`; `.logits` is computed when it is used. z_loss: as in cross_entropy.

    Raises:
        ValueError: the output layer is not an nn.Linear, or the loss function is not ForCausalLMLoss.
    """
    _stand_in(model, z_loss).asked = True
    return model


def tile_loss_where(model: nn.Module, where: Callable[[int], bool], *, must: bool = False) -> None:
    """Make a Hugging Face causal language model compute those losses without logits of which `where` says so,
    given the number of labels. A model that uses its logits before the loss makes them, and the log says so;
    where it `must` not, it raises as with tile_loss_. `untile_loss_` leaves it.

    Raises:
        ValueError: as tile_loss_.
    """
    head = _stand_in(model, 0.0)
    head.where, head.must = where, must


def _stand_in(model: nn.Module, z_loss: float) -> Head:
    find = getattr(model, "get_output_embeddings", None)
    head: Any = find() if find is not None else None
    if type(head) not in (nn.Linear, TiledLinear):
        raise ValueError(
            f"the output layer of {type(model).__name__} is {type(head).__name__}, not an nn.Linear"
        )
    original: Any = getattr(model, "loss_function", None)
    if isinstance(original, Loss):
        original = original.original
    elif getattr(original, "__name__", "") != "ForCausalLMLoss":
        raise ValueError(
            f"{type(model).__name__} has the loss function {original}: only ForCausalLMLoss can be tiled"
        )
    found = head.__dict__.get("forward")
    if not isinstance(found, Head):
        found = Head(head, head.forward)
        found.stand_in(model)
    model.loss_function = Loss(original, z_loss)  # type: ignore[assignment]
    return found


def untile_loss_(model: nn.Module) -> nn.Module:
    """Undo tile_loss_, in place; returns the model."""
    heads = [one.__dict__.get("forward") for one in model.modules()]
    stay = False
    for head in heads:
        if isinstance(head, Head) and head.where is not None:
            head.asked, stay = False, True
        elif isinstance(head, Head):
            head.undo()
    loss: Any = getattr(model, "loss_function", None)
    if isinstance(loss, Loss):
        model.loss_function = Loss(loss.original, 0.0) if stay else loss.original  # type: ignore[assignment]
    return model
