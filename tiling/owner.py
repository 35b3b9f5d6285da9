"""What tiled modules have in common: tiles that look, from outside, like one weight.

[Note: keys]
In a state_dict tiles are saved and loaded by themselves, as any module is (so an engine that answers for
their parameters needs to know nothing), and the owner, before and after them, cuts and joins: outside there
are only `weight` and `bias`, whole. Tied weights come out as one tensor under both names.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.tiling.grid import Grid
from infinity.tiling.whole import Whole


class Tiled(nn.Module):
    """A module whose weight is cut into tiles. `weight` and `bias` answer metadata and take initial values;
    see [Note: whole weights] in whole.py.
    """

    tiles: nn.ModuleList
    grid: Grid

    def _hold(self, tiles: Sequence[nn.Module], grid: Grid, bias: Sequence[nn.Module] | None) -> None:
        """Become the owner of `tiles`, in row-major order; `bias` names those that hold the bias, in
        order.
        """
        self.tiles = nn.ModuleList(tiles)
        self.grid = grid
        wholes = {"weight": Whole.of(tiles, grid, "weight")}
        if bias:
            sizes = tuple(getattr(tile, "bias").numel() for tile in bias)  # noqa: B009
            wholes["bias"] = Whole.of(bias, Grid(sizes, (1,)), "bias")
        self.__dict__["_wholes"] = wholes
        self.register_state_dict_post_hook(_join)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]

    def _whole(self, name: str) -> Whole:
        wholes: dict[str, Whole] = self.__dict__["_wholes"]
        whole = wholes[name]
        if whole.dtype != whole.pieces()[0].dtype:  # module.to() reached the tiles alone
            whole = wholes[name] = Whole.of(whole.tiles, whole.grid, name)
        return whole

    def __setattr__(self, name: str, value: Any) -> None:
        """Tie, when given the weight of another tiled module."""
        if name in ("weight", "bias") and "_wholes" in self.__dict__:
            self._tie(name, value)
        else:
            super().__setattr__(name, value)

    def _tie(self, name: str, other: Any) -> None:
        if not isinstance(other, Whole) or name != "weight":
            raise TypeError(
                f"{type(self).__name__}.{name} is in {len(self.tiles)} tiles: no {type(other).__name__} can "
                "take their place: load values with load_state_dict, tie to a weight tiled alike."
            )
        mine = self._whole("weight")
        if other.grid != mine.grid:
            raise ValueError(
                f"a weight in tiles of {other.grid.rows} x {other.grid.columns} cannot be tied to one in "
                f"tiles of {mine.grid.rows} x {mine.grid.columns}: cut both alike"
            )
        for tile, parameter in zip(self.tiles, other.pieces(), strict=True):
            tile.weight = parameter

    def extra_repr(self) -> str:
        """Shape and tiles."""
        rows, columns = self.grid.shape
        return f"[{rows}, {columns}] in {len(self.grid.rows)} x {len(self.grid.columns)} tiles"


_saved: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By its first piece: the state_dict that a whole was put into last, under which key, and its pieces."""


def _numbers(owner: Tiled, name: str) -> list[int]:
    """Return which tiles hold pieces of `name`, in row-major order."""
    return [number for number, tile in enumerate(owner.tiles) if getattr(tile, name) is not None]


def _join(owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Put whole tensors in the place of what the tiles saved."""
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
        if name == "bias":
            state[prefix + name] = torch.cat(pieces)
        else:
            columns = len(owner.grid.columns)
            rows = [pieces[first : first + columns] for first in range(0, len(pieces), columns)]
            state[prefix + name] = torch.cat([row[0] if columns == 1 else torch.cat(row, 1) for row in rows])
        if isinstance(state, OrderedDict):  # as torch makes it; to a plain dict nothing can refer weakly
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
    """Put views for the tiles in the place of whole tensors."""
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
        own = metadata.get("assign_to_params_buffers", False)  # a view would keep the whole alive
        for number, (rows, columns) in zip(_numbers(owner, name), whole.grid.slices(), strict=True):
            piece = values[rows, columns] if name == "weight" else values[rows]
            state[f"{prefix}tiles.{number}.{name}"] = piece.clone() if own else piece
