"""Random layerwise token dropping (random-LTD, arXiv 2211.11586): layers compute on some of the tokens.

[Note: recomputed layers]
A layer draws one number from torch's generator of the CPU, and from that, with a generator of its own, the
tokens that it keeps. With gradient checkpointing of transformers since 5.24, and with
Config(activation_memory=...), the draw is outside of what is recomputed. Where it is inside, the checkpoint
restores the generator, as it does for dropout, and the same number is drawn. Each number is noted with the
tokens that were kept then, whatever the schedule says now: a number that is not noted would give other
tokens, and is an error. A layer that keeps all tokens notes the number that it would have drawn, and
draws none.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.activations.blocks import FEWEST, blocks_of
from infinity.activations.by_budget import in_backward
from infinity.errors import ConfigError, UnsupportedError
from infinity.planning.kept_tokens import TokenSchedule
from infinity.sequences.parallel import is_divided
from infinity.sequences.sparse_attention import inner_attention
from infinity.sequences.tokens import KNOWN, KeptTokens, caches_in, check_layouts
from infinity.tiling import runs_in_slices

_ATTENTION = ("eager", "sdpa")
"""transformers' attention whose masks are tensors. Flash attention would take kept tokens for packed ones."""
_NOTED = 1 << 14
"""Draws that are noted for a backward that recomputes: more than any step has layers and micro-batches."""
_routed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class RandomLTD:
    """Lets layers of a model compute on some tokens of each row, drawn anew for each layer, row and forward;
    the other tokens go around the layer. Fewer tokens at first, all of them at the end.

    model: one with blocks in a list, such as transformers' models; built in Init or not. shortest, longest:
    tokens of a row that are kept at first, and after `steps` steps; in multiples of `multiple`: DeepSpeed's
    schedule "fixed_linear". layers: numbers of the blocks that leave tokens out, from 0; None for all but
    the first and the last. seq_first: hidden states are [tokens, rows, ...]. arguments: which dimensions
    other arguments of the blocks have, as {"bias": "b.t"}: b rows, t tokens, . others; "" for none of these.

    Call step() after each step of the optimizer. Where `longest` is as long as the rows, a layer that keeps
    all is the layer itself, bit for bit. In eval mode, and while generating with a cache, all tokens are
    kept. Masks, positions and their embeddings are those of the tokens that are kept. What is drawn comes
    from torch's generator of the CPU, as dropout's masks do on a CPU: seed it, by rank where ranks have other
    data.

    Raises: ConfigError for numbers that do not fit; UnsupportedError for a model without blocks, blocks that
    run in slices or leave tokens out already, flash or flex attention, and sequences that ranks divide.
    """

    def __init__(
        self,
        model: nn.Module,
        shortest: int,
        longest: int,
        *,
        steps: int,
        multiple: int = 16,
        layers: Iterable[int] | None = None,
        seq_first: bool = False,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """Change the forward of the chosen blocks, on these instances."""
        self.schedule = TokenSchedule(shortest=shortest, longest=longest, steps=steps, multiple=multiple)
        self.steps = 0
        """Steps so far."""
        self.computed = self.left_out = 0
        """Tokens, of rows and layers, that the chosen blocks were given in training and computed, and those
        that they left out; not counted again where a layer is recomputed."""
        self.layouts = {**KNOWN, **(arguments or {})}
        check_layouts(self.layouts)
        self._hidden = "tb" if seq_first else "bt"
        self._noted: dict[int, _Draw] = {}
        if is_divided(model):
            raise UnsupportedError(
                "RandomLTD: ranks share the sequences of this model, and each would leave out tokens of its "
                "own part; leave sequence_parallel out"
            )
        chosen = _chosen(model, layers)
        replaced = [RoutedBlock(self, one) for one in chosen]  # all, or an error and none
        self._replaced = [weakref.ref(one) for one in replaced]
        for block, forward in zip(chosen, replaced, strict=True):
            block.forward = forward
            _routed.add(block)

    def __deepcopy__(self, memo: object) -> RandomLTD:
        """Return itself: a copy of the model follows the same steps."""
        return self

    @property
    def kept(self) -> int:
        """Tokens of a row that the chosen blocks keep now."""
        return self.schedule.after(self.steps)

    def step(self) -> None:
        """Count a step of the optimizer."""
        self.steps += 1

    def seek(self, steps: int) -> None:
        """Go on after so many steps."""
        self.steps = steps

    def state_dict(self) -> dict[str, int]:
        """Return what load_state_dict takes: plain numbers."""
        return {"steps": self.steps, "computed": self.computed, "left_out": self.left_out}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from there. The schedule is that of this object."""
        self.steps = int(state_dict["steps"])
        self.computed, self.left_out = int(state_dict["computed"]), int(state_dict["left_out"])

    def remove(self) -> None:
        """Give the blocks their own forward back; a second call does nothing."""
        for reference in self._replaced:
            replaced = reference()
            if replaced is not None:
                replaced.undo()
        self._replaced = []

    def choose(self, hidden: torch.Tensor, kind: str, *, training: bool) -> tuple[KeptTokens | None, str]:
        """Return the tokens that a call of a block keeps, None for all; and the layout of `hidden`.

        Raises: UnsupportedError for hidden states without tokens, and for a block that is recomputed with
        other random numbers.
        """
        layout = self._hidden + "." * (hidden.dim() - 2)
        if len(layout) != hidden.dim():
            raise UnsupportedError(
                f"RandomLTD: the first argument of {kind} is {tuple(hidden.shape)}: expected hidden states, "
                "[rows, tokens, ...]"
            )
        rows, tokens = (hidden.shape[layout.index(one)] for one in "bt")
        count = min(self.kept, tokens) if training else tokens
        if in_backward():
            return self._again(rows, tokens, count, hidden.device, kind), layout
        if training:
            self.computed += rows * count
            self.left_out += rows * (tokens - count)
        if count == tokens:
            if training or torch.is_grad_enabled():
                self._note(_next_draw(), tokens)
            return None, layout
        drawn = _draw()
        self._note(drawn, count)
        return _keep(drawn, rows, tokens, count, hidden.device), layout

    def _note(self, drawn: int, count: int) -> None:
        before = self._noted.pop(drawn, None)
        unclear = before is not None and before.count != count and not before.repeated
        self._noted[drawn] = _Draw(None if unclear else count)
        if len(self._noted) > _NOTED:
            del self._noted[next(iter(self._noted))]

    def _again(
        self, rows: int, tokens: int, count: int, device: torch.device, kind: str
    ) -> KeptTokens | None:
        """Return what a block that is recomputed keeps; see [Note: recomputed layers]."""
        noted = self._noted.get(_next_draw())
        if noted is None and count == tokens:
            return None
        if noted is None:
            raise UnsupportedError(
                f"RandomLTD: a {kind} is recomputed in the backward with other random numbers than its "
                "forward had, and would keep other tokens. Checkpoint it with preserve_rng_state=True, "
                "torch's default"
            )
        if noted.count is None:
            raise UnsupportedError(
                f"RandomLTD: a {kind} is recomputed in the backward, and two forwards with the same random "
                "numbers kept different numbers of tokens. Do not seed both alike, or run the backward "
                "before step()"
            )
        noted.repeated = True
        return None if noted.count >= tokens else _keep(_draw(), rows, tokens, noted.count, device)


@dataclass(slots=True)
class _Draw:
    """A number that was drawn, or would have been."""

    count: int | None
    """Tokens that were kept; None where forwards that may both still be recomputed kept different ones."""
    repeated: bool = False


class RoutedBlock:
    """Replaces a block's forward, on that one instance."""

    def __init__(self, routing: RandomLTD, block: nn.Module) -> None:
        """Let `block` compute on the tokens that `routing` chooses."""
        self._routing, self._block, self._kind = routing, weakref.ref(block), type(block).__name__
        self.own: Callable[..., Any] | None = block.__dict__.get("forward")
        """The instance's own forward; None where it has its class's."""
        self.active = True
        self.__wrapped__ = type(block).forward  # for inspect.signature
        self._names = _names(type(block))
        self._config = _attention_of(block)
        self._number = next((one.layer_idx for one in block.modules() if hasattr(one, "layer_idx")), None)
        """The layer's in a cache of keys and values."""
        self._check_attention()

    def undo(self) -> None:
        """Give the block its own forward back; where that is not on top, let all tokens through."""
        self.active = False
        block = self._block()
        if block is None:
            return
        _routed.discard(block)
        if block.__dict__.get("forward") is self:
            del block.forward
            if self.own is not None:
                block.forward = self.own

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutedBlock:
        """Return one for the copy of the block, which is being made."""
        twin = memo.get(id(self._block()))
        if twin is None:
            raise UnsupportedError(f"the forward of a {self._kind} was copied without it; copy the module")
        copied = object.__new__(RoutedBlock)
        own, config = copy.deepcopy((self.own, self._config), memo)
        vars(copied).update({**vars(self), "_block": weakref.ref(twin), "own": own, "_config": config})
        _routed.add(twin)
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled with the block."""
        raise UnsupportedError(
            "a model whose layers leave tokens out cannot be pickled: save model.state_dict(), which is that "
            "of the layers alone, or call remove() of its RandomLTD first"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on the tokens that it keeps, and put them among the others."""
        block = self._block()
        if block is None:
            raise ReferenceError(f"the forward of a {self._kind} that was freed")
        forward = self.own or type(block).forward.__get__(block)
        names = [*self._names[: len(args)], *(f"args[{one}]" for one in range(len(self._names), len(args)))]
        given = dict(zip(names, args, strict=True)) | kwargs
        first = next(iter(self._names), "args[0]")
        hidden = given.get(first, next(iter(given.values()), None))
        caches = caches_in(given.values())
        generates = bool(caches) and not torch.is_grad_enabled()
        if not self.active or generates or not isinstance(hidden, torch.Tensor):
            return forward(*args, **kwargs)
        kept, layout = self._routing.choose(hidden, self._kind, training=block.training)
        if kept is None:
            return forward(*args, **kwargs)
        self._check_attention()
        for cache in caches:
            self._check_cache(cache)
        layouts = self._routing.layouts
        given = {name: None if any(one is cache for cache in caches) else one for name, one in given.items()}
        taken = {
            name: kept.of(one, layout, name) if one is hidden else kept.argument(name, one, layouts)
            for name, one in given.items()
        }
        count = len(args)
        output = forward(*(taken[name] for name in names), **{name: taken[name] for name in [*given][count:]})
        return self._joined(kept, hidden, output, layout)

    def _check_cache(self, cache: Any) -> None:
        """Raises: UnsupportedError for a cache that holds tokens: an empty one is left out."""
        number = () if self._number is None else (self._number,)
        if cache.get_seq_length(*number) > 0:
            raise UnsupportedError(
                f"RandomLTD: {self._kind} was given a {type(cache).__name__} that holds tokens, in a forward "
                "with gradients. Call the model with use_cache=False and without a cache"
            )

    def _joined(self, kept: KeptTokens, hidden: torch.Tensor, output: Any, layout: str) -> Any:
        many = isinstance(output, tuple)
        first = output[0] if many and output else output
        expected = list(hidden.shape)
        expected[layout.index("t")] = kept.indices.shape[1]
        if not isinstance(first, torch.Tensor) or list(first.shape) != expected:
            found = tuple(first.shape) if isinstance(first, torch.Tensor) else type(first).__name__
            raise UnsupportedError(
                f"RandomLTD: {self._kind} returned {found} for the {tuple(expected)} of the kept tokens; "
                "expected hidden states of the same shape, alone or first in a tuple"
            )
        whole = kept.put_back(hidden, first, layout)
        return (whole, *output[1:]) if many else whole

    def _check_attention(self) -> None:
        name = inner_attention(getattr(self._config, "_attn_implementation", None))
        if name is not None and name not in _ATTENTION:
            raise UnsupportedError(
                f"RandomLTD: attn_implementation={name!r} does not take the mask of the tokens that are "
                f"kept; choose one of {', '.join(map(repr, _ATTENTION))}"
            )


def _chosen(model: nn.Module, layers: Iterable[int] | None) -> list[nn.Module]:
    """Return the blocks that leave tokens out.

    Raises: UnsupportedError, ConfigError.
    """
    blocks = list(blocks_of(model))
    if not blocks:
        raise UnsupportedError(
            f"RandomLTD: {type(model).__name__} has no blocks: layers for which transformers has activation "
            f"checkpointing, or {FEWEST} or more modules of one class in an nn.ModuleList or nn.Sequential"
        )
    numbers = list(range(1, len(blocks) - 1)) if layers is None else list(layers)
    wrong = [one for one in numbers if type(one) is not int or not 0 <= one < len(blocks)]
    if wrong or len(set(numbers)) < len(numbers) or not numbers:
        raise ConfigError(
            f"RandomLTD(layers={numbers}): expected different numbers of the {len(blocks)} blocks, from 0 to "
            f"{len(blocks) - 1}; without layers all but the first and the last are taken"
        )
    for number in numbers:
        block = blocks[number]
        if block in _routed:
            raise UnsupportedError(
                f"RandomLTD: block {number} leaves tokens out already; remove() the other RandomLTD first"
            )
        if runs_in_slices(block):
            raise UnsupportedError(
                f"RandomLTD: block {number} runs in slices; make the RandomLTD before they are cut "
                "(tile_batch_, accumulate_by_block)"
            )
    return [blocks[number] for number in numbers]


def _names(kind: type[nn.Module]) -> list[str]:
    """Return the names of the arguments that a forward takes by position."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return [one.name for one in parameters if one.kind in positional]


def _attention_of(block: nn.Module) -> Any:
    """Return the configuration that says how a block attends; None for none."""
    for module in block.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            return config
    return None


def _draw() -> int:
    return int(torch.randint(1 << 62, (), device="cpu"))


def _next_draw() -> int:
    """Return what _draw would, and leave the generator as it is."""
    before = torch.get_rng_state()
    drawn = _draw()
    torch.set_rng_state(before)
    return drawn


def _keep(drawn: int, rows: int, tokens: int, count: int, device: torch.device) -> KeptTokens:
    """Return the tokens that a draw stands for: every choice of each row is as likely."""
    generator = torch.Generator(device="cpu").manual_seed(drawn)
    keys = torch.rand(rows, tokens, generator=generator, dtype=torch.float64, device="cpu")
    indices = keys.topk(count, dim=1).indices.sort(dim=1).values
    return KeptTokens(indices.to(device), tokens)
