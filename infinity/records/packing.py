"""Fields of which several tiles share a block of the disk: a pass reads each block once, and writes it once.

[Note: packed fields]
The scales of 8-bit moments take 8 bytes for 256 elements: of a small tile far less than a block, which is the
least that a transfer can move. So the tiles of such a field lie one behind the other, and a *span* of them,
as many as fill whole blocks, is moved at once (see Format.span). Passes work tile by tile all the same, in
their slots. Meanwhile the span waits in memory of its own, a block as a rule, from the read of its first tile
on until its last tile was worked on and it is written: of two spans at a time in a pass, beside the slots.

A pass may leave tiles out. So a span that was ever written is read before a part of it is written. And a span
counts as written, for all of its tiles, from the end of its last one on: until then each tile of a pass finds
it as the first one did.
"""

from __future__ import annotations

from collections.abc import Iterator

from infinity import kernels
from infinity.records.checksums import TileChecksums
from infinity.records.record import Record
from infinity.storage.memory import Arena
from infinity.storage.store import DONE, AllOf, Transfer


class _Span:
    """A span in memory; zero as far as it was never written."""

    def __init__(self, record: Record, name: str, start: int, *, urgent: bool) -> None:
        """Begin to read the span of a field from element `start` on, if it was ever written."""
        self.name, self.start = name, start
        self.stop = min(start + record.span(name), record.shard.numel)
        self.changed = False
        self.reading: Transfer | None = None
        self._record = record
        self._memory = Arena(record.tile_nbytes(name, self.stop - start))
        if record.written(name, start):
            at = self._memory.address
            self.reading = record.read(name, start, self.stop, at, self._memory, urgent=urgent)

    def address(self, start: int) -> int:
        """Return the address of element `start`, when the span is there.

        Raises: CorruptionError; what the disk says.
        """
        if self.reading is not None:
            self.reading.wait()
            self.reading = None
            self._sums(reads=(self.name,)).compare()
        return self._memory.address + self._record.form.nbytes(self.name, start - self.start)

    def write(self) -> Transfer:
        """Begin to write all of it."""
        self._sums(writes=(self.name,)).keep()
        return self._record.write(self.name, self.start, self.stop, self._memory.address, self._memory)

    def _sums(self, *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> TileChecksums:
        return self._record.sums(self.start, self.stop, {self.name: self._memory.address}, reads, writes)


class _Piece:
    """One tile's part of a span that is read: it is where it belongs when it was waited for."""

    def __init__(self, packed: PackedSpans, span: _Span, start: int, nbytes: int, address: int) -> None:
        """Prepare to copy `nbytes` from element `start` on to `address`."""
        self._packed, self._span, self._start = packed, span, start
        self._nbytes, self._address = nbytes, address
        self._reading = span.reading

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._reading is None or self._reading.done

    @property
    def began_s(self) -> float:
        """When the read of the span began."""
        return self._reading.began_s if self._reading is not None else 0.0

    @property
    def ended_s(self) -> float | None:
        """When that was over: of the span's first tile alone, since it is one transfer."""
        first = self._start == self._span.start
        return self._reading.ended_s if first and self._reading is not None else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the span, and copy."""
        kernels.copy(self._nbytes, self._address, self._span.address(self._start))
        self._packed.let_go(self._span)


class PackedSpans:
    """The spans that one pass over a record works on, tile after tile in rising order; see the Note above."""

    def __init__(self, record: Record) -> None:
        """Begin with none."""
        self._record = record
        self._spans: dict[tuple[str, int], _Span] = {}
        self._noted: list[tuple[str, int, int]] = []

    def read(self, name: str, start: int, stop: int, address: int, *, urgent: bool) -> Transfer:
        """Begin to bring elements [start, stop), a tile, to `address`: with what else is in their span."""
        span = self._span(name, start, urgent=urgent)
        return _Piece(self, span, start, self._record.form.nbytes(name, stop - start), address)

    def write(self, name: str, start: int, stop: int, address: int) -> Transfer:
        """Take elements [start, stop), a tile, from `address`; begin to write what that completes."""
        span = self._span(name, start, urgent=True)
        kernels.copy(self._record.form.nbytes(name, stop - start), span.address(start), address)
        span.changed = True
        begun = list(self._write(name, span.stop if stop >= span.stop else span.start))
        return AllOf(begun) if begun else DONE  # else it is written with others of its span

    def note_written(self, name: str, start: int, stop: int) -> None:
        """Remember that a tile was written where it lies."""
        self._noted.append((name, start, stop))

    def settle(self) -> list[Transfer]:
        """The pass was at its last tile: begin to write what is left, and let all count as written."""
        for noted in self._noted:
            self._record.note_written(*noted)
        self._noted.clear()
        return [one for name in {name for name, _ in self._spans} for one in self._write(name)]

    def let_go(self, reached: _Span) -> None:
        """A tile of a span is worked on: earlier ones that nothing has changed are needed no more."""
        for key, span in list(self._spans.items()):
            if span.name == reached.name and span.start < reached.start and not span.changed:
                del self._spans[key]

    def _span(self, name: str, start: int, *, urgent: bool) -> _Span:
        begin = start // self._record.span(name) * self._record.span(name)
        if (name, begin) not in self._spans:
            self._spans[name, begin] = _Span(self._record, name, begin, urgent=urgent)
        return self._spans[name, begin]

    def _write(self, name: str, until: int | None = None) -> Iterator[Transfer]:
        """Begin to write the changed spans of a field that end by element `until`; forget them."""
        for key, span in list(self._spans.items()):
            if span.name == name and (until is None or span.stop <= until):
                del self._spans[key]
                if span.changed:
                    yield span.write()
