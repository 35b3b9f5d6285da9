"""Modules over slices of the sequence or of the batch: see [Note: one call, one gradient] in slices.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.tiling.slices import run_in_slices


@dataclass(slots=True)
class InSlices:
    """The forward of a module that runs in slices: `module.forward` on that one instance."""

    module: nn.Module
    forward: Callable[..., Any]

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cut: Any, size: int, *, straight: bool = False
    ) -> Any:
        before, parameters = _recorded(), list(self.module.parameters())
        result = run_in_slices(self.forward, parameters, args, kwargs, cut=cut, size=size, straight=straight)
        found = [key for key, number in _recorded().items() if number != before.get(key, 0)]
        if found:
            raise ValueError(
                f"{', '.join(found)} inside a {type(self.module).__name__} run in slices: recorded once "
                "per slice, without gradients. Do not ask for them (output_router_logits, "
                "output_attentions), or slice a part of the module that does not give them."
            )
        return result


def _recorded() -> dict[str, int]:
    """Return how many outputs of each sort transformers has recorded so far in the model's forward."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    recorded = collector.get() if collector is not None else None
    return {key: len(found) for key, found in (recorded or {}).items() if isinstance(found, list)}


@dataclass(slots=True)
class SequenceSlices(InSlices):
    """Cuts every tensor argument along `dim`."""

    tiles: int
    dim: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        lengths = [one.shape[self.dim] for one in _tensors((args, kwargs))]
        size = max(-(-max(lengths, default=0) // self.tiles), 1)
        return self._run(args, kwargs, lambda _: self.dim, size, straight=True)


@dataclass(slots=True)
class BatchSlices(InSlices):
    """Cuts along dimension 0 the tensor arguments that have a row per sample."""

    micro_batch: int
    whole: frozenset[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if _has_cache(args, kwargs):
            if not torch.is_grad_enabled():
                return self.forward(*args, **kwargs)
            raise ValueError(
                "a block with a cache would fill it twice, in forward and backward: use_cache=False"
            )
        if getattr(self.module, "gradient_checkpointing", False) and self.module.training:
            raise ValueError("tile_batch recomputes by itself: switch the model's gradient checkpointing off")
        tensors = _tensors((args, kwargs))
        if not tensors or not tensors[0].dim():
            raise ValueError(f"{type(self.module).__name__} was called without a batch to cut")
        batch = tensors[0].shape[0]
        kept = {id(one) for name in self.whole for one in _tensors(kwargs.get(name))}

        def cut(tensor: torch.Tensor) -> int | None:
            per_sample = tensor.dim() > 1 and tensor.shape[0] == batch and id(tensor) not in kept
            return 0 if per_sample or tensor is tensors[0] else None

        return self._run(args, kwargs, cut, self.micro_batch)


def _has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a block is given a cache of keys and values, by whatever name (5.24 of transformers has another
    than 5.23, and models with a state of their own have theirs).
    """
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return kwargs.get("past_key_values") is not None or any(
        isinstance(one, kind) for one in (*args, *kwargs.values())
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    forward = module.__dict__.get("forward", module.forward)
    while isinstance(forward, InSlices):
        forward = forward.forward
    return forward  # type: ignore[no-any-return]


def tile_sequence(module: nn.Module, tiles: int, dim: int = -2) -> nn.Module:
    """Let a position-wise module (an MLP) run on `tiles` slices of the sequence, recomputed in backward;
    returns it.

    Its activations are then those of one slice, and its parameters' gradients come once. The state_dict stays
    as it is. Every tensor argument is cut along `dim`. Of a mixture of experts (a module with `experts`), the
    experts are sliced,
    over tokens and their routing: the router stays outside, since a loss on its logits needs their gradient.
    Calling it again changes the number; `untile_` undoes it.

    Raises:
        ValueError: fewer than one tile.
    """
    if tiles < 1:
        raise ValueError(f"tiles={tiles}: 1 or more")
    experts = getattr(module, "experts", None)
    if isinstance(experts, nn.Module):
        tile_sequence(experts, tiles, 0)
        return module
    module.forward = SequenceSlices(module, _own_forward(module), tiles, dim)
    return module


def tile_batch(block: nn.Module, micro_batch: int, whole: Collection[str] = ()) -> nn.Module:
    """Let a block run on `micro_batch` samples at a time, recomputed in backward, while its parameters stay
    put; returns it.

    The results are those of accumulating gradients over as many micro-batches; see [Note: one call, one
    gradient]. Tensor arguments of two or more dimensions with as many rows as the first one (the hidden
    states) are cut; the rest (a mask or rotary table for all samples) is passed whole.

    whole: keyword arguments that are passed whole though they have as many rows as there are samples.

    Raises:
        ValueError: fewer than one sample; an embedding with sparse gradients.
    """
    if micro_batch < 1:
        raise ValueError(f"micro_batch={micro_batch}: 1 or more")
    if any(getattr(one, "sparse", False) is True for one in block.modules()):
        raise ValueError(f"{type(block).__name__} has sparse gradients, which are not added up: sparse=False")
    block.forward = BatchSlices(block, _own_forward(block), micro_batch, frozenset(whole))
    return block


def untile_(module: nn.Module) -> nn.Module:
    """Undo tile_sequence, tile_batch and tile_batch_ on this module and all within it; returns it."""
    for one in module.modules():
        if runs_in_slices(one):
            forward = _own_forward(one)
            del one.forward
            if forward != one.forward:  # somebody else's, from before
                one.forward = forward
    return module


def runs_in_slices(module: nn.Module) -> bool:
    """Whether one call of `module` is many of each of its children: who fetches parameters around calls
    should fetch those of all of them around this one.
    """
    return isinstance(module.__dict__.get("forward"), InSlices)


class TiledMLP(nn.Module):
    """A position-wise module over slices of the sequence, as a module around it; the keys of its state_dict
    are the inner module's own.

    inner: the module, which `tile_sequence` would change in place instead.
    """

    def __init__(self, inner: nn.Module, tiles: int, dim: int = -2) -> None:
        super().__init__()
        self.inner = inner
        self.slices = SequenceSlices(inner, inner, tiles, dim)
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the inner module returns."""
        return self.slices(*args, **kwargs)


def _drop_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}inner.")]:
        state[prefix + key.removeprefix(f"{prefix}inner.")] = state.pop(key)


def _add_prefix(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}inner.{key.removeprefix(prefix)}"] = state.pop(key)
