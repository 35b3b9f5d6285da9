"""The fields of all units as columns of numbers, so that those of many slices are ranked at once; see
[Note: many slices] in planning/densest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_

import numpy as np

from infinity.planning.densest import FieldColumns, Integers, numbered
from infinity.planning.frequency import Frequencies
from infinity.planning.placement import Key
from infinity.records.record import Record
from infinity.units.unit import Unit


class AllFields:
    """Every field of the units of one engine, a row each: unit after unit."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Of units whose records may get and lose fields later."""
        self._units = units
        self._seen: list[tuple[str, ...]] = []
        """The fields of each unit that the columns are of."""
        self.keys: list[Key] = []
        """Of each row."""
        self.nbytes: Integers = np.zeros(0, np.int64)
        """Of each row, as `look` found them."""
        self._row: dict[Key, int] = {}
        self._unit = self._field = self.nbytes
        self._is_hi = self._derived = np.zeros(0, np.bool_)
        self._in_bits: list[int] = []
        """Rows of weights that are packed in a checkpoint's files, or were."""

    def look(self) -> None:
        """See which fields there are now."""
        seen = [unit.record.fields for unit in self._units]
        if seen != self._seen:
            self._read()
        elif not all(map(is_, seen, self._seen)):  # those that have moved, or came from a checkpoint, anew
            for unit, fields, before in zip(self._units, seen, self._seen, strict=True):
                if fields is not before:
                    for name in fields:
                        self.nbytes[self._row[unit.index, name]] = unit.record.field_nbytes(name)
        self._seen = seen

    def _read(self) -> None:
        fields = [(unit, name) for unit in self._units for name in unit.record.fields]
        self.keys = [(unit.index, name) for unit, name in fields]
        self._row = {key: row for row, key in enumerate(self.keys)}
        self.nbytes = np.array([unit.record.field_nbytes(name) for unit, name in fields], np.int64)
        self._unit = np.array([unit.index for unit, _ in fields], np.int64)
        self._field, names = numbered([name for _, name in fields])
        self._is_hi = np.array([name == "hi" for name in names], np.bool_)[self._field]
        self._derived = np.array([name in unit.record.schema.derived for unit, name in fields], np.bool_)
        self._in_bits = [
            row
            for row, (unit, name) in enumerate(fields)
            if name == "hi" and unit.record.packed_nbytes is not None
        ]

    def columns(
        self,
        expected: Frequencies,
        placed: Iterable[Key],
        packed_nbytes: Callable[[Record, str], int | None] | None,
    ) -> FieldColumns:
        """Return them with what a step, or a round, is expected to read and write of them.

        packed_nbytes: what a field takes in host memory where it stays packed there; None where none does.
        """
        fetches, updates = expected.fetches_of_all()[self._unit], expected.updates_of_all()[self._unit]
        reads = np.where(self._is_hi, fetches - np.where(self._derived, updates, 0.0), updates)
        there = np.zeros(len(self.keys), np.bool_)
        there[[self._row[key] for key in placed]] = True
        nbytes = self.nbytes
        if packed_nbytes is not None and self._in_bits:
            nbytes = nbytes.copy()
            for row in self._in_bits:
                unit, name = self.keys[row]
                packed = packed_nbytes(self._units[unit].record, name)
                nbytes[row] = nbytes[row] if packed is None else packed
        return FieldColumns(self._unit, self._field, nbytes, reads + updates, there)
