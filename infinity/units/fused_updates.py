"""Steps of AdamW and Adam on a CUDA device, each in one kernel: the bits of tensor_steps, in one pass over
the record's memory in place of some thirty.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.kernels import nvrtc
from infinity.kernels.library import ffi
from infinity.kernels.nvrtc import CudaKernel, CudaKernelError
from infinity.kernels.operations import rounded
from infinity.records import tensor_steps
from infinity.records.tensor_steps import Scratch, TensorStep

logger = logging.getLogger("infinity")

_IS_ADAM: dict[TensorStep, int] = {tensor_steps.adamw: 0, tensor_steps.adam: 1}
_KINDS = {torch.bfloat16: 1, torch.float32: 2}
_OF_ZEROS = 0


def make_step(
    step: TensorStep, at: Mapping[str, Tensor], grad: Tensor | None, scalars: Any, scratch: Scratch | None
) -> None:
    """Make a step of a part of a record, in place, as tensor_steps.make_step does: in one kernel where there
    is one for this step and this device, by torch's own operations elsewhere, in `scratch`.
    """
    device = at["hi"].device
    kernel = kernel_of(device) if is_fused(step, device, None if grad is None else grad.dtype) else None
    if kernel is None:
        if scratch is None:
            raise AssertionError("expected memory for the intermediate values of a step, got none")
        tensor_steps.make_step(step, at, grad, scalars, scratch)
        return
    numel = at["hi"].numel()
    if not numel:
        return
    addresses = [at[name].data_ptr() if name in at else 0 for name in ("hi", "lo", "m", "v")]
    addresses.append(0 if grad is None else grad.data_ptr())
    arguments = [
        ffi.new("uint64_t *", numel),
        *(ffi.new("uint64_t *", one) for one in addresses),
        ffi.new("int32_t *", _OF_ZEROS if grad is None else _KINDS[grad.dtype]),
        rounded(scalars),
        ffi.new("int32_t *", _IS_ADAM[step]),
    ]
    kernel.launch(numel, torch.cuda.current_stream(device).cuda_stream, arguments)


def is_fused(step: TensorStep | None, device: torch.device, grad: torch.dtype | None) -> bool:
    """Whether a step is made in one kernel, which needs no memory for intermediate values. grad: the type of
    the gradient; None for zeros.
    """
    if device.type != "cuda" or step not in _IS_ADAM or (grad is not None and grad not in _KINDS):
        return False
    return kernel_of(device) is not None


@functools.cache
def kernel_of(device: torch.device) -> CudaKernel | None:
    """Return the kernel for a CUDA device, compiled at the first call; None, and said once, where it cannot
    be had: torch for ROCm, or no NVRTC.
    """
    try:
        return _compiled(device)
    except CudaKernelError as error:
        logger.warning(
            "updates on %s are made by torch's operations, some thirty passes over memory each, since the "
            "kernel for them could not be had: %s",
            device,
            error,
        )
        return None


def _compiled(device: torch.device) -> CudaKernel:
    if torch.version.cuda is None:
        raise CudaKernelError("this torch is not built for CUDA")
    major, minor = torch.cuda.get_device_capability(device)
    places = nvrtc.places(torch.version.cuda, Path(torch.__file__).parent)
    source = (resources.files("infinity.kernels") / "adamw.cu").read_text()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # makes the device's context, and this thread's, if nothing has yet
        return CudaKernel(source, "infinity_adamw_device", f"sm_{major}{minor}", places)
