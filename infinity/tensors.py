"""Tensors as bytes and back, with the names that safetensors has for dtypes."""

from __future__ import annotations

import sys
from typing import Any

import torch
import xxhash

from infinity.errors import UnsupportedError

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
    if flat.numel() < 2:  # which may have another stride, that a view of bytes does not take
        flat = flat.as_strided(flat.shape, (1,))
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


def sharers(tensor: torch.Tensor) -> int:
    """Return how many tensors share the storage of one, with it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# DTensors, of which this process has a local tensor. torch.distributed.tensor takes a second to import.


def is_distributed(tensor: object) -> bool:
    """Whether this is a DTensor of torch.distributed.tensor."""
    if type(tensor) is torch.Tensor:  # as nearly always
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # none while it is imported
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, which has arrived; any other tensor as it is."""
    if not is_distributed(tensor):
        return tensor
    values: Any = tensor._local_tensor  # type: ignore[attr-defined]
    return values.trigger_wait() if hasattr(values, "trigger_wait") else values  # type: ignore[no-any-return]


def spread_as(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the DTensor whose local tensor is `values` where `parameter` is one, with its mesh, shape and
    placements; else `values`.
    """
    if not is_distributed(parameter):
        return values
    module, spec = sys.modules["torch.distributed.tensor"], parameter._spec  # type: ignore[attr-defined]
    shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
    whole: torch.Tensor = module.DTensor.from_local(
        values, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
    )
    return whole


def part_of(parameter: torch.Tensor, values: torch.Tensor, what: str) -> torch.Tensor:
    """Return the local tensor of `values` as `parameter`, a DTensor, is placed: they are redistributed if
    they are placed otherwise, by every rank of its mesh. Of an ordinary parameter all is local.

    Raises: UnsupportedError, naming `what`, where one of both is a DTensor, or they have other meshes.
    """
    if not is_distributed(parameter) and not is_distributed(values):
        return values
    if not (is_distributed(parameter) and is_distributed(values)):
        kinds = ["a DTensor" if is_distributed(one) else "an ordinary tensor" for one in (parameter, values)]
        raise UnsupportedError(
            f"{what}: the parameter is {kinds[0]}, and what is given for it {kinds[1]}. Give the same: "
            "torch.distributed.tensor.distribute_tensor(values, p.device_mesh, p.placements) makes a DTensor "
            "of the whole, values.full_tensor() the whole of a DTensor"
        )
    wanted, given = parameter._spec, values._spec  # type: ignore[attr-defined]
    if given.mesh != wanted.mesh:
        raise UnsupportedError(
            f"{what}: the parameter is on {wanted.mesh}, and what is given for it on {given.mesh}"
        )
    if given.placements != wanted.placements:
        values = values.redistribute(wanted.mesh, wanted.placements)  # type: ignore[attr-defined]
    return local(values.detach())
