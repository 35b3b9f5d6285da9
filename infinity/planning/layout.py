"""How a unit's parameters lie in one flat range, and how that range is cut into tiles. Pure: no torch, no
I/O.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from infinity.sizes import BLOCK, round_up

STATE_BLOCK = 256
"""Elements that share one pair of scales in an 8- or 4-bit state; see kernels."""

_WEIGHTS: dict[str, dict[str, float]] = {
    "bf16": {"hi": 2, "lo": 2},
    "bf16, fp24": {"hi": 2, "lo": 1},
    "fp16": {"hi": 2, "master": 4},
    "fp32": {"hi": 4},
}
_MASTERS = {"bf16": ("hi", "lo"), "fp16": ("master",), "fp32": ("hi",)}
_GRADIENTS = {"bf16": "grad16", "fp16": "grad16", "fp32": "grad32"}
_MOMENTS: dict[str, dict[str, float]] = {
    "fp32": {"m": 4, "v": 4},
    "bf16": {"m": 2, "v": 2},
    "int8": {"m": 1, "v": 1, "scale": 8 / STATE_BLOCK},
    "int4": {"m4": 0.5, "v4": 0.5, "mv": 1, "scale": 8 / STATE_BLOCK},
}
_BOTH = ("m", "v")
_OTHERS = {"grad16": 2, "grad32": 4, "activation": 2, "second": 2}
_SLOT_NBYTES = 16


class RecordSchema:
    """The fields of a record, and what they take: fixed by the type that computes, and that of the
    optimizer's state.

    state_dtype: "fp32", "bf16", "int8" or "int4", of which `mv` has both moments of an element in a byte, and
    `m4` and `v4` have a moment that is kept alone, two elements to a byte; dtype: "bf16", "fp16" or "fp32";
    master_dtype: "fp32", or with "bf16" "fp24", whose `lo` has 8 bits. `hi` is what computes, whatever its
    type. grad16 and grad32 are a spilled gradient's two forms; an activation is a record of its own, and so
    is a second part of weights.
    """

    def __init__(
        self, state_dtype: str, dtype: str = "bf16", more: Sequence[str] = (), *, master_dtype: str = "fp32"
    ) -> None:
        """more: see with_fields. Raises: KeyError for a type that is none."""
        self.dtype = dtype
        self.state_dtype, self.master_dtype = state_dtype, master_dtype
        self.kept = dtype if master_dtype == "fp32" else f"{dtype}, {master_dtype}"
        """How weights are kept, masters with them: a key of KEPT in records/weights.py."""
        widths = {**_WEIGHTS[self.kept], **_OTHERS, **_MOMENTS[state_dtype]}
        self._nbytes = {name: round(width * STATE_BLOCK) for name, width in widths.items()}
        self._nbytes |= dict.fromkeys(more, 4 * STATE_BLOCK)
        self.weights = tuple(_WEIGHTS[self.kept])
        """The fields that Init makes."""
        self.master = _MASTERS[dtype]
        """Those of them that the fp32 master is in."""
        self.derived = frozenset(() if "hi" in self.master else ("hi",))
        """Those that an update makes anew from the master, and need not read."""
        self.gradient = _GRADIENTS[dtype]
        """The field for a gradient as one backward yields it."""
        self.moments = tuple(_MOMENTS[state_dtype])
        """The fields of an optimizer's state; each optimizer has those it needs."""
        self.fields = (*self.weights, *self.moments_of(_BOTH))
        """What a record holds of a unit that an optimizer of two moments trains, gradients apart."""
        self.names = (*self.weights, *self.moments, *more)
        """All fields that a record may have, gradients apart."""
        self.width = round(_WEIGHTS[dtype]["hi"])
        """Bytes of an element that computes."""
        self.slot_nbytes = max(_SLOT_NBYTES, round(sum(widths[name] for name in self.fields)) + 4)
        """Bytes per element of a slot: of a whole record, and a gradient of 4."""
        self.of_workers = tuple(more)
        """Fields of what other ranks have of the unit, which go on behind the parameters of this shard."""
        self.fields += self.of_workers
        self.align_numel = round(BLOCK / min(width for width in widths.values() if width >= 1))
        """Elements. Segments start on whole blocks of every field, so each parameter can be read and written
        by itself; so do tiles.
        """

    def with_fields(self, names: Sequence[str]) -> RecordSchema:
        """Return this schema with further fields, of fp32, which no slot holds beside all the others."""
        return RecordSchema(self.state_dtype, self.dtype, names, master_dtype=self.master_dtype)

    @property
    def is_exact(self) -> bool:
        """Whether masters and moments are fp32: nothing is rounded at random when it is stored."""
        return self.state_dtype == self.master_dtype == "fp32"

    @property
    def is_updated_on_device(self) -> bool:
        """Whether an accelerator updates its records where they lie: those of fp32 moments, and of masters
        that are fp32 or split. The others need kernels of our own: see records/tensor_steps.py.
        """
        return self.is_exact and self.dtype in ("bf16", "fp32")

    @property
    def name(self) -> str:
        """What tells it from every other, for people."""
        masters = "" if self.master_dtype == "fp32" else f", masters in {self.master_dtype}"
        if self.dtype == "bf16":
            return self.state_dtype + masters
        return f"{self.dtype} record" + ("" if self.state_dtype == "fp32" else f", {self.state_dtype}")

    @property
    def in_blocks(self) -> bool:
        """Whether moments are codes, whose blocks of STATE_BLOCK elements have scales."""
        return "scale" in self.moments

    def moments_of(self, kept: Iterable[str]) -> tuple[str, ...]:
        """Return the fields in which an optimizer's moments are that keeps these of `m` and `v`."""
        kept = set(kept)
        if kept and "mv" in self.moments:
            return "mv" if len(kept) > 1 else f"{kept.pop()}4", "scale"
        return tuple(name for name in self.moments if name in kept or (kept and name == "scale"))

    @property
    def stepped_nbytes(self) -> float:
        """Bytes that AdamW's step of an element reads and writes: its record, and its gradient."""
        of_record = sum(self._nbytes[name] * (1 if name in self.derived else 2) for name in self.fields)
        return of_record / STATE_BLOCK + self.width

    def nbytes(self, field: str, numel: int) -> int:
        """Bytes of `numel` elements; of scales, for whole blocks of elements alone exact."""
        return -(-numel * self._nbytes[field] // STATE_BLOCK)

    def span(self, field: str, tile_numel: int) -> int:
        """Elements of a field that are moved at once, on whole blocks: a tile, or of what takes less than a
        byte an element as many tiles as fill their blocks; see packing.
        """
        if self._nbytes[field] >= STATE_BLOCK:
            return tile_numel
        return tile_numel * BLOCK // math.gcd(self.nbytes(field, tile_numel), BLOCK)

    def stored_nbytes(self, field: str, numel: int, span: int) -> int:
        """Bytes that `numel` elements take in an extent, each `span` of them whole blocks."""
        whole, rest = divmod(numel, span)
        nbytes = whole * round_up(self.nbytes(field, span), BLOCK)
        return nbytes + round_up(self.nbytes(field, rest), BLOCK) if rest else nbytes


FP32 = RecordSchema("fp32")


@functools.cache
def schema_beside(dtype: str) -> RecordSchema:
    """Return the schema of parameters that compute in a type of their own, beside those of Config's; its
    state is fp32.
    """
    return RecordSchema("fp32", dtype)


ALIGN_NUMEL = FP32.align_numel
"""Elements; see RecordSchema."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place in a flat range; of a rank's shard, the place of the part that the rank holds."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # elements from the start of the range
    numel: int  # elements, without padding
    first: int = 0  # the parameter's element at `start`

    @property
    def stop(self) -> int:
        """The first element behind the parameter, padding not counted."""
        return self.start + self.numel

    @property
    def elements(self) -> range:
        """The parameter's elements that are here."""
        return range(self.first, self.first + self.numel)

    def elements_of(self, elements: range) -> range:
        """Return which of some consecutive elements are here."""
        start, stop = (min(max(at, self.first), self.elements.stop) for at in (elements.start, elements.stop))
        return range(start, stop)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A flat, padded range of parameters, one behind the other: a whole unit, or a rank's shard of it, where
    a parameter may have no element.
    """

    segments: tuple[Segment, ...]
    numel: int  # elements, with padding
    end: int = field(init=False, repr=False, compare=False)
    """The first element behind the last parameter: what follows is padding, and never written."""

    def renamed(self, names: Sequence[str]) -> FlatLayout:
        """Return the same range with other names of the parameters."""
        segments = zip(self.segments, names, strict=True)
        return FlatLayout(tuple(replace(one, name=name) for one, name in segments), self.numel)

    def __post_init__(self) -> None:
        """Check that segments are whole-block aligned, ordered and inside the range."""
        end = 0
        for segment in self.segments:
            if segment.start % ALIGN_NUMEL or segment.start < end:
                raise ValueError(
                    f"{segment.name}: starts at element {segment.start}, expected a multiple of "
                    f"{ALIGN_NUMEL} ≥ {end}"
                )
            end = segment.stop
        if self.numel % ALIGN_NUMEL or self.numel < end:
            raise ValueError(f"shard of {self.numel} elements: expected a multiple of {ALIGN_NUMEL} ≥ {end}")
        last = max((one.stop for one in self.segments if one.numel), default=0)
        object.__setattr__(self, "end", last)  # found once: each tile asks


class FieldCuts:
    """How the fields of one record are cut into spans: what is moved at once. See packing."""

    def __init__(self, schema: RecordSchema, tile_numel: int) -> None:
        """Cut each field as its schema says."""
        self._schema, self._tile_numel = schema, tile_numel
        self._of: dict[str, tuple[int, int]] = {}

    def know(self, schema: RecordSchema) -> None:
        """Take a schema with further fields in the place of the one before."""
        self._schema = schema

    def _cut(self, name: str) -> tuple[int, int]:
        """Return the elements and the bytes of a span that is asked for the first time."""
        return self.put(name, self._schema.span(name, self._tile_numel))

    def put(self, name: str, span: int) -> tuple[int, int]:
        """Cut a field into spans of so many elements; return these, and their bytes."""
        self._of[name] = cut = span, self._schema.stored_nbytes(name, span, span)
        return cut

    def reset(self, name: str) -> None:
        """Cut a field as its schema says."""
        self._of.pop(name, None)

    def span(self, name: str) -> int:
        """Return the elements of a span."""
        return (self._of.get(name) or self._cut(name))[0]

    def span_of(self, name: str, numel: int, nbytes: int) -> int | None:
        """Return the span with which `numel` elements of a field take `nbytes`: that of its schema, or a
        tile, as in runs from before fields were packed, which aligned every tile to a block. None if `nbytes`
        matches neither: they are of another unit, or of another schema. An extent without elements has a
        block, too.
        """
        for span in (self._schema.span(name, self._tile_numel), self._tile_numel):
            if max(self._schema.stored_nbytes(name, numel, span), BLOCK) == nbytes:
                return span
        return None

    def nbytes(self, name: str, numel: int) -> int:
        """Return the bytes, in whole blocks, that `numel` elements from the start of a span take."""
        span, span_nbytes = self._of.get(name) or self._cut(name)
        if numel == span:
            return span_nbytes
        whole, rest = divmod(numel, span)
        nbytes = whole * span_nbytes
        return nbytes + round_up(self._schema.nbytes(name, rest), BLOCK) if rest else nbytes

    def offset(self, name: str, start: int) -> int:
        """Return the bytes from a field's start to element `start`."""
        if not start:
            return 0
        span, span_nbytes = self._of.get(name) or self._cut(name)
        whole, within = divmod(start, span)
        offset = whole * span_nbytes
        return offset + self._schema.nbytes(name, within) if within else offset


def lay_out(
    parameters: Sequence[tuple[str, Sequence[int]]], align_numel: int = ALIGN_NUMEL, ranks: int = 1
) -> FlatLayout:
    """Place `(name, shape)` one behind the other, each on a whole block of every field, and pad the whole
    until `ranks` can have equal shares of whole blocks.
    """
    segments = []
    start = 0
    for name, shape in parameters:
        segment = Segment(name, tuple(shape), start, math.prod(shape))
        segments.append(segment)
        start = round_up(segment.stop, align_numel)
    return FlatLayout(tuple(segments), round_up(start, ranks * align_numel))


def shard_of(whole: FlatLayout, rank: int, ranks: int) -> FlatLayout:
    """Return what `rank` of `ranks` holds of a unit laid out for so many: an equal, contiguous part of every
    unit, so that all ranks read it at once, each over its own link (bandwidth-centric partitioning,
    ZeRO-Infinity 6.1).
    """
    numel = whole.numel // ranks
    begin = rank * numel
    parts = []
    for one in whole.segments:
        start, stop = (min(max(at, begin), begin + numel) for at in (one.start, one.stop))
        first = start - one.start if stop > start else 0
        parts.append(replace(one, start=start - begin, numel=stop - start, first=first))
    return FlatLayout(tuple(parts), numel)


@dataclass(frozen=True, slots=True)
class Holders:
    """Which of `ranks` ranks have parts of a record: every `step`th from `first` on. All of them, unless the
    record is of experts that are divided among ranks.
    """

    ranks: int
    first: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        """Check that there is such a rank."""
        if not 0 <= self.first < self.step <= self.ranks or self.ranks % self.step:
            raise ValueError(f"of {self.ranks} ranks, each {self.step}th from {self.first} on: no such ranks")

    @property
    def members(self) -> range:
        """These ranks, in the order of their parts."""
        return range(self.first, self.ranks, self.step)

    @property
    def are_all(self) -> bool:
        """Whether every rank has a part."""
        return self.step == 1

    def place(self, rank: int) -> int | None:
        """Return which of the parts a rank has; None for none."""
        return (rank - self.first) // self.step if rank in self.members else None

    def shard_of(self, whole: FlatLayout, rank: int) -> FlatLayout:
        """Return what a rank holds of a unit that is laid out for as many ranks as these: nothing, if it is
        none of them.
        """
        place = self.place(rank)
        if place is not None:
            return shard_of(whole, place, len(self.members))
        return FlatLayout(tuple(replace(one, start=0, numel=0, first=0) for one in whole.segments), 0)


ALONE = Holders(1)
"""A single rank, which has all."""


@dataclass(slots=True)  # not frozen, which takes three times as long to make: each update makes some
class TilePiece:
    """The part of one parameter that lies in one tile: elements [start, start + numel) of the shard."""

    index: int  # of the segment in its shard
    start: int  # in the shard
    within: int  # in the shard's part of the parameter
    numel: int
    element: int  # in the parameter


def tiles(numel: int, tile_numel: int) -> Iterator[tuple[int, int]]:
    """Cut [0, numel) into consecutive ranges of at most `tile_numel` elements."""
    for start in range(0, numel, tile_numel):
        yield start, min(start + tile_numel, numel)


def pieces(shard: FlatLayout, start: int, stop: int) -> list[TilePiece]:
    """Return the parameters' parts in elements [start, stop) of the shard, in order."""
    found = []
    for index, segment in enumerate(shard.segments):
        first, last = max(start, segment.start), min(stop, segment.stop)
        if first < last:
            within = first - segment.start
            found.append(TilePiece(index, first, within, last - first, segment.first + within))
    return found
