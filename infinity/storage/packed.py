"""Weights that a checkpoint's files have in fewer bits: where their bytes are, and how they are widened.

[Note: packed weights]
The bytes that are read are those of the file. They are widened when they arrive, or where they are kept, to
the type that computes, with the bits that transformers' own conversion of the same file gives:
- Block8, e4m3 with block scales (DeepSeek's "fp8", compressed-tensors'): the value of the code times the
  scale of its block, rounded to fp32, then to the type that computes, ties to even.
- Rows8, int8 with row scales (bitsandbytes' LLM.int8): code times scale times 1/127, each product rounded to
  fp32, then to the type that computes. compressed-tensors' int8 has no factor, and may have a scale for each
  part of a row.
- Blocks4, nf4 and fp4 (bitsandbytes): the value of the code in the table of the file times the scale of its
  block, rounded as those of Block8. The scales may be in 8 bits ("double quantisation"). int4 of
  compressed-tensors is that with a table of -8 to 7.
- Stack4, MXFP4 (gpt-oss): values of e2m1 times a power of two for each 32 of them. The file has every matrix
  of a stack of experts transposed: all of it is read for any row of the parameter, in stretches of rows of
  the file, each of which becomes columns.
Scales in bf16 or fp16 are widened to fp32 first, where the product with a code is exact: it is rounded once,
to the type that computes, also where the file's own library computes in the type of the scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from infinity import kernels
from infinity.errors import HostMemoryError
from infinity.kernels import Strided
from infinity.sizes import BLOCK, format_size
from infinity.storage.memory import Arena

_CHUNK_NUMEL = 1 << 16


def _as_it_is(n: int, source: int, target: int) -> None:
    kernels.copy(4 * n, target, source)


_NARROW: Mapping[str, Callable[[int, int, int], None]] = {
    "bf16": kernels.narrow,
    "fp16": kernels.narrow_f16,
    "fp32": _as_it_is,
}
"""From fp32 to each type that computes: (n, source, target)."""

_WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}

_WIDEN: Mapping[str, Callable[[int, int, int], None]] = {"bf16": kernels.widen, "fp16": kernels.widen_f16}
"""From the types that scales may have, beside fp32, to fp32: (n, source, target)."""

MX_BLOCK = 32
"""Elements of MXFP4 with the same scale."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TWICE = array("f", [2 * sign * value for sign in (1.0, -1.0) for value in _E2M1])
"""Twice the values of its codes: see widen_e8m0."""

_INT8_STEP = 7.874015718698502e-3
"""1/127, as bitsandbytes has it."""


class FileRange(NamedTuple):
    """Bytes of a file: a tensor's values, or a part of what is packed."""

    path: str
    offset: int
    nbytes: int

    def part(self, first: int, nbytes: int) -> FileRange:
        """Return bytes [first, first + nbytes) of the range."""
        return FileRange(self.path, self.offset + first, nbytes)


class PackedCut(NamedTuple):
    """Elements [first, first + numel) of a packed weight, in the file's order, which are widened at once."""

    first: int
    numel: int
    sources: tuple[FileRange, ...]
    """What is read for them."""


def _room_nbytes(sources: Sequence[FileRange]) -> int:
    """Return the bytes that hold the blocks around ranges of files."""
    return sum(one.nbytes + 2 * BLOCK for one in sources)


def _address(table: array[float]) -> int:
    return table.buffer_info()[0]


def _other(value: Any, usual: Any) -> list[Any]:
    """Return what is to be said of a value: nothing where it is the usual one."""
    return [] if value == usual else [value]


def _scales_f32(n: int, dtype: str, at: int) -> tuple[int, array[float] | None]:
    """Return the address of n scales in fp32, from those of a type at `at`, and what keeps them alive."""
    if dtype == "fp32":
        return at, None
    widened = array("f", bytes(4 * n))
    _WIDEN[dtype](n, at, _address(widened))
    return _address(widened), widened


class Packed(ABC):
    """A weight in fewer bits than it computes in; see [Note: packed weights]."""

    numel: int
    transposed = False
    """Whether the file has it in another order than the parameter."""

    @property
    @abstractmethod
    def ranges(self) -> tuple[FileRange, ...]:
        """All bytes of files that it is, codes first."""

    @abstractmethod
    def sources(self, first: int, numel: int) -> tuple[FileRange, ...]:
        """Return the part of each of `ranges` that elements, in the file's order, need."""

    @abstractmethod
    def to_f32(self, first: int, numel: int, at: Sequence[int], f32: int) -> None:
        """Widen elements in the file's order to fp32. at: addresses of their `sources`."""

    @abstractmethod
    def describe(self) -> list[Any]:
        """Return what tells it from others, but for paths, as plain values for JSON."""

    def _cut(self, first: int, numel: int) -> PackedCut:
        return PackedCut(first, numel, self.sources(first, numel))

    def cuts(self, first: int, numel: int, room_nbytes: int) -> Iterator[PackedCut]:
        """Cut elements [first, first + numel) of the parameter into what is read to `room_nbytes` at once.

        Raises: HostMemoryError where that is too little for any.
        """
        yield from self._in_order(first, numel, 1, room_nbytes)

    def _in_order(self, first: int, numel: int, unit: int, room_nbytes: int) -> Iterator[PackedCut]:
        """Cut elements in the file's order, into whole multiples of `unit`, but for the last."""
        stop, n = first + numel, numel
        while first < stop:
            one = self._cut(first, min(n, stop - first))
            if _room_nbytes(one.sources) <= room_nbytes:
                yield one
                first += one.numel
            elif one.numel <= unit:
                raise HostMemoryError(
                    f"{self.ranges[0].path}: reading a packed weight takes "
                    f"{format_size(_room_nbytes(one.sources))} of one slot at least, which has "
                    f"{format_size(room_nbytes)} left. Give Config a larger host_memory."
                )
            else:
                ends = 2 * BLOCK * len(one.sources)
                fits = one.numel * (room_nbytes - ends) // (_room_nbytes(one.sources) - ends)
                n = max(unit, min(fits, one.numel - 1) // unit * unit)

    def widen(
        self, dtype: str, cut: PackedCut, at: Sequence[int], first: int, numel: int, target: int
    ) -> None:
        """Put what a cut has of elements [first, first + numel) of the parameter to `target`, where `first`
        belongs, in the type that computes. at: addresses of the cut's sources.
        """
        memory, narrow, width = Arena(4 * min(_CHUNK_NUMEL, cut.numel)), _NARROW[dtype], _WIDTHS[dtype]
        for start in range(cut.first, cut.first + cut.numel, _CHUNK_NUMEL):
            n = min(_CHUNK_NUMEL, cut.first + cut.numel - start)
            self.to_f32(start, n, self._within(cut, start, n, at), memory.address)
            narrow(n, memory.address, target + (start - first) * width)

    def _within(self, cut: PackedCut, start: int, numel: int, at: Sequence[int]) -> list[int]:
        """Return the addresses of the sources of some elements of a cut."""
        parts = zip(at, cut.sources, self.sources(start, numel), strict=True)
        return [address + part.offset - whole.offset for address, whole, part in parts]


@dataclass(frozen=True)
class Block8(Packed):
    """A matrix of e4m3 codes with a scale for each block of it, or for what its edges leave of one."""

    codes: FileRange
    scales: FileRange
    blocks: kernels.ScaleBlocks
    scale_dtype: str = "fp32"

    @property
    def numel(self) -> int:  # type: ignore[override]
        """Elements."""
        return self.codes.nbytes

    @property
    def ranges(self) -> tuple[FileRange, ...]:
        """See Packed."""
        return self.codes, self.scales

    def sources(self, first: int, numel: int) -> tuple[FileRange, ...]:
        """See Packed: whole rows of scales."""
        begin, stop = self._scales_of(first, numel)
        width = _WIDTHS[self.scale_dtype]
        return self.codes.part(first, numel), self.scales.part(width * begin, width * (stop - begin))

    def _scales_of(self, first: int, numel: int) -> tuple[int, int]:
        """Return the first scale of elements, and the first after them."""
        cut = self.blocks
        in_row = -(-cut.cols // cut.block_cols)
        begin, last = (element // cut.cols // cut.block_rows for element in (first, first + numel - 1))
        return begin * in_row, (last + 1) * in_row

    def to_f32(self, first: int, numel: int, at: Sequence[int], f32: int) -> None:
        """See Packed."""
        begin, stop = self._scales_of(first, numel)
        scales, _alive = _scales_f32(stop - begin, self.scale_dtype, at[1])
        kernels.widen_e4m3(first, numel, self.blocks, at[0], scales, f32)

    def describe(self) -> list[Any]:
        """See Packed."""
        return [self.codes.offset, self.scales.offset, *self.blocks, *_other(self.scale_dtype, "fp32")]


@dataclass(frozen=True)
class Rows8(Packed):
    """A matrix of int8 codes with a scale for each `cols` of them, a row or a part of one; a value is its
    code times its scale times `factor`. By default the scale is the largest magnitude.
    """

    codes: FileRange
    scales: FileRange
    cols: int
    scale_dtype: str = "fp32"
    factor: float = _INT8_STEP

    @property
    def numel(self) -> int:  # type: ignore[override]
        """Elements."""
        return self.codes.nbytes

    @property
    def ranges(self) -> tuple[FileRange, ...]:
        """See Packed."""
        return self.codes, self.scales

    def sources(self, first: int, numel: int) -> tuple[FileRange, ...]:
        """See Packed."""
        begin, last = first // self.cols, (first + numel - 1) // self.cols
        width = _WIDTHS[self.scale_dtype]
        return self.codes.part(first, numel), self.scales.part(width * begin, width * (last + 1 - begin))

    def to_f32(self, first: int, numel: int, at: Sequence[int], f32: int) -> None:
        """See Packed."""
        n = (first + numel - 1) // self.cols + 1 - first // self.cols
        scales, _alive = _scales_f32(n, self.scale_dtype, at[1])
        kernels.widen_i8(first, numel, self.cols, self.factor, at[0], scales, f32)

    def describe(self) -> list[Any]:
        """See Packed."""
        others = [*_other(self.scale_dtype, "fp32"), *_other(self.factor, _INT8_STEP)]
        return [self.codes.offset, self.scales.offset, self.cols, *others]


class NestedScales(NamedTuple):
    """Scales in 8 bits: the value in a table of 256 times the fp32 scale of its block, plus an offset."""

    codes: FileRange
    scales: FileRange
    block: int
    table: array[float]
    offset: float


@dataclass(frozen=True)
class Blocks4(Packed):
    """4-bit codes of a table, two in a byte, that of the even element in the high half or in the low one;
    each `block` of them has a scale, of a type of its own or nested.
    """

    numel: int
    codes: FileRange
    scales: FileRange | NestedScales
    block: int
    table: array[float]
    scale_dtype: str = "fp32"
    high_first: bool = True

    @property
    def ranges(self) -> tuple[FileRange, ...]:
        """See Packed."""
        if isinstance(self.scales, NestedScales):
            return self.codes, self.scales.codes, self.scales.scales
        return self.codes, self.scales

    def sources(self, first: int, numel: int) -> tuple[FileRange, ...]:
        """See Packed."""
        stop = first + numel
        codes = self.codes.part(first // 2, (stop + 1) // 2 - first // 2)
        begin, end = first // self.block, -(-stop // self.block)
        if not isinstance(self.scales, NestedScales):
            width = _WIDTHS[self.scale_dtype]
            return codes, self.scales.part(width * begin, width * (end - begin))
        outer = begin // self.scales.block, -(-end // self.scales.block)
        scales = self.scales.scales.part(4 * outer[0], 4 * (outer[1] - outer[0]))
        return codes, self.scales.codes.part(begin, end - begin), scales

    def to_f32(self, first: int, numel: int, at: Sequence[int], f32: int) -> None:
        """See Packed."""
        begin, nested = first // self.block, self.scales
        n = -(-(first + numel) // self.block) - begin
        if isinstance(nested, NestedScales):
            alive = array("f", bytes(4 * n))
            scales, table = _address(alive), _address(nested.table)
            kernels.widen_scales(begin, n, nested.block, table, at[1], at[2], scales, offset=nested.offset)
        else:
            scales, _alive = _scales_f32(n, self.scale_dtype, at[1])
        table = _address(self.table)
        kernels.widen_4bit(first, numel, self.block, table, at[0], scales, f32, high_first=self.high_first)

    def describe(self) -> list[Any]:
        """See Packed."""
        nested = [self.scales.offset] if isinstance(self.scales, NestedScales) else []
        others = [*nested, *_other(self.scale_dtype, "fp32"), *_other(self.high_first, True)]
        return [*(one.offset for one in self.ranges), self.block, *self.table, *others]


@dataclass(frozen=True)
class Stack4(Packed):
    """A stack of matrices in MXFP4, each of which the file has transposed, as `rows` times `cols` codes, two
    in a byte, that of the even element in the low half, and an e8m0 scale for each 32 of a row.
    """

    codes: FileRange
    scales: FileRange
    rows: int
    cols: int
    transposed = True

    @property
    def numel(self) -> int:  # type: ignore[override]
        """Elements."""
        return 2 * self.codes.nbytes

    @property
    def ranges(self) -> tuple[FileRange, ...]:
        """See Packed."""
        return self.codes, self.scales

    def matrices(self, first: int, count: int) -> Stack4:
        """Return a part of the stack."""
        numel = self.rows * self.cols
        codes = self.codes.part(first * numel // 2, count * numel // 2)
        scales = self.scales.part(first * numel // MX_BLOCK, count * numel // MX_BLOCK)
        return replace(self, codes=codes, scales=scales)

    def sources(self, first: int, numel: int) -> tuple[FileRange, ...]:
        """See Packed. Both are multiples of 32."""
        codes = self.codes.part(first // 2, numel // 2)
        return codes, self.scales.part(first // MX_BLOCK, numel // MX_BLOCK)

    def cuts(self, first: int, numel: int, room_nbytes: int) -> Iterator[PackedCut]:
        """See Packed: whole rows of the file, of every matrix that the elements are in."""
        matrix = self.rows * self.cols
        begin, end = first // matrix, -(-(first + numel) // matrix)
        for number in range(begin, end):
            yield from self._in_order(number * matrix, matrix, self.cols, room_nbytes)

    def to_f32(self, first: int, numel: int, at: Sequence[int], f32: int) -> None:
        """See Packed."""
        scales = array("f", bytes(4 * (numel // MX_BLOCK)))
        kernels.widen_e8m0(len(scales), at[1], _address(scales))
        table = _address(_E2M1_TWICE)
        kernels.widen_4bit(0, numel, MX_BLOCK, table, at[0], _address(scales), f32, high_first=False)

    def widen(
        self, dtype: str, cut: PackedCut, at: Sequence[int], first: int, numel: int, target: int
    ) -> None:
        """See Packed."""
        width, step = _WIDTHS[dtype], self.cols * max(1, _CHUNK_NUMEL // self.cols)
        step = min(step, cut.numel)
        memory, narrowed, narrow = Arena(4 * step), Arena(width * step), _NARROW[dtype]
        for start in range(cut.first, cut.first + cut.numel, step):
            n = min(step, cut.first + cut.numel - start)
            self.to_f32(start, n, self._within(cut, start, n, at), memory.address)
            narrow(n, memory.address, narrowed.address)
            number, row = divmod(start // self.cols, self.rows)
            # Elements of the parameter, counted from this matrix's first one.
            begin = first - number * self.rows * self.cols
            to = target - begin * width
            begin, end = max(0, begin), min(begin + numel, self.rows * self.cols)
            for cols, rows in self._wanted(row, row + n // self.cols, begin, end):
                source = narrowed.address + ((rows.start - row) * self.cols + cols.start) * width
                into = to + (cols.start * self.rows + rows.start) * width
                strides = Strided(source, self.cols * width), Strided(into, self.rows * width)
                kernels.transpose(len(rows), len(cols), width, *strides)

    def _wanted(self, row: int, stop: int, begin: int, end: int) -> Iterator[tuple[range, range]]:
        """Yield the columns and rows of the file, of rows [row, stop), that are elements [begin, end) of the
        transposed matrix.
        """
        (first, within), (last, rest) = divmod(begin, self.rows), divmod(end, self.rows)
        if first == last:
            parts = [(range(first, first + 1), range(max(row, within), min(stop, rest)))]
        else:
            parts = [
                (range(first, first + 1), range(max(row, within), stop)),
                (range(first + 1, last), range(row, stop)),
                (range(last, last + 1), range(row, min(stop, rest))),
            ]
        yield from ((cols, rows) for cols, rows in parts if cols and rows)

    def describe(self) -> list[Any]:
        """See Packed."""
        return [self.codes.offset, self.scales.offset, self.rows, self.cols]
