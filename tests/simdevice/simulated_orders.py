"""Sequences of calls of the engine's accelerator, without a model: each depends on one order."""

from __future__ import annotations

import gc

import torch

from infinity.device.device import AcceleratorDevice
from infinity.storage.memory import Arena

NUMEL = 1 << 15


def _memory(device: AcceleratorDevice) -> torch.Tensor:
    flat = torch.empty(NUMEL, dtype=torch.bfloat16, device=device.torch_device)
    device.allocated(flat)
    return flat


def leaving(device: AcceleratorDevice) -> None:
    """A unit is uploaded and given back unused; its memory is given to another owner."""
    arena = Arena(2 * NUMEL)
    device.pin(arena.address, arena.nbytes)
    flat = _memory(device)
    device.upload(flat, 0, arena.address, NUMEL)
    device.leaving(flat)
    del flat
    torch.zeros(NUMEL, dtype=torch.bfloat16, device=device.torch_device)
    device.synchronize()
    device.close()


def gathered(device: AcceleratorDevice) -> None:
    """A stream of its own fills memory that nothing was uploaded to, and that queued kernels still read."""
    values = torch.ones(NUMEL, dtype=torch.bfloat16, device=device.torch_device)
    for _ in range(3):
        values.add_(values)
    del values
    flat = _memory(device)
    before = torch.accelerator.current_stream()
    device.enter_thread()
    device.arrived(flat)
    flat.fill_(3)
    device.assembled(flat)
    torch.accelerator.set_stream(before)
    device.arrived(flat)
    flat.add_(1)
    device.leaving(flat)
    torch.accelerator.synchronize()
    device.close()


def unpinned(device: AcceleratorDevice) -> None:
    """A download that nobody waits for is dropped, and its buffer with it."""
    device.memory.trim(0)
    values = torch.ones(NUMEL, dtype=torch.bfloat16, device=device.torch_device)
    device.download(values)
    gc.collect()
    device.memory.trim(0)
    torch.accelerator.synchronize()
    device.close()


def unmapped(device: AcceleratorDevice) -> None:
    """A lent buffer is uploaded, as offloaded activations are, and its last user drops it."""
    flat = _memory(device)
    host = device.memory.lend(NUMEL, torch.bfloat16).fill_(3)
    device.upload(flat, 0, host.data_ptr(), NUMEL)
    del host
    gc.collect()
    device.memory.trim(0)
    torch.accelerator.synchronize()
    device.close()


ORDERS = {one.__name__: one for one in (leaving, gathered, unpinned, unmapped)}
