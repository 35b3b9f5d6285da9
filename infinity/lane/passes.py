"""The passes beside fetching and updating: spilling gradients, reading and writing single parameters, writing
fields out of host memory, checking hashes.
"""

from __future__ import annotations

import ctypes
import dataclasses
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from infinity import kernels
from infinity.lane.base import Pass
from infinity.planning.layout import pieces, tiles
from infinity.records.record import Record
from infinity.records.stored_moments import read_moments, write_moments
from infinity.records.weights import ACCUMULATE, KEPT, KERNEL_DTYPE, WIDEN, compute_dtype
from infinity.storage.store import DONE, Extent, Future, Transfer


def piece_address(record: Record, base: int, element: int, start: int, field: str) -> int:
    """Return the address of `element` of a field whose tile, from element `start` on, lies at `base`."""
    return base + record.schema.nbytes(field, element - start)


def piece_addresses(record: Record, tile: Mapping[str, int], element: int, start: int) -> dict[str, int]:
    """Return where `element` is of the record's fields in a tile that begins at element `start`."""
    names = record.schema.names
    return {one: piece_address(record, at, element, start, one) for one, at in tile.items() if one in names}


def clear(record: Record, addresses: dict[str, int], name: str, numel: int) -> None:
    """Make a field of a tile of `numel` elements zero."""
    ctypes.memset(addresses[name], 0, record.schema.nbytes(name, numel))


@dataclass(slots=True)
class SquareSum:
    """The fp64 sum of a gradient's squares, as far as its tiles have been summed."""

    value: float = 0.0
    finite: bool = True
    """Whether every element is."""

    def add(self, value: float, finite: bool) -> None:  # noqa: FBT001 - as a kernel returns them
        """Add the sum of a part."""
        self.value += value
        self.finite &= finite


@dataclass(slots=True)
class SpillPart:
    """One parameter's new gradient for a spill: added to what is stored, or stored instead of it.

    measure: sum its squares on the way. arriving: `tensor` may be read when this is over.
    """

    tensor: torch.Tensor
    add: bool = False
    measure: bool = False
    arriving: Future = DONE
    square_sum: SquareSum = dataclasses.field(default_factory=SquareSum)

    def let_go(self) -> None:
        """Drop the tensor, which was used up; the sum stays."""
        self.tensor = self.tensor.new_empty(0)


class SpillPass(Pass):
    """Write gradients to the record, beside or on top of those that are there.

    parts: new gradients by parameter. carried: parameters whose stored gradient must survive. source: the
    field that holds it, None if there is none. target: the field to write; fp32 as soon as anything is added.
    """

    def __init__(
        self,
        record: Record,
        tile_numel: int,
        parts: dict[int, SpillPart],
        carried: set[int],
        source: str | None,
        target: str,
    ) -> None:
        """Prepare to write `target`."""
        super().__init__(record)
        self._shard = record.shard
        self._computes = compute_dtype(record.schema)
        self._tile_numel = tile_numel
        self._parts = parts
        self._carried = carried
        self._source = source
        self._target = target
        self._take_parts: Callable[[dict[int, SpillPart]], None] | None = None

    def give_parts_to(self, call: Callable[[dict[int, SpillPart]], None]) -> None:
        """Have `call` called with the parts when the last tile was worked on, with the lane's lock held."""
        self._take_parts = call

    def touched(self) -> Iterable[str]:
        """Gradients alone."""
        return [self._target, *([self._source] if self._source else [])]

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile."""
        return tiles(self._shard.numel, self._tile_numel)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """The stored gradients, if any count, and the new ones."""
        return ((self._source,) if self._source else ()), (self._target,)

    @property
    def computes(self) -> bool:
        """See QueuedPass: it may wait for gradients."""
        return True

    @property
    def ready(self) -> bool:
        """Whether the new gradients have come."""
        return all(part.arriving.done for part in self._parts.values())

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Write each parameter's piece: stored, new, or their fp32 sum."""
        target = addresses[self._target]
        if self._source is None:
            clear(self.record, addresses, self._target, stop - start)
        for piece in pieces(self._shard, start, stop):
            part = self._parts.get(piece.index)
            to = piece_address(self.record, target, piece.start, start, self._target)
            if (
                self._source
                and (piece.index in self._carried or (part and part.add))
                and self._source != self._target
            ):
                stored = piece_address(self.record, addresses[self._source], piece.start, start, self._source)
                WIDEN[self._computes](piece.numel, stored, to)
            if part is None:
                continue
            part.arriving.wait()
            of_part = part.tensor.dtype
            new = part.tensor.data_ptr() + piece.within * of_part.itemsize
            if part.add:
                ACCUMULATE[of_part](piece.numel, to, new)
            elif self._target == "grad32":
                WIDEN[of_part](piece.numel, new, to)
            else:
                kernels.copy(piece.numel * of_part.itemsize, to, new)
            if part.measure:
                dtype = torch.float32 if self._target == "grad32" else self._computes
                part.square_sum.add(*kernels.sum_squares(piece.numel, to, KERNEL_DTYPE[dtype]))

    def done_processing(self) -> None:
        """Drop the tensors."""
        parts, self._parts = self._parts, {}
        if self._take_parts:
            self._take_parts(parts)


def field_nbytes(record: Record, field: str, numel: int) -> int:
    """Return the bytes of `numel` elements of a field as it is stored; "master" in fp32."""
    return 4 * numel if field == "master" else record.schema.nbytes(field, numel)


class _RangePass(Pass):
    """Moves elements [start, stop) of a record's fields from or to host memory."""

    def __init__(
        self, record: Record, tile_numel: int, start: int, stop: int, values: Mapping[str, torch.Tensor]
    ) -> None:
        """values: contiguous host tensors by field; "master" stands for the fields that keep it."""
        super().__init__(record)
        self.start, self.stop = start, stop
        self.values = dict(values)
        self._tile_numel = tile_numel
        self._weights = KEPT[record.schema.kept]
        self._names = tuple(dict.fromkeys(name for field in values for name in self._kept_in(field)))

    def _kept_in(self, field: str) -> Sequence[str]:
        """Return the fields of the record to move for a field of `values`."""
        return self.record.schema.master if field == "master" else (field,)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """The range's tiles."""
        first = self.start // self._tile_numel * self._tile_numel
        for start in range(first, self.stop if self.start < self.stop else first, self._tile_numel):
            yield start, min(start + self._tile_numel, self.record.shard.numel)

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Move what the tile has of the range."""
        first, last = max(start, self.start), min(stop, self.stop)
        stored = {name: piece_address(self.record, addresses[name], first, start, name) for name in addresses}
        values = {
            field: tensor.data_ptr() + self._nbytes(field, first - self.start)
            for field, tensor in self.values.items()
        }
        self._move(last - first, stored, values)

    def _nbytes(self, field: str, numel: int) -> int:
        """Return the bytes of `numel` elements of a field in its tensor."""
        return field_nbytes(self.record, field, numel)

    @abstractmethod
    def _move(self, numel: int, stored: dict[str, int], values: dict[str, int]) -> None:
        """Move `numel` elements between the addresses of the record's fields and those of `values`."""


class CopyOutPass(_RangePass):
    """Copies a range of a record into buffers, as it is stored; what was never written is zero."""

    def _kept_in(self, field: str) -> Sequence[str]:
        """In a checkpoint's files, `hi` is the master, too."""
        in_files = self.record.in_files is not None
        return ("hi",) if field == "master" and in_files else super()._kept_in(field)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Of the fields asked for, those that were ever written."""
        return tuple(name for name in self._names if self.record.written(name, start)), ()

    def _move(self, numel: int, stored: dict[str, int], values: dict[str, int]) -> None:
        for field, to in values.items():
            if field == "master" and self.record.in_files is not None:
                WIDEN[self._weights.dtype](numel, stored["hi"], to)
            elif field == "master" and all(name in stored for name in self._kept_in(field)):
                self._weights.read_master(numel, stored, to)
            else:
                _copy_or_clear(self._nbytes(field, numel), to, stored.get(field))


class ReadPass(CopyOutPass):
    """Copy fields of one parameter into tensors: "hi", of the type that computes; "m", "v" and "master" in
    fp32, in whatever fields they are kept.
    """

    def __init__(
        self, record: Record, index: int, tile_numel: int, into: dict[str, torch.Tensor], first: int = 0
    ) -> None:
        """Prepare to fill the contiguous host tensors `into`, all of one length, with the elements of this
        rank's part of the parameter from `first` on.
        """
        start = record.shard.segments[index].start + first
        numels = {tensor.numel() for tensor in into.values()}
        self._index = index
        super().__init__(record, tile_numel, start, start + max(numels, default=0), into)

    def _kept_in(self, field: str) -> Sequence[str]:
        return self.record.moments_of(self._index) if field in ("m", "v") else super()._kept_in(field)

    def _nbytes(self, field: str, numel: int) -> int:
        return numel * self.values[field].element_size()

    def _move(self, numel: int, stored: dict[str, int], values: dict[str, int]) -> None:
        super()._move(numel, stored, {field: to for field, to in values.items() if field not in ("m", "v")})
        moments = {field: to for field, to in values.items() if field in ("m", "v")}
        read_moments(self.record.schema, numel, stored, moments)


def _copy_or_clear(nbytes: int, to: int, address: int | None) -> None:
    """Copy `nbytes` from `address`; None stands for a field that was never written, and counts as zero."""
    if address is None:
        ctypes.memset(to, 0, nbytes)
    else:
        kernels.copy(nbytes, to, address)


class CopyInPass(_RangePass):
    """Replaces a range of a record, whole tiles, by what buffers hold, as it is stored."""

    rewrites = True

    def _kept_in(self, field: str) -> Sequence[str]:
        """All weights follow their master."""
        return self.record.schema.weights if field == "master" else (field,)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Everything is replaced, padding included."""
        return (), self._names

    def _move(self, numel: int, stored: dict[str, int], values: dict[str, int]) -> None:
        for name in self._names:
            clear(self.record, stored, name, numel)
        for field, source in values.items():
            if field == "master":
                self._weights.write_master(numel, source, stored)
            else:
                kernels.copy(self._nbytes(field, numel), stored[field], source)

    def done_processing(self) -> None:
        """Drop the buffers."""
        self.values = {}


_MOMENTS_IN = {"m4": ("m",), "v4": ("v",), "mv": ("m", "v"), "scale": ()}
"""The moments that are kept in fields of other names."""


class WritePass(Pass):
    """Set parameters from tensors: values of the master, in fp32 or in the type that computes, or of the
    moments "m" and "v".

    values: by parameter and field, contiguous host tensors; the field "master" becomes the record's weights.
    With `rewrite`, masters in the type that computes change only the elements whose value differs (the others
    keep their remainder).
    """

    rewrites = True

    def __init__(
        self,
        record: Record,
        tile_numel: int,
        values: dict[int, dict[str, torch.Tensor]],
        *,
        rewrite: bool = False,
    ) -> None:
        """Prepare to write `values`."""
        super().__init__(record)
        self._tile_numel = tile_numel
        self._values = values
        self._rewrite = rewrite
        names = {name for fields in values.values() for name in fields}
        wanted = {name for index, fields in values.items() for name in self._moments(index, fields)}
        kept = [name for name in record.fields if name in wanted]
        self._names = (*kept, *(record.schema.weights if "master" in names else ()))

    def _moments(self, index: int, given: Iterable[str]) -> Iterable[str]:
        """Return the fields to write of a parameter's moments: where they share blocks, those of both."""
        given = {"m", "v"}.intersection(given)
        in_blocks = self.record.schema.in_blocks
        return self.record.moments_of(index) if given and in_blocks else given

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Tiles with a part of any of the parameters."""
        for start, stop in tiles(self.record.shard.numel, self._tile_numel):
            if any(piece.index in self._values for piece in pieces(self.record.shard, start, stop)):
                yield start, stop

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Read the fields first, unless every parameter in the tile is replaced."""
        parts = list(pieces(self.record.shard, start, stop))
        if not self._rewrite and all(
            set(self._values.get(part.index, ())) >= self._fields_set(part.index) for part in parts
        ):
            return (), self._names
        return tuple(name for name in self._names if self.record.written(name, start)), self._names

    def _fields_set(self, index: int) -> set[str]:
        """Return what has to be given of a parameter for all that is written of it to be replaced."""
        record, written = self.record, set(self._names)
        kept = written.intersection(record.moments_of(index))
        if kept and record.schema.in_blocks:
            kept = set(record.fields).intersection(record.moments_of(index))
        found = {one for name in kept for one in _MOMENTS_IN.get(name, (name,))}
        return found | ({"master"} if written.intersection(record.schema.weights) else set())

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Split, rewrite or copy each parameter's piece."""
        reads, _ = self.reads_and_writes(start, stop)
        for name in self._names:
            if name not in reads:
                clear(self.record, addresses, name, stop - start)
        for piece in pieces(self.record.shard, start, stop):
            values = self._values.get(piece.index, {})
            new = {
                name: tensor.data_ptr() + piece.within * tensor.element_size()
                for name, tensor in values.items()
            }
            kept = {*self.record.schema.weights, *self.record.moments_of(piece.index)}
            here = {name: addresses[name] for name in addresses if name in kept}
            stored = piece_addresses(self.record, here, piece.start, start)
            if "master" in new:
                self._write_master(piece.numel, new["master"], values["master"].dtype, stored)
            moments = {name: at for name, at in new.items() if name in ("m", "v")}
            write_moments(self.record.schema, piece.numel, stored, moments)

    def _write_master(self, numel: int, new: int, dtype: torch.dtype, stored: dict[str, int]) -> None:
        weights = KEPT[self.record.schema.kept]
        if self._rewrite and dtype == weights.dtype:
            weights.rewrite(numel, new, stored)
        elif dtype == torch.float32:
            weights.write_master(numel, new, stored)
        else:
            weights.take(numel, new, stored)

    def done_processing(self) -> None:
        """Drop the tensors."""
        self._values = {}


Home: TypeAlias = "tuple[Extent, array[int]]"
"""Where a field lies on NVMe, and its tiles' hashes."""


class _WriteOutPass(Pass):
    """Write fields of a record from host memory to extents."""

    def __init__(self, record: Record, homes: Mapping[str, Home], tile_numel: int, most_numel: int) -> None:
        """Prepare to write the fields that `homes` names, each to its extent; its tiles' hashes go there.
        most_numel: elements written at once, in whole tiles.
        """
        super().__init__(record)
        self._homes = homes
        self._tile_numel = tile_numel
        self._most_numel = most_numel

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile with anything written, neighbours at once."""
        begun, ended = 0, 0
        names: tuple[str, ...] = ()
        for start, stop in tiles(self.record.shard.numel, self._tile_numel):
            here = self._written(start)
            if here != names or stop - begun > self._most_numel:
                if names:
                    yield begun, ended
                begun, names = start, here
            ended = stop
        if names:
            yield begun, ended

    def _written(self, start: int) -> tuple[str, ...]:
        return tuple(name for name in self._homes if self.record.written(name, start))

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Those that were ever written, where they lie."""
        return self._written(start), ()

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> Sequence[Transfer]:
        """Begin to write them."""
        record = self.record
        return [
            record.write_to(*self._homes[name], name, start, stop, address, record.memory(name))
            for name, address in addresses.items()
        ]


class KeepPass(_WriteOutPass):
    """Write fields of a record to extents from host memory, where they stay."""

    def __init__(self, record: Record, homes: Mapping[str, Home], tile_numel: int) -> None:
        """Prepare to write the fields that `homes` names, as many tiles at once as a slot would hold."""
        tile_nbytes = sum(record.schema.nbytes(name, tile_numel) for name in homes)
        tiles_at_once = max(1, record.schema.slot_nbytes * tile_numel // tile_nbytes)
        super().__init__(record, homes, tile_numel, tiles_at_once * tile_numel)

    @property
    def nbytes(self) -> int:
        """Of the fields, whole."""
        return sum(map(self.record.field_nbytes, self._homes))

    @property
    def in_memory(self) -> bool:
        """No: the thread that submits it shall not wait for its writes."""
        return False


class LeavePass(_WriteOutPass):
    """Write one field from where it lies to an extent, mostly of the tier below, then let it lie there."""

    def __init__(self, record: Record, name: str, to: Extent, tile_numel: int) -> None:
        """Prepare to move the field `name`."""
        hashes = record.new_hashes(name)
        super().__init__(record, {name: (to, hashes)}, tile_numel, tile_numel)
        self.on_finished.append(partial(record.move, name, to, hashes))


class CheckPass(Pass):
    """Read all that was ever written of a record; the lane compares it with the hashes."""

    def __init__(self, record: Record, tile_numel: int) -> None:
        """Prepare to read `record`."""
        super().__init__(record)
        self._tile_numel = tile_numel

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile."""
        return tiles(self.record.shard.numel, self._tile_numel)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """The fields of the tile that were ever written."""
        return tuple(name for name in self.record.fields if self.record.written(name, start)), ()

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Do nothing: the lane has compared the hashes."""
