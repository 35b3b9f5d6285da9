"""The base class of tiled modules, whose tiles look like one weight from outside.

[Note: keys]
A state_dict has the keys of the whole module (`weight` and `bias`, or those of its stacks). Each tile saves
and loads itself like any module, so an engine that provides its parameters needs no special case. The tiled
module joins what its tiles saved, and cuts what is loaded before they load it. Tied weights are saved as one
tensor under both names.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.tiling.grid import Grid
from infinity.tiling.whole import Whole, not_in_blocks


class Visit(Protocol):
    """Rows that ranks have sent to the experts of this one."""

    experts: list[int]
    """Those that are to be called, in order."""
    rows: torch.Tensor
    """The first tensor of all of them."""

    def given(self, expert: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of one expert: rows in the order of the ranks that sent them."""

    def back(self, results: torch.Tensor) -> torch.Tensor:
        """Send a row back for each that came, in the order of `experts`; return those for what was sent."""


class ExpertDivision(Protocol):
    """What ranks do of which each has some of the experts of a module."""

    def send(self, counts: list[int], tensors: list[torch.Tensor], *, trained: bool) -> Visit:
        """Send rows to their experts, and return what comes. Every rank calls it at the same time.

        counts: rows for each expert of the module. tensors: their rows, by expert. trained: whether an expert
        gets gradients.
        """

    def refuse_whole(self, kind: str, how: str) -> None:
        """Refuse to put the stacks of a module together, of which each rank has a part."""


class RoutingFollower(Protocol):
    """What an engine does for a `Routed` module."""

    division: ExpertDivision | None
    """Of the experts of the module among ranks; None where each rank computes with all."""

    def agreed(self, needed: list[int], count: int) -> list[int]:
        """Return, of `count` things, those that any process needs, where this one needs `needed`. Every
        process calls it at the same time.
        """

    def announced(self, numbers: list[int], hidden: torch.Tensor | None) -> None:
        """Hear which tiles are about to be used, by number, in this order. hidden: of experts, what they
        compute with [tokens, features].
        """


class Tiled(nn.Module):
    """A module whose weight is cut into tiles; `weight` and `bias` stand for the whole: see [Note: whole
    weights] in whole.py.
    """

    tiles: nn.ModuleList
    grid: Grid

    def _hold(self, tiles: Sequence[nn.Module], grid: Grid, bias: Sequence[nn.Module] | None) -> None:
        """Take ownership of `tiles`, in row-major order. bias: the tiles that hold the bias, in order."""
        self.tiles = nn.ModuleList(tiles)
        self.grid = grid
        wholes = {"weight": Whole.of(tiles, grid, "weight")}
        if bias:
            sizes = tuple(getattr(tile, "bias").numel() for tile in bias)  # noqa: B009
            wholes["bias"] = Whole.of(bias, Grid(sizes, (1,)), "bias")
        self._stand_for(wholes)

    def _stand_for(self, wholes: dict[str, Whole]) -> None:
        """Have `wholes`, by name, stand for what the tiles make up, here and in a state_dict."""
        self.__dict__["_wholes"] = wholes
        self.register_state_dict_post_hook(_join)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]

    def wholes(self) -> dict[str, Whole]:
        """Return what stands for each of the module's parameters, by name."""
        return {name: self._whole(name) for name in self.__dict__["_wholes"]}

    def _whole(self, name: str) -> Whole:
        wholes: dict[str, Whole] = self.__dict__["_wholes"]
        whole = wholes[name]
        if whole.dtype != getattr(whole.tiles[0], whole.field).dtype:  # module.to() changed the tiles only
            before, whole = whole, Whole.of(whole.tiles, whole.grid, name)
            if before.joins:
                whole.join(before.error, before.kind)
            wholes[name] = whole
        return whole

    def __setattr__(self, name: str, value: Any) -> None:
        """Tie the weight if it is assigned that of another tiled module."""
        if name in self.__dict__.get("_wholes", ()):
            self._tie(name, value)
        else:
            super().__setattr__(name, value)

    def _tie(self, name: str, other: Any) -> None:
        mine = self._whole(name)
        if mine.joins:
            raise not_in_blocks(
                f"a {type(other).__name__} would become the {name} of {mine.kind}",
                mine,
                f"Load values with load_state_dict, or as module.{name}.data = values in "
                "infinity.gathered(model, write=True); tie weights inside infinity.Init; or keep",
            )
        if not isinstance(other, Whole) or name != "weight":
            raise TypeError(
                f"{type(self).__name__}.{name} consists of {len(self.tiles)} tiles, not replaceable by a "
                f"{type(other).__name__}: load values with load_state_dict, or tie the weight to one "
                "with the same tiles."
            )
        if other.grid != mine.grid:
            raise ValueError(
                f"a weight in tiles of {other.grid.rows} x {other.grid.columns} cannot be tied to one in "
                f"tiles of {mine.grid.rows} x {mine.grid.columns}: cut both the same way"
            )
        for tile, parameter in zip(self.tiles, other.pieces(), strict=True):
            tile.weight = parameter

    def extra_repr(self) -> str:
        """Describe shape and tiles."""
        rows, columns = self.grid.shape
        return f"[{rows}, {columns}] in {len(self.grid.rows)} x {len(self.grid.columns)} tiles"


class Routed(Tiled):
    """A tiled module whose forward may use those of its tiles alone that its input needs. For the others, an
    engine that follows it has to do what gradients of zeros would.
    """

    _follower: RoutingFollower | None = None

    def follow(self, follower: RoutingFollower) -> None:
        """Let an engine know, from now on, what a forward is about to use."""
        self.__dict__["_follower"] = follower

    @property
    def is_followed(self) -> bool:
        """Whether an engine does what gradients of zeros would."""
        return self._follower is not None

    def agreed(self, needed: list[int], count: int) -> list[int]:
        """Return, of `count` things, those that any process needs, where this one needs `needed`."""
        return needed if self._follower is None else self._follower.agreed(needed, count)

    @property
    def division(self) -> ExpertDivision | None:
        """How the module's experts are divided among ranks; None where they are not."""
        return None if self._follower is None else self._follower.division

    def announce(self, numbers: Iterable[int], hidden: torch.Tensor | None = None) -> None:
        """Say which tiles are about to be used, in their order, and with what."""
        if self._follower is not None:
            self._follower.announced(list(numbers), hidden)


_saved: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For the first piece of a whole weight: the state_dict that the weight was last saved in, its key there, and
the ids of its pieces. A tied weight is found here when it is saved a second time."""


def _numbers(owner: Tiled, name: str) -> list[int]:
    """Return which tiles hold pieces of `name`, in row-major order."""
    return [number for number, tile in enumerate(owner.tiles) if getattr(tile, name) is not None]


def _join(owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Replace the pieces that the tiles saved by whole tensors."""
    if not isinstance(owner, Tiled):
        raise TypeError(f"{type(owner).__name__} has no tiles")
    for name in owner.__dict__["_wholes"]:
        whole = owner._whole(name)  # noqa: SLF001 - this module's own
        pieces = [state.pop(f"{prefix}tiles.{number}.{name}") for number in _numbers(owner, name)]
        parts = [id(one) for one in whole.pieces()]
        saved = _saved.get(whole.pieces()[0])
        if saved is not None and saved[0]() is state and saved[1] in state and saved[2] == parts:
            state[prefix + name] = state[saved[1]]
            continue
        if name != "weight":
            state[prefix + name] = torch.cat(pieces)
        else:
            rows = owner.grid.by_row(pieces)
            state[prefix + name] = torch.cat([row[0] if len(row) == 1 else torch.cat(row, 1) for row in rows])
        if isinstance(state, OrderedDict):  # torch's own kind; a plain dict has no weak references
            _saved[whole.pieces()[0]] = (weakref.ref(state), prefix + name, parts)


def _cut(
    owner: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,  # noqa: ARG001, FBT001 - torch's order
    missing: list[str],
    unexpected: list[str],  # noqa: ARG001
    errors: list[str],
) -> None:
    """Replace whole tensors by the pieces that the tiles load."""
    if not isinstance(owner, Tiled):
        raise TypeError(f"{type(owner).__name__} has no tiles")
    for name in owner.__dict__["_wholes"]:
        whole = owner._whole(name)  # noqa: SLF001 - this module's own
        values = state.pop(prefix + name, None)
        if values is None:
            missing.append(prefix + name)
            continue
        if tuple(values.shape) != tuple(whole.shape):
            errors.append(
                f"size mismatch for {prefix}{name}: copying a param with shape {tuple(values.shape)} from "
                f"checkpoint, the shape in current model is {tuple(whole.shape)}."
            )
            continue
        own = metadata.get("assign_to_params_buffers", False)  # then a view would keep the whole alive
        for number, place in zip(_numbers(owner, name), whole.places(), strict=True):
            piece = values[place]
            state[f"{prefix}tiles.{number}.{name}"] = piece.clone() if own else piece
