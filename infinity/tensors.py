"""Tensors as bytes and back, with the names that safetensors has for dtypes."""

from __future__ import annotations

import torch
import xxhash

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of_dtype(tensor: torch.Tensor, what: str) -> str:
    """Return safetensors' name of a tensor's dtype.

    Raises: ValueError naming `what` for a dtype without a name, and for a tensor that is not strided.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout != torch.strided:
        known = ", ".join(str(dtype) for dtype in _NAMES)
        raise ValueError(
            f"{what} is {tensor.dtype}, {tensor.layout}; only dense tensors of {known} can be written"
        )
    return name


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements in row-major order as bytes; no copy if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def digest(*tensors: torch.Tensor) -> int:
    """Return a hash of the tensors' bytes, in 63 bits: a number that ranks can compare."""
    hashed = xxhash.xxh3_64()
    for one in tensors:
        hashed.update(as_bytes(one))
    return hashed.intdigest() >> 1


def empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an uninitialised tensor of a dtype that is given by safetensors' name."""
    return torch.empty(shape, dtype=DTYPES[dtype], device="cpu")


def is_part(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage holds more than this tensor."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes
