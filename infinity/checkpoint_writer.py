"""The files of a checkpoint that is being written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from infinity.engine import Engine
from infinity.inventory import KINDS, Inventory
from infinity.manifest import MASTER, PLAIN, Form, Tensor
from infinity.ranges import copied_out, parts
from infinity.streams import Sink
from infinity.tensorfile import Entry, TensorWriter, storage_full
from infinity.tensors import name_of_dtype
from infinity.unit import Unit

FILE_NBYTES = 4 << 30
"""A file of a checkpoint takes about as much, or one tensor."""


class CheckpointWriter:
    """The files of a checkpoint that is being written."""

    def __init__(self, folder: Path, inventory: Inventory, kept: Mapping[str, torch.Tensor]) -> None:
        """Create all files, so that a full disk is known before anything is written."""
        self._forms: dict[tuple[str, str], Entry] = {}
        self._sinks: dict[tuple[str, str], Sink] = {}
        self._writers: list[TensorWriter] = []
        forms: dict[tuple[str, str], Form] = {
            **{(MASTER, name): form for name, form in inventory.masters().items()},
            **{(PLAIN, name): form for name, form in inventory.plains().items()},
            **inventory.moments(set(inventory.steps)),
            **{("extra", key): (name_of_dtype(one, key), tuple(one.shape)) for key, one in kept.items()},
        }
        prefixes = {MASTER: "weights", PLAIN: "weights", "extra": "extra"}
        groups: dict[str, list[tuple[str, str]]] = {}
        for (kind, name), (dtype, shape) in forms.items():
            key = name if kind in prefixes else f"{kind}.{name}"
            self._forms[kind, name] = Entry(key, dtype, shape)
            groups.setdefault(prefixes.get(kind, "moments"), []).append((kind, name))
        there = os.statvfs(folder)
        free, needed = there.f_bavail * there.f_frsize, sum(one.nbytes for one in self._forms.values())
        if needed > free:
            raise storage_full(folder, needed, free)
        try:
            for prefix, of_group in groups.items():
                for number, together in enumerate(self._cut(of_group), 1):
                    self._open(folder / f"{prefix}-{number:05}.safetensors", together)
        except BaseException:
            self.close()
            raise

    def _cut(self, keys: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
        """Cut tensors into files."""
        together: list[tuple[str, str]] = []
        nbytes = 0
        for key in keys:
            nbytes += self._forms[key].nbytes
            if together and nbytes > FILE_NBYTES:
                yield together
                together, nbytes = [], self._forms[key].nbytes
            together.append(key)
        yield together

    def _open(self, path: Path, keys: Sequence[tuple[str, str]]) -> None:
        writer = TensorWriter(path, [self._forms[key] for key in keys], {"format": "pt"})
        self._writers.append(writer)
        for key in keys:
            self._sinks[key] = Sink(writer, self._forms[key].name)

    def write_units(self, inventory: Inventory) -> None:
        """Write masters and moments, chunk by chunk."""
        for unit, chunk in copied_out(_ranges(inventory)):
            names = inventory.names_in(unit)
            for part in parts(chunk.record, chunk.start, chunk.stop, chunk.values):
                name = names[part.index]
                kind = KINDS.get(part.field, MASTER)
                if name is not None and (kind, name) in self._sinks:
                    self.write(kind, name, part.values)

    def write(self, kind: str, name: str, values: memoryview) -> None:
        """Write the next bytes of a tensor."""
        self._sinks[kind, name].write(values)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what the manifest says of them, now that all is written."""
        for writer in self._writers:
            writer.check_whole()
        return tuple(
            Tensor(name, kind, form.dtype, form.shape, (self._sinks[kind, name].finish(0, form.numel),))
            for (kind, name), form in self._forms.items()
        )

    def files(self) -> dict[str, int]:
        """Return the bytes of each file."""
        return {writer.path.name: writer.nbytes for writer in self._writers}

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers:
            writer.close()


def _ranges(inventory: Inventory) -> Iterator[tuple[Engine, Unit, Sequence[str]]]:
    """Return the units, each with the fields of it that are saved."""
    steps = inventory.steps
    for engine, unit in inventory.units():
        stepped = any(name in steps for name in inventory.names_in(unit) if name is not None)
        yield engine, unit, ("master", *(engine.form.moments if stepped else ()))
