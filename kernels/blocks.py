"""Packed weights in memory to fp32: codes of 4 or 8 bits, with scales that may be packed themselves.

One codec for every layout: e4m3 with block scales, int8 with row scales, 4-bit codes of any table (nf4, fp4,
MXFP4) with scales in fp32, in 8 bits with scales of their own, or as e8m0; and there and back, what ranks
send: int8 and int4 with a scale for each block of CODE_BLOCK elements. `kernels.h` states the bits.
"""

from typing import NamedTuple

from infinity.kernels.library import ffi, library
from infinity.kernels.operations import AnyGradientDtype, as_f32, as_u8, check
from infinity.kernels.recipes import type_of

_WIDTHS = (2, 4)
CODE_BLOCK = 256
"""Elements that `encode` gives one scale."""
_CODE_BITS = (4, 8)
_SIGNED = ffi.new("float[16]", [*range(8), *range(-8, 0)])
"""The value of each code of 4 bits."""


class Strided(NamedTuple):
    """The place of a matrix in memory."""

    address: int
    row_nbytes: int
    """From one row to the next."""


class ScaleBlocks(NamedTuple):
    """How a matrix is cut into blocks that have a scale each."""

    cols: int
    """Of the matrix."""
    block_rows: int
    block_cols: int


def widen_e4m3(first: int, n: int, blocks: ScaleBlocks, codes: int, scales: int, f32: int) -> None:
    """Convert elements [first, first + n) of a matrix of e4m3 codes to fp32: value times scale, rounded once.

    Args:
        first: the first element, in rows.
        n: the count of elements.
        blocks: of the matrix.
        codes: address of the first element's code.
        scales: address of the fp32 scales of the blocks, from the first of the row of blocks that `first` is
        in.
        f32: address of the results.
    """
    check(n, codes=codes, scales=scales, f32=f32)
    if min(blocks) < 1 or first < 0:
        message = f"first={first}, {blocks}: expected counts of at least 1, and an element of the matrix"
        raise ValueError(message)
    cut = ffi.new("struct infinity_blocks *", blocks._asdict())
    at = as_u8(codes), as_f32(scales), as_f32(f32)
    library.infinity_widen_e4m3(first, n, cut, *at)


def _check_place(first: int, of: int) -> None:
    if first < 0 or of < 1:
        message = f"first={first}: expected an element, of blocks of at least 1, got {of}"
        raise ValueError(message)


def widen_i8(first: int, n: int, cols: int, factor: float, codes: int, scales: int, f32: int) -> None:
    """Convert elements [first, first + n) of a matrix of int8 codes, of `cols` columns, to fp32: code times
    scale times factor, rounded twice.

    codes, f32: addresses of the first element's; scales: of its row's.
    """
    check(n, codes=codes, scales=scales, f32=f32)
    _check_place(first, cols)
    at = ffi.cast("int8_t *", codes), as_f32(scales), as_f32(f32)
    library.infinity_widen_i8(first, n, cols, factor, *at)


def widen_4bit(
    first: int, n: int, block: int, table: int, codes: int, scales: int, f32: int, *, high_first: bool
) -> None:
    """Convert elements [first, first + n), of 4-bit codes, to fp32: their values times their blocks' scales,
    rounded once.

    Args:
        first: the first element.
        n: the count of elements.
        block: even count of consecutive elements with the same scale.
        table: address of the fp32 values of the 16 codes.
        codes: address of the byte that the first element is in.
        scales: address of the fp32 scale of the first element's block.
        f32: address of the results.
        high_first: the element that comes first in a byte is in its high half.
    """
    check(n, table=table, codes=codes, scales=scales, f32=f32)
    _check_place(first, block if block % 2 == 0 else 0)
    at = as_f32(table), as_u8(codes), as_f32(scales), as_f32(f32)
    library.infinity_widen_4bit(first, n, block, int(high_first), *at)


def widen_scales(
    first: int, n: int, block: int, table: int, codes: int, scales: int, f32: int, *, offset: float
) -> None:
    """Convert scales [first, first + n), in 8 bits, to fp32: the value of each in a table of 256, times the
    scale of its block, plus `offset`, rounded twice. codes, f32: addresses of the first one's; scales: of
    the scale of its block.
    """
    check(n, table=table, codes=codes, scales=scales, f32=f32)
    _check_place(first, block)
    at = as_f32(table), as_u8(codes), as_f32(scales)
    library.infinity_widen_scales(first, n, block, *at, offset, as_f32(f32))


def widen_e8m0(n: int, codes: int, f32: int) -> None:
    """Convert n exponents to half of the powers of two that they are, in fp32: see `kernels.h`."""
    check(n, codes=codes, f32=f32)
    library.infinity_widen_e8m0(n, as_u8(codes), as_f32(f32))


def _check_bits(bits: int) -> None:
    if bits not in _CODE_BITS:
        message = f"bits={bits}: expected 4 or 8"
        raise ValueError(message)


def encode(n: int, values: int, dtype: AnyGradientDtype, bits: int, codes: int, scales: int) -> None:
    """Convert n values to codes of 4 or 8 bits, with an fp32 scale for each CODE_BLOCK of them.

    A block with an infinity or a NaN has a scale that is one, and no code of 0. codes: address for n bytes,
    or (n + 1) // 2; scales: for 4 bytes a block; any alignment.
    """
    check(n, values=values, codes=codes, scales=scales)
    _check_bits(bits)
    at = as_u8(codes), as_f32(scales)
    library.infinity_encode(n, ffi.cast("void *", values), type_of(dtype), bits, *at)


def decode(n: int, bits: int, codes: int, scales: int, f32: int) -> None:
    """Convert n codes of `encode`, from the first of a block on, to fp32: code times scale, rounded once."""
    check(n, codes=codes, scales=scales, f32=f32)
    _check_bits(bits)
    at = as_f32(scales), as_f32(f32)
    if bits == 4:
        library.infinity_widen_4bit(0, n, CODE_BLOCK, 0, _SIGNED, as_u8(codes), *at)
    else:
        library.infinity_widen_i8(0, n, CODE_BLOCK, 1.0, ffi.cast("int8_t *", codes), *at)


def transpose(rows: int, cols: int, width: int, source: Strided, target: Strided) -> None:
    """Copy element [row][col] of a source to [col][row] of the target. width: bytes of an element, 2 or 4."""
    check(rows, source=source.address, target=target.address)
    if cols < 0 or width not in _WIDTHS:
        message = f"cols={cols}, width={width}: expected a count of at least 0, and 2 or 4 bytes"
        raise ValueError(message)
    at = ffi.cast("void *", source.address), source.row_nbytes
    to = ffi.cast("void *", target.address), target.row_nbytes
    library.infinity_transpose(rows, cols, width, *at, *to)
