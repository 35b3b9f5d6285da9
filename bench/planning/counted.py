"""Counts the activations of any language model of transformers, tensor by tensor, on tensors without memory.

[Note: how blocks are counted]
A forward and backward runs in torch's FakeTensorMode, where tensors have shapes and no values, at two lengths
of a sequence. What is alive behind a block and was not before it is what the block keeps. The most that its
backward adds to what is alive when it begins is what that needs beside. The two lengths tell what grows with
the sequence, attention scores, from what a token keeps.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from infinity.bench.planning.live_tensors import LiveTensors
from infinity.errors import InfinityError
from infinity.planning.activations import Activations, KeptOfToken

_LENGTHS = 61, 127
"""Tokens of the sequences: primes, so that no activation has the shape of a weight."""
_WIDTH = 2
"""Bytes of an element of bf16."""


class UncountedError(InfinityError, RuntimeError):
    """What a model's activations take cannot be found; the message says why."""


@dataclass(slots=True)
class _CountedBlock:
    """Bytes of one block."""

    end: tuple[int, int] = (0, 0)
    """Alive behind it: in all, and of wide elements."""
    began: int = 0
    """Alive when its backward began."""
    backward: int = 0


@dataclass(slots=True)
class _Watch:
    """Hooks on the blocks of a model, which count what is alive."""

    live: LiveTensors
    found: list[_CountedBlock] = field(default_factory=list)
    hidden: int = 0
    start: tuple[int, int] = (0, 0)
    """Alive before the first block, as `end`."""

    def kept(self, number: int) -> tuple[int, int]:
        """Return what is alive behind a block and was not behind the one before it."""
        before = self.found[number - 1].end if number else self.start
        nbytes, wide_nbytes = (now - then for now, then in zip(self.found[number].end, before, strict=True))
        return nbytes, wide_nbytes

    def on(self, blocks: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Watch these, until the handles are removed."""
        self.found = [_CountedBlock() for _ in blocks]
        return [
            handle for block, one in zip(blocks, self.found, strict=True) for handle in self._on(block, one)
        ]

    def _on(self, block: nn.Module, one: _CountedBlock) -> list[RemovableHandle]:
        def begin(_module: object, args: Any, kwargs: Any) -> None:
            entering = _first_tensor((args, *kwargs.values()))
            self.hidden = entering.shape[-1]
            if not any(self.start):
                self.start = self.live.nbytes, self.live.wide_nbytes
            if entering.requires_grad:
                entering.register_hook(lambda _: end_backward())

        def end(_module: object, _args: object, _kwargs: object, output: Any) -> None:
            one.end = self.live.nbytes, self.live.wide_nbytes
            _first_tensor(output).register_hook(lambda _: begin_backward())

        def begin_backward() -> None:
            one.began = self.live.nbytes
            self.live.begin_peak()

        def end_backward() -> None:
            one.backward = self.live.peak_nbytes - one.began

        return [
            block.register_forward_pre_hook(begin, with_kwargs=True),
            block.register_forward_hook(end, with_kwargs=True),
        ]


def _first_tensor(values: Any) -> Tensor:
    """Return the first tensor of floating point in values that may be nested: a block's input, or output."""
    for one in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(one, Tensor) and one.is_floating_point():
            return one
        if isinstance(one, (tuple, list)) and one:
            return _first_tensor(one)
    raise UncountedError("a block takes, or returns, no tensor of floating point")


def activations_of(model: nn.Module, blocks: Sequence[nn.Module]) -> Activations:
    """Return what each of the blocks of a language model keeps; see [Note: how blocks are counted]. The model
    is on the meta device, in bf16, and cannot be used any more.

    Raises: UncountedError naming why it cannot be counted, such as shapes that depend on values.
    """
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int) or not blocks:
        raise UncountedError("it has no config.vocab_size, or no list of blocks of one class")
    try:
        model.train().to(torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True), _no_packing():
            model.to_empty(device="cpu")
            short, long = (_counted(model, blocks, length) for length in _LENGTHS)
    except Exception as error:  # whatever a forward may raise without values
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UncountedError(f"a forward and backward without values failed ({said})") from error
    numbers = range(len(blocks))
    return Activations(short.hidden, vocabulary, tuple(_of_token(short, long, number) for number in numbers))


@contextlib.contextmanager
def _no_packing() -> Iterator[None]:
    """Have transformers make no mask for several texts in one sequence, as it does where it sees no values:
    attention with a mask keeps more.
    """
    masks = sys.modules.get("transformers.masking_utils")
    found = getattr(masks, "find_packed_sequence_indices", None)
    if found is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None  # type: ignore[union-attr]
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = found  # type: ignore[union-attr]


def _counted(model: nn.Module, blocks: Sequence[nn.Module], length: int) -> _Watch:
    parameters = list(model.parameters())
    ids = torch.zeros(1, length, dtype=torch.long)
    watch = _Watch(LiveTensors([*parameters, *model.buffers(), ids]))
    handles = watch.on(blocks)
    with watch.live:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    return watch


def _of_token(short: _Watch, long: _Watch, number: int) -> KeptOfToken:
    """Return what a token keeps in a block, from two lengths of a sequence."""
    first, second = _LENGTHS
    (kept, wide), (longer_kept, longer_wide) = short.kept(number), long.kept(number)
    backward, longer_backward = (watch.found[number].backward for watch in (short, long))
    grows, wide_grows, back_grows = (
        (more / second - less / first) / (second - first)
        for less, more in ((kept, longer_kept), (wide, longer_wide), (backward, longer_backward))
    )
    of_wide = wide / first - wide_grows * first
    of_narrow = kept / first - grows * first - of_wide
    beside = backward / first - back_grows * first - _WIDTH * short.hidden
    return KeptOfToken(
        narrow=max(0.0, of_narrow) / _WIDTH,
        wide=max(0.0, of_wide) / 4,
        pairs=max(0.0, grows - wide_grows) / _WIDTH,
        wide_pairs=max(0.0, wide_grows) / 4,
        pairs_beside=max(0.0, back_grows) / _WIDTH,
        gated=max(0.0, beside) / (2 * _WIDTH),
    )
