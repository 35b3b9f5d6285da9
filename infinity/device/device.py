"""The device that computes: units become resident on it, by uploads, and gradients leave it, by downloads.

On the CPU an upload is one copy in memory, and a gradient stays where it is. On an accelerator both are
copies on streams of their own, beside the compute stream. The order of `AcceleratorDevice` is tested with
recorded streams (tests/device/test_device.py) and, with its bits, on a simulated device
(tests/device/test_simulated_device.py), and on a GPU where there is one (tests/device/test_gpu.py).

[Note: who waits for whom]
The host waits only in `Transfer.wait`. Streams wait for each other's events:
allocated   compute -> upload    reused memory may still be read by queued kernels
arrived     upload -> compute    the first kernel that uses a unit runs after its last tile is uploaded; if
                                 nothing was uploaded, a stream that fills the unit waits for `allocated`
leaving     upload -> compute    memory may be freed while unused uploads still write to it, and while
                                 streams other than that which allocated it still use it
download    compute -> download  the copy runs after the kernel that makes the gradient
Everything waits only for work queued before it. So there is no cycle, and a slot whose upload has begun
becomes free by itself, whatever the host does.

What a download reads is held until the host has seen that it is over: see [Note: one ledger] in room.
"""

from __future__ import annotations

import functools
import logging
import os
import pkgutil
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from infinity import kernels
from infinity.config.settings import ACCELERATORS, UNPROVEN, Config
from infinity.device.room import DeviceRoom
from infinity.device.store import DeviceStore
from infinity.device.streams import Copy, Event, HostMemory, Streams
from infinity.errors import ConfigError
from infinity.storage import cpu_affinity as cores
from infinity.storage.direct import DirectTarget, FilesToDevice
from infinity.storage.memory import Ledger, view
from infinity.storage.store import DONE, Future, TensorStore, Transfer
from infinity.tensors import is_part

logger = logging.getLogger("infinity")
_CALLS = ("current_device", "mem_get_info", "set_device")
"""What an accelerator's module of torch has to have."""


class Download(NamedTuple):
    """A contiguous copy of a tensor in host memory, and its transfer, which may still run: a Future.

    On an accelerator the memory is reused when the last tensor that shares it is gone.
    """

    tensor: torch.Tensor
    transfer: Transfer

    @property
    def done(self) -> bool:
        """Whether `tensor` may be read."""
        return self.transfer.done

    def wait(self) -> None:
        """Wait until `tensor` may be read."""
        self.transfer.wait()


class Device:
    """The interface of a device. `flat`: a unit's memory, 1-D, 16-bit.

    The lane's thread and the compute thread call `upload`; the compute thread calls the rest, unless a method
    says otherwise.
    Methods without a result do nothing by default, which is right for a device without streams.
    """

    torch_device: torch.device
    is_host: bool
    """Whether units and gradients are in host memory, where kernels may read them by address."""
    room: DeviceRoom | None = None
    """What counts our bytes on the device; None where it has no memory of its own."""

    @property
    def moved_nbytes(self) -> tuple[int, int]:
        """Bytes copied to the device and from it since the start."""
        return 0, 0

    def free_nbytes(self) -> int:
        """Return the bytes of memory that are free on the device, 0 where it has none of its own."""
        return 0

    def failed_allocations(self) -> int:
        """Return how often the device had no memory for an allocation of torch's, but for those that were
        handled; 0 if not known.
        """
        return 0

    def failure_was_handled(self) -> None:
        """Do not count the last allocation of torch's that failed: it was ours, and we do without it, or have
        made it again with success.
        """

    @property
    def pageable_reason(self) -> str:
        """Why some host memory is not page-locked, so that its copies make the host wait; empty if all is."""
        return ""

    def open_store(self) -> TensorStore | None:
        """Return a store of extents in the device's memory; None where it has none of its own."""
        return None

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, on the device, of a contiguous tensor in host memory, when it is there."""
        raise NotImplementedError

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock existing memory, to the byte. If that fails, copies still work, but the host waits."""

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is freed; nothing happens for memory that is not page-locked."""

    def allocated(self, flat: torch.Tensor) -> None:
        """The memory was just allocated: uploads to it wait for the work queued so far."""

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> Transfer:
        """Begin to copy `numel` elements at `address` to `flat[start:]`.

        The caller keeps the memory at `address` unchanged until the transfer is over.
        """
        raise NotImplementedError

    def arrived(self, flat: torch.Tensor | None = None) -> None:
        """Later work on the calling thread's stream sees all uploads so far to `flat` (None: to any unit)."""

    def leaving(self, flat: torch.Tensor) -> Future | None:
        """The memory is about to be freed. Return a copy that still reads it, until whose end it may not be;
        None for none. Called from any thread.
        """
        return None

    def outlived(self, flat: torch.Tensor) -> None:
        """Views of the program's keep the memory beyond `leaving`, which follows."""

    def enter_thread(self) -> None:
        """Give the calling thread a stream of its own, beside those of other threads."""

    def finish_thread(self) -> None:
        """Return when the work queued on the calling thread's stream is over."""

    def assembled(self, flat: torch.Tensor) -> None:
        """The work queued on the calling thread's stream completes `flat`: `arrived` waits for it as well."""

    def download(self, tensor: torch.Tensor, *, ours: bool = True) -> Download:
        """Begin to copy `tensor` to host memory, after the work queued on the calling thread's stream. Its
        memory is kept until the copy is over. ours: it counts as device_memory until then; else the caller
        sees to that.
        """
        raise NotImplementedError

    def download_part(self, flat: torch.Tensor, part: torch.Tensor) -> Download:
        """Like `download`, of a part of a unit's memory, which stays until the copy is over, and counts."""
        raise NotImplementedError

    def room_for_downloads(self, *shares: Ledger) -> None:
        """Keep the memory of finished downloads for the next ones, within the free bytes of `shares`."""

    def take_host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory, 1-D, from which and to which copies are fast. From any thread."""
        raise NotImplementedError

    def prepare(self, nbytes: int, count: int) -> bool:
        """Allocate memory for `count` downloads of `nbytes` each; returns whether one can start now.

        If not, `download` would allocate more; in the steady state the caller waits instead.
        """
        raise NotImplementedError

    @property
    def made_ahead_nbytes(self) -> int:
        """Bytes of host memory that `prepare` has allocated."""
        return 0

    def to_host(self, tensor: torch.Tensor, *, ours: bool = True) -> torch.Tensor:
        """Return `tensor` in host memory and contiguous; itself if it is so already. ours: see `download`."""
        raise NotImplementedError

    def read_files_by(self, files: FilesToDevice) -> None:
        """Have fetches read from NVMe to this device's memory, where there is some."""

    def direct_target(self, flat: torch.Tensor) -> DirectTarget | None:
        """Return a unit's memory as a target of reads from files; None where these go through host memory."""
        return None

    def synchronize(self) -> None:
        """Return when every copy begun so far is over."""

    def close(self) -> None:
        """Synchronize, and undo every `pin`. Nothing is copied afterwards."""


class CpuDevice(Device):
    """The CPU computes: copies are over when they return."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.is_host = True

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> Transfer:
        """Copy in memory."""
        kernels.copy(flat.itemsize * numel, flat.data_ptr() + flat.itemsize * start, address)
        return DONE

    def download(self, tensor: torch.Tensor, *, ours: bool = True) -> Download:
        """Return `tensor`, made contiguous if it is not."""
        return Download(tensor.contiguous(), DONE)

    def download_part(self, flat: torch.Tensor, part: torch.Tensor) -> Download:
        """Return the part, which is not copied."""
        return Download(part, DONE)

    def take_host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def prepare(self, nbytes: int, count: int) -> bool:
        """Downloads need no memory."""
        return True

    def to_host(self, tensor: torch.Tensor, *, ours: bool = True) -> torch.Tensor:
        """Return `tensor`, made contiguous if it is not."""
        return tensor.contiguous()


@dataclass(slots=True)
class _MemoryEvents:
    """The events that order the uses of one unit's memory."""

    stream: Any
    """The stream that allocated it."""
    free: Event
    """After this, uploads or gathers may fill it."""
    uploaded: Event | None = None
    """The end of the last upload so far: compute waits for it."""
    others: list[Any] = field(default_factory=list)
    """Further streams that have used it."""
    read: Copy | None = None
    """The last copy of a part of it to the host."""


class AcceleratorDevice(Device):
    """One accelerator computes; see [Note: who waits for whom]."""

    room: DeviceRoom

    def __init__(self, torch_device: torch.device, streams: Streams) -> None:
        self.torch_device = torch_device
        self.is_host = False
        self.memory = HostMemory(streams)
        self._streams = streams
        self._up, self._down = self.memory.up, self.memory.down
        self._events_of: Any = WeakIdKeyDictionary()  # flat -> _MemoryEvents
        self.room = DeviceRoom()
        self._uploaded_nbytes = self._downloaded_nbytes = 0
        self._files: FilesToDevice | None = None
        self._handled = 0
        """Failures of torch's allocator that `failure_was_handled` was told of."""
        self._counting = threading.Lock()

    @property
    def moved_nbytes(self) -> tuple[int, int]:
        """See Device."""
        return self._uploaded_nbytes, self._downloaded_nbytes

    def free_nbytes(self) -> int:
        """See Device."""
        return self._streams.free_nbytes()

    def failed_allocations(self) -> int:
        """See Device."""
        return self._streams.failed_allocations() - self._handled

    def failure_was_handled(self) -> None:
        """See Device."""
        self._handled += 1

    @property
    def pageable_reason(self) -> str:
        """See Device."""
        return self.memory.pageable_reason

    def pin(self, address: int, nbytes: int) -> None:
        """See Device and HostMemory. What the budget gives to this memory free buffers have no longer."""
        self.memory.look_at_late()
        self.memory.trim(self.memory.spare_nbytes)
        self.memory.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        """See Device."""
        self.memory.unpin(address)

    def open_store(self) -> TensorStore:
        """See Device."""
        return DeviceStore(self.torch_device, self._streams, self.memory, self.room, self._count)

    def _count(self, uploaded_nbytes: int, downloaded_nbytes: int) -> None:
        """Count copies. The lane uploads units, the thread that computes boundaries."""
        with self._counting:
            self._uploaded_nbytes += uploaded_nbytes
            self._downloaded_nbytes += downloaded_nbytes

    def read_files_by(self, files: FilesToDevice) -> None:
        """See Device."""
        self._files = files

    def direct_target(self, flat: torch.Tensor) -> DirectTarget | None:
        """See Device."""
        events: _MemoryEvents | None = self._events_of.get(flat)
        if self._files is None or events is None:
            return None
        return self._files.into(flat, Copy(events.free))

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Device."""
        with torch.inference_mode(mode=False), torch.no_grad():
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=self.torch_device)
        self.allocated(flat)
        if tensor.numel():
            self.upload(flat, 0, tensor.data_ptr(), tensor.numel()).wait()
            self.arrived(flat)
        return flat.view(tensor.shape)

    def allocated(self, flat: torch.Tensor) -> None:
        """See Device."""
        stream = self._streams.current()
        self._events_of[flat] = _MemoryEvents(stream, self._streams.record(stream))

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> Transfer:
        """See Device."""
        residence: _MemoryEvents | None = self._events_of.get(flat)
        if residence is None:
            raise AssertionError(
                f"upload of {numel} elements to memory of {flat.numel()} that `allocated` was not told of"
            )
        if residence.uploaded is None:
            self._streams.wait(self._up, residence.free)
        with torch._C.DisableTorchFunction():  # a TorchFunctionMode of the caller's is for what it computes
            host = torch.frombuffer(view(address, numel * flat.itemsize), dtype=flat.dtype)
            self._streams.copy(self._up, flat[start : start + numel], host)
        residence.uploaded = self._streams.record(self._up)
        self._count(numel * flat.itemsize, 0)
        copy = Copy(residence.uploaded)
        self.memory.copies(address, copy)
        return copy

    def arrived(self, flat: torch.Tensor | None = None) -> None:
        """See Device."""
        stream = self._streams.current()
        if flat is None:
            self._streams.wait(stream, self._streams.record(self._up))
            return
        residence: _MemoryEvents | None = self._events_of.get(flat)
        if residence is None:
            return
        if residence.uploaded is not None:
            self._streams.wait(stream, residence.uploaded)
        elif stream != residence.stream:  # a gather fills it alone: this rank's shard is padding
            self._streams.wait(stream, residence.free)
        if stream != residence.stream and stream not in residence.others:
            residence.others.append(stream)

    def leaving(self, flat: torch.Tensor) -> Future | None:
        """See Device."""
        residence: _MemoryEvents | None = self._events_of.pop(flat, None)
        if residence is None:
            return None
        if residence.uploaded is not None:
            self._streams.wait(residence.stream, residence.uploaded)
        for stream in residence.others:
            self._streams.wait(residence.stream, self._streams.record(stream))
        return residence.read

    def outlived(self, flat: torch.Tensor) -> None:
        """See Device."""
        residence: _MemoryEvents | None = self._events_of.get(flat)
        for stream in residence.others if residence is not None else ():
            self._streams.keep(stream, flat)

    def enter_thread(self) -> None:
        """See Device."""
        self._streams.enter(self._streams.open())

    def finish_thread(self) -> None:
        """See Device."""
        self._streams.record(self._streams.current()).synchronize()

    def assembled(self, flat: torch.Tensor) -> None:
        """See Device."""
        residence: _MemoryEvents | None = self._events_of.get(flat)
        if residence is not None:
            stream = self._streams.current()
            residence.uploaded = self._streams.record(stream)
            if stream in residence.others:  # all that it did is before that
                residence.others.remove(stream)

    def download(self, tensor: torch.Tensor, *, ours: bool = True) -> Download:
        """See Device; the buffer is from `memory`."""
        if not tensor.numel():
            return Download(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), DONE)
        taken = self.room.take(tensor.nbytes, "a gradient on its way to the host") if ours else 0
        try:
            source = tensor.detach().contiguous()
            if ours and is_part(source):
                source = source.clone()  # else the rest of its storage would stay, and is not counted
            host, copy = self._begin_download(source)
        except BaseException:
            self.room.give_back(taken)
            raise
        self.room.leaves(taken, copy, source)
        return Download(host, copy)

    def download_part(self, flat: torch.Tensor, part: torch.Tensor) -> Download:
        """See Device: `leaving` returns the copy."""
        host, copy = self._begin_download(part)
        self._events_of[flat].read = copy
        return Download(host, copy)

    def _begin_download(self, source: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        """Begin to copy contiguous memory, which the caller keeps until the copy is over."""
        host = self.memory.take(source.numel(), source.dtype).view(source.shape)
        self._streams.wait(self._down, self._streams.record(self._streams.current()))
        self._streams.copy(self._down, host, source)
        self._count(0, source.nbytes)
        copy = Copy(self._streams.record(self._down))
        self.memory.copies(host.data_ptr(), copy)
        return host, copy

    def room_for_downloads(self, *shares: Ledger) -> None:
        """See Device."""
        self.memory.share(*shares)

    def take_host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See Device: page-locked."""
        return self.memory.take(numel, dtype)

    def prepare(self, nbytes: int, count: int) -> bool:
        """See Device."""
        return self.memory.prepare(nbytes, count)

    @property
    def made_ahead_nbytes(self) -> int:
        """See Device."""
        return self.memory.ahead_nbytes

    def to_host(self, tensor: torch.Tensor, *, ours: bool = True) -> torch.Tensor:
        """See Device."""
        download = self.download(tensor, ours=ours)
        download.wait()
        self.room.collect()
        return download.tensor

    def synchronize(self) -> None:
        """See Device."""
        self.memory.synchronize()

    def close(self) -> None:
        """See Device."""
        self.synchronize()
        if self._files is not None:
            self._files.close()
        self.room.close()
        self.memory.close()


def choose_device(config: Config) -> str:
    """Return where a model of these settings computes: what they name, else the accelerator that torch sees.

    Raises: ConfigError for a device that is not supported, or does not go with the other settings.
    """
    device = config.device or os.environ.get("INFINITY_DEVICE")
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        chosen = found is not None and found.type in ACCELERATORS and found.type not in UNPROVEN
        device = found.type if found is not None and chosen else "cpu"
        _say_device(device, found.type if found else "no accelerator")
    config.check_place(device)
    return device


@functools.cache
def _say_device(device: str, found: str) -> None:
    """Log the choice, once in a process."""
    logger.info("computing on %r: torch sees %s; Config(device=...) names another", device, found)


def open_device(name: str) -> Device:
    """Return the device called `name`, such as "cpu" or "cuda:0".

    Raises: ConfigError for an accelerator that does not exist, or of which torch cannot do what is needed.
    """
    if name == "cpu":
        return CpuDevice()
    kind, index = _type_and_index(name)
    seen = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if seen is not None and seen.type == kind else 0
    if (index or 0) >= count:
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} sees {count} {kind.upper()} devices; "
            "use device='cpu'"
        )
    _check_calls(name, kind)
    device = torch.device(kind, torch.get_device_module(kind).current_device() if index is None else index)
    return AcceleratorDevice(device, pkgutil.resolve_name(ACCELERATORS[kind])(device))


def _type_and_index(name: str) -> tuple[str, int | None]:
    """Return the type and the index of a device. Raises: ConfigError for a type that torch does not know."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} does not know such devices ({error}). Likely cause: "
            "the package of its vendor is not imported. Import it before the model is built, or use "
            "device='cpu'"
        ) from None
    return device.type, device.index


def _check_calls(name: str, kind: str) -> None:
    """See that torch can do with an accelerator what is needed, and say where nobody has tried it.

    Raises: ConfigError naming what is missing.
    """
    if kind not in UNPROVEN:
        return
    module = torch.get_device_module(kind)
    missing = [f"torch.{kind}.{call}" for call in _CALLS if not hasattr(module, call)]
    if not hasattr(torch.Stream, "__enter__"):
        missing.append("a torch.Stream that is a context manager")
    if missing:
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} lacks {', '.join(missing)}. Use a newer torch (2.7 "
            "or above), or device='cpu'"
        )
    logger.warning(
        "device=%r: nobody has run Infinity on such a device. Compare the losses of some steps with those of "
        "device='cpu' before you trust it.",
        name,
    )


def choose_cores(device: Device) -> tuple[int, ...]:
    """Set the number of kernel threads to the cores that torch's threads leave free, if any, and with several
    ranks on this machine bind them to this rank's cores. Returns those cores; see cpu_affinity.

    Torch's number of threads stays the user's choice, since it changes results.
    """
    here = cores.here()
    share = cores.share(here, torch.get_num_threads() if device.is_host else 1)
    if kernels.threads() == len(here.allowed):  # otherwise the user has chosen a number
        kernels.set_threads(share.threads)
        kernels.bind_threads(share.cpus)
    return share.cpus
