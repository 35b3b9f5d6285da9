"""The walks over records that a step is made of: fetch, update, spill, and reading or writing single
parameters.

Each says which fields of a tile it reads and writes and what it does in between; the lane does the rest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from infinity import kernels
from infinity.device import Device
from infinity.lanes import Pass
from infinity.memory import SLOT_NBYTES_PER_ELEMENT
from infinity.shard import FIELD_NBYTES, Segment, pieces, tiles
from infinity.store import Extent, Record
from infinity.unit import Unit

GRADIENT_FIELD = {torch.bfloat16: "grad16", torch.float32: "grad32"}
_KERNEL_DTYPE: dict[str, kernels.GradientDtype] = {"grad16": "bf16", "grad32": "f32"}


@dataclass(frozen=True, slots=True)
class Update:
    """What step() decided for one parameter: the step's scalars, and where the gradient is.

    tensor: the gradient in host memory, contiguous, bf16 or fp32. field: else the record's field that holds
    it. Neither: a gradient of zeros.
    """

    scalars: kernels.AdamWScalars
    tensor: torch.Tensor | None
    field: str | None


def _piece_address(base: int, element: int, start: int, field: str) -> int:
    return base + (element - start) * FIELD_NBYTES[field]


class FetchPass(Pass):
    """Bring a unit's `hi` to the device; updates that were pending are applied on the way and written behind.

    With `resident` given, only update: `hi` is taken from the unit's storage on the CPU if `resident`, else
    read.
    """

    def __init__(
        self, unit: Unit, device: Device, tile_numel: int, *, upload: bool = True, resident: bool = False
    ) -> None:
        """Take over what is pending for `unit`."""
        super().__init__(unit.record)
        self.unit = unit
        self.pending, unit.pending = unit.pending, {}
        self._device = device
        self._tile_numel = tile_numel
        self._upload = upload
        self._resident = resident
        self.on_processed: Callable[[], None] | None = None

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Whole records tile by tile; where only `hi` moves, as much as a slot holds at once."""
        wide = self._tile_numel * (1 if self.pending else SLOT_NBYTES_PER_ELEMENT // FIELD_NBYTES["hi"])
        for start, stop in tiles(self.unit.shard.numel, wide):
            if self._upload or self._updates(start, stop):
                yield start, stop

    def _updates(self, start: int, stop: int) -> bool:
        return any(piece.index in self.pending for piece in pieces(self.unit.shard, start, stop))

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Without an update in the tile, `hi` alone."""
        if not self._updates(start, stop):
            return ("hi",), ()
        reads = [] if self._resident else ["hi"]
        reads += [name for name in ("lo", "m", "v") if self.record.written(name, start)]
        indices = {piece.index for piece in pieces(self.unit.shard, start, stop)}
        spilled = {
            update.field for index, update in self.pending.items() if index in indices and update.field
        }
        return (*reads, *sorted(spilled)), ("hi", "lo", "m", "v")

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Apply the updates, then upload."""
        if "m" in at:
            if self._resident:
                kernels.copy(2 * (stop - start), at["hi"], self.unit.flat.data_ptr() + 2 * start)
            for name in ("m", "v"):
                if not self.record.written(name, start):
                    ctypes.memset(at[name], 0, (stop - start) * FIELD_NBYTES[name])
            self._apply(start, stop, at)
        if self._upload:
            self._device.upload(self.unit.flat, start, at["hi"], stop - start)

    def _apply(self, start: int, stop: int, at: dict[str, int]) -> None:
        for piece in pieces(self.unit.shard, start, stop):
            update = self.pending.get(piece.index)
            if update is None:
                continue
            field, zeros = update.field, None
            if update.tensor is not None:
                field = GRADIENT_FIELD[update.tensor.dtype]
                gradient = update.tensor.data_ptr() + piece.within * FIELD_NBYTES[field]
            elif field is not None:
                gradient = _piece_address(at[field], piece.start, start, field)
            else:
                zeros = torch.zeros(piece.numel, dtype=torch.bfloat16)
                field, gradient = "grad16", zeros.data_ptr()
            hi, lo, m, v = (
                _piece_address(at[name], piece.start, start, name) for name in ("hi", "lo", "m", "v")
            )
            kernels.adamw(piece.numel, hi, lo, m, v, gradient, _KERNEL_DTYPE[field], update.scalars)

    def done_processing(self) -> None:
        """Let go of the gradients."""
        self.pending = {}
        if self.on_processed:
            self.on_processed()


@dataclass(slots=True)
class SpillPart:
    """One parameter's new gradient for a spill: added to what is stored, or stored instead of it."""

    tensor: torch.Tensor
    add: bool
    square_sum: float = 0.0
    finite: bool = True


class SpillPass(Pass):
    """Write gradients to the record, beside or on top of those that are there.

    parts: new gradients by parameter. carried: parameters whose stored gradient must survive. source: the
    field that holds it, None if there is none. target: the field to write; fp32 as soon as anything is added.
    """

    def __init__(
        self,
        unit: Unit,
        tile_numel: int,
        parts: dict[int, SpillPart],
        carried: set[int],
        source: str | None,
        target: str,
    ) -> None:
        """Prepare to write `target`."""
        super().__init__(unit.record)
        self._shard = unit.shard
        self._tile_numel = tile_numel
        self._parts = parts
        self._carried = carried
        self._source = source
        self._target = target
        self.on_processed: Callable[[dict[int, SpillPart]], None] | None = None

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile."""
        return tiles(self._shard.numel, self._tile_numel)

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """The stored gradients, if any count, and the new ones."""
        return ((self._source,) if self._source else ()), (self._target,)

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Write each parameter's piece: stored, new, or their fp32 sum."""
        target = at[self._target]
        if self._source is None:
            ctypes.memset(target, 0, (stop - start) * FIELD_NBYTES[self._target])
        for piece in pieces(self._shard, start, stop):
            part = self._parts.get(piece.index)
            to = _piece_address(target, piece.start, start, self._target)
            if (
                self._source
                and (piece.index in self._carried or (part and part.add))
                and self._source != self._target
            ):
                kernels.widen(
                    piece.numel, _piece_address(at[self._source], piece.start, start, self._source), to
                )
            if part is None:
                continue
            size = part.tensor.element_size()
            new = part.tensor.data_ptr() + piece.within * size
            if part.add:
                (kernels.accumulate if size == 2 else kernels.accumulate_f32)(piece.numel, to, new)
                square_sum, finite = kernels.sum_squares(piece.numel, to, "f32")
                part.square_sum += square_sum
                part.finite &= finite
            elif size == 2 and self._target == "grad32":
                kernels.widen(piece.numel, new, to)
            else:
                kernels.copy(piece.numel * size, to, new)

    def done_processing(self) -> None:
        """Let go of the tensors."""
        parts, self._parts = self._parts, {}
        if self.on_processed:
            self.on_processed(parts)


def _tiles_of(segment: Segment, numel: int, tile_numel: int) -> Iterator[tuple[int, int]]:
    """Return the whole tiles that hold any of `segment`."""
    for start, stop in tiles(numel, tile_numel):
        if start < segment.stop and segment.start < stop:
            yield start, stop


class ReadPass(Pass):
    """Copy fields of one parameter into tensors: {"hi": bf16}, {"m": fp32}, or "master" (fp32, joined from hi
    and lo).
    """

    def __init__(self, record: Record, index: int, tile_numel: int, into: dict[str, torch.Tensor]) -> None:
        """Prepare to fill the contiguous host tensors `into`, each with as many elements as the parameter."""
        super().__init__(record)
        self._index = index
        self._segment = record.shard.segments[index]
        self._tile_numel = tile_numel
        self._into = into
        self._names = tuple(name for name in into if name != "master") + (
            ("hi", "lo") if "master" in into else ()
        )

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Tiles with a part of the parameter."""
        return _tiles_of(self._segment, self.record.shard.numel, self._tile_numel)

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """What was ever written of the fields asked for; the rest counts as zero."""
        return tuple(name for name in dict.fromkeys(self._names) if self.record.written(name, start)), ()

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Copy, or join."""
        for piece in pieces(self.record.shard, start, stop):
            if piece.index != self._index:
                continue
            for name, tensor in self._into.items():
                to = tensor.data_ptr() + piece.within * tensor.element_size()
                if name == "master":
                    hi, lo = (_piece_address(at[half], piece.start, start, half) for half in ("hi", "lo"))
                    kernels.join(piece.numel, hi, lo, to)
                elif name in at:
                    kernels.copy(
                        piece.numel * tensor.element_size(),
                        to,
                        _piece_address(at[name], piece.start, start, name),
                    )
                else:
                    ctypes.memset(to, 0, piece.numel * tensor.element_size())


class WritePass(Pass):
    """Set parameters from tensors: fp32 or bf16 values of the master, or of the moments "m" and "v".

    values: by parameter and field, contiguous host tensors; the field "master" becomes hi and lo. With
    `rewrite`, bf16 masters change only the elements whose 16-bit value differs (the others keep their
    remainder).
    """

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
        self._names = tuple(name for name in ("m", "v") if name in names) + (
            ("hi", "lo") if "master" in names else ()
        )

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Tiles with a part of any of the parameters."""
        for start, stop in tiles(self.record.shard.numel, self._tile_numel):
            if any(piece.index in self._values for piece in pieces(self.record.shard, start, stop)):
                yield start, stop

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Read what is there, unless every parameter in the tile is replaced."""
        parts = list(pieces(self.record.shard, start, stop))
        if not self._rewrite and all(
            set(self._values.get(part.index, ())) >= self._fields_set() for part in parts
        ):
            return (), self._names
        return tuple(name for name in self._names if self.record.written(name, start)), self._names

    def _fields_set(self) -> set[str]:
        return {"master" if name in ("hi", "lo") else name for name in self._names}

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Split, rewrite or copy each parameter's piece."""
        reads, _ = self.fields(start, stop)
        for name in self._names:
            if name not in reads:
                ctypes.memset(at[name], 0, (stop - start) * FIELD_NBYTES[name])
        for piece in pieces(self.record.shard, start, stop):
            for name, tensor in self._values.get(piece.index, {}).items():
                new = tensor.data_ptr() + piece.within * tensor.element_size()
                if name == "master":
                    hi, lo = (_piece_address(at[half], piece.start, start, half) for half in ("hi", "lo"))
                    self._write_master(piece.numel, new, tensor.dtype, hi, lo)
                else:
                    kernels.copy(piece.numel * 4, _piece_address(at[name], piece.start, start, name), new)

    def _write_master(self, numel: int, new: int, dtype: torch.dtype, hi: int, lo: int) -> None:
        if dtype == torch.float32:
            kernels.split(numel, new, hi, lo)
        elif self._rewrite:
            kernels.rewrite(numel, new, hi, lo)
        else:
            kernels.copy(2 * numel, hi, new)
            ctypes.memset(lo, 0, 2 * numel)

    def done_processing(self) -> None:
        """Let go of the tensors."""
        self._values = {}


class MovePass(Pass):
    """Copy one field to an extent of another tier, then let the field lie there."""

    def __init__(self, record: Record, name: str, to: Extent, tile_numel: int) -> None:
        """Prepare to move the field `name`."""
        super().__init__(record)
        self._name = name
        self._to = to
        self._tile_numel = tile_numel

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile that was ever written."""
        for start, stop in tiles(self.record.shard.numel, self._tile_numel):
            if self.record.written(self._name, start):
                yield start, stop

    def fields(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Read the field; the copy to the new extent is no write of the record."""
        return (self._name,), ()

    def process(self, start: int, stop: int, at: dict[str, int]) -> None:
        """Copy to the new extent."""
        size = FIELD_NBYTES[self._name]
        nbytes = (stop - start) * size
        self._to.store.write(self._to, start * size, at[self._name], nbytes, self.record.name, None).wait()

    def done_processing(self) -> None:
        """Switch."""
        self.record.move(self._name, self._to)
