"""Stacks of experts, (experts, ...), as tiles of one expert or a few: what is not routed to is not touched.

[Note: experts in tiles]
transformers keeps a layer's experts in stacked parameters, and lets `config._experts_implementation` choose
the function that computes with them. Here each tile is a module with its slices of all the stacks. A forward
calls the tiles that tokens were routed to, one after another, and none of the others. So an engine fetches,
updates and writes those alone; no stack is ever whole, and neither is its gradient.

The bits are those of the stacks, for "eager" and "grouped_mm", because a tile runs the very function that the
model would run, on its slices and on the tokens of one expert: both compute every expert by itself. What they
do with all tokens at once (sort them, weight them, add them up) is done here, in the same order. So it is
with "batched_mm", whose products torch may sum in another order for another number of tokens. Any other
implementation gets the stacks put together, whole.

[Note: experts on other ranks]
Where ranks divide the experts, each has the tiles of its own, and a forward sends the tokens to them: the
rows of each expert, in the order of experts, with all that the function takes beside them. A rank's tiles
compute with the rows of all ranks, one rank's behind the other's, and the results go back. What is done with
all tokens at once is done where they are from, as ever. No weight of an expert leaves its ranks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from infinity.tiling.grid import Grid, cut_to, spans
from infinity.tiling.owner import Routed
from infinity.tiling.tile import Piece
from infinity.tiling.whole import Whole

logger = logging.getLogger("infinity")

_INTERFACE = "transformers.integrations.moe"
_AT_ONCE = ("grouped_mm", "batched_mm")
_SORTED_STABLY = 16
"""So few equal elements torch.sort leaves in their order."""
_GIVEN = 3
"""What a forward takes: hidden states [tokens, features], the experts and the weights of each [tokens, k]."""


class ExpertTile(Piece):
    """Slices of all stacks of some experts; computes for those of them that have tokens."""

    def __init__(self, part: int = 0) -> None:
        """part: which part of the experts, of those that ranks divide them into, the tile belongs to."""
        super().__init__()
        self.part = part
        self._unmade: dict[str, torch.Tensor] = {}

    def begin(self, name: str, shape: Sequence[int], like: nn.Parameter) -> nn.Parameter:
        """Take a parameter that has no memory before `make`; on the meta device it never gets any. Returns
        what stands for it meanwhile.
        """
        empty = nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"), like.requires_grad)
        self._parameters[name] = empty
        if not like.is_meta:
            self._unmade[name] = like.new_empty(0)
        return empty

    def make(self) -> None:
        """Give the parameters that have begun their memory, all together."""
        unmade, self._unmade = self._unmade, {}
        for name, like in unmade.items():
            begun = self._parameters[name]
            if begun is not None:
                setattr(self, name, nn.Parameter(like.new_empty(begun.shape), begun.requires_grad))

    def forward(
        self, given: dict[int, tuple[torch.Tensor, ...]], compute: Callable[..., torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return what `compute(stacks, *given[number])` does for each expert, by its number in this tile.

        An expert without tokens, which other ranks have some for, gets gradients of zeros.
        """
        own = {name: one for name, one in self._parameters.items() if one is not None}
        slices = {name: (one,) if len(one) == 1 else one.split(1) for name, one in own.items()}
        results = []
        for number, tensors in given.items():
            stacks = {name: parts[number] for name, parts in slices.items()}
            if len(tensors[0]):
                results.append(compute(stacks, *tensors))
            else:
                rows = tensors[0]
                for stack in stacks.values():  # one after another, as a backward comes to those that are used
                    rows = _Idle.apply(rows, stack)  # type: ignore[no-untyped-call]
                results.append(rows)
        return results


class _Idle(torch.autograd.Function):
    """Passes a tensor without rows on; gives a slice that was not used a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, slice_: torch.Tensor) -> torch.Tensor:
        """Return `rows`."""
        ctx.save_for_backward(slice_)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return zeros. The slice is asked for, as where there are rows: ranks fetch and sum in one order."""
        return grads[0], torch.zeros_like(*ctx.saved_tensors)


class _One:
    """A stack of one expert, out of which a forward takes that one by any index."""

    def __init__(self, stack: torch.Tensor) -> None:
        self._stack = stack

    def __getitem__(self, _index: Any) -> torch.Tensor:
        return self._stack.squeeze(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stack, name)


class _StandIn:
    """What a forward takes for its module: that module, with other stacks."""

    def __init__(self, module: nn.Module, others: dict[str, Any]) -> None:
        self.__dict__.update(others)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class TiledExperts(Routed):
    """A module of stacked experts in tiles: see [Note: experts in tiles]. An instance is also one of its
    original class, whose attributes it has; the stacks are stood for.

    Raises: IndexError where an expert is routed to that is not there.
    """

    num_experts: int
    _refused = ""
    _is_view: Callable[[torch.Tensor], bool] | None = None

    @classmethod
    def of(cls, module: nn.Module) -> TiledExperts:
        """Turn a module whose stacks are stood for, as `stand_in_for_stack` makes them, into one in tiles."""
        wholes = {name: one for name, one in module._parameters.items() if isinstance(one, Whole)}
        for name, one in wholes.items():
            one.pieces()  # have memory from now on
            del module._parameters[name]
        kind = type(module)
        module.__class__ = type(f"Tiled{kind.__name__}", (cls, kind), {"__module__": kind.__module__})
        if not isinstance(module, TiledExperts):
            raise TypeError(f"a {kind.__name__} cannot be tiled")
        module.begin(wholes)
        return module

    def begin(self, wholes: dict[str, Whole]) -> None:
        """Take the tiles that `wholes` stand for, by the names of the stacks."""
        first = next(iter(wholes.values()))
        self.tiles, self.grid = nn.ModuleList(first.tiles), first.grid
        # Of many experts, each forward would take longer to count them than to compute with a few.
        self._begins = [span.start for span in spans(self.grid.rows)]
        self._tile_of = [number for number, rows in enumerate(self.grid.rows) for _ in range(rows)]
        self._stand_for(wholes)

    def view_where(self, is_view: Callable[[torch.Tensor], bool] | None) -> None:
        """Let slices of a stack that is assigned be views of it where `is_view` says so, as of a mapped file,
        whose memory costs nothing; None: they are copies.
        """
        self.__dict__["_is_view"] = is_view

    def join(self, error: type[Exception]) -> None:
        """Let code that uses a stack as a whole have one that is put together for it, or `error`."""
        for whole in self.wholes().values():
            whole.join(error, "experts")

    def __getattr__(self, name: str) -> Any:
        """Return what stands for a stack, or what any module has."""
        if name in self.__dict__.get("_wholes", ()):
            return self._whole(name)
        return super().__getattr__(name)

    def _tie(self, name: str, other: Any) -> None:
        """Take a stack's values, as from_pretrained sets them, slice by slice."""
        if not isinstance(other, nn.Parameter) or isinstance(other, Whole):
            super()._tie(name, other)
        whole = self._whole(name)
        if other.shape != whole.shape:
            raise ValueError(f"{name} is of shape {tuple(whole.shape)}, not {tuple(other.shape)}")
        viewed = self._is_view is not None and self._is_view(other)
        for tile, place in zip(self.tiles, whole.places(), strict=True):
            values = other.detach()[place].data  # with a version of its own
            if not viewed:
                values = values.clone(memory_format=torch.contiguous_format)  # else each would keep the whole
            setattr(tile, name, nn.Parameter(values, other.requires_grad))
        fresh = self.__dict__["_wholes"][name] = Whole.of(list(self.tiles), self.grid, name)
        if whole.joins:
            fresh.join(whole.error, whole.kind)
        fresh.__dict__.update(other.__dict__)  # transformers notes there what needs no initial values

    def _route(self, ids: torch.Tensor) -> list[int]:
        """Return the experts that are to be called, in order, of those that `ids` names."""
        hit: list[int] = ids.unique().tolist()
        if hit and (hit[0] < 0 or hit[-1] >= self.num_experts):
            raise IndexError(
                f"experts {hit[0]} to {hit[-1]} were routed to, but the layer has {self.num_experts}"
            )
        return hit

    # Forward

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute what the original class would."""
        eager = _eager(type(self))
        given = inspect.signature(eager).bind(self, *args, **kwargs).args[1:]
        how = getattr(getattr(self, "config", None), "_experts_implementation", None) or "eager"
        if how in _AT_ONCE and len(given) == _GIVEN:
            return self._all_at_once(how, *given)
        if how == "eager" and len(given) == _GIVEN:
            return self._one_by_one(eager, *given)
        if self.division is not None:
            self.division.refuse_whole(type(self).__name__, how)
        if self._refused != how:
            self._refused = how
            logger.warning(
                "a %s with experts_implementation=%r uses its stacks whole: they are fetched whole, and put "
                'together in memory, in each forward. "eager", "grouped_mm" and "batched_mm" compute one '
                "expert after another",
                type(self).__name__,
                how,
            )
        stacks = {name: torch.cat(list(one.pieces())) for name, one in self.wholes().items()}
        whole: torch.Tensor = super().forward.__func__(_StandIn(self, stacks), *args, **kwargs)  # type: ignore[attr-defined]
        return whole

    def _one_by_one(
        self, eager: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Do what the eager forwards do: one expert after another adds to the sum."""
        final = torch.zeros_like(hidden)
        turned = ids.t()
        places: dict[int, tuple[torch.Tensor, ...]] = {}

        def tokens_of(expert: int) -> tuple[torch.Tensor, ...]:
            rank, token = places[expert] = torch.where(turned == expert)
            return hidden[token], weights[token, rank, None]

        def compute(
            stacks: dict[str, torch.Tensor], rows: torch.Tensor, weighted: torch.Tensor
        ) -> torch.Tensor:
            ones = {name: _One(stack) for name, stack in stacks.items()}
            nowhere = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
            found: torch.Tensor = eager(_StandIn(self, {**ones, "num_experts": 1}), rows, nowhere, weighted)
            return found

        for expert, result in self._computed(hidden, ids, tokens_of, compute):
            final.index_add_(0, places[expert][1], result)
        return final

    def _all_at_once(
        self, how: str, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Do what grouped_mm_experts_forward and batched_mm_experts_forward of transformers do."""
        function = _functions()[how]
        tokens, k = ids.shape
        flat = ids.reshape(-1)
        ordered, order = torch.sort(flat, stable=how == "batched_mm")
        if how == "grouped_mm":
            rows = hidden[order // k]
            dtype = next(iter(self.wholes().values())).dtype
            rows = rows if rows.dtype == dtype else rows.to(dtype)
        else:
            rows = hidden.repeat_interleave(k, dim=0)[order]
        experts, counts = ordered.unique_consecutive(return_counts=True)
        spread = dict(zip(experts.tolist(), rows.split(counts.tolist()), strict=True))

        def tokens_of(expert: int) -> tuple[torch.Tensor, ...]:
            return (spread[expert] if expert in spread else rows[:0],)

        def compute(stacks: dict[str, torch.Tensor], some: torch.Tensor) -> torch.Tensor:
            plain = {"num_experts": 1, "has_post_expert_norm": False, "_is_expert_parallel": False}
            nowhere = torch.zeros(len(some), 1, dtype=torch.long, device=some.device)
            ones = torch.ones(len(some), 1, dtype=some.dtype, device=some.device)
            others = {**stacks, **plain}
            if how == "batched_mm" or len(some) <= _SORTED_STABLY:
                found: torch.Tensor = function(_StandIn(self, others), some, nowhere, ones)
                return found
            # It sorts the tokens, all of one expert, and not stably: they may change places.
            turned = torch.sort(nowhere[:, 0]).indices
            given = torch.empty_like(turned)
            given[turned] = torch.arange(len(turned), device=turned.device)
            found = function(_StandIn(self, others), some[given], nowhere, ones)
            return found[turned]

        computed = [result for _, result in self._computed(hidden, ids, tokens_of, compute)]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        flat_weights = weights.reshape(-1)
        out = torch.cat(computed) if computed else rows
        if how == "grouped_mm":
            out = (self._normed(out) * flat_weights[order].unsqueeze(-1))[place]
        else:
            out = self._normed(out[place]) * flat_weights.unsqueeze(-1)
        return out.view(tokens, k, out.shape[-1]).sum(dim=1).to(hidden.dtype)

    def _normed(self, out: torch.Tensor) -> torch.Tensor:
        norm: Any = getattr(self, "post_expert_norm", None)
        return out if norm is None or not getattr(self, "has_post_expert_norm", False) else norm(out)

    def _computed(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        tokens_of: Callable[[int], tuple[torch.Tensor, ...]],
        compute: Callable[..., torch.Tensor],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the experts that are routed to, in their order, each with what its tile computes."""
        hit = self._route(ids)
        if self.division is None:
            yield from self._called(self.agreed(hit, self.num_experts), tokens_of, compute, hidden)
            return
        rows = [tokens_of(expert) for expert in hit] or [tokens_of(0)]
        counts = [0] * self.num_experts
        for expert, tensors in zip(hit, rows, strict=False):
            counts[expert] = len(tensors[0])
        trained = any(one.requires_grad for tile in self.tiles for one in tile.parameters())
        sent = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        visit = self.division.send(counts, sent, trained=trained)
        results = [result for _, result in self._called(visit.experts, visit.given, compute)]
        back = visit.back(torch.cat(results) if results else visit.rows)
        own = hit or [0]  # the graph leads to what was sent also where no row was
        yield from zip(own, back.split([counts[expert] for expert in own]), strict=True)

    def _called(
        self,
        hit: list[int],
        tokens_of: Callable[[int], tuple[torch.Tensor, ...]],
        compute: Callable[..., torch.Tensor],
        hidden: torch.Tensor | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the experts `hit`, which are in tiles that this process has, with what these compute. hidden:
        of all tokens; None where they are of several ranks.
        """
        by_tile: dict[int, list[int]] = {}
        for expert in hit:
            by_tile.setdefault(self._tile_of[expert], []).append(expert)
        self.announce(by_tile, hidden)
        for number, experts in by_tile.items():
            given = {expert - self._begins[number]: tokens_of(expert) for expert in experts}
            yield from zip(experts, self.tiles[number](given, compute), strict=True)

    def tile_numbers(self) -> list[int]:
        """Return the number of each expert's tile."""
        return list(self._tile_of)

    def extra_repr(self) -> str:
        """Describe experts and tiles."""
        return f"{self.num_experts} experts in {len(self.tiles)} tiles"


def _eager(kind: type[nn.Module]) -> Any:
    """Return the forward that a class was written with, before the interface decided."""
    for one in kind.__mro__:
        forward = vars(one).get("forward")
        if forward is not None and getattr(forward, "__globals__", {}).get("__name__") == _INTERFACE:
            return forward.__wrapped__
    return None


def _functions() -> Any:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS


def is_stack(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a parameter of `module` is a stack of experts that transformers dispatches."""
    experts = getattr(module, "num_experts", None)
    if not isinstance(experts, int) or experts < 2 or _eager(type(module)) is None:
        return False
    return parameter.dim() > 1 and parameter.shape[0] == experts


def stand_in_for_stack(
    module: nn.Module, name: str, stack: nn.Parameter, least_nbytes: int, parts: int = 1
) -> Whole | None:
    """Return what a module registers instead of a stack of experts; None: register the stack as it is.

    least_nbytes: the bytes that a tile of the first stack has at least; where all of it has no more, the
    experts stay whole. parts: equal parts of the experts, which ranks divide among themselves: no tile is of
    two of them, and none stays whole.
    """
    if isinstance(module, TiledExperts) or isinstance(stack, Whole) or not is_stack(module, stack):
        return None
    before = [one for one in module._parameters.values() if isinstance(one, Whole)]
    if before:
        tiles, grid = before[0].tiles, before[0].grid
    elif any(one is not None for one in module._parameters.values()):
        return None  # its forward uses a parameter of another kind
    else:
        together = max(least_nbytes * len(stack) // stack.nbytes, 1)
        if together >= len(stack) and parts == 1:
            return None
        of_part = cut_to(len(stack) // parts, min(together, len(stack) // parts))
        grid = Grid(of_part * parts, (1,))
        tiles = [ExpertTile(part) for part in range(parts) for _ in of_part]
    for tile, rows in zip(tiles, grid.rows, strict=True):
        if not isinstance(tile, ExpertTile):
            raise TypeError(f"{type(module).__name__}.{name}: its experts are in tiles of another kind")
        tile.begin(name, (rows, *stack.shape[1:]), stack)
    return Whole.of(tiles, grid, name)
