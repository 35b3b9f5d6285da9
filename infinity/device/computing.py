"""A device that computes in the type that it is asked for."""

from __future__ import annotations

import torch

from infinity.device.device import Device, open_device
from infinity.errors import UnsupportedError


def open_computing(name: str, dtype: torch.dtype) -> Device:
    """Return the device called `name`, see open_device; that it multiplies matrices of a type is tried before
    anything is built for it.

    Raises: UnsupportedError naming both where it does not.
    """
    device = open_device(name)
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
