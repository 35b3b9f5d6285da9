"""A tensor's bytes as a stream: hashed as they are written, checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import xxhash

from infinity.errors import CorruptionError
from infinity.storage.manifest import RANGE_NBYTES, WIDTHS, Tensor, TensorPiece
from infinity.storage.safetensors_file import TensorReader, TensorWriter


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

    def finish(self, start: int, stop: int) -> TensorPiece:
        """Return the manifest's entry of the piece, elements [start, stop) of its tensor."""
        if self.written_nbytes % RANGE_NBYTES:
            self._close_range()
        return TensorPiece(self.writer.path.name, self.key, start, stop, tuple(self.hashes))


class TensorSource:
    """Reads a tensor's bytes in order, across its pieces."""

    def __init__(self, tensor: Tensor, files: Mapping[str, TensorReader], first: int = 0) -> None:
        """Start at element `first` of `tensor`, whose pieces are in `files`."""
        self._tensor = tensor
        self._files = files
        self._width = WIDTHS[tensor.dtype]
        self._at = first * self._width
        self._range = memoryview(b"")
        """Bytes that are checked and not yet returned."""

    def read(self, into: memoryview) -> None:
        """Fill `into` with the next bytes.

        Raises: CorruptionError naming file, tensor and range.
        """
        while into:
            if not self._range:
                self._range = self._next_range()
            nbytes = min(len(into), len(self._range))
            into[:nbytes] = self._range[:nbytes]
            into, self._range = into[nbytes:], self._range[nbytes:]
            self._at += nbytes

    def _next_range(self) -> memoryview:
        piece = next(piece for piece in self._tensor.pieces if self._at < piece.stop * self._width)
        number, within = divmod(self._at - piece.start * self._width, RANGE_NBYTES)
        first = number * RANGE_NBYTES
        nbytes = min(RANGE_NBYTES, (piece.stop - piece.start) * self._width - first)
        values = memoryview(bytearray(nbytes))
        reader = self._files[piece.file]
        reader.read(piece.key, first, values)
        found = xxhash.xxh3_64_hexdigest(values)
        if found != piece.hashes[number]:
            raise CorruptionError(
                f"{reader.path}: bytes {first} to {first + nbytes} of {piece.key} ({self._tensor.kind} of "
                f"{self._tensor.name}) are not those that were saved (xxh3 {found}, expected "
                f"{piece.hashes[number]}). Likely cause: the disk or a copy damaged them. The model is "
                "partly loaded: load another checkpoint before going on."
            )
        return values[within:]
