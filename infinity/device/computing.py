"""Devices that compute in the type that they are asked for."""

from __future__ import annotations

import torch

from infinity.device.device import Device
from infinity.errors import UnsupportedError


def that_computes(device: Device, dtype: torch.dtype) -> Device:
    """Return a device that multiplies matrices of a type, which is tried before anything is built for it.

    Raises: UnsupportedError naming both where it does not.
    """
    try:
        one = torch.ones(2, 2, dtype=dtype, device=device.torch_device)
        torch.mm(one, one)
    except (RuntimeError, TypeError) as error:
        kind = str(dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"{device.torch_device} does not compute in {kind}: {error}. Choose another type, such as "
            'Config(dtype="fp32"), or another device'
        ) from error
    return device
