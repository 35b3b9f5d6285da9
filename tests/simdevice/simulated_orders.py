"""Sequences of calls of the engine's accelerator, without a model: each depends on one order."""

from __future__ import annotations

import gc

import torch
from torch import nn

from infinity import AdamW, Init
from infinity.device.device import AcceleratorDevice
from infinity.engine import engine as engine_module
from infinity.engine.engine import engine_of_model
from infinity.storage.memory import Arena, Ledger
from infinity.storage.store import Request

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


def gathers(device: AcceleratorDevice) -> None:
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


def stored(device: AcceleratorDevice) -> None:
    """An extent is filled from the host, worked on, and read back."""
    store, arena = device.open_store(), Arena(2 * NUMEL)
    device.pin(arena.address, arena.nbytes)
    extent = store.allocate(2 * NUMEL, "values")
    request = Request(extent, 0, arena.address, 2 * NUMEL, "values", arena)
    store.write(request)
    store.arrived(extent)
    store.tensor(extent).view(torch.bfloat16).add_(1)
    store.used(extent)
    store.read(request).wait()
    store.free(extent)
    device.synchronize()
    device.close()


def updated(device: AcceleratorDevice) -> None:
    """An extent is worked on by queued kernels, and read by the host behind them."""
    store, arena = device.open_store(), Arena(2 * NUMEL)
    device.pin(arena.address, arena.nbytes)
    extent = store.allocate(2 * NUMEL, "values")
    values = store.tensor(extent).view(torch.bfloat16)
    for _ in range(3):
        values.add_(1)
    store.used(extent)
    store.read(Request(extent, 0, arena.address, 2 * NUMEL, "values", arena)).wait()
    del values
    store.free(extent)
    device.synchronize()
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
    host = device.memory.take(NUMEL, torch.bfloat16).fill_(3)
    device.upload(flat, 0, host.data_ptr(), NUMEL)
    del host
    gc.collect()
    device.memory.trim(0)
    torch.accelerator.synchronize()
    device.close()


def lent_again(device: AcceleratorDevice) -> None:
    """A lent buffer is uploaded, and its last user drops it; the host writes to the next one of its size."""
    device.room_for_downloads(Ledger(8 * NUMEL))
    flat = _memory(device)
    host = device.take_host_buffer(NUMEL, torch.bfloat16).fill_(3)
    device.upload(flat, 0, host.data_ptr(), NUMEL)
    del host
    gc.collect()
    device.take_host_buffer(NUMEL, torch.bfloat16).fill_(4)
    torch.accelerator.synchronize()
    device.close()


def kept_aside(device: AcceleratorDevice) -> None:
    """Values of a record that lives on the device are copied, to be kept aside, and then replaced."""
    engine_module.open_device = lambda _: device
    with Init(nvme=None, host_memory="8MiB", device="sim", device_memory="4MiB"):
        model = nn.Linear(64, 64, bias=False)
    optimizer = AdamW(model.parameters(), update="backward")
    model(torch.ones(2, 64, dtype=torch.bfloat16).to("sim")).sum().backward()
    optimizer.step()
    engine = engine_of_model(model)
    (unit,) = engine.units
    extent, arena = unit.record.home("hi")[0], Arena(2 * 64 * 64)
    torch.accelerator.synchronize()
    engine.residency.hold_aside(unit)
    extent.store.write(Request(extent, 0, arena.address, arena.nbytes, "hi", arena))
    torch.accelerator.synchronize()
    engine.residency.drop(unit)
    engine.close()
    del model, optimizer, engine, unit, extent
    gc.collect()


_ALL = leaving, gathers, stored, updated, unpinned, unmapped, lent_again, kept_aside
ORDERS = {one.__name__: one for one in _ALL}
