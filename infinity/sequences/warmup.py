"""A data loader whose sequences are short at first (curriculum by sequence length, arXiv 2108.06084)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from infinity.errors import ConfigError, UnsupportedError
from infinity.planning.lengths import LengthSchedule
from infinity.sequences.batches import cut, length_of, state_of


class SequenceWarmup:
    """Yields the batches of another loader, cut to the length of the step: the rest of each row is left out.

    loader: yields dicts of tensors [rows, tokens, ...], or tensors [rows, tokens]. shortest, longest, and
    the options of schedule ("fixed_linear": steps, multiple=8; "fixed_root": also degree; "fixed_discrete":
    lengths, until; "custom": function): see planning.lengths.LengthSchedule. accumulate: batches of one
    step.

    Short steps at first cost less, and large learning rates are stable earlier. A step's length changes no
    plan. `len`, `dataset` and the like are the loader's. The state is a few numbers, and the loader's own if
    it has one: optimizer.track(loader=...) resumes where it was.

    Raises: ConfigError for options that do not fit; UnsupportedError for batches that cannot be cut.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        shortest: int,
        longest: int,
        *,
        schedule: str = "fixed_linear",
        accumulate: int = 1,
        **options: Any,
    ) -> None:
        """Cut the batches of `loader`."""
        self.lengths = LengthSchedule(shortest=shortest, longest=longest, schedule=schedule, **options)
        self.loader = loader
        self.accumulate = _checked(accumulate)
        self.batches = 0
        """Batches given so far, in all epochs."""
        self.length = shortest
        """Tokens of a row in the last of them."""
        self._in_epoch = self._skip = 0

    @classmethod
    def of(cls, loader: Iterable[Any], lengths: LengthSchedule, accumulate: int) -> SequenceWarmup:
        """Cut the batches of `loader` to these lengths."""
        options = {one.name: getattr(lengths, one.name) for one in fields(lengths)}
        return cls(loader, accumulate=accumulate, **options)

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute (dataset, batch_size, sampler, ...) on the loader."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        length: int = len(self.loader)  # type: ignore[arg-type]
        return length

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches, or the rest of the one that load_state_dict has put it in."""
        skipped, self._skip = self._skip, 0
        self._in_epoch = skipped
        for place, batch in enumerate(self.loader):
            if place < skipped:
                continue
            step = self.batches // self.accumulate + 1
            self.length = self.lengths.after(self.length, step)
            shortened = shorten(batch, self.length)
            self.batches += 1
            self._in_epoch += 1
            yield shortened
        self._in_epoch = 0

    def set_function(self, function: Callable[[int], int]) -> None:
        """Change the function of schedule="custom"."""
        self.lengths = replace(self.lengths, function=function)

    def set_accumulate(self, accumulate: int) -> None:
        """Change the batches of one step: the steps so far stay as many."""
        steps, within = divmod(self.batches, self.accumulate)
        self.accumulate = _checked(accumulate)
        self.seek(steps, within)

    def seek(self, steps: int, within: int = 0, length: int | None = None) -> None:
        """Go on after so many steps, and `within` batches of the next one, wherever the loader is.

        length: that of the batch before; None for the one that it is.
        """
        self.batches = steps * self.accumulate + min(within, self.accumulate)
        if length is not None:
            self.length = min(length, self.lengths.longest)

    def state_dict(self) -> dict[str, Any]:
        """Return what load_state_dict takes: plain numbers, and the loader's state if it has one."""
        state: dict[str, Any] = {"batches": self.batches, "length": self.length, "in_epoch": self._in_epoch}
        if (own := state_of(self.loader)) is not None:
            state["loader"] = own
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there with the next iteration. A loader without a state is read again up to that batch;
        its order has to be the same then, as that of a sampler with a seed is.
        """
        self.batches, self.length = int(state_dict["batches"]), int(state_dict["length"])
        if "loader" in state_dict:
            self.loader.load_state_dict(state_dict["loader"])  # type: ignore[attr-defined] # it had a state
        else:
            self._skip = self._in_epoch = int(state_dict["in_epoch"])


def _checked(accumulate: int) -> int:
    if type(accumulate) is not int or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r}: expected a number of batches, 1 or more")
    return accumulate


def shorten(batch: Any, length: int) -> Any:
    """Return a batch with at most `length` tokens of each row.

    Raises: UnsupportedError for what is neither a tensor [rows, tokens] nor a dict of such.
    """
    if isinstance(batch, torch.Tensor) and batch.ndim > 1:
        return batch[:, :length]
    if not isinstance(batch, Mapping):
        raise UnsupportedError(
            f"SequenceWarmup: a batch is a {type(batch).__name__}: expected a tensor [rows, tokens], or a "
            "dict of tensors as transformers' collators give it"
        )
    return cut(batch, 0, length) if length < length_of(batch) else batch
