"""A data loader whose batches are split along the sequence, over the ranks that share it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from infinity.errors import ConfigError, RanksError, UnsupportedError
from infinity.sequences.batches import length_of, state_of
from infinity.sequences.parallel import SequenceParallel, sequences_of
from infinity.tensors import DTYPES, as_bytes, name_of_dtype

_BATCHES = ("same", "in turn")
_WHAT = "next batch of a sequence"


class SequenceParallelLoader:
    """Yields this rank's part of each batch of another loader: with position_ids, and shift_labels made of
    labels.

    loader: yields dicts of tensors [rows, tokens, ...]. sequences: the model, or what
    infinity.sequence_parallel returned. batches: "same", where the loader gives all ranks of a sequence the
    same batch: a sampler for `sequences.data_ranks` replicas, of which this is `sequences.data_rank`. Or "in
    turn", where it gives each rank batches of its own, as the Trainer's does: then the ranks work on those of
    the first, of the second, and so on. Losses are those of one rank with whole sequences. Inside
    `sequences.whole()`, where each rank computes on whole sequences, it yields whole batches.

    Raises: RanksError where the ranks' batches are not the same, or do not end together; UnsupportedError for
    lengths that the ranks do not divide.
    """

    def __init__(
        self, loader: Iterable[Any], sequences: SequenceParallel | nn.Module, *, batches: str = "same"
    ) -> None:
        """Split the batches of `loader`."""
        if batches not in _BATCHES:
            raise ConfigError(f"batches={batches!r}: expected one of {', '.join(map(repr, _BATCHES))}")
        self.loader, self.batches = loader, batches
        self.sequences: SequenceParallel = (
            sequences_of(sequences) if isinstance(sequences, nn.Module) else sequences
        )
        self._in_turn = batches == "in turn"
        self._turn = 0
        self._before: Any = None
        """The loader's state before the batches whose turn it is."""

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute (dataset, batch_size, sampler, ...) on the loader."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        length: int = len(self.loader)  # type: ignore[arg-type]
        return length * self.sequences.size if self._in_turn else length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield parts of batches. Every rank of a sequence iterates."""
        begun, skipped = iter(self.loader), self._turn
        while True:
            if self._in_turn:
                self._before = state_of(self.loader)
            batch = next(begun, None)
            self._agree(batch)
            if batch is None:
                self._turn = 0
                return
            for turn in range(skipped, self.sequences.size) if self._in_turn else (0,):
                whole = self._given(batch, turn) if self._in_turn else batch
                self._turn = (turn + 1) % self.sequences.size if self._in_turn else 0
                yield dict(whole) if self.sequences.is_whole else self.sequences.split(whole)
            skipped = 0

    def _agree(self, batch: Any) -> None:
        """See that the ranks have the same batch, or one each.

        Raises: RanksError naming what each rank has.
        """
        if batch is not None and not isinstance(batch, Mapping):
            raise UnsupportedError(
                f"a batch is a {type(batch).__name__}: expected a dict of tensors, as transformers' "
                "collators give it"
            )
        digest = 0 if batch is None or self._in_turn else _digest(batch)
        group = self.sequences.group
        said = group.gather(
            torch.tensor([batch is not None, digest], dtype=torch.float64, device="cpu"), _WHAT
        ).tolist()
        if any(one != said[0] for one in said):
            has = ", ".join(
                f"rank {rank}: {f'batch {int(one[1]):x}' if one[0] else 'no more'}"
                for rank, one in enumerate(said)
            )
            raise RanksError(
                f"the ranks of a sequence have different batches ({has}). Give the loader's sampler the "
                "sequences' place: DistributedSampler(data, num_replicas=sequences.data_ranks, "
                "rank=sequences.data_rank) and "
                "the same seed; "
                'or SequenceParallelLoader(..., batches="in turn"), where each rank has batches of its own'
            )

    def _given(self, batch: Mapping[str, Any], root: int) -> dict[str, Any]:
        """Return the batch of one rank, on all."""
        group = self.sequences.group
        if group.size == 1:
            return dict(batch)
        said = group.ranks.each(_description(batch).encode(), "describe a batch")[root]
        given: dict[str, Any] = {}
        for name, what in json.loads(said).items():
            if not isinstance(what, dict):
                given[name] = what[0]
                continue
            mine = (
                batch[name]
                if group.rank == root
                else torch.empty(what["shape"], dtype=DTYPES[what["dtype"]], device="cpu")
            )
            sent = mine.detach().cpu().contiguous()
            group.spread(sent.view(-1).view(torch.uint8), root, f"spread {name}")
            given[name] = sent.to(next(one.device for one in batch.values() if isinstance(one, torch.Tensor)))
        return given

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, and the turn; for optimizer.track(loader=...)."""
        state = self._before if self._turn else state_of(self.loader)
        if state is None:
            raise UnsupportedError(
                f"{type(self.loader).__name__} has no state_dict(): give a loader that has, such as "
                "torchdata's StatefulDataLoader, or infinity.SequenceWarmup"
            )
        return {"loader": state, "turn": self._turn}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there with the next iteration."""
        self.loader.load_state_dict(state_dict["loader"])  # type: ignore[attr-defined] # it had a state
        self._turn = int(state_dict["turn"])


def _digest(batch: Mapping[str, Any]) -> int:
    digest = xxhash.xxh3_64()
    for name in sorted(batch):
        digest.update(name.encode())
        if isinstance(batch[name], torch.Tensor):
            digest.update(as_bytes(batch[name]))
    return digest.intdigest() >> 12  # as fp64 holds it


def _description(batch: Mapping[str, Any]) -> str:
    """Return a batch as JSON: its tensors by shape and type, all else by value, in a list of one.

    Raises: UnsupportedError naming what is neither a tensor nor such a value.
    """
    length_of(batch)
    said: dict[str, Any] = {}
    for name, one in batch.items():
        if isinstance(one, torch.Tensor):
            said[name] = {"shape": list(one.shape), "dtype": name_of_dtype(one, name)}
            continue
        said[name] = [one]
        try:
            json.dumps(one)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(
                f"{name!r} of a batch, of type {type(one).__name__}, cannot go to other ranks: {error}. "
                'With batches="in turn" give tensors, numbers, text, and lists of those; remove it in the '
                "collator, or make it a tensor"
            ) from None
    return json.dumps(said)
