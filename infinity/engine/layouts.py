"""The layouts of packed weights that transformers loads: from the tensors of a file to what reads them there.

Sources: transformers' integrations finegrained_fp8.py and mxfp4.py; bitsandbytes' QuantState, whose keys are
those of its `as_dict(packed=True)`, and its Linear8bitLt; compressed-tensors' naive_quantized and
pack_quantized compressors.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity.errors import UnsupportedError
from infinity.kernels import ScaleBlocks
from infinity.storage.packed import (
    MX_BLOCK,
    Block8,
    Blocks4,
    FileRange,
    NestedScales,
    Packed,
    Rows8,
    Stack4,
)
from infinity.tensors import as_bytes

Find = Callable[[torch.Tensor], "FileRange | None"]
"""Returns the range of a file that a tensor is, None for one that is in memory."""

_CODES_4BIT, _SCALES_8BIT = 16, 256
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_INT4, _IN_INT32 = array("f", range(-8, 8)), 8


def fp8(tensors: Mapping[str, torch.Tensor], find: Find) -> Block8 | None:
    """Return a matrix of e4m3 codes, "weight", with the scales of its blocks, "weight_scale_inv", or one for
    all of it; None if either is not in a file, or the blocks are not equal.
    """
    codes, scales = tensors["weight"], tensors["weight_scale_inv"]
    blocks = _blocks(codes, scales, None)
    return _block8(codes, scales, blocks, find) if blocks is not None else None


def _blocks(codes: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None) -> ScaleBlocks | None:
    """Return the blocks of a matrix that have a scale each: equal ones, or of the shape `block` as far as the
    matrix goes; None if neither is so.
    """
    grid = (1, 1) if scales.numel() == 1 else tuple(scales.shape)
    if codes.dim() != 2 or len(grid) != 2 or 0 in grid:
        return None
    (rows, cols), (grid_rows, grid_cols) = codes.shape, grid
    if block is not None and grid == (-(-rows // block[0]), -(-cols // block[1])):
        return ScaleBlocks(cols, *block)
    if rows % grid_rows or cols % grid_cols:
        return None
    return ScaleBlocks(cols, rows // grid_rows, cols // grid_cols)


def _block8(codes: torch.Tensor, scales: torch.Tensor, blocks: ScaleBlocks, find: Find) -> Block8 | None:
    if codes.dtype != torch.float8_e4m3fn or scales.dtype not in _NAMES:
        return None
    found = _all(find, codes, scales)
    return Block8(found[0], found[1], blocks, _NAMES[scales.dtype]) if found else None


def compressed(
    tensors: Mapping[str, torch.Tensor], find: Find, dtype: torch.dtype, block: Sequence[int] | None = None
) -> Packed | None:
    """Return a matrix of compressed-tensors: e4m3 or int8, "weight", or int4, "weight_packed" with its
    "weight_shape"; and "weight_scale", one for all of it, each row, each part of a row, or each `block`.

    None if any is not in a file; where codes are relative to a zero point ("weight_zero_point"); and where
    the library would round twice: it multiplies in the type of the scales, and converts to `dtype`.
    """
    scales = tensors["weight_scale"]
    known = scales.dtype in _NAMES and scales.dtype in (torch.float32, dtype)
    if not known or tensors.keys() & {"weight_zero_point", "weight_global_scale"}:
        return None
    codes = tensors.get("weight")
    if codes is None:
        return _int4(tensors["weight_packed"], tensors["weight_shape"].tolist(), scales, find)
    if codes.dtype == torch.int8:
        run, found = _run(codes.shape, scales), _all(find, codes, scales)
        return Rows8(found[0], found[1], run, _NAMES[scales.dtype], 1.0) if found and run else None
    blocks = _blocks(codes, scales, block)
    return _block8(codes, scales, blocks, find) if blocks is not None else None


def _run(shape: Sequence[int], scales: torch.Tensor) -> int:
    """Return how many consecutive elements of a matrix have a scale together; 0 for other scales."""
    numel = math.prod(shape)
    runs = scales.numel() == 1 or (scales.dim() == 2 and len(shape) == 2 and len(scales) == shape[0])
    return numel // scales.numel() if runs and scales.numel() and numel % scales.numel() == 0 else 0


def _int4(codes: torch.Tensor, shape: Sequence[int], scales: torch.Tensor, find: Find) -> Blocks4 | None:
    """Return a matrix whose codes are 8 to an int32, the first in the lowest bits, each plus 8."""
    run, numel = _run(shape, scales), math.prod(shape)
    whole = len(shape) == 2 and tuple(codes.shape) == (shape[0], shape[1] / _IN_INT32)
    found = _all(find, codes, scales)
    if codes.dtype != torch.int32 or not whole or not run or run % 2 or not found:
        return None
    return Blocks4(numel, found[0], found[1], run, _INT4, _NAMES[scales.dtype], high_first=False)


def mxfp4(tensors: Mapping[str, torch.Tensor], find: Find) -> Stack4 | None:
    """Return a stack of matrices in MXFP4: "blocks", uint8 of [matrices, rows, blocks, 16], and "scales", of
    [matrices, rows, blocks]; None if either is not in a file.
    """
    blocks, scales = tensors["blocks"], tensors["scales"]
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.dim() != 4:
        return None
    if blocks.shape[:-1] != scales.shape or 2 * blocks.shape[-1] != MX_BLOCK:
        return None
    found = _all(find, blocks, scales)
    return Stack4(found[0], found[1], blocks.shape[1], blocks.shape[2] * MX_BLOCK) if found else None


def int8(name: str, tensors: Mapping[str, torch.Tensor], find: Find) -> Rows8 | None:
    """Return a matrix of int8 codes, "weight", with the fp32 scales of its rows, "SCB"; None if either is not
    in a file.

    Raises: UnsupportedError naming a weight in another format than rows.
    """
    codes, scales = tensors["weight"], tensors["SCB"]
    order = tensors.get("weight_format")
    if order is not None and int(order):
        raise UnsupportedError(
            f"{name}: int8 weights in bitsandbytes' format no. {int(order)}, an order of tensor cores; only "
            "rows (0) are read. Save the model again with a newer bitsandbytes."
        )
    if codes.dtype != torch.int8 or codes.dim() != 2 or scales.dtype != torch.float32:
        raise UnsupportedError(f"{name}: {codes.dtype} of {list(codes.shape)} is not a matrix of int8 codes")
    if scales.numel() != len(codes):
        raise UnsupportedError(f"{name}: {len(codes)} rows, and {scales.numel()} scales (SCB)")
    found = _all(find, codes, scales)
    return Rows8(found[0], found[1], codes.shape[1]) if found else None


def four_bits(
    name: str, tensors: Mapping[str, torch.Tensor], find: Find
) -> tuple[Blocks4 | None, torch.Size, torch.dtype]:
    """Return a weight of bitsandbytes in 4 bits, its shape, and the type that bitsandbytes widens it to. The
    weight is None if not all of it is in files.

    Raises: UnsupportedError naming a weight that is not whole.
    """
    state = _state(name, tensors)
    shape, dtype = torch.Size(state["shape"]), getattr(torch, str(state["dtype"]))
    codes, block = tensors["weight"], int(state["blocksize"])
    absmax, table = (_tensor(name, tensors, one) for one in ("absmax", "quant_map"))
    count = -(-shape.numel() // block)
    if 2 * codes.nbytes < shape.numel() or absmax.numel() != count or table.numel() != _CODES_4BIT:
        raise UnsupportedError(
            f"{name}: {codes.nbytes} B of codes, {absmax.numel()} scales (absmax) and a table of "
            f"{table.numel()} values (quant_map) are not {list(shape)} in 4 bits, in blocks of {block}"
        )
    nested = "nested_absmax" in tensors
    outer = [_tensor(name, tensors, "nested_absmax")] if nested else []
    found = _all(find, codes, absmax, *outer)
    if not found:
        return None, shape, dtype
    scales: FileRange | NestedScales = found[1]
    if nested:
        names = _tensor(name, tensors, "nested_quant_map")
        if names.numel() != _SCALES_8BIT or absmax.dtype != torch.uint8:
            raise UnsupportedError(f"{name}: nested scales of {absmax.dtype}, of {names.numel()} values")
        offset = torch.tensor(
            float(state["nested_offset"]), device="cpu"
        ).item()  # as bitsandbytes has it, in fp32
        table_8bit = array("f", names.float().tolist())
        scales = NestedScales(found[1], found[2], int(state["nested_blocksize"]), table_8bit, offset)
    elif absmax.dtype != torch.float32:
        raise UnsupportedError(f"{name}: scales (absmax) of {absmax.dtype}, expected torch.float32")
    return (
        Blocks4(shape.numel(), found[0], scales, block, array("f", table.float().tolist())),
        shape,
        dtype,
    )


def in_memory(tensors: Sequence[torch.Tensor]) -> Find:
    """Return what finds tensors in memory, as ranges of a file that stands for it, named by their place."""
    places = {id(one): FileRange(str(number), 0, one.nbytes) for number, one in enumerate(tensors)}
    return lambda tensor: places[id(tensor)]


def widened(
    weight: Packed, tensors: Sequence[torch.Tensor], shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values of a weight whose ranges are `in_memory` of these tensors, in a new tensor."""
    values = torch.empty(shape, dtype=dtype, device="cpu")
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    for cut in weight.cuts(0, weight.numel, 1 << 62):
        at = [tensors[int(one.path)].data_ptr() + one.offset for one in cut.sources]
        weight.widen(name, cut, at, 0, weight.numel, values.data_ptr())
    return values


def _all(find: Find, *tensors: torch.Tensor) -> list[FileRange]:
    """Return where all of some tensors are; nothing if one of them is in no file."""
    found = [find(one) for one in tensors]
    return [one for one in found if one is not None] if None not in found else []


def _tensor(name: str, tensors: Mapping[str, torch.Tensor], part: str) -> torch.Tensor:
    if part not in tensors:
        raise UnsupportedError(
            f"{name}: a weight of bitsandbytes in 4 bits without {part!r}: the checkpoint is not whole, or "
            f"of another version. It has {', '.join(sorted(tensors))}."
        )
    return tensors[part]


def _state(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what bitsandbytes' quant_state says, JSON in a tensor of bytes."""
    keys = [one for one in tensors if one.startswith("quant_state.bitsandbytes__")]
    if len(keys) != 1:
        _tensor(name, tensors, "quant_state.bitsandbytes__nf4")
    try:
        state = json.loads(bytes(as_bytes(tensors[keys[0]])))
        missing = {"shape", "dtype", "blocksize"} - state.keys()
    except (ValueError, AttributeError) as error:
        raise UnsupportedError(f"{name}: its {keys[0]} cannot be read: {error}") from error
    if missing or state["blocksize"] < 1 or state["blocksize"] % 2:
        raise UnsupportedError(f"{name}: its {keys[0]} has no valid shape, dtype and blocksize: {state}")
    return dict(state)
