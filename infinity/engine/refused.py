"""Parameters that cannot be offloaded: refused by name, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from infinity.engine.asked import KEPT
from infinity.errors import UnsupportedError
from infinity.ranks.mesh import MeshRanks
from infinity.tensors import is_distributed


def check_kept(module: nn.Module, name: str, parameter: nn.Parameter, mesh: MeshRanks) -> None:
    """Check that a parameter can be offloaded, of ranks that are so in a mesh. Raises: UnsupportedError."""
    what = f"{type(module).__name__}.{name}"
    if parameter.is_complex():
        raise UnsupportedError(wrong_dtype(module, name, parameter))
    if isinstance(parameter, UninitializedParameter):
        raise UnsupportedError(
            f"{what} is a lazy parameter, whose shape is not known in Init. Give the module its shapes."
        )
    if is_distributed(parameter):
        mesh.check(what, parameter)
    elif type(parameter) is not nn.Parameter:
        raise UnsupportedError(
            f"{what} is a {type(parameter).__name__}; only plain nn.Parameter can be offloaded"
        )
    if parameter.dtype not in KEPT:
        raise UnsupportedError(wrong_dtype(module, name, parameter))


_PACKED = {torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}
"""Types of parameters that have no values yet, and will get packed ones."""


def refuse_packed(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Refuse packed weights that would stay in memory, or could not be trained, before anything is read.

    Raises: UnsupportedError.
    """
    if parameter.dtype in _PACKED:
        raise UnsupportedError(
            f"{type(module).__name__}.{name} is {parameter.dtype} without values: packed weights of a "
            "quantised model, in a layout that is not read in place. Those of checkpoints in fp8 with block "
            "scales, MXFP4, nf4, fp4 and int8 of bitsandbytes, and compressed-tensors are. "
            "Others: let transformers convert them (dequantize=True), or load a checkpoint in 16 bits."
        )


def wrong_dtype(module: nn.Module | None, name: str, parameter: torch.Tensor) -> str:
    """Say why a parameter cannot be offloaded in its type, and what to do."""
    what = f"{type(module).__name__}.{name}"
    message = f"{what} is {parameter.dtype}, which a record with an fp32 master cannot hold: "
    if parameter.is_complex():
        return (
            f"{message}keep its real and imaginary parts, nn.Parameter(torch.view_as_real({name})), and let "
            f"forward compute with torch.view_as_complex(self.{name})"
        )
    return f"{message}make it torch.float32, or a buffer (register_buffer) where it is not trained"


def check_adapters(models: Iterable[nn.Module], mesh: MeshRanks) -> None:
    """Check that adapters of PEFT are those of whole layers: of a DTensor PEFT takes the local shape, and the
    ranks would take their parts for copies of one adapter.

    Raises: UnsupportedError.
    """
    for name, module in (pair for model in models for pair in model.named_modules()):
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if not isinstance(weight, torch.Tensor) or not (is_distributed(weight) and mesh.is_cut(weight)):
            continue
        sizes = {getattr(module, "in_features", None), getattr(module, "out_features", None)}
        own = {size for size in sizes if isinstance(size, int)} - {*weight.shape}
        parts = [one for one in module.parameters() if not is_distributed(one) and own & {*one.shape}]
        if parts:
            raise UnsupportedError(
                f"{name}: PEFT has made adapters for this rank's part of a weight of {tuple(weight.shape)}, "
                "which is a DTensor. Adapt the whole model first (get_peft_model), inside Init, and divide "
                "it then, adapters too: parallelize_module(layer, mesh, {'q_proj.base_layer': ColwiseParallel"
                "(), 'q_proj.lora_B.default': ColwiseParallel()})"
            )
