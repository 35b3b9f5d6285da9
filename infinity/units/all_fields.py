"""The fields of all units as columns of numbers, so that those of many slices are ranked at once; see
[Note: many slices] in planning/densest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from infinity.planning.densest import FieldColumns, Integers, Rest, numbered
from infinity.planning.frequency import Frequencies
from infinity.planning.placement import Key
from infinity.records.record import Record
from infinity.units.unit import Unit

Sizes = tuple[tuple[str, int], ...]
"""Fields of a record, with the bytes of each."""

_LIKELY, _LEAST_LIKELY = 4, 64
"""Times the units that have room, and how many at least, that are looked at before all are."""


class AllFields:
    """Every field of the units of one engine, a row each: unit after unit."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Of units whose records may get and lose fields later."""
        self._units = units
        self._changed: set[int] = set()
        """Places of units whose fields may be others than the columns are of, or take other bytes."""
        self._seen: list[tuple[str, ...]] | None = None
        """The fields of each unit that the columns are of; None before the first look."""
        self.keys: list[Key] = []
        """Of each row."""
        self.nbytes: Integers = np.zeros(0, np.int64)
        """Of each row, as `look` found them."""
        self.unit_nbytes: Integers = self.nbytes
        """Of each unit."""
        self._sizes: list[Sizes] = []
        self._row: dict[Key, int] = {}
        self._unit = self._field = self.nbytes
        self._is_hi = self._derived = np.zeros(0, np.bool_)
        self._in_bits: list[int] = []
        """Rows of weights that are packed in a checkpoint's files, or were."""
        for place, unit in enumerate(units):
            unit.record.tell_fields(self._changed, place)

    def look(self) -> None:
        """See which fields there are now, of those records that have told of others since the last time."""
        if self._seen is None:
            self._read()
        while self._changed and self._seen is not None:
            place = self._changed.pop()
            unit, before = self._units[place], self._seen[place]
            if unit.record.fields != before:
                self._read()
                continue
            sizes = self._sizes[place] = _sizes(unit.record)
            for name, nbytes in sizes:  # it came from a checkpoint
                self.nbytes[self._row[unit.index, name]] = nbytes
            self.unit_nbytes[unit.index] = sum(nbytes for _, nbytes in sizes)

    def _read(self) -> None:
        self._changed.clear()  # first: others may come meanwhile
        self._seen = [unit.record.fields for unit in self._units]
        alike: dict[Sizes, Sizes] = {}  # of many slices few differ
        self._sizes = [alike.setdefault(one, one) for one in (_sizes(unit.record) for unit in self._units)]
        fields = [(unit, name) for unit, names in zip(self._units, self._seen, strict=True) for name in names]
        self.keys = [(unit.index, name) for unit, name in fields]
        self._row = {key: row for row, key in enumerate(self.keys)}
        self.nbytes = np.array([nbytes for sizes in self._sizes for _, nbytes in sizes], np.int64)
        self._unit = np.array([unit.index for unit, _ in fields], np.int64)
        self.unit_nbytes = np.zeros(len(self._units), np.int64)
        np.add.at(self.unit_nbytes, self._unit, self.nbytes)
        self._field, names = numbered([name for _, name in fields])
        self._is_hi = np.array([name == "hi" for name in names], np.bool_)[self._field]
        self._derived = np.array([name in unit.record.schema.derived for unit, name in fields], np.bool_)
        self._in_bits = [
            row
            for row, (unit, name) in enumerate(fields)
            if name == "hi" and unit.record.packed_nbytes is not None
        ]

    def of_unit(self, index: int) -> Sizes:
        """Return the fields of a unit, as `look` found them."""
        return self._sizes[index]

    @property
    def any_packed(self) -> bool:
        """Whether any weights are packed in a checkpoint's files, or were."""
        return bool(self._in_bits)

    def columns(
        self,
        expected: Frequencies,
        placed: Iterable[Key],
        packed_nbytes: Callable[[Record, str], int | None] | None = None,
    ) -> FieldColumns:
        """Return them with what a step, or a round, is expected to read and write of them.

        packed_nbytes: what a field takes in host memory where it stays packed there; None where none does.
        """
        nbytes = self.nbytes
        if packed_nbytes is not None and self._in_bits:
            nbytes = nbytes.copy()
            for row in self._in_bits:
                unit, name = self.keys[row]
                packed = packed_nbytes(self._units[unit].record, name)
                nbytes[row] = nbytes[row] if packed is None else packed
        return self._columns(np.arange(len(self.keys)), nbytes, expected, placed)

    def likely(
        self, expected: Frequencies, placed: Mapping[Key, object], room_nbytes: int
    ) -> tuple[list[Key], FieldColumns, Rest] | None:
        """Return the fields of the units that are used and updated most, several times as many as have room,
        and all fields that are placed; and bounds on the fields left out. None where the model has too few
        units for that to leave any out.
        """
        count = len(self._units)
        some = _LEAST_LIKELY + _LIKELY * count * room_nbytes // max(1, int(self.nbytes.sum()))
        if 2 * some > count:
            return None
        updates = expected.updates_of_all()
        most = np.maximum(expected.fetches_of_all(), updates) + updates  # no field of a unit is denser
        rest = float(np.partition(most, count - some)[count - some])
        looked_at = most > rest
        looked_at[[unit for unit, _ in placed]] = True
        rows = np.flatnonzero(looked_at[self._unit])
        columns = self._columns(rows, self.nbytes[rows], expected, placed)
        return [self.keys[row] for row in rows.tolist()], columns, Rest(rest, int(self.nbytes.min()))

    def _columns(
        self, rows: Integers, nbytes: Integers, expected: Frequencies, placed: Iterable[Key]
    ) -> FieldColumns:
        units = self._unit[rows]
        fetches, updates = expected.fetches_of_all()[units], expected.updates_of_all()[units]
        reads = np.where(self._is_hi[rows], fetches - np.where(self._derived[rows], updates, 0.0), updates)
        there = np.zeros(len(self.keys), np.bool_)
        there[[self._row[key] for key in placed]] = True
        return FieldColumns(units, self._field[rows], nbytes, reads + updates, there[rows])


def _sizes(record: Record) -> Sizes:
    return tuple((name, record.field_nbytes(name)) for name in record.fields)
