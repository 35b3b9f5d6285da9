"""A stand-in for the whole weight that tiles make up: it has its shape, and takes its initial values.

[Note: whole weights]
`module.weight` of a tiled module is a `Whole`: an nn.Parameter with the whole's shape and dtype that has no
values and is registered nowhere. It answers questions about metadata. Initialisation in place (`normal_`,
`uniform_`, `mul_`, `copy_`, and the functions of torch.nn.init made of these) works on one tile after another
and draws the numbers that the whole weight would have got. Assigning it to another module's `weight` ties the
tiles. Every other use raises an error that names the operation; none returns an empty or stale value.

Where a weight was cut without anybody having asked for it, code may use the weight as it always did. Such a
`Whole` *joins*: any other operation gets the tiles put together, and what it changes in place goes back to
them. The first such use in a forward is logged. Inside `gathered` they are put together in memory that is
theirs as well, so that views of it may be changed, too: see [Note: one piece of memory] in in_one.py. What
would have to be asked of one parameter (its gradient, hooks, another module's `weight`) is refused.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from infinity.tiling.grid import ALIGNMENT, Grid, spans
from infinity.tiling.in_one import OnePiece, opening_of
from infinity.tiling.joined import ReadOnlyCopy, changes_first
from infinity.tiling.tile import Piece

logger = logging.getLogger("infinity")

_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "grad"})
METADATA = frozenset({"size", "dim", "ndimension", "numel", "nelement", "__len__", "__hash__"})
METADATA |= {"element_size", "is_floating_point", "is_complex", "is_signed"}
"""Methods that a tensor without values can answer."""
_ELEMENTWISE = frozenset({"zero_", "fill_", "add_", "sub_", "mul_", "div_", "neg_", "abs_", "sqrt_", "exp_"})
_ELEMENTWISE |= {"clamp_", "clamp_min_", "clamp_max_", "erfinv_"}
_RANDOM = frozenset({"uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "bernoulli_"})
_OF_ONE = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "share_memory_"})
"""Methods whose effect is on one parameter, and on nothing that is put together."""
_DRAWN_NUMEL = 1 << 22
"""Elements that are drawn at a time if a row of the whole lies in several tiles."""


class Whole(nn.Parameter):
    """Stands for the weight or bias that tiles make up; see [Note: whole weights]."""

    tiles: Sequence[nn.Module]
    grid: Grid
    field: str
    kind: str = "an embedding"
    """What it is of."""
    joins: bool = False
    """Whether what no tile can do by itself is done with all of them put together."""
    error: type[Exception] = RuntimeError
    """What is raised for what cannot be done so either, where it joins."""

    @staticmethod
    def of(tiles: Sequence[nn.Module], grid: Grid, name: str) -> Whole:
        """Make a stand-in for the parameters `name` of `tiles`: "weight", in the tiles of `grid`, or another,
        of which each tile has a slice along dimension 0.
        """
        first = getattr(tiles[0], name)
        shape = grid.shape if name == "weight" else (sum(grid.rows), *first.shape[1:])
        empty = torch.empty(shape, dtype=first.dtype, device="meta")
        whole = torch.Tensor._make_subclass(Whole, empty, first.requires_grad)  # noqa: SLF001 - as nn.Parameter does
        whole.tiles, whole.grid, whole.field = tiles, grid, name
        return whole

    def pieces(self) -> list[nn.Parameter]:
        """Return the tiles' parameters, in row-major order."""
        for tile in self.tiles:
            if isinstance(tile, Piece):
                tile.make()
        return [getattr(tile, self.field) for tile in self.tiles]

    def places(self) -> list[tuple[slice, ...]]:
        """Return which part of the whole each of these is."""
        if self.field == "weight":
            return list(self.grid.slices())
        return [(rows,) for rows in spans(self.grid.rows)]

    def join(self, error: type[Exception], kind: str) -> None:
        """From now on, do what no tile can do by itself with all of them put together; raise `error` for what
        cannot be done so either. kind: of what it is, for the error.
        """
        self.joins, self.error, self.kind = True, error, kind
        for piece in self.pieces():
            _joining[piece] = weakref.ref(self)

    def in_one(self) -> OnePiece | None:
        """Return the memory that all tiles lie in; None outside of `gathered`."""
        pieces = self.pieces() if self.joins else []
        opening = opening_of(pieces) if pieces else None
        return opening.piece(self.shape, self.dtype, pieces) if opening is not None else None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata, do initialisation, and refuse all other functions, or join."""
        try:
            return cls._answer(func, args, kwargs or {})
        except _OnlyInTilesError:
            leaves = pytree.tree_leaves((args, kwargs))
            if not all(one.joins for one in leaves if isinstance(one, Whole)):
                raise
        return _joined(func, args, kwargs or {})

    @staticmethod
    def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(getattr(func, "__name__", func))
        if name in ("__get__", "__set__"):
            attribute = str(getattr(getattr(func, "__self__", None), "__name__", name))
            return _attribute(func, attribute, args)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if "tensor" in kwargs:  # torch.nn.init passes its arguments by name
            return _initialise(name, **kwargs)
        whole = args[0] if args else None
        if not isinstance(whole, Whole) or any(isinstance(one, Whole) for one in args[1:]):
            raise _refused(name, next((one for one in args if isinstance(one, Whole)), None))
        return _change(whole, name, args[1:], kwargs)

    def _say(self, operation: str) -> None:
        if not self.__dict__.get("_said"):
            self.__dict__["_said"] = True
            logger.warning(
                "%s() uses a weight of %s as a whole, which is kept in %d slices of its rows: it is fetched "
                'whole, and put together in memory. experts="whole" keeps such weights whole',
                operation,
                " x ".join(map(str, self.shape)),
                len(self.grid),
            )

    def __repr__(self) -> str:  # type: ignore[override]
        """Show shape, dtype and tiles, without values."""
        return f"Whole({tuple(self.shape)}, {self.dtype}, {len(self.grid)} tiles)"

    def __format__(self, spec: str) -> str:
        """Format like `repr`."""
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        """Return a stand-in for copies of the tiles."""
        if id(self) not in memo:
            memo[id(self)] = Whole.of(
                [copy.deepcopy(tile, memo) for tile in self.tiles], self.grid, self.field
            )
            if self.joins:
                memo[id(self)].join(self.error, self.kind)
        whole: Whole = memo[id(self)]
        return whole

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle the tiles that it stands for."""
        return Whole.of, (list(self.tiles), self.grid, self.field)


_joining: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each piece of a weight that joins, the weight, weakly."""


def joining(piece: torch.Tensor) -> Whole | None:
    """Return the weight, one that joins, that a parameter is a piece of."""
    reference = _joining.get(piece)
    whole: Whole | None = reference() if reference is not None else None
    return whole


def all_joining(pieces: Sequence[torch.Tensor]) -> list[Whole]:
    """Return the weights that join and all of whose pieces are among these."""
    known = {id(one) for one in pieces}
    found = {id(whole): whole for one in pieces if (whole := joining(one)) is not None}
    return [one for one in found.values() if all(id(piece) in known for piece in one.pieces())]


class _OnlyInTilesError(RuntimeError):
    """A use of a weight that no tile can answer by itself."""


def not_in_blocks(what: str, whole: Whole, instead: str = "") -> Exception:
    """Return the error for a use of a weight that its blocks of rows cannot have."""
    shape, keep = " x ".join(map(str, whole.shape)), instead or "To do so, keep"
    return whole.error(
        f"{what}, whose {whole.field} of {shape} is kept in blocks of rows, so that a step moves those it "
        f'uses. {keep} the {whole.field} as one parameter: infinity.Init(experts="whole").'
    )


def _refused(operation: str, whole: Whole | None) -> RuntimeError:
    shape = tuple(whole.shape) if whole is not None else "a tiled module's"
    return _OnlyInTilesError(
        f"{operation}() on a weight of shape {shape} that exists only in tiles. Call the tiled module; for "
        "the values use module.state_dict(); to initialise it in another way, initialise the weights of "
        "module.tiles; if other code uses the weight, leave the module out of tiling."
    )


def _attribute(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
    whole: Whole = args[0]
    if func.__name__ == "__get__":
        if name == "data" and whole.in_one() is None:
            return whole
        if name == "grad_fn" and whole.joins and sys._getframe(3).f_code is _REGISTERING:
            raise not_in_blocks(
                f"another module would get the {whole.field} of {whole.kind}",
                whole,
                "Tie the two inside infinity.Init, where the model is built, or keep",
            )
        if name in ("device", "is_meta", "requires_grad", "is_cuda", "is_cpu"):
            return getattr(whole.pieces()[0], name)
        if name not in _VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
    elif name == "requires_grad":
        return _change(whole, "requires_grad_", args[1:], {})
    raise _refused(name, whole)


_REGISTERING = nn.Module.register_parameter.__code__


def _joined(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do something with weights put together; what is changed in place goes back to their tiles."""
    name, first = str(getattr(func, "__name__", func)), args[0] if args else None
    if isinstance(first, Whole):
        if name in ("__get__", "__set__"):
            attribute = str(getattr(getattr(func, "__self__", None), "__name__", name))
            if attribute == "grad" or name == "__set__":
                return _gradient_or_set(first, attribute, name == "__get__", args[1:])
        elif name in _OF_ONE:
            raise not_in_blocks(f"{first.field}.{name}() of {first.kind}", first)
    changes = changes_first(name)
    out = {id(one) for one in pytree.tree_leaves(kwargs.get("out"))}
    changed = out | ({id(first)} if changes else set())
    wholes = {id(one): one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Whole)}
    together = {key: _together(one, changes=key in changed) for key, one in wholes.items()}
    if torch.is_grad_enabled():
        for one in wholes.values():
            one._say(name)  # noqa: SLF001 - its own class's
    args, kwargs = pytree.tree_map(lambda one: together.get(id(one), one), (args, kwargs))
    result = func(*args, **kwargs)
    with torch.no_grad():
        for key in changed & set(wholes):
            if wholes[key].in_one() is None:
                for piece, place in zip(wholes[key].pieces(), wholes[key].places(), strict=True):
                    piece.copy_(together[key][place])
    changed_of = {id(together[key]): wholes[key] for key in changed & set(wholes)}
    return changed_of.get(id(result), result)


def _gradient_or_set(whole: Whole, attribute: str, is_get: bool, values: Sequence[Any]) -> None:  # noqa: FBT001
    """Do `whole.data = values`; say that there is no gradient, or refuse."""
    if attribute == "data":
        _set(whole, values[0])
    elif not (is_get and all(one.grad is None for one in whole.pieces())):
        raise not_in_blocks(
            f"{whole.field}.{attribute} of {whole.kind}",
            whole,
            "Gradients are those of the blocks, which model.parameters() yields. Use them, or keep",
        )


def _together(whole: Whole, *, changes: bool) -> torch.Tensor:
    """Return a weight put together. changes: its values are about to be changed, and no graph is made."""
    one = whole.in_one()
    if one is None and changes:
        return torch.cat(list(whole.pieces())).detach()
    if one is None:
        return ReadOnlyCopy.of(torch.cat(list(whole.pieces())), partial(_would_be_lost, whole))
    graph = not changes and torch.is_grad_enabled() and whole.pieces()[0].requires_grad
    return one.in_graph() if graph else one.values()


def _would_be_lost(whole: Whole, operation: str) -> Exception:
    return whole.error(
        f"{operation}() would change a copy of the {whole.field} of {whole.kind}, which is kept in blocks of "
        "rows: the change would be lost. Change it between steps, in `with infinity.gathered(module, "
        'write=True):`; to change it in a forward, keep it as one parameter: infinity.Init(experts="whole").'
    )


def _set(whole: Whole, values: torch.Tensor) -> None:
    """Do `whole.data = values`."""
    if tuple(values.shape) != tuple(whole.shape) or values.dtype != whole.dtype:
        raise not_in_blocks(
            f"{whole.field}.data = {values.dtype} of shape {tuple(values.shape)} on {whole.kind} of "
            f"{whole.dtype}",
            whole,
            "It keeps its shape and type; to have others, build it so inside infinity.Init. To keep",
        )
    with torch.no_grad():
        for piece, place in zip(whole.pieces(), whole.places(), strict=True):
            piece.copy_(values[place])


def _initialise(name: str, tensor: Whole, **arguments: Any) -> Any:
    """Do the work of functions of torch.nn.init that dispatch to __torch_function__ themselves."""
    if name == "kaiming_uniform_":
        fan = nn.init._calculate_correct_fan(tensor, arguments.get("mode", "fan_in"))  # noqa: SLF001
        gain = nn.init.calculate_gain(arguments.get("nonlinearity", "leaky_relu"), arguments.get("a", 0))
        bound = math.sqrt(3.0) * (gain / math.sqrt(fan))
        return _change(tensor, "uniform_", (-bound, bound), _generator(arguments))
    if name == "uniform_":
        limits = (arguments.get("a", 0.0), arguments.get("b", 1.0))
        return _change(tensor, "uniform_", limits, _generator(arguments))
    if name == "normal_":
        moments = (arguments.get("mean", 0.0), arguments.get("std", 1.0))
        return _change(tensor, "normal_", moments, _generator(arguments))
    if name == "constant_":
        return _change(tensor, "fill_", (arguments["val"],), {})
    raise _refused(name, tensor)


def _generator(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"generator": arguments.get("generator")}


def _change(whole: Whole, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operation == "empty_like":  # as transformers does for what a file does not have
        like = {"dtype": whole.dtype, "device": whole.pieces()[0].device, **kwargs}
        return torch.empty(whole.shape, **like)
    if operation in ("detach", "__getitem__") and whole.in_one() is not None:
        raise _refused(operation, whole)  # views of all of it may be changed
    if operation in ("detach", "requires_grad_"):
        for piece in whole.pieces() if operation == "requires_grad_" else ():
            piece.requires_grad_(*args, **kwargs)
        return whole
    if operation == "__getitem__" and isinstance(args[0], int) and len(whole.grid.columns) == 1:
        row = args[0] % len(whole)
        for piece, span in zip(whole.pieces(), spans(whole.grid.rows), strict=True):
            if span.start <= row < span.stop:
                return piece[row - span.start]
    with torch.no_grad():
        _in_place(whole, operation, args, kwargs)
    return whole


def _in_place(whole: Whole, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if operation == "copy_":
        values = args[0].expand(whole.shape)
        for piece, place in zip(whole.pieces(), whole.places(), strict=True):
            piece.copy_(values[place])
    elif operation in _ELEMENTWISE and not any(isinstance(one, torch.Tensor) for one in args):
        for piece in whole.pieces():
            getattr(piece, operation)(*args, **kwargs)
    elif operation in _RANDOM and _is_cut_between_draws(whole):
        _draw_across(whole.pieces(), operation, args, kwargs)
    elif operation in _RANDOM:
        for row in whole.grid.by_row(whole.pieces()):
            _draw(row, whole.grid.columns, operation, args, kwargs)
    else:
        raise _refused(operation, whole)


def _is_cut_between_draws(whole: Whole) -> bool:
    """Whether slices along dimension 0 do not begin where torch begins a chunk of numbers."""
    return len(whole.grid.columns) == 1 and any(piece.numel() % ALIGNMENT for piece in whole.pieces()[:-1])


def _draw(
    pieces: Sequence[nn.Parameter],
    columns: tuple[int, ...],
    operation: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Draw one row of tiles in the order in which the whole would be drawn: along its rows."""
    if len(pieces) == 1:
        getattr(pieces[0], operation)(*args, **kwargs)
        return
    rows = pieces[0].shape[0]
    step = max(_DRAWN_NUMEL // sum(columns) // ALIGNMENT, 1) * ALIGNMENT
    for start in range(0, rows, step):
        drawn = pieces[0].new_empty(min(step, rows - start), sum(columns))
        getattr(drawn, operation)(*args, **kwargs)
        for piece, span in zip(pieces, spans(columns), strict=True):
            piece[start : start + step].copy_(drawn[:, span])


def _draw_across(
    pieces: Sequence[nn.Parameter], operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Draw slices that do not begin where torch begins a chunk of numbers, as the whole would be drawn."""
    left = sum(piece.numel() for piece in pieces)
    drawn = pieces[0].new_empty(0)
    for piece in pieces:
        while drawn.numel() < piece.numel():  # the last chunk is drawn with the one before it
            more = left if left < 2 * _DRAWN_NUMEL else _DRAWN_NUMEL
            left -= more
            drawn = torch.cat([drawn, getattr(pieces[0].new_empty(more), operation)(*args, **kwargs)])
        piece.copy_(drawn[: piece.numel()].view(piece.shape))
        drawn = drawn[piece.numel() :]
