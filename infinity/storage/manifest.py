"""The manifest of a checkpoint, as values and as JSON. Pure: no torch, no I/O.

[Note: logical tensors]
A checkpoint is a set of named tensors in their logical shape: parameters and moments as if there were one
rank, one budget and one tier. A tensor consists of *pieces*, each of which lies in one file: ranges of its
flat elements; or, of a mesh, of those of a box of it, the part of the whole that some of the ranks have (see
planning.boxes). A writer knows only its own pieces; a reader asks for any range of any box. So any number of
ranks, on any mesh, can read what any other has written.

[Note: hashes]
The manifest contains an xxh3 hash of each RANGE_NBYTES of a piece, and one of itself. Reading checks a range
before any byte of it is used. This detects damage, not forgery: anybody can compute fitting hashes. But
nothing in a checkpoint is ever executed: JSON and plain arrays hold data only.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from operator import attrgetter
from typing import Any

import xxhash

from infinity.errors import InfinityError
from infinity.planning.boxes import Box, all_of

FORMAT = "infinity checkpoint"
VERSION = 1
NAME = "manifest.json"
RANGE_NBYTES = 4 << 20
"""Bytes that share one hash."""

MASTER, PLAIN = "master", "plain"
"""Kinds of tensors: the fp32 master of an offloaded parameter; a buffer or ordinary parameter, unchanged."""

WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of an element, by safetensors' names of types."""

TensorSpec = tuple[str, tuple[int, ...]]
"""A tensor's type and shape."""

_SHOWN = 20
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors")
_LISTED = {"__tuple__", "__items__", "__float__", "__tensor__"}


class CheckpointError(InfinityError, ValueError):
    """A checkpoint cannot be read, or does not fit the model and optimizer that it is to be loaded into."""


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Context for parsing untrusted content: errors become a CheckpointError that names `what`."""
    try:
        yield
    except InfinityError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Elements [start, stop) of a tensor, or of a box of it, which are the whole tensor `key` of a file."""

    file: str
    key: str
    start: int
    stop: int
    hashes: tuple[str, ...]
    """Of each RANGE_NBYTES of the piece, xxh3_64 in hex."""
    box: Box | None = None
    """None for the whole tensor."""

    def within(self, shape: tuple[int, ...]) -> Box:
        """Return the box, of a tensor of this shape."""
        return self.box or all_of(shape)

    @property
    def order(self) -> tuple[Any, ...]:
        """By which the pieces of a tensor are sorted."""
        return (self.box.first, self.box.shape) if self.box else ((), ()), self.start, self.stop


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor; see [Note: logical tensors]."""

    name: str
    kind: str  # MASTER, PLAIN, "exp_avg", "exp_avg_sq", "exp_avg_scale", "extra"
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __post_init__(self) -> None:
        """Check that the pieces cover the tensor, once, and have a hash for each of their ranges."""
        what = f"{self.kind} of {self.name}"
        if not (type(self.name) is type(self.kind) is str):
            raise CheckpointError(f"{what}: name and kind of a tensor must be text")
        if self.dtype not in WIDTHS or not all(type(size) is int and size >= 0 for size in self.shape):
            raise CheckpointError(f"{what}: {self.dtype} {list(self.shape)} is not a valid type and shape")
        reached: dict[Box, int] = {}
        for piece in self.pieces:
            box = piece.within(self.shape)
            at = reached.get(box, 0)
            if piece.start != at or piece.stop < at:
                raise CheckpointError(
                    f"{what}: a piece of elements {piece.start} to {piece.stop}, expected from {at}"
                )
            if not _FILE.fullmatch(piece.file):
                raise CheckpointError(f"{what}: {piece.file!r} is not a file name of a checkpoint")
            expected = hash_count((piece.stop - piece.start) * WIDTHS[self.dtype])
            if len(piece.hashes) != expected:
                raise CheckpointError(f"{what}: {len(piece.hashes)} hashes, expected {expected}")
            reached[box] = piece.stop
        self._check_boxes(reached, what)

    def _check_boxes(self, reached: Mapping[Box, int], what: str) -> None:
        """Check that boxes, each with the elements up to the one that it has, are the tensor, once."""
        for box, at in reached.items():
            if not box.lies_in(self.shape) or at != box.numel:
                where = f" at {list(box.first)} of {list(box.shape)}" if len(reached) > 1 else ""
                raise CheckpointError(f"{what}: pieces of {at} elements{where}, expected {box.numel}")
        for number, box in enumerate(reached):
            for other in list(reached)[:number]:
                if box.meet(other) is not None:
                    raise CheckpointError(f"{what}: {box} and {other} have elements in common")
        if (at := sum(reached.values())) != self.numel:
            raise CheckpointError(f"{what}: pieces of {at} elements, expected {self.numel}")


def hash_count(nbytes: int) -> int:
    """Return how many ranges a piece of `nbytes` has."""
    return -(-nbytes // RANGE_NBYTES)


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """Where a rank is among those that save or load together."""

    data: int
    """Its number among the ranks that have different data."""
    beside: int = 0
    """Its number among those that have the same, where they are a mesh."""
    beside_size: int = 1
    """How many these are."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint except the values of tensors; what is not a tensor is in the form of `encode`."""

    tensors: tuple[Tensor, ...]
    files: Mapping[str, int]  # bytes of each
    optimizer: Mapping[str, Any] | None = None
    scheduler: Any = None
    rng: Mapping[str, Any] = field(default_factory=dict)
    extra: Any = None
    model: Mapping[str, Any] | None = None
    """The class and configuration of a model of transformers; None for other models."""
    further: tuple[Mapping[str, Any], ...] = ()
    """"rng" and "extra" of ranks 1, 2, …; those of rank 0 are the fields above."""
    places: tuple[MeshPlace, ...] = ()
    """Of each rank, where they are a mesh; else they all have different data."""

    def of_rank(self, rank: int) -> Mapping[str, Any] | None:
        """Return "rng" and "extra" of a rank; None for a rank that took no part in saving."""
        if rank == 0:
            return {"rng": self.rng, "extra": self.extra}
        return self.further[rank - 1] if rank <= len(self.further) else None

    @property
    def data_size(self) -> int:
        """How many different data the ranks have had."""
        return 1 + max(place.data for place in self._placed)

    @property
    def _placed(self) -> Sequence[MeshPlace]:
        return self.places or [MeshPlace(rank) for rank in range(1 + len(self.further))]

    def at_place(self, place: MeshPlace) -> Mapping[str, Any] | None:
        """Return "rng" and "extra" of the rank at a place of the mesh; of one that had its data, where the
        mesh was another beside these; None where no rank had its data.
        """
        there = {one: rank for rank, one in enumerate(self._placed)}
        same_data = (rank for one, rank in there.items() if one.data == place.data)
        rank = there.get(place, next(same_data, None))
        return None if rank is None else self.of_rank(rank)

    def by_kind(self) -> dict[tuple[str, str], Tensor]:
        """Return the tensors by (kind, name)."""
        return {(one.kind, one.name): one for one in self.tensors}

    @property
    def digest(self) -> str:
        """A hash of all of it."""
        return _hash(self._body())

    def to_json(self) -> str:
        """Return the manifest's text."""
        body = self._body()
        return json.dumps({"xxh3": _hash(body), "manifest": body}, indent=1, allow_nan=False)

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "range_nbytes": RANGE_NBYTES,
            "files": dict(self.files),
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": self.rng,
            "extra": self.extra,
            "model": self.model,
            **({"further": self.further} if self.further else {}),
            **({"mesh": [[*astuple(one)] for one in self.places]} if self.places else {}),
            "tensors": [
                [one.name, one.kind, one.dtype, one.shape, [_piece_out(piece) for piece in one.pieces]]
                for one in self.tensors
            ],
        }

    @staticmethod
    def from_json(text: str | bytes) -> Manifest:
        """Read what `to_json` returned.

        Raises: CheckpointError saying what is wrong with it.
        """
        with readable("the manifest"):
            outer = json.loads(text)
            body = outer["manifest"]
            if body["format"] != FORMAT or body["version"] != VERSION or body["range_nbytes"] != RANGE_NBYTES:
                raise CheckpointError(
                    f"the manifest is of {body['format']!r}, version {body['version']}, ranges of "
                    f"{body['range_nbytes']} B; this Infinity reads {FORMAT!r}, version {VERSION}, ranges of "
                    f"{RANGE_NBYTES} B"
                )
            if _hash(body) != outer["xxh3"]:
                raise CheckpointError("the manifest was changed or damaged: its hash does not fit")
            tensors = tuple(
                Tensor(name, kind, dtype, tuple(shape), tuple(_piece_in(piece) for piece in pieces))
                for name, kind, dtype, shape, pieces in body["tensors"]
            )
            kept = {key: body[key] for key in ("optimizer", "scheduler", "rng", "extra", "model")}
            further = tuple({"rng": one["rng"], "extra": one["extra"]} for one in body.get("further", ()))
            places = tuple(MeshPlace(*map(int, one)) for one in body.get("mesh", ()))
            if places and len(places) != 1 + len(further):
                raise CheckpointError(f"places of {len(places)} ranks, and state of {1 + len(further)}")
            manifest = Manifest(tensors, body["files"], **kept, further=further, places=places)
        if len(manifest.by_kind()) != len(tensors):
            raise CheckpointError("the manifest names a tensor twice")
        return manifest


@dataclass(frozen=True, slots=True)
class RankManifest:
    """The part of a manifest from one of the ranks that save together."""

    pieces: Mapping[tuple[str, str], tuple[TensorSpec, tuple[TensorPiece, ...]]]
    """By (kind, name): type and shape of the whole tensor, and the rank's pieces of it."""
    files: Mapping[str, int]
    rng: Mapping[str, Any]
    extra: Any
    place: MeshPlace = MeshPlace(0)

    def to_json(self) -> bytes:
        """Return its text."""
        rows = [
            [kind, name, *spec, list(map(_piece_out, pieces))]
            for (kind, name), (spec, pieces) in self.pieces.items()
        ]
        said = {"pieces": rows, "files": dict(self.files), "rng": self.rng, "extra": self.extra}
        said["place"] = astuple(self.place)
        return json.dumps(said, separators=(",", ":"), allow_nan=False).encode()

    @staticmethod
    def from_json(text: bytes) -> RankManifest:
        """Read what `to_json` returned."""
        said = json.loads(text)
        pieces = {
            (kind, name): ((dtype, tuple(shape)), tuple(map(_piece_in, pieces)))
            for kind, name, dtype, shape, pieces in said["pieces"]
        }
        return RankManifest(pieces, said["files"], said["rng"], said["extra"], MeshPlace(*said["place"]))


def joined(ranks: Sequence[RankManifest], said: Mapping[str, Any]) -> Manifest:
    """Return the manifest of all ranks' pieces. said: the fields that all ranks have in common.

    Raises: CheckpointError if the ranks have different models, or the pieces do not make whole tensors.
    """
    specs: dict[tuple[str, str], TensorSpec] = {}
    pieces: dict[tuple[str, str], list[TensorPiece]] = {}
    files: dict[str, int] = {}
    for rank, own in enumerate(ranks):
        files.update(own.files)
        for (kind, name), (spec, of_rank) in own.pieces.items():
            if specs.setdefault((kind, name), spec) != spec:
                before = _spec_text(specs[kind, name])
                raise CheckpointError(
                    f"{kind} of {name}: {_spec_text(spec)} on rank {rank}, but {before} on an earlier rank"
                )
            pieces.setdefault((kind, name), []).extend(of_rank)
    tensors = tuple(
        Tensor(name, kind, *spec, tuple(sorted(pieces[kind, name], key=attrgetter("order"))))
        for (kind, name), spec in specs.items()
    )
    of_ranks = [{"rng": one.rng, "extra": one.extra} for one in ranks]
    places = tuple(one.place for one in ranks) if any(one.place.beside_size > 1 for one in ranks) else ()
    return Manifest(tensors, files, **said, **of_ranks[0], further=tuple(of_ranks[1:]), places=places)


def _hash(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_64_hexdigest(text.encode())


def _piece_out(piece: TensorPiece) -> list[Any]:
    box = [] if piece.box is None else [[piece.box.first, piece.box.shape]]
    return [piece.file, piece.key, piece.start, piece.stop, piece.hashes, *box]


def _piece_in(piece: Sequence[Any]) -> TensorPiece:
    file, key, start, stop, hashes, *boxes = piece
    box = None
    if boxes:
        ((first, shape),) = boxes
        box = Box(tuple(map(int, first)), tuple(map(int, shape)))
    return TensorPiece(str(file), str(key), int(start), int(stop), tuple(map(str, hashes)), box)


# Does it fit?


def compare(saved: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], what: str) -> list[str]:
    """Return, in words, how the saved tensors differ from those expected; empty if they match."""
    missing = [name for name in expected if name not in saved]
    unexpected = [name for name in saved if name not in expected]
    differing = [
        f"{name}: {_spec_text(saved[name])}, expected {_spec_text(expected[name])}"
        for name in expected
        if name in saved and saved[name] != expected[name]
    ]
    return [
        f"{len(names)} {what} {how}: {_listed(names)}"
        for names, how in (
            (missing, "missing in the checkpoint"),
            (unexpected, "in the checkpoint that the model does not have"),
            (differing, "of another shape or type"),
        )
        if names
    ]


def _spec_text(spec: TensorSpec) -> str:
    return f"{spec[0]} {list(spec[1])}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def compare_groups(saved: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> list[str]:
    """Return, in words, how the saved param groups (lists of names) differ from those expected."""
    if len(saved) != len(expected):
        return [f"{len(saved)} param groups in the checkpoint, {len(expected)} in the optimizer"]
    found = []
    for number, (theirs, ours) in enumerate(zip(saved, expected, strict=True)):
        if list(theirs) == list(ours):
            continue
        missing, more = [one for one in ours if one not in theirs], [one for one in theirs if one not in ours]
        if missing or more:
            found.append(
                f"param group {number} has {len(theirs)} parameters in the checkpoint, {len(ours)} in the "
                f"optimizer: only there {_listed(more) or 'none'}; only here {_listed(missing) or 'none'}"
            )
        else:
            found.append(f"param group {number} lists its {len(ours)} parameters in another order")
    return found


# Plain values as JSON


def encode(value: Any, what: str, tensor: Callable[[Any, str], str | None]) -> Any:
    """Return a plain value (None, bool, int, float, str, list, tuple, dict) as JSON values.

    what: the value's name, for errors. tensor: called for any other value; stores it and returns its key, or
    None if it cannot.

    Raises: CheckpointError naming the place of a value that is not plain and was not stored.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        plain = float(value)
        return plain if math.isfinite(plain) else {"__float__": str(plain)}
    if type(value) in (list, tuple):
        items = [encode(one, f"{what}[{index}]", tensor) for index, one in enumerate(value)]
        return items if type(value) is list else {"__tuple__": items}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not _LISTED & value.keys():
            return {key: encode(one, f"{what}[{key!r}]", tensor) for key, one in value.items()}
        pairs = [
            [encode(key, f"a key of {what}", tensor), encode(one, f"{what}[{key!r}]", tensor)]
            for key, one in value.items()
        ]
        return {"__items__": pairs}
    key = tensor(value, what)
    if key is None:
        raise CheckpointError(
            f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
            "hold: nothing in one is ever unpickled. Give it as None, bool, int, float, str, list, tuple, "
            "dict or tensor."
        )
    return {"__tensor__": key}


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:  # noqa: PLR0911 - a case each
    """Return the value that was given to `encode`. tensor: returns the value stored under a key."""
    if isinstance(value, list):
        return [decode(one, tensor) for one in value]
    if not isinstance(value, dict):
        return value
    if "__float__" in value:
        return float(value["__float__"])
    if "__tuple__" in value:
        return tuple(decode(one, tensor) for one in value["__tuple__"])
    if "__items__" in value:
        return {_hashable(decode(key, tensor)): decode(one, tensor) for key, one in value["__items__"]}
    if "__tensor__" in value:
        return tensor(value["__tensor__"])
    return {key: decode(one, tensor) for key, one in value.items()}


def _hashable(key: Any) -> Any:
    if isinstance(key, (list, dict)):
        raise CheckpointError(f"{key!r} cannot be the key of a dict")
    return key


def names_of(tensors: Iterable[Tensor], kind: str) -> dict[str, TensorSpec]:
    """Return type and shape of every tensor of a kind, by name."""
    return {one.name: (one.dtype, one.shape) for one in tensors if one.kind == kind}
