"""Fields whose tiles share blocks of the drive: a pass reads each block once, and writes it once.

[Note: packed fields]
The scales of 8-bit moments take 8 bytes per 256 elements: for a small tile far less than a block, the least
that a transfer can move. So the tiles of such a field are stored back to back, and moved by *spans*: as many
tiles as fill whole blocks (see RecordSchema.span). Passes still work tile by tile, in their slots. A span,
usually one block, has memory of its own from the read of its first tile until its last tile is done and the
span is written; a pass holds at most two spans at a time, beside its slots.

A pass may skip tiles, so a span that was ever written is read before a part of it is replaced. A span counts
as written, for all of its tiles, only once its last tile is done: until then every tile of the pass sees the
state that the first one saw.
"""

from __future__ import annotations

from collections.abc import Iterator

from infinity import kernels
from infinity.records.checksums import TileChecksums
from infinity.records.next_fields import NextFields
from infinity.records.record import Record
from infinity.storage.memory import Arena
from infinity.storage.store import DONE, AllOf, Transfer


class _Span:
    """A span in memory: zeros, if it was never written."""

    def __init__(
        self, record: Record, name: str, start: int, *, urgent: bool, to: NextFields | None = None
    ) -> None:
        """Start to read the span of a field at element `start`, if it was ever written. to: what it is
        written to, the record if None.
        """
        self._to = to or record
        self.name, self.start = name, start
        self.stop = min(start + record.span(name), record.shard.numel)
        self.changed = False
        self.reading: Transfer | None = None
        self._record = record
        self._memory = Arena(record.tile_nbytes(name, self.stop - start))
        if record.written(name, start):
            at = self._memory.address
            self.reading = record.read(name, start, self.stop, at, self._memory, urgent=urgent)

    def address(self, start: int, timeout_s: float | None = None) -> int:
        """Wait for the span, and return the address of element `start`.

        Raises: CorruptionError; the error of the read; a TimeoutError if that still runs after `timeout_s`.
        """
        if self.reading is not None:
            self.reading.wait(timeout_s)
            self.reading = None
            self._checksums(reads=(self.name,)).compare()
        return self._memory.address + self._record.schema.nbytes(self.name, start - self.start)

    def write(self) -> Transfer:
        """Start to write the whole span."""
        self._checksums(writes=(self.name,)).keep()
        return self._to.write(self.name, self.start, self.stop, self._memory.address, self._memory)

    def _checksums(self, *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> TileChecksums:
        return self._to.checksums(self.start, self.stop, {self.name: self._memory.address}, reads, writes)


class _Piece:
    """One tile's part of a span that is read; `wait` copies it to the tile's slot."""

    def __init__(self, packed: PackedSpans, span: _Span, start: int, nbytes: int, address: int) -> None:
        """Prepare to copy `nbytes`, from element `start` on, to `address`."""
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
        """When the read ended: for the span's first tile alone, so that one transfer is counted once."""
        first = self._start == self._span.start
        return self._reading.ended_s if first and self._reading is not None else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the span, for so long at most, and copy."""
        kernels.copy(self._nbytes, self._address, self._span.address(self._start, timeout_s))
        self._packed.drop_before(self._span)


class PackedSpans:
    """The spans that one pass over a record works on, tile by tile in rising order: [Note: packed fields]."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._to: NextFields | None = None
        self._spans: dict[tuple[str, int], _Span] = {}
        self._noted: list[tuple[str, int, int]] = []

    def write_to(self, fields: NextFields) -> None:
        """Write what changes to `fields` instead of the record. Before the first read."""
        self._to = fields

    def read(self, name: str, start: int, stop: int, address: int, *, urgent: bool) -> Transfer:
        """Start to read elements [start, stop), a tile, to `address`, with the rest of their span."""
        span = self._span(name, start, urgent=urgent)
        return _Piece(self, span, start, self._record.schema.nbytes(name, stop - start), address)

    def write(self, name: str, start: int, stop: int, address: int) -> Transfer:
        """Copy elements [start, stop), a tile, from `address`; start to write the spans this completes."""
        span = self._span(name, start, urgent=True)
        kernels.copy(self._record.schema.nbytes(name, stop - start), span.address(start), address)
        span.changed = True
        begun = list(self._write(name, span.stop if stop >= span.stop else span.start))
        return AllOf(begun) if begun else DONE  # else it is written with others of its span

    def note_written(self, name: str, start: int, stop: int) -> None:
        """Remember that a tile was changed in place, in host memory."""
        self._noted.append((name, start, stop))

    def settle(self) -> list[Transfer]:
        """After the last tile of the pass: start to write what is left; all tiles count as written."""
        for noted in self._noted:
            self._record.note_written(*noted)
        self._noted.clear()
        return [one for name in {name for name, _ in self._spans} for one in self._write(name)]

    def drop_before(self, reached: _Span) -> None:
        """Drop the field's unchanged spans before `reached`, which the pass has left behind."""
        for key, span in list(self._spans.items()):
            if span.name == reached.name and span.start < reached.start and not span.changed:
                del self._spans[key]

    def _span(self, name: str, start: int, *, urgent: bool) -> _Span:
        begin = start // self._record.span(name) * self._record.span(name)
        if (name, begin) not in self._spans:
            self._spans[name, begin] = _Span(self._record, name, begin, urgent=urgent, to=self._to)
        return self._spans[name, begin]

    def _write(self, name: str, until: int | None = None) -> Iterator[Transfer]:
        """Start to write a field's changed spans that end by element `until`, and drop them."""
        for key, span in list(self._spans.items()):
            if span.name == name and (until is None or span.stop <= until):
                del self._spans[key]
                if span.changed:
                    yield span.write()
