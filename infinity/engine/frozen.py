"""Frozen weights in fewer bits, made once, when Init ends: Config(frozen_dtype="int8" or "nf4").

[Note: made once]
The weights of linear layers and of experts are read, stretch by stretch, from wherever they lie, quantised,
and written to one new file in the folder on NVMe; then their records are ranges of that file, as those of
packed checkpoints are of theirs. The file has no name any more once it is open: it goes with the process,
whatever ends it. The user's folder is only read.

What is made, and how far from the weight it is at most:
- "int8": a scale for each row, its largest magnitude; a code is the nearest of 255 multiples of 1/127 of
  that: 1/254 of the row's largest magnitude.
- "nf4": 64 consecutive elements share a scale, their largest magnitude; a code is the nearest of 16 values
  (Dettmers et al., QLoRA, appendix E): 0.152 of that scale. Scales are in 8 bits, 256 of them with a scale of
  their own: the nearest of 255 multiples of 1/127 of the largest distance from the mean of all.
"""

from __future__ import annotations

import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from infinity.engine.engine import Engine
from infinity.errors import ConfigError, UnsupportedError
from infinity.planning.layout import Segment
from infinity.records.record import Record
from infinity.sizes import BLOCK, format_size, round_up
from infinity.storage.packed import Blocks4, FileRange, NestedScales, Packed, Rows8
from infinity.storage.safetensors_file import storage_full
from infinity.tensors import as_bytes
from infinity.tiling import ExpertTile

logger = logging.getLogger("infinity")

_STRETCH_NUMEL = 1 << 20
_BLOCK, _OUTER = 64, 256
_LEAST_NUMEL = 4096
_ALIGNED = 64

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_TABLE_4, _TABLE_8 = array("f", _NF4), array("f", [max(code - 128, -127) / 127 for code in range(256)])

Read = Callable[[int, int], torch.Tensor]
"""Returns elements [start, stop) of a parameter."""


@dataclass(frozen=True)
class _Place:
    """Where in the file one parameter goes: the bytes of each of its parts."""

    segment: Segment
    packed: bool
    parts: tuple[FileRange, ...]


class FrozenFile:
    """The new file of quantised weights; see [Note: made once]."""

    def __init__(self, engine: Engine, kind: str) -> None:
        """kind: "int8" or "nf4"."""
        self._engine, self._kind = engine, kind
        self._folder = engine.config.nvme_folders[0]
        self._path = ""
        self._fd = -1
        self._nbytes = 0

    def take(self, records: Mapping[Record, Sequence[bool]]) -> None:
        """Quantise the parameters of records that are marked, and let all of these records lie in the file.

        Raises: aio.StorageFullError with the numbers; UnsupportedError on several ranks.
        """
        if not records:
            return
        if self._engine.ranks.size > 1:
            raise UnsupportedError(
                f"frozen_dtype={self._kind!r} on {self._engine.ranks.size} ranks: each would quantise parts "
                "of blocks. Quantise the checkpoint ahead, as bitsandbytes does, and load that"
            )
        folder = tempfile.mkdtemp(prefix="infinity-frozen-", dir=self._folder)
        self._path = f"{folder}/frozen.{self._kind}"
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            places = {record: list(self._places(record, marks)) for record, marks in records.items()}
            self._write_all(places)
        finally:
            if self._fd >= 0:
                os.close(self._fd)
                Path(self._path).unlink()
            Path(folder).rmdir()

    def _places(self, record: Record, marks: Sequence[bool]) -> Iterator[_Place]:
        for segment, packed in zip(record.shard.segments, marks, strict=True):
            sizes = self._sizes(segment, packed=packed, width=record.schema.width)
            self._nbytes = round_up(self._nbytes, BLOCK)
            parts = []
            for nbytes in sizes:
                parts.append(FileRange(self._path, self._nbytes, nbytes))
                self._nbytes = round_up(self._nbytes + nbytes, _ALIGNED)
            yield _Place(segment, packed, tuple(parts))

    def _sizes(self, segment: Segment, *, packed: bool, width: int) -> tuple[int, ...]:
        if not packed:
            return (width * segment.numel,)
        if self._kind == "int8":
            return segment.numel, 4 * (segment.numel // segment.shape[-1])
        blocks = -(-segment.numel // _BLOCK)
        return (segment.numel + 1) // 2, blocks, 4 * -(-blocks // _OUTER)

    def _write_all(self, places: Mapping[Record, Sequence[_Place]]) -> None:
        """Write all weights, then let the records lie in the file."""
        try:
            os.posix_fallocate(self._fd, 0, round_up(self._nbytes, BLOCK))
        except OSError as error:
            there = os.statvfs(self._folder)
            free = there.f_bavail * there.f_frsize
            raise storage_full(Path(self._path), self._nbytes, free, error.errno or 0) from error
        made: dict[Record, list[FileRange | Packed]] = {}
        for record, own in places.items():
            made[record] = [self._write_one(record, place) for place in own]
        os.fsync(self._fd)
        before = sum(one.field_nbytes(name) for one in made for name in one.schema.weights)
        for record, ranges in made.items():
            for name in record.schema.weights:
                record.drop(name)
            self._engine.lay_in_files(record, ranges)
        self._engine.traffic.written["nvme", "packed"] += self._nbytes
        logger.info(
            "frozen_dtype=%r: the weights of %d layers were quantised once, to %s in %s, where records of "
            "their own would take %s. What they compute is an approximation",
            self._kind,
            len(made),
            format_size(self._nbytes),
            self._folder,
            format_size(before),
        )

    def _write_one(self, record: Record, place: _Place) -> FileRange | Packed:
        start, dtype = place.segment.start, self._engine.weights.dtype

        def read(first: int, stop: int) -> torch.Tensor:
            return self._engine.parameters.read_range(record, start + first, start + stop, dtype)

        if not place.packed:
            return self._write_raw(place, read)
        return self._write_int8(place, read) if self._kind == "int8" else self._write_nf4(place, read)

    def _put(self, part: FileRange, offset: int, values: torch.Tensor) -> None:
        left, at = as_bytes(values), part.offset + offset
        while left:
            done = os.pwrite(self._fd, left, at)
            left, at = left[done:], at + done

    def _write_raw(self, place: _Place, read: Read) -> FileRange:
        (whole,), numel = place.parts, place.segment.numel
        for first in range(0, numel, _STRETCH_NUMEL):
            values = read(first, min(first + _STRETCH_NUMEL, numel))
            self._put(whole, first * values.itemsize, values)
        return whole

    def _write_int8(self, place: _Place, read: Read) -> Rows8:
        (codes, scales), numel, cols = place.parts, place.segment.numel, place.segment.shape[-1]
        step = cols * max(1, _STRETCH_NUMEL // cols)
        for first in range(0, numel, step):
            values = read(first, min(first + step, numel)).float().view(-1, cols)
            largest = values.abs().amax(1)
            steps = 127 / torch.where(largest > 0, largest, 1.0)
            self._put(codes, first, (values * steps[:, None]).round().to(torch.int8))
            self._put(scales, 4 * (first // cols), largest)
        return Rows8(codes, scales, cols)

    def _write_nf4(self, place: _Place, read: Read) -> Blocks4:
        (codes, eight, outer), numel = place.parts, place.segment.numel
        table = torch.tensor(_NF4, device="cpu")
        middles, scales = (table[1:] + table[:-1]) / 2, []
        for first in range(0, numel, _STRETCH_NUMEL):
            values = read(first, min(first + _STRETCH_NUMEL, numel)).float()
            values = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
            largest = values.abs().amax(1)
            scales.append(largest)
            near = torch.bucketize(values / torch.where(largest > 0, largest, 1.0)[:, None], middles)
            pairs = near.to(torch.uint8).view(-1, 2)
            packed = pairs[:, 0] << 4 | pairs[:, 1]
            self._put(codes, first // 2, packed[: (min(_STRETCH_NUMEL, numel - first) + 1) // 2])
        absmax = torch.cat(scales)
        offset = float(absmax.mean())
        spread = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % _OUTER)).view(-1, _OUTER)
        largest = spread.abs().amax(1)
        steps = 127 / torch.where(largest > 0, largest, 1.0)
        names = ((spread * steps[:, None]).round() + 128).to(torch.uint8).flatten()[: len(absmax)]
        self._put(eight, 0, names)
        self._put(outer, 0, largest)
        nested = NestedScales(eight, outer, _OUTER, _TABLE_8, offset)
        return Blocks4(numel, codes, nested, _BLOCK, _TABLE_4)


def frozen_layers(
    named: Sequence[tuple[str, nn.Module]], units: Mapping[Record, Sequence[nn.Parameter]], kind: str
) -> dict[Record, list[bool]]:
    """Return which parameters of which records are quantised to `kind`: weights of linear layers and of
    experts, frozen, in no other module, and not a model's output head. Records with a parameter that is
    trained, and those that are packed already, are left alone.

    Raises: ConfigError where there is none, and none is packed.
    """
    users: dict[int, list[nn.Module]] = {}
    for _, module in named:
        for one in module._parameters.values():
            if one is not None:
                users.setdefault(id(one), []).append(module)
    heads = set()
    for _, module in named:
        if callable(find := getattr(module, "get_output_embeddings", None)):
            heads.add(id(find()))

    def is_one(parameter: nn.Parameter) -> bool:
        layer, *others = users.get(id(parameter), [None])
        of_layer = isinstance(layer, nn.Linear) and id(layer) not in heads and parameter.dim() > 1
        of_experts = isinstance(layer, ExpertTile) and parameter.dim() > 2
        return not others and (of_layer or of_experts) and parameter.numel() >= _LEAST_NUMEL

    found = {}
    for record, parameters in units.items():
        marks = [is_one(one) for one in parameters]
        frozen = not any(one.requires_grad for one in parameters)
        if frozen and any(marks) and record.packed_nbytes is None:
            found[record] = marks
    if not found and all(record.packed_nbytes is None for record in units):
        raise ConfigError(
            f"frozen_dtype={kind!r}: no weight of a linear layer or of experts, of {_LEAST_NUMEL} elements "
            "or more, is frozen when Init ends, and what is trained is not quantised. Init(frozen=True) "
            "freezes what is loaded; so do requires_grad_(False) and PEFT inside Init. Or leave it out."
        )
    return found
