"""The engine's accelerator with one order missing, each under a name; see the note in device/device.py."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from infinity.device.device import AcceleratorDevice, Download
from infinity.device.room import DeviceRoom
from infinity.device.store import DeviceStore
from infinity.device.streams import HostMemory
from infinity.storage.store import DONE
from simulator import SimStreams


class NoWaitForUploads(AcceleratorDevice):
    """Kernels do not wait for uploads."""

    def arrived(self, flat=None):
        residence = None if flat is None else self._events_of.get(flat)
        if residence is not None and residence.uploaded is None:
            super().arrived(flat)


class NoWaitForMemory(AcceleratorDevice):
    """Uploads do not wait for kernels that still use the memory."""

    def allocated(self, flat):
        super().allocated(flat)
        self._events_of[flat].free = torch.Event(self.torch_device)


class GathersDoNotWait(AcceleratorDevice):
    """A gather into memory that nothing was uploaded to does not wait for kernels that still use it."""

    def arrived(self, flat=None):
        residence = None if flat is None else self._events_of.get(flat)
        if residence is None or residence.uploaded is not None:
            super().arrived(flat)


class LeavesAtOnce(AcceleratorDevice):
    """Memory is freed while unused uploads still write to it."""

    def leaving(self, flat):
        self._events_of.pop(flat, None)


class DownloadsAreRead(AcceleratorDevice):
    """The host reads a download before it is over."""

    def download(self, tensor, *, ours=True):
        return Download(super().download(tensor, ours=ours).tensor, DONE)


class SlotsAreReused(AcceleratorDevice):
    """The host reuses the source of an upload before it is over."""

    def upload(self, flat, start, address, numel):
        super().upload(flat, start, address, numel)
        return DONE


class HostKernel(AcceleratorDevice):
    """A kernel of the host gets a device address."""

    def download(self, tensor, *, ours=True):
        ctypes.c_short.from_address(tensor.data_ptr()).value  # noqa: B018
        return super().download(tensor, ours=ours)


class UpdatesAreForgotten(AcceleratorDevice):
    """Copies of what lives on the device do not wait for the updates there."""

    class Store(DeviceStore):
        def used(self, extent):
            pass

    def open_store(self):
        return self.Store(self.torch_device, self._streams, self.memory, self.room, self._count)


class StoresAreUsedAtOnce(AcceleratorDevice):
    """Kernels do not wait for copies to what lives on the device."""

    class Store(DeviceStore):
        def arrived(self, extent):
            pass

    def open_store(self):
        return self.Store(self.torch_device, self._streams, self.memory, self.room, self._count)


class NothingIsHeld(AcceleratorDevice):
    """The memory of a gradient is freed while it is downloaded."""

    class Room(DeviceRoom):
        def leaves(self, nbytes, future, *held):
            super().leaves(nbytes, future)

    def __init__(self, place, streams):
        super().__init__(place, streams)
        self.room = self.Room()


class LeftToTheAllocator(AcceleratorDevice):
    """That memory is kept by torch's allocator, which looks for the end of the download itself."""

    class Room(DeviceRoom):
        def leaves(self, nbytes, future, *held):
            for one in held:
                self.streams.keep(self.down, one)
            super().leaves(nbytes, future)

    def __init__(self, place, streams):
        super().__init__(place, streams)
        self.room = self.Room()
        self.room.streams, self.room.down = streams, self._down


class DownloadsDoNotWait(SimStreams):
    """Downloads do not wait for the kernel that makes the gradient."""

    def __init__(self, device):
        super().__init__(device)
        self.opened = []

    def open(self):
        self.opened.append(super().open())
        return self.opened[-1]

    def wait(self, stream, event):
        if stream != self.opened[1]:  # HostMemory opens that of uploads first
            super().wait(stream, event)


class BuffersComeBackAtOnce(AcceleratorDevice):
    """A buffer whose last tensor is gone is lent again, or unlocked, while a copy still uses it."""

    class Memory(HostMemory):
        def copies(self, address, copy):
            pass

    def __init__(self, place, streams):
        super().__init__(place, streams)
        self.memory = self.Memory(streams)
        self._up, self._down = self.memory.up, self.memory.down


@dataclass(frozen=True)
class Fault:
    """caught: what is found, a part of the first failure; empty where the bits alone show it. case: what
    finds it, with other settings; empty where a single order does (simulated_orders).
    """

    caught: str
    case: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    device: type[AcceleratorDevice] = AcceleratorDevice
    streams: type[SimStreams] = SimStreams

    def opened(self) -> AcceleratorDevice:
        """Return the device that has the fault."""
        place = torch.device("sim", 0)
        return self.device(place, self.streams(place))

    def plant(self, module: Any) -> None:
        """Let engines be opened on it."""
        module.open_device = lambda _: self.opened()


LATE = {"copy_us": 2000}
SLOW = {"copy_us": 20_000, "steps": 2}  # the memory is reused long before the host waits for the download
FAULTS = {
    "arrived": Fault("not ordered behind an upload", device=NoWaitForUploads),
    "allocated": Fault("not ordered behind", device=NoWaitForMemory),
    "download": Fault("a download on stream", streams=DownloadsDoNotWait),
    "held": Fault("not ordered behind a download", settings=SLOW, device=NothingIsHeld),
    "read early": Fault("", settings=LATE, device=DownloadsAreRead),
    "slot reused": Fault("the host changed the source of an upload", settings=LATE, device=SlotsAreReused),
    "host kernel": Fault("SIGSEGV", device=HostKernel),
}
ORDERS = {
    "leaving": Fault("not ordered behind an upload", device=LeavesAtOnce),
    "gathers": Fault("not ordered behind", device=GathersDoNotWait),
    "updated": Fault("a download on stream", device=UpdatesAreForgotten),
    "stored": Fault("not ordered behind an upload", device=StoresAreUsedAtOnce),
    "unpinned": Fault("host memory is unpinned while a download", device=BuffersComeBackAtOnce),
    "unmapped": Fault("host memory is unpinned while an upload", device=BuffersComeBackAtOnce),
    "lent_again": Fault("the host changed the source of an upload", device=BuffersComeBackAtOnce),
    "kept_aside": Fault("not ordered behind", device=UpdatesAreForgotten),
}
"""Orders that no training here depends on: each is caught by a sequence of calls of its own."""
BUDGETS = {"left to the allocator": Fault("more than is counted", device=LeftToTheAllocator)}
"""Memory that is held beyond what is counted, which counting at every use finds: see simulated_tiers."""
