"""Modules over slices of the sequence or of the batch: see [Note: one call, one gradient] in slices.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.tiling.slices import run_in_slices


@dataclass(slots=True)
class InSlices:
    """Replaces `module.forward`, on that one instance, to run it in slices."""

    module: nn.Module
    forward: Callable[..., Any]

    def cuts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments calls each child several times."""
        return True

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], cut: Any, size: int, *, straight: bool = False
    ) -> Any:
        parameters = list(self.module.parameters())
        with self.unrecorded():
            return run_in_slices(
                self.forward, parameters, args, kwargs, cut=cut, size=size, straight=straight
            )

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """See that transformers records no output of the module within, once per slice.

        Raises: ValueError naming what is recorded.
        """
        before = _recorded()
        yield
        found = [key for key, number in _recorded().items() if number != before.get(key, 0)]
        if found:
            raise ValueError(
                f"{', '.join(found)} inside a {type(self.module).__name__} that runs in slices would be "
                "recorded once per slice, without gradients. Do not ask for them (output_router_logits, "
                "output_attentions), or slice a part of the module that does not record them."
            )


def _recorded() -> dict[str, int]:
    """Return how many outputs of each kind transformers has recorded so far in the model's forward."""
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
        """Run the module in slices."""
        lengths = [one.shape[self.dim] for one in _tensors((args, kwargs))]
        size = max(-(-max(lengths, default=0) // self.tiles), 1)
        return self._run(args, kwargs, lambda _: self.dim, size, straight=True)


@dataclass(slots=True)
class ChosenSlices(InSlices):
    """Cuts every tensor argument along `dim`, into as many slices as is said of each call; calls that are not
    cut are those of the module as it is. `untile_` leaves it.
    """

    choose: Callable[[torch.Tensor], int]
    """Returns the number of slices for a call with this first tensor; it tells by the shape alone, so that a
    recomputation is cut as its forward was.
    """
    dim: int
    alike: Callable[[], bool]
    """Whether to fetch around calls that are not cut as around those that are: see `cuts`."""

    def cuts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is cut, or others may be at the same time, on ranks with longer sequences."""
        return self._tiles(args, kwargs) > 1 or self.alike()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, in slices where it is large."""
        tiles = self._tiles(args, kwargs)
        if tiles == 1:
            return self.forward(*args, **kwargs)
        length = _tensors((args, kwargs))[0].shape[self.dim]
        return self._run(args, kwargs, lambda _: self.dim, max(-(-length // tiles), 1), straight=True)

    def _tiles(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return 1
        tensors = _tensors((args, kwargs))
        if not tensors or tensors[0].dim() < -self.dim:
            return 1
        length = tensors[0].shape[self.dim]
        if length < 2 or any(one.dim() < 2 or one.shape[self.dim] != length for one in tensors):
            return 1
        return min(self.choose(tensors[0]), length)


@dataclass(slots=True)
class BatchSlices(InSlices):
    """Cuts along dimension 0 the tensor arguments that have a row per sample."""

    micro_batch: int
    whole: frozenset[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block in slices."""
        if _has_cache(args, kwargs):
            if not torch.is_grad_enabled():
                return self.forward(*args, **kwargs)
            raise ValueError(
                f"a {type(self.module).__name__} in micro-batches was given a cache, which its recomputation "
                "would fill again: use_cache=False"
            )
        if getattr(self.module, "gradient_checkpointing", False) and self.module.training:
            raise ValueError("tile_batch recomputes by itself: switch the model's gradient checkpointing off")
        tensors = _tensors((args, kwargs))
        if not tensors or not tensors[0].dim():
            raise ValueError(f"{type(self.module).__name__} was called without a tensor to cut into samples")
        batch = tensors[0].shape[0]
        bias = heads_in_front(kwargs)
        if bias is not None and bias.partition(" ")[0] not in self.whole:
            raise ValueError(
                f"a {type(self.module).__name__} in micro-batches was given {bias}: it cannot be cut. Leave "
                "the model out of tile_batch."
            )
        kept = {id(one) for name in self.whole for one in _tensors(kwargs.get(name))}

        def cut(tensor: torch.Tensor) -> int | None:
            per_sample = tensor.dim() > 1 and tensor.shape[0] == batch and id(tensor) not in kept
            return 0 if per_sample or tensor is tensors[0] else None

        return self._run(args, kwargs, cut, self.micro_batch)


def heads_in_front(kwargs: Mapping[str, Any]) -> str | None:
    """Say which bias on attention scores has a row for each head in front, as MPT's and Bloom's do, and none
    for each sample: its length may be that of the batch by chance. None where there is none.
    """
    for name in ("position_bias", "alibi"):
        bias = kwargs.get(name)
        if isinstance(bias, torch.Tensor) and bias.dim() == 3:
            return f"{name} of shape {tuple(bias.shape)}, with heads, and no row for each sample, in front"
    return None


def _has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a block is given a cache of keys and values.

    The argument's name differs between transformers 5.23 and 5.24, and between models.
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
    """Make a position-wise module (an MLP) run on `tiles` slices of the sequence, recomputed in backward.

    Memory then holds the activations of one slice; each parameter still gets one gradient per backward, and
    the state_dict does not change. Every tensor argument is cut along `dim`. For a mixture of experts (a
    module with `experts`), only the experts are sliced, over tokens and their routing; the router stays
    outside, since a loss on its logits needs their gradient. A second call changes the number of slices;
    `untile_` undoes it. Returns the module.

    Raises:
        ValueError: fewer than one tile.
    """
    if tiles < 1:
        raise ValueError(f"tiles={tiles}: expected 1 or more")
    experts = getattr(module, "experts", None)
    if isinstance(experts, nn.Module):
        tile_sequence(experts, tiles, 0)
        return module
    module.forward = SequenceSlices(module, _own_forward(module), tiles, dim)
    return module


def tile_batch(block: nn.Module, micro_batch: int, whole: Collection[str] = ()) -> nn.Module:
    """Make a block run on `micro_batch` samples at a time, recomputed in backward, while its parameters stay
    resident. Returns the block.

    The results are those of accumulating gradients over as many micro-batches; see [Note: one call, one
    gradient]. Tensor arguments of two or more dimensions with as many rows as the first one (the hidden
    states) are cut; the rest (a mask or rotary table for all samples) is passed whole.

    whole: names of keyword arguments to pass whole although they have as many rows as there are samples.

    Raises:
        ValueError: fewer than one sample; an embedding with sparse gradients.
    """
    if micro_batch < 1:
        raise ValueError(f"micro_batch={micro_batch}: expected 1 or more")
    if any(getattr(one, "sparse", False) is True for one in block.modules()):
        raise ValueError(
            f"{type(block).__name__} has an embedding with sparse gradients, which slices cannot sum: "
            "build it with sparse=False"
        )
    block.forward = BatchSlices(block, _own_forward(block), micro_batch, frozenset(whole))
    return block


def untile_(module: nn.Module) -> nn.Module:
    """Undo tile_sequence, tile_batch and tile_batch_ on a module and its descendants; returns the module."""
    for one in module.modules():
        if runs_in_slices(one) and not isinstance(one.forward, ChosenSlices):
            forward = _own_forward(one)
            del one.forward
            if forward != one.forward:  # an instance had a forward of its own before
                one.forward = forward
    return module


def tile_sequence_where(
    module: nn.Module, choose: Callable[[torch.Tensor], int], dim: int, alike: Callable[[], bool]
) -> None:
    """Make a position-wise module run in as many slices as `choose` says of each call, as tile_sequence. It
    is given the call's first tensor, and tells by its shape alone. alike: whether parameters are to be
    fetched around every call alike, cut or not, as ranks need it that may choose differently.
    """
    module.forward = ChosenSlices(module, _own_forward(module), choose, dim, alike)


def runs_in_slices(module: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> bool:
    """Whether one call of `module` calls each of its children several times; inputs: (args, kwargs) of the
    call, None for any.

    Code that fetches parameters around module calls should then fetch the children's around this call.
    """
    forward = module.__dict__.get("forward")
    return isinstance(forward, InSlices) and (inputs is None or forward.cuts(*inputs))


class TiledMLP(nn.Module):
    """Wraps a position-wise module to run it over slices of the sequence, as `tile_sequence` does in place.

    The keys of its state_dict are those of the inner module.
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
