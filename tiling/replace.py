"""Tiles for an existing model: large layers are replaced in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.tiling.embedding import TiledEmbedding
from infinity.tiling.grid import Grid, cut_to, tiles_of
from infinity.tiling.linear import TiledConv1D, TiledLinear
from infinity.tiling.owner import Tiled
from infinity.tiling.tile import Conv1DTile, EmbeddingTile, LinearTile, Tile


@dataclass(frozen=True, slots=True)
class Cut:
    """What `tile_` did to one weight."""

    names: tuple[str, ...]  # of the modules that use the weight; several if it is tied
    shape: tuple[int, int]  # of the weight, as stored
    nbytes: int
    rows: int  # tiles along the weight's dimension 0
    columns: int  # along dimension 1

    def __str__(self) -> str:
        """Describe the cut in one line."""
        tiles = self.rows * self.columns
        return (
            f"{', '.join(self.names)}: {self.shape[0]} x {self.shape[1]}, {self.nbytes} bytes, in "
            f"{self.rows} x {self.columns} tiles of {-(-self.nbytes // tiles)} bytes"
        )


def tile_(module: nn.Module, above: int) -> list[Cut]:
    """Replace every nn.Linear, nn.Embedding and Hugging Face Conv1D below `module` whose weight has more than
    `above` bytes by tiles of at most `above` bytes each, in place. Tied weights stay tied.

    Subclasses of these layers stay whole, since their code may use the weight, and so do layers with hooks or
    parametrizations. While a weight is cut, memory holds it twice. Build the optimizer afterwards: the
    parameters are new.

    Raises:
        ValueError: `above` is not a number of bytes; `module` itself is such a layer (use TiledLinear
            instead); a large weight is tied to a module that cannot be tiled.
    """
    if isinstance(above, bool) or not isinstance(above, int) or above < 1:
        raise ValueError(f"above={above!r}: expected a number of bytes, 1 or more, such as 256 << 20")
    if kind(module) is not None and weight_of(module).nbytes > above:
        raise ValueError(f"a {type(module).__name__} cannot be replaced in place: call tile_ on its parent")
    large = list(_large(module, above))[::-1]
    done: list[Cut] = []
    while large:  # popped, so that each weight is freed once it is cut
        done.append(_replace(module, large.pop(), above))
    return done


def weight_of(module: nn.Module) -> torch.Tensor:
    """Return the weight of a layer that can be tiled."""
    weight: torch.Tensor = module._parameters["weight"]  # type: ignore[assignment]
    return weight


def kind(module: nn.Module) -> str | None:
    """Return the kind of a layer that can be tiled: linear, embedding or conv1d; None for other modules."""
    if type(module) is nn.Linear:
        return "linear"
    if type(module) is nn.Embedding:
        return "embedding"
    named = (type(module).__name__, type(module).__module__) == ("Conv1D", "transformers.pytorch_utils")
    return "conv1d" if named else None


def _large(root: nn.Module, above: int) -> Iterator[dict[str, nn.Module]]:
    """Yield, for each weight above the limit, the modules that use it, by name."""
    users: dict[int, dict[str, nn.Module]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, (Tiled, Tile)):
            continue
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), {})[name] = module
                parameters[id(parameter)] = parameter
    for key, modules in users.items():
        kinds = {kind(one) for one in modules.values() if one._parameters.get("weight") is parameters[key]}
        if parameters[key].nbytes <= above or not kinds - {None}:
            continue
        if any(
            kind(one) is None or one._parameters.get("weight") is not parameters[key]
            for one in modules.values()
        ):
            raise ValueError(_untileable(modules, "share a weight, and not all of them can be tiled"))
        if len(kinds) > 1 and "conv1d" in kinds:
            raise ValueError(_untileable(modules, "share a weight that a Conv1D holds transposed"))
        if not any(_hooked(one) for one in modules.values()):
            yield modules


def _untileable(modules: dict[str, nn.Module], why: str) -> str:
    names = ", ".join(f"{name} ({type(module).__name__})" for name, module in modules.items())
    return f"{names}: {why}. Raise the limit, or untie them."


def _hooked(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any(getattr(module, name) for name in names)
    return hooked or "forward" in module.__dict__ or getattr(module, "max_norm", None) is not None


def _replace(root: nn.Module, users: dict[str, nn.Module], above: int) -> Cut:
    weight = weight_of(next(iter(users.values())))
    grid = choice(weight, {kind(one) for one in users.values()}, above)
    # The pieces are made once, and shared by all modules that use the weight.
    pieces = [_piece(weight, at) for at in grid.slices()]
    replaced: dict[int, nn.Module] = {}
    for name, module in users.items():
        if id(module) not in replaced:
            new = replaced[id(module)] = tiled(module, grid, pieces)
            new.train(module.training)
        parent, _, own = name.rpartition(".")
        root.get_submodule(parent).register_module(own, replaced[id(module)])
    shape = (int(weight.shape[0]), int(weight.shape[1]))
    return Cut(tuple(users), shape, weight.nbytes, len(grid.rows), len(grid.columns))


def choice(weight: torch.Tensor, kinds: set[str | None], above: int) -> Grid:
    """Choose the tiles of a weight as it is stored; an embedding's rows stay whole."""
    size = weight.element_size()
    if "conv1d" in kinds:
        turned = tiles_of(weight.shape[1], weight.shape[0], size, above)
        return Grid(turned.columns, turned.rows)
    if "embedding" in kinds:
        return Grid(cut_to(weight.shape[0], max(above // (weight.shape[1] * size), 1)), (weight.shape[1],))
    return tiles_of(weight.shape[0], weight.shape[1], size, above)


def _piece(values: torch.Tensor, at: tuple[slice, ...]) -> nn.Parameter:
    return nn.Parameter(
        values.detach()[at].clone(memory_format=torch.contiguous_format), values.requires_grad
    )


def tiled(module: nn.Module, grid: Grid, pieces: Sequence[nn.Parameter]) -> nn.Module:
    """Return the tiled module that computes what `module` does, with these pieces of its weight."""
    if isinstance(module, nn.Embedding):
        return TiledEmbedding.of([EmbeddingTile(piece) for piece in pieces], grid, module)
    bias: torch.Tensor | None = module.bias  # type: ignore[assignment]
    if isinstance(module, nn.Linear):
        tiles = [
            LinearTile(piece, _piece(bias, (rows,)) if bias is not None and columns.start == 0 else None)
            for piece, (rows, columns) in zip(pieces, grid.slices(), strict=True)
        ]
        return TiledLinear.of(tiles, grid)
    turned = [
        Conv1DTile(piece, _piece(bias, (columns,)) if bias is not None and rows.start == 0 else None)
        for piece, (rows, columns) in zip(pieces, grid.slices(), strict=True)
    ]
    return TiledConv1D.of(turned, grid, type(module))
