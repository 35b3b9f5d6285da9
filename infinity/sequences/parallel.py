"""A model of transformers whose sequences are in parts over ranks (Ulysses, arXiv 2309.14509).

[Note: no model code changed]
transformers calls attention, and makes masks, through two tables of functions
by name. A model gets a name of its own in both; its configuration holds that name from then on. Two hooks on
its forward do the rest: positions and labels before it, the mean of the loss after it. All other layers see a
rank's tokens and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, UnsupportedError
from infinity.sequences.attention import INNER, attend, divide_heads
from infinity.sequences.batches import split
from infinity.sequences.calls import Meeting, SequenceCall, arguments, refuse
from infinity.sequences.group import SequenceGroup
from infinity.sequences.losses import MeanOverSequence
from infinity.sequences.masks import whole_mask
from infinity.tiling.causal_lm import Loss

_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers, in a configuration's layer_types, that see other tokens in their attention alone."""
_numbers = itertools.count()
_of_models: weakref.WeakKeyDictionary[nn.Module, SequenceParallel] = weakref.WeakKeyDictionary()


class SequenceParallel:
    """What infinity.sequence_parallel returns: the ranks that share a model's sequences, and what they
    exchange.
    """

    def __init__(
        self, model: Any, group: SequenceGroup, data: tuple[int, int], attention: str | None
    ) -> None:
        """Have `model` compute on parts of sequences over `group`.

        data: the place of this rank's sequence among those that are trained at once, and their number.
        attention: see infinity.sequence_parallel.

        Raises: ConfigError for heads that the ranks do not divide; UnsupportedError for a model, or an
        attention, that cannot be divided.
        """
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.data_rank, self.data_ranks = data
        check(model)
        self._before = model.config._attn_implementation  # noqa: SLF001 - transformers has no other name for it
        inner = _inner(model, self._before, attention)
        divide_heads(*_heads(model.config), self.size)
        self._meeting = Meeting(group)
        self._call: SequenceCall | None = None
        self._away = False
        self._model = weakref.ref(model)
        self._name = f"infinity_sequences_{next(_numbers)}"
        _register(self._name, weakref.WeakMethod(self._attend), weakref.WeakMethod(self._mask))
        self._inner, self._make = INNER[inner], _mask_function(inner)
        self._install(model)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)
        _of_models[model] = self

    @property
    def exchanged_nbytes(self) -> int:
        """Bytes of the buffers that this rank's all-to-alls have sent so far; 1/size of them stays here.

        For each layer and forward: rows x tokens / size x width x (2 query heads + 2 max(key heads, size)) x
        bytes of an element. A backward sends as many; recomputing a forward, too.
        """
        return sum(self.group.nbytes.values())

    @property
    def is_whole(self) -> bool:
        """Whether each rank computes on whole sequences now, inside whole()."""
        return self._away

    def split(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch of whole sequences, with position_ids and shift_labels.

        Raises: UnsupportedError for a length that the ranks do not divide, and for masks of queries and keys.
        """
        return split(batch, self.rank, self.size)

    def mean(self, total: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
        """Return the mean of a loss of your own over the whole sequence: the sum of all ranks' `total`,
        divided by that of all ranks' `count`; differentiable, for the engine's mean over all ranks. Every
        rank calls it.

        total: a scalar, the sum over this rank's tokens. count: how many of them it counts.
        """
        counts = self.group.gather(
            torch.as_tensor(count, dtype=torch.float64), "count the labels of a sequence"
        )
        return self._mean(total, counts.sum())

    def _mean(self, total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = MeanOverSequence.apply(self.group, total, count)  # type: ignore[no-untyped-call]
        return mean

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Let each rank compute on whole sequences inside the `with`, to generate or to evaluate."""
        model = self._model()
        if model is None:
            raise ReferenceError("sequences.whole() of a model that was freed")
        if self._away:  # inside another one
            yield
            return
        self._away = True
        model.set_attn_implementation(self._before)
        try:
            yield
        finally:
            self._away = False
            self._install(model)

    def close(self) -> None:
        """Close the connections. The model's forward fails from then on, outside of whole()."""
        self.group.close()

    # What transformers and the model's hooks call

    def _install(self, model: Any) -> None:
        model.set_attn_implementation(self._name)
        models = [one for one in model.modules() if hasattr(one, "set_attn_implementation")]
        if any(one.config._attn_implementation != self._name for one in models):  # noqa: SLF001
            raise UnsupportedError(
                f"{type(model).__name__} does not take its attention from transformers' AttentionInterface, "
                "so it cannot be divided among ranks"
            )

    def _attend(self, *args: Any, **options: Any) -> Any:
        if self._call is not None:
            self._call.attend()
        return attend(self.group, self._inner, *args, **options)

    def _mask(self, **given: Any) -> Any:
        if self._call is None:
            raise UnsupportedError(
                "a part of the model was called by itself: positions and masks of a sequence in parts are "
                "made when the model that infinity.sequence_parallel was given is called. Call that one"
            )
        return whole_mask(self._make, self._call.sequence, **given)

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._call = None
        if self._away:
            return None
        given = arguments(model, args, kwargs)
        refuse(model.config, given)
        if given.get("labels") is not None:
            _check_loss(model)
        self._call = self._meeting.meet(given)
        if "use_cache" in _parameters(model):
            given["use_cache"] = False  # a cache would hold a rank's tokens alone
        return (), given

    def _leave(self, model: Any, _args: Any, output: Any) -> Any:
        call, self._call = self._call, None
        if call is None or output is None:  # an error is on its way
            return None
        layers = getattr(model.config, "num_hidden_layers", call.attended)
        if call.attended < layers:
            raise UnsupportedError(
                f"{type(model).__name__}: {call.attended} of {layers} layers attended through transformers' "
                "interface: the others would have seen this rank's tokens alone"
            )
        if call.count is None:
            return None
        if isinstance(output, tuple):
            return self._mean(output[0], call.count), *output[1:]
        output["loss"] = self._mean(output["loss"], call.count)
        return output


def is_divided(model: nn.Module) -> bool:
    """Whether ranks share the sequences of a model."""
    return any(one in _of_models for one in model.modules())


def sequences_of(model: nn.Module) -> SequenceParallel:
    """Return what divides a model's sequences among ranks.

    Raises: ConfigError where nothing does.
    """
    for one in model.modules():
        if one in _of_models:
            return _of_models[one]
    raise ConfigError(
        f"{type(model).__name__}: its sequences are not divided among ranks; call "
        "infinity.sequence_parallel(model, ranks), or build it with Config(sequence_parallel=...)"
    )


def check(model: Any) -> None:
    """See that a model's sequences can be divided.

    Raises: UnsupportedError.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedError(
            f"{name} is not a model of transformers: its attention cannot be divided among ranks"
        )
    if model in _of_models:
        raise ConfigError(f"{name}: its sequences are divided among ranks already")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{name} attends from a decoder to an encoder, which is not divided among ranks"
        )
    parts = {id(one.config): one for one in model.modules() if hasattr(one, "set_attn_implementation")}
    if len(parts) > 1:
        raise UnsupportedError(
            f"{name} consists of several models, {', '.join(type(one).__name__ for one in parts.values())}: "
            "give infinity.sequence_parallel a language model alone"
        )
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - _LAYERS)
    mixing = sorted({type(one).__name__ for one in model.modules() if isinstance(one, nn.Conv1d)})
    if kinds or mixing:
        raise UnsupportedError(
            f"{name} has layers that see other tokens outside of attention, {', '.join(kinds + mixing)}: "
            "they would see those of one rank alone"
        )
    if "position_ids" not in _parameters(model):
        raise UnsupportedError(
            f"{name}.forward takes no position_ids: it would count each rank's tokens from 0"
        )


def _parameters(model: nn.Module) -> Mapping[str, Any]:
    import inspect

    return inspect.signature(type(model).forward).parameters


def _heads(config: Any) -> tuple[int, int]:
    queries = int(config.num_attention_heads)
    return queries, int(getattr(config, "num_key_value_heads", None) or queries)


def _inner(model: Any, now: str, asked: str | None) -> str:
    """Return which of INNER is to attend with a part of the heads.

    Raises: UnsupportedError, with what to choose.
    """
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    chosen = asked or ("sdpa" if sinks and now == "eager" else now)  # sdpa() has sinks, transformers' has not
    if chosen not in INNER:
        raise UnsupportedError(
            f"{type(model).__name__} has attn_implementation={chosen!r}, which is not divided among ranks: "
            "it would keep weights of all tokens by all tokens, or needs lengths of its own. Choose one of "
            f'{", ".join(map(repr, INNER))}: infinity.sequence_parallel(model, attention="sdpa")'
        )
    return chosen


def _check_loss(model: Any) -> None:
    loss = model.loss_function
    if getattr(loss, "__name__", "") != "ForCausalLMLoss" and not isinstance(loss, Loss):
        raise UnsupportedError(
            f"{type(model).__name__} has the loss {loss}: with labels, only transformers' ForCausalLMLoss is "
            "a sum over tokens that ranks can add. Leave labels out, and use sequences.mean(sum, count) for "
            "a loss of your own"
        )


def _mask_function(inner: str) -> Callable[..., Any]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    made: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[inner]
    return made


def _register(name: str, attention: weakref.WeakMethod[Any], mask: weakref.WeakMethod[Any]) -> None:
    """Enter functions into transformers' tables, which last for ever, without keeping what they belong to."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, partial(_call, attention))
    AttentionMaskInterface.register(name, partial(_call, mask))


def _call(method: weakref.WeakMethod[Any], *args: Any, **options: Any) -> Any:
    found = method()
    if found is None:
        raise ReferenceError("attention of a model that was freed")
    return found(*args, **options)
