"""Ranks that divide the experts of each layer among them, and the tokens that they send to these.

[Note: expert parallelism]
Of W ranks, each N neighbours have all experts between them (`sharers`): rank number e of them has part e of
the experts of each layer, and part e of another group's is the same (`copies`): these ranks partition the
records of their experts, as all ranks do with all other records. On a mesh of (data, experts) a group is a
row, and `copies` a column.

A forward of a layer sends each token to the ranks of its experts, and the results back; a backward does the
same with gradients. Before it, the sharers tell each other how many rows each sends to each expert, and the
copies which experts any of them needs: they fetch these in one order, each its share.

What all ranks have in common may not depend on what one of them has of experts. So units of these wait for
their use in a share of memory of their own, have lanes of collectives of their own, and no plan has them. The
order of a backward is the same on all ranks, since autograd runs nodes in the reverse order of their making:
both exchanges are nodes on every rank, also on one whose experts got no token or whose tokens need no
gradient (`anchor`).

A loss is the mean over all W ranks' losses. An expert's gradient is a sum over the tokens of N ranks; the
copies add theirs up and divide by W. So it is the gradient of the same mean as every other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xxhash

from infinity.errors import UnsupportedError
from infinity.planning.layout import Holders
from infinity.ranks.group import Ranks
from infinity.units.residency import UnitResidency


class ExpertRanks:
    """The ranks of one engine, in groups that have all experts: see [Note: expert parallelism]. Used by the
    thread that computes.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        """Connect this rank's group of `size`, and the ranks that have the same experts. All ranks do so."""
        self.size = size
        self._ranks = ranks.size
        group, self.part = divmod(ranks.rank, size)
        self.sharers = ranks.some(range(group * size, (group + 1) * size))
        self.copies = ranks.some(range(self.part, ranks.size, size))
        self._tokens = self.sharers.channel()
        self.nbytes = 0
        """Bytes of rows, and of what goes with them, that this rank has sent to experts and back, those for
        itself included.
        """

    def holders(self, part: int) -> Holders:
        """Return the ranks that have a part of the experts."""
        return Holders(self._ranks, part, self.size)

    def send_rows(self, rows: torch.Tensor, to: list[int], come: list[int], what: str) -> torch.Tensor:
        """Send `to` rows to each rank of the group; return those that `come` from each, one behind the
        other.
        """
        rows = rows.contiguous()
        self.nbytes += rows.nbytes
        received = rows.new_empty(sum(come), *rows.shape[1:])
        self._tokens.exchange(received, rows, what, (come, to))
        return received

    def close(self) -> None:
        """Close the connections."""
        for ranks in (self.sharers, self.copies):
            ranks.close()


class Journey:
    """The way of the rows of one forward of a layer: to the ranks of their experts, and back."""

    def __init__(
        self, ranks: ExpertRanks, name: str, counts: list[list[int]], meet: Callable[[], None]
    ) -> None:
        """name: of the layer. counts: for each rank of the group its rows for each expert. meet: returns when
        every rank is about to send rows: one may need others before, see units/meeting.py.
        """
        self._ranks, self._name, self._meet = ranks, name, meet
        each = len(counts[0]) // ranks.size
        mine = slice(ranks.part * each, (ranks.part + 1) * each)
        own = counts[ranks.sharers.rank]
        self._to = [sum(own[part * each : (part + 1) * each]) for part in range(ranks.size)]
        here = torch.tensor([row[mine] for row in counts], dtype=torch.int64, device="cpu")
        self._come: list[int] = here.sum(1).tolist()
        experts = torch.arange(each, device="cpu").repeat(ranks.size)
        self._order = experts.repeat_interleave(here.view(-1)).argsort(stable=True)
        self.counts: list[int] = here.sum(0).tolist()
        """Rows for each of this rank's experts."""

    def go(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows, by expert; return those that come, by expert and then by rank."""
        self._meet()
        came = self._ranks.send_rows(rows, self._to, self._come, f"send tokens of {self._name}")
        return came[self._order]

    def come_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Undo `go`."""
        self._meet()
        by_rank = torch.empty_like(rows)
        by_rank[self._order] = rows
        return self._ranks.send_rows(by_rank, self._come, self._to, f"bring tokens of {self._name} back")


class ToExperts(torch.autograd.Function):
    """Rows go to the ranks of their experts, and their gradients come back."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:  # noqa: ARG004
        """tensors: a row of each for each token of an expert. anchor: see the module's note."""
        ctx.journey = journey
        return tuple(map(journey.go, tensors))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Bring the gradients back to the tokens' ranks."""
        wanted = ctx.needs_input_grad[2:]
        back = [ctx.journey.come_back(one) if want else None for one, want in zip(grads, wanted, strict=True)]
        return None, None, *back


class FromExperts(torch.autograd.Function):
    """Results come back to the tokens' ranks, and their gradients go to the experts."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, anchor: torch.Tensor, results: torch.Tensor) -> Any:  # noqa: ARG004
        """Send the results of this rank's experts back."""
        ctx.journey = journey
        return journey.come_back(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Bring the gradients to the experts."""
        return None, None, ctx.journey.go(grads[0]) if ctx.needs_input_grad[2] else None


class RowsOfRanks:
    """Rows that ranks have sent to the experts of this one: see tiling.owner.Visit."""

    def __init__(
        self,
        journey: Journey,
        anchor: torch.Tensor,
        first: int,
        needed: list[int],
        came: tuple[torch.Tensor, ...],
    ) -> None:
        """first: this rank's first expert. needed: numbers, among its own, of those that any copy needs."""
        self._journey, self._anchor = journey, anchor
        self.experts = [first + number for number in needed]
        self.rows = came[0]
        parts = [one.split(journey.counts) for one in came]
        self._given = {first + number: tuple(one[number] for one in parts) for number in needed}

    def given(self, expert: int) -> tuple[torch.Tensor, ...]:
        """See Visit."""
        return self._given[expert]

    def back(self, results: torch.Tensor) -> torch.Tensor:
        """See Visit."""
        rows: torch.Tensor = FromExperts.apply(self._journey, self._anchor, results)  # type: ignore[no-untyped-call]
        return rows


class DividedExperts:
    """The experts of one module, of which each rank of a group has a part: see tiling.ExpertDivision."""

    def __init__(self, ranks: ExpertRanks, residency: UnitResidency, name: str) -> None:
        """name: of the module."""
        self._ranks, self._residency, self._name = ranks, residency, name
        self._digest = xxhash.xxh3_64_intdigest(name.encode()) >> 1

    def send(self, counts: list[int], tensors: list[torch.Tensor], *, trained: bool) -> RowsOfRanks:
        """See ExpertDivision."""
        self._residency.meet()
        sharers, what = self._ranks.sharers, f"route {self._name}"
        rows = sharers.of_all([self._digest, *counts], what)
        if any(row[0] != self._digest for row in rows):
            sharers.agree(what)  # raises: they do different things
        journey = Journey(self._ranks, self._name, [row[1:] for row in rows], self._residency.meet)
        here = [number for number, count in enumerate(journey.counts) if count]
        needed = self._ranks.copies.union(here, len(journey.counts), what)
        leads = torch.is_grad_enabled() and (trained or any(one.requires_grad for one in tensors))
        anchor = torch.empty(0, device="cpu", requires_grad=leads)
        came = ToExperts.apply(journey, anchor, *tensors)  # type: ignore[no-untyped-call]
        return RowsOfRanks(journey, anchor, self._ranks.part * len(journey.counts), needed, came)

    def refuse_whole(self, kind: str, how: str) -> None:
        """See ExpertDivision. Raises: UnsupportedError."""
        raise UnsupportedError(
            f"{self._name}, a {kind} with experts_implementation={how!r}, uses its stacks whole, and each of "
            f"{self._ranks.size} ranks has a part of them (expert_parallel={self._ranks.size}). Use "
            '"eager", "grouped_mm" or "batched_mm", which compute one expert after another; or leave '
            "expert_parallel out"
        )
