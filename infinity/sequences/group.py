"""The ranks that share one sequence, and what they exchange."""

from __future__ import annotations

from collections import Counter

import torch

from infinity.ranks.group import Ranks


class SequenceGroup:
    """Ranks of which each holds an equal part of the tokens, in the order of ranks; or a single one.

    Used by the thread that computes alone: every rank runs the same modules in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Open a channel between `ranks`. All of them do so, in the same order."""
        self.ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.nbytes: Counter[str] = Counter()
        """Bytes of the buffers that all-to-alls have sent, by their names; 1/size of each stays here."""
        self._channel = ranks.channel() if ranks.size > 1 else None

    def exchange(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        """Send row i of [size, numel] to rank i; return what the ranks sent here, in their order."""
        self.nbytes[what] += rows.nbytes
        if self._channel is None:
            return rows
        received = torch.empty_like(rows)
        self._channel.exchange(received, rows, what)
        return received

    def gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return [size, numel]: every rank's numbers, in fp64 in host memory. All give as many."""
        mine = values.detach().to("cpu", torch.float64).reshape(1, -1)
        if self._channel is None or not mine.numel():
            return mine.expand(self.size, -1)
        rows = mine.new_empty(self.size, mine.numel())
        self._channel.gather(rows.view(-1), mine.view(-1), what)
        return rows

    def spread(self, values: torch.Tensor, root: int, what: str) -> None:
        """Fill `values`, of the same size on every rank, with those of rank `root`."""
        if self._channel is not None:
            self._channel.spread(values, root, what)

    def close(self) -> None:
        """Close the connections."""
        self.ranks.close()
