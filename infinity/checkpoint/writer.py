"""The files of a checkpoint that one rank writes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from infinity.checkpoint.hashed_stream import Sink
from infinity.checkpoint.inventory import Inventory
from infinity.checkpoint.kinds import KINDS
from infinity.checkpoint.ranges import copied_out, parts
from infinity.engine.engine import Engine
from infinity.planning.boxes import Turns
from infinity.storage.manifest import MASTER, PLAIN, WIDTHS, TensorPiece, TensorSpec
from infinity.storage.safetensors_file import TensorEntry, TensorWriter, split_by_size, storage_full
from infinity.tensors import as_bytes, local, name_of_dtype
from infinity.units.unit import Unit

FILE_NBYTES = 4 << 30
"""The most bytes of tensors in one file, unless it holds a single larger one."""

_PREFIXES = {MASTER: "weights", PLAIN: "weights", "extra": "extra"}
"""Prefixes of files by kind of tensor; all other kinds are moments."""


class CheckpointWriter:
    """The files of a checkpoint that one rank writes."""

    def __init__(self, folder: Path, inventory: Inventory, kept: Mapping[str, torch.Tensor]) -> None:
        """Create and allocate all files of this rank, so that a full disk is noticed first.

        kept: tensors of this rank alone. Buffers and ordinary parameters, which all ranks have, are rank 0's.
        """
        self._rank, self._ranks = inventory.ranks.rank, inventory.ranks.size
        self._turns = inventory.turns
        self._specs: dict[tuple[str, str], TensorSpec] = {
            **{(MASTER, name): spec for name, spec in inventory.masters().items()},
            **{(PLAIN, name): spec for name, spec in inventory.plains().items()},
            **inventory.moments(set(inventory.steps)),
            **{("extra", key): (name_of_dtype(one, key), tuple(one.shape)) for key, one in kept.items()},
        }
        self._held = inventory.held()
        self._sinks: dict[tuple[str, str], dict[int, Sink]] = {}
        """By the number of the box, of those that this rank has of a tensor."""
        self._at: dict[tuple[str, str], int] = {}
        """The element, of those, that is written next, where they are in several boxes."""
        self._writers: list[TensorWriter] = []
        groups: dict[str, dict[TensorEntry, tuple[str, str, int]]] = {}
        for kind, name in self._specs:
            for number in range(self._boxes(kind, name)):
                start, stop = self._range(kind, name, number)
                if start < stop or (self._rank == 0 and not self._numel(kind, name)):
                    group = groups.setdefault(_PREFIXES.get(kind, "moments"), {})
                    group[self._entry(kind, name, number)] = kind, name, number
        there = os.statvfs(folder)
        free = there.f_bavail * there.f_frsize
        needed = sum(entry.nbytes for group in groups.values() for entry in group)
        if needed > free:
            raise storage_full(folder, needed, free)
        try:
            rank = f"rank{self._rank:05}-" if self._ranks > 1 else ""
            for prefix, group in groups.items():
                for number, entries in enumerate(split_by_size(group, FILE_NBYTES), 1):
                    path = folder / f"{prefix}-{rank}{number:05}.safetensors"
                    self._writers.append(TensorWriter(path, entries, {"format": "pt"}))
                    for entry in entries:
                        kind, name, box = group[entry]
                        sink = Sink(self._writers[-1], entry.name)
                        self._sinks.setdefault((kind, name), {})[box] = sink
        except BaseException:
            self.close()
            raise

    def _of(self, kind: str, name: str) -> Turns | None:
        """Return which elements this rank, and those that it shares them with, have of a tensor; None for
        all.
        """
        return self._turns(name) if kind != "extra" else None

    def _boxes(self, kind: str, name: str) -> int:
        turns = self._of(kind, name)
        return 1 if turns is None else len(turns.boxes)

    def _numel(self, kind: str, name: str) -> int:
        """Return how many elements these have of a tensor, in each box."""
        turns = self._of(kind, name)
        return math.prod(self._specs[kind, name][1]) if turns is None else turns.boxes[0].numel

    def _range(self, kind: str, name: str, number: int) -> tuple[int, int]:
        """Return the elements [start, stop) of a tensor, or of a box of it, that this rank writes."""
        if kind == "extra":
            return 0, self._numel(kind, name)
        turns, (start, stop) = self._of(kind, name), self._held.get((kind, name), (0, 0))
        return (start, stop) if turns is None else turns.range_of(number, start, stop)

    def _entry(self, kind: str, name: str, number: int) -> TensorEntry:
        """Return the file's entry of this rank's piece of a tensor; a whole tensor keeps its name, and a
        whole box its shape.
        """
        dtype, shape = self._specs[kind, name]
        start, stop = self._range(kind, name, number)
        key = name if kind in _PREFIXES else f"{kind}.{name}"
        if (turns := self._of(kind, name)) is not None:
            box = turns.boxes[number]
            bounds = (f"{at}:{at + size}" for at, size in zip(box.first, box.shape, strict=True))
            key, shape = f"{key}[{','.join(bounds)}]", box.shape
        if stop - start == self._numel(kind, name):
            return TensorEntry(key, dtype, shape)
        return TensorEntry(f"{key}[{start}:{stop}]", dtype, (stop - start,))

    def _write(self, kind: str, name: str, values: memoryview) -> None:
        """Write the next elements of a tensor that this rank has."""
        key, turns = (kind, name), self._of(kind, name)
        if turns is None or len(turns.boxes) == 1:
            self._sinks[key][0].write(values)
            return
        at, width = self._at.get(key, self._held[key][0]), WIDTHS[self._specs[key][0]]
        self._at[key] = at + len(values) // width
        for number, first, last in turns.cut(at, self._at[key]):
            nbytes = (last - first) * width
            self._sinks[key][number].write(values[:nbytes])
            values = values[nbytes:]

    def write_units(self, inventory: Inventory) -> None:
        """Write masters and moments, range by range."""
        for unit, chunk in copied_out(_ranges(inventory)):
            names = inventory.names_in(unit)
            for part in parts(chunk.record, chunk.start, chunk.stop, chunk.values):
                name = names[part.index]
                kind = KINDS.get(part.field, MASTER)
                if name is not None and (kind, name) in self._sinks:
                    self._write(kind, name, part.values)

    def write_plain(self, tensors: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors in ordinary memory that belong to this rank."""
        for kind, of_kind in ((PLAIN, tensors), ("extra", kept)):
            for name, tensor in of_kind.items():
                if (kind, name) in self._sinks:
                    self._write(kind, name, as_bytes(local(tensor)))

    def pieces(self) -> dict[tuple[str, str], tuple[TensorSpec, tuple[TensorPiece, ...]]]:
        """Return every tensor's spec, and this rank's pieces of it; everything has to be written."""
        for writer in self._writers:
            writer.check_whole()
        return {key: (spec, tuple(self._pieces(*key))) for key, spec in self._specs.items()}

    def _pieces(self, kind: str, name: str) -> Iterator[TensorPiece]:
        turns = self._of(kind, name)
        for number, sink in self._sinks.get((kind, name), {}).items():
            box = None if turns is None else turns.boxes[number]
            yield sink.finish(*self._range(kind, name, number), box)

    def files(self) -> dict[str, int]:
        """Return the size of each file in bytes."""
        return {writer.path.name: writer.nbytes for writer in self._writers}

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers:
            writer.close()


def _ranges(inventory: Inventory) -> Iterator[tuple[Engine, Unit, Sequence[str]]]:
    """Yield the units, each with its fields that are saved."""
    steps = inventory.steps
    for engine, unit in inventory.units():
        stepped = any(name in steps for name in inventory.names_in(unit) if name is not None)
        yield engine, unit, ("master", *(inventory.fields_in(unit) if stepped else ()))
