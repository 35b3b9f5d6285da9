"""A tensor's bytes as a stream: hashed as they are written, checked when they are read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import xxhash

from infinity.errors import CorruptionError
from infinity.planning.boxes import Box, Turns, all_of
from infinity.storage.manifest import RANGE_NBYTES, WIDTHS, Tensor, TensorPiece
from infinity.storage.safetensors_file import TensorReader, TensorWriter
from infinity.tensors import as_bytes

_KEPT = 8
"""Ranges, at most, that a source keeps: pieces that are boxes are read by turns."""


@dataclass(slots=True)
class Sink:
    """Writes one piece of a tensor to a file, in order, and hashes it by ranges."""

    writer: TensorWriter
    key: str
    written_nbytes: int = 0
    hashes: list[str] = field(default_factory=list)
    _hasher: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def write(self, values: memoryview) -> None:
        """Write the next bytes."""
        self.writer.write(self.key, self.written_nbytes, values)
        while values:
            room = RANGE_NBYTES - self.written_nbytes % RANGE_NBYTES
            now, values = values[:room], values[room:]
            self._hasher.update(now)
            self.written_nbytes += len(now)
            if self.written_nbytes % RANGE_NBYTES == 0:
                self._close_range()

    def _close_range(self) -> None:
        self.hashes.append(self._hasher.hexdigest())
        self._hasher.reset()

    def finish(self, start: int, stop: int, box: Box | None) -> TensorPiece:
        """Return a manifest's entry of the piece, elements [start, stop) of its tensor, or of a box of it."""
        if self.written_nbytes % RANGE_NBYTES:
            self._close_range()
        return TensorPiece(self.writer.path.name, self.key, start, stop, tuple(self.hashes), box)


class TurnsSource:
    """Reads the bytes of boxes of a tensor whose elements come by turns."""

    def __init__(self, tensor: Tensor, files: Mapping[str, TensorReader], first: int, turns: Turns) -> None:
        """Start at element `first` of all; see TensorSource."""
        self._turns, self._at, self._width = turns, first, WIDTHS[tensor.dtype]
        firsts = [turns.range_of(number, first, first)[0] for number in range(len(turns.boxes))]
        self._sources = [
            TensorSource(tensor, files, at, box) for at, box in zip(firsts, turns.boxes, strict=True)
        ]

    def read(self, into: memoryview) -> None:
        """Fill `into` with the next bytes. Raises: as TensorSource."""
        stop = self._at + len(into) // self._width
        for number, first, last in self._turns.cut(self._at, stop):
            nbytes = (last - first) * self._width
            self._sources[number].read(into[:nbytes])
            into = into[nbytes:]
        self._at = stop


def source_of(
    tensor: Tensor, files: Mapping[str, TensorReader], first: int, turns: Turns | None
) -> TensorSource | TurnsSource:
    """Return what reads a tensor, or what a rank has of it, from element `first` of that on."""
    if turns is None or len(turns.boxes) == 1:
        return TensorSource(tensor, files, first, None if turns is None else turns.boxes[0])
    return TurnsSource(tensor, files, first, turns)


class TensorSource:
    """Reads the bytes of a tensor, or of a box of it, in order, from whatever pieces it has."""

    def __init__(
        self, tensor: Tensor, files: Mapping[str, TensorReader], first: int = 0, box: Box | None = None
    ) -> None:
        """Start at element `first` of `box`, which is in `tensor`, whose pieces are in `files`; None: of the
        whole tensor.
        """
        self._tensor = tensor
        self._files = files
        self._width = WIDTHS[tensor.dtype]
        self._box = box or all_of(tensor.shape)
        self._at = first
        self._ranges: dict[tuple[int, int], torch.Tensor] = {}
        """Bytes that are checked and not yet returned, by piece and number of the range."""

    def read(self, into: memoryview) -> None:
        """Fill `into` with the next bytes.

        Raises: CorruptionError naming file, tensor and range.
        """
        stop = self._at + len(into) // self._width
        for box in self._box.cut(self._at, stop):
            nbytes = box.numel * self._width
            self._fill(box, _seen_as(into[:nbytes], box, self._width))
            into = into[nbytes:]
        self._at = stop

    def _fill(self, box: Box, values: torch.Tensor) -> None:
        """Fill the bytes of a box with what the pieces have of it."""
        pieces = enumerate(self._tensor.pieces)  # a stack may have thousands, of one box or a few
        for _, of_box in itertools.groupby(pieces, lambda numbered: numbered[1].box):
            number, piece = next(of_box)
            whole = piece.within(self._tensor.shape)
            common = whole.meet(box)
            if common is None:
                continue
            first, last = whole.span(common)
            for index, one in itertools.chain([(number, piece)], of_box):
                if one.stop > first and one.start < last:
                    self._fill_from(index, whole, (max(first, one.start), min(last, one.stop)), box, values)

    def _fill_from(
        self, index: int, whole: Box, span: tuple[int, int], box: Box, values: torch.Tensor
    ) -> None:
        """Fill the bytes of a box with what a piece has of it, in elements `span` of the box `whole`."""
        piece, range_numel = self._tensor.pieces[index], RANGE_NBYTES // self._width
        at, stop = span
        while at < stop:
            number = (at - piece.start) // range_numel
            begin = piece.start + number * range_numel
            end = min(begin + range_numel, piece.stop)
            there = self._range(index, number)
            for one in whole.cut(at, min(end, stop)):
                if (both := one.meet(box)) is not None:
                    first = (whole.span(one)[0] - begin) * self._width
                    seen = _seen_as(there[first : first + one.numel * self._width], one, self._width)
                    values[_slices(both, box)] = seen[_slices(both, one)]
            if stop >= end:  # what follows lies behind it
                self._ranges.pop((index, number), None)
            at = end

    def _range(self, index: int, number: int) -> torch.Tensor:
        """Return the bytes of a range of a piece, checked."""
        kept = self._ranges.get((index, number))
        if kept is None:
            while len(self._ranges) >= _KEPT:
                del self._ranges[next(iter(self._ranges))]
            kept = self._ranges[index, number] = self._read_range(self._tensor.pieces[index], number)
        return kept

    def _read_range(self, piece: TensorPiece, number: int) -> torch.Tensor:
        first = number * RANGE_NBYTES
        nbytes = min(RANGE_NBYTES, (piece.stop - piece.start) * self._width - first)
        values = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        seen = as_bytes(values)
        reader = self._files[piece.file]
        reader.read(piece.key, first, seen)
        found = xxhash.xxh3_64_hexdigest(seen)
        if found != piece.hashes[number]:
            raise CorruptionError(
                f"{reader.path}: bytes {first} to {first + nbytes} of {piece.key} ({self._tensor.kind} of "
                f"{self._tensor.name}) are not those that were saved (xxh3 {found}, expected "
                f"{piece.hashes[number]}). Likely cause: the disk or a copy damaged them. The model is "
                "partly loaded: load another checkpoint before going on."
            )
        return values


def _seen_as(values: memoryview | torch.Tensor, box: Box, width: int) -> torch.Tensor:
    """Return bytes as a tensor in a box's shape, with the bytes of an element as its last dimension."""
    flat = values if isinstance(values, torch.Tensor) else torch.frombuffer(values, dtype=torch.uint8)
    return flat.view(*box.shape, width)


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return where `inner` lies in a tensor that is `outer`."""
    return tuple(
        slice(at - begin, at - begin + size)
        for at, begin, size in zip(inner.first, outer.first, inner.shape, strict=True)
    )
