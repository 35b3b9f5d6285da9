"""A commit: the description of one committed step, as bytes and back. Pure: no torch, no I/O.

[Note: two slots]
A commit overwrites the one before the last, after all data that it names is on disk; so at any moment at
least one of the two slots is whole. A slot consists of a header with lengths and a hash of everything, of
JSON, and of raw bytes. One that does not match its hash was cut short by a crash, and is ignored. Slots
alternate by sequence number, so the newest commit is found without further data. Nothing in a slot is ever
executed.

[Note: contents of a commit]
For each field of each record: the places of its two sides, which side is live in which bytes (see
generations), and the checksum of each tile (see kernels), 8 bytes for up to 1 Mi elements. Besides: step
counts of parameters, options of param groups, states of generators and of tracked objects, and the model's
buffers.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from infinity.storage.manifest import WIDTHS, CheckpointError, readable

VERSION = 2
_MAGIC = b"infinity commit\n"
_HEADER = struct.Struct("<16sIIQQQ16s")  # magic, version, 0, sequence, bytes of JSON, bytes behind, xxh3_128
_MOST_NBYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class FieldAt:
    """One field of a record."""

    name: str
    nbytes: int
    """Bytes of each side."""
    sides: tuple[Any, ...]
    """The places of the two sides, as their store describes them; None for one without room yet."""
    runs: tuple[tuple[int, int], ...]
    """(stop, side): the live side of the bytes up to `stop`."""
    hashes: bytes
    """The checksum of each span of tiles, little-endian; 0 for one that was never written."""

    @property
    def in_files(self) -> Mapping[str, Any] | None:
        """The ranges of a checkpoint's files that it is, as CheckpointStore describes them; None for a field
        on NVMe.
        """
        place = self.sides[0]
        return place if isinstance(place, dict) else None


@dataclass(frozen=True, slots=True)
class RecordAt:
    """One record: a unit's name, its parameters by (name, shape), and its fields."""

    name: str
    segments: tuple[tuple[str, tuple[int, ...]], ...]
    fields: tuple[FieldAt, ...]


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor outside the records, by value."""

    dtype: str
    shape: tuple[int, ...]
    values: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """One rank's description of a committed step; see [Note: contents of a commit]."""

    run: str
    """The run's id, which is part of its files' names."""
    sequence: int
    """The number of the commit; its parity selects the slot."""
    step: int
    """The number of optimizer steps done."""
    tile_numel: int
    state_dtype: str
    paths: int
    """The number of folders that the records are striped over."""
    records: tuple[RecordAt, ...]
    said: Mapping[str, Any] = field(default_factory=dict)
    """Everything but tensors, in the form of manifest.encode."""
    tensors: Mapping[str, PlainTensor] = field(default_factory=dict)
    rank: int = 0
    """The rank, of `ranks`, that has these records."""
    ranks: int = 1

    def to_bytes(self) -> bytes:
        """Return the bytes of the commit's slot."""
        body = {
            "run": self.run,
            "step": self.step,
            "tile_numel": self.tile_numel,
            "state_dtype": self.state_dtype,
            "paths": self.paths,
            "rank": self.rank,
            "ranks": self.ranks,
            "records": [
                [
                    one.name,
                    one.segments,
                    [[at.name, at.nbytes, at.sides, at.runs, len(at.hashes)] for at in one.fields],
                ]
                for one in self.records
            ],
            "said": self.said,
            "tensors": [[key, one.dtype, one.shape, len(one.values)] for key, one in self.tensors.items()],
        }
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        behind = [at.hashes for one in self.records for at in one.fields]
        behind += [one.values for one in self.tensors.values()]
        nbytes = sum(map(len, behind))
        hashed = xxhash.xxh3_128(_HEADER.pack(_MAGIC, VERSION, 0, self.sequence, len(text), nbytes, b""))
        for part in (text, *behind):
            hashed.update(part)
        header = _HEADER.pack(_MAGIC, VERSION, 0, self.sequence, len(text), nbytes, hashed.digest())
        return b"".join((header, text, *behind))


def read_slot(data: bytes, what: str) -> Commit | None:
    """Return the commit in a slot's bytes; None if there is no whole one. what: the slot, for errors.

    Raises: CheckpointError for a whole commit that this version cannot read.
    """
    if len(data) < _HEADER.size:
        return None
    magic, version, zero, sequence, text_nbytes, nbytes, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC or text_nbytes + nbytes > min(len(data) - _HEADER.size, _MOST_NBYTES):
        return None
    whole = memoryview(data)[_HEADER.size : _HEADER.size + text_nbytes + nbytes]
    hashed = xxhash.xxh3_128(_HEADER.pack(magic, version, zero, sequence, text_nbytes, nbytes, b""))
    hashed.update(whole)
    if hashed.digest() != digest:
        return None
    if version != VERSION:
        raise CheckpointError(f"{what}: a commit of version {version}; this Infinity reads {VERSION}")
    with readable(what):
        return _commit(sequence, json.loads(bytes(whole[:text_nbytes])), whole[text_nbytes:])


def _commit(sequence: int, body: Mapping[str, Any], behind: memoryview) -> Commit:
    at = 0

    def take(nbytes: int) -> bytes:
        nonlocal at
        if type(nbytes) is not int or not 0 <= nbytes <= len(behind) - at:
            raise ValueError(f"{nbytes} B at {at} of {len(behind)}")
        at += nbytes
        return bytes(behind[at - nbytes : at])

    records = tuple(
        RecordAt(
            str(name),
            tuple((str(one), tuple(map(_count, shape))) for one, shape in segments),
            tuple(
                FieldAt(str(of), _count(nbytes), (one, other), _runs(runs, nbytes), take(hashed))
                for of, nbytes, (one, other), runs, hashed in fields
            ),
        )
        for name, segments, fields in body["records"]
    )
    tensors = {}
    for key, dtype, shape, nbytes in body["tensors"]:
        if dtype not in WIDTHS:
            raise ValueError(f"{key}: {dtype} is not a known dtype")
        tensors[str(key)] = PlainTensor(dtype, tuple(map(_count, shape)), take(nbytes))
    counts = {name: _count(body[name]) for name in ("step", "tile_numel", "paths")}
    counts |= {name: _count(body.get(name, alone)) for name, alone in (("rank", 0), ("ranks", 1))}
    run, state_dtype = str(body["run"]), str(body["state_dtype"])
    if not run.isalnum() or not isinstance(body["said"], dict):
        raise ValueError(f"{run!r} is not the id of a run")
    return Commit(
        run, sequence, state_dtype=state_dtype, records=records, said=body["said"], tensors=tensors, **counts
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value


def _runs(runs: Any, nbytes: int) -> tuple[tuple[int, int], ...]:
    """Return runs, checked to cover `nbytes` in rising order."""
    found = tuple((_count(stop), _count(side)) for stop, side in runs)
    stops = [stop for stop, _ in found]
    whole = stops == sorted(set(stops)) and stops[-1:] == [nbytes]
    if not whole or not {side for _, side in found} <= {0, 1}:
        raise ValueError(f"{runs!r} do not cover {nbytes} B")
    return found


def hashes_of(data: bytes, count: int, what: str) -> array[int]:
    """Return the `count` hashes in `data`. what: the field, for errors.

    Raises: CheckpointError for another number of them.
    """
    if len(data) != 8 * count:
        raise CheckpointError(f"{what}: {len(data) // 8} hashes in the commit, expected {count}")
    return array("Q", data)
