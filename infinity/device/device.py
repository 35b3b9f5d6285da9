"""The device that computes: where units become resident, and how bytes get there and back.

On the CPU an upload is one copy in memory, and a gradient is in host memory where it is. On CUDA both are
copies on a stream of their own, beside the one that computes. `CudaDevice` has not run on a GPU yet: its
order is proven with recorded streams (tests/device/test_device.py), its calls of torch.cuda are not.

[Note: who waits for whom]
Nothing here makes the host wait but a `Transfer` that somebody waits for. Streams wait for each other's
events:
allocated   compute -> upload    memory that is given out again may still be read by queued kernels
arrived     upload -> compute    the first kernel that uses a unit comes behind its last tile; where nothing
                                 was uploaded, another stream that fills it comes behind `allocated`
leaving     upload -> compute    memory is given back while uploads that nobody used may still write to it
download    compute -> download  the copy comes behind the kernel that makes the gradient
An upload waits only for what was queued before it, and so does all the rest: there is no cycle, and a slot
whose upload was begun becomes free by itself, whatever the host does.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from infinity import kernels
from infinity.config.settings import Config
from infinity.device.streams import Event, HostMemory, Streams, TorchStreams
from infinity.errors import ConfigError
from infinity.storage import cpu_affinity as cores
from infinity.storage.memory import Ledger, view
from infinity.storage.store import DONE, Transfer

logger = logging.getLogger("infinity")

_POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class Download:
    """A copy of a tensor in host memory, contiguous, that may still be under way: a Transfer.

    On CUDA its memory is reused when the last tensor that shares it is gone.
    """

    tensor: torch.Tensor
    transfer: Transfer

    @property
    def done(self) -> bool:
        """Whether `tensor` may be read."""
        return self.transfer.done

    @property
    def began_s(self) -> float:
        """When it began, by time.perf_counter."""
        return self.transfer.began_s

    @property
    def ended_s(self) -> float | None:
        """When it was over; None while it is not."""
        return self.transfer.ended_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when `tensor` may be read."""
        self.transfer.wait(timeout_s)


class Device(Protocol):
    """What the lane, the executor and the gradients ask of a device. `flat`: a unit's memory, 1-D, 16-bit.

    The lane's thread calls `upload`; the others, unless they say so, are for the thread that computes.
    """

    torch_device: torch.device
    is_host: bool
    """Whether units and gradients are in host memory: by their address, kernels may read them in place."""

    @property
    def pageable_reason(self) -> str:
        """Why some host memory is not page-locked, so that its copies make the host wait; empty if all is."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock existing memory, to the byte. Where that fails, copies work all the same, and wait."""

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is given back; nothing for memory that is not page-locked."""

    def allocated(self, flat: torch.Tensor) -> None:
        """The memory was just allocated: uploads to it come behind what is queued now."""

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> Transfer:
        """Begin to copy `numel` elements at `address` to `flat[start:]`.

        The memory at `address` stays as it is until the transfer is over.
        """

    def arrived(self, flat: torch.Tensor | None = None) -> None:
        """Later work of the calling thread's stream sees all uploads to `flat` (None: to anything) so far."""

    def leaving(self, flat: torch.Tensor) -> None:
        """The memory is about to be given back. Called from any thread."""

    def enter_thread(self) -> None:
        """What the calling thread queues from now on goes beside what others have queued."""

    def assembled(self, flat: torch.Tensor) -> None:
        """What the calling thread's stream has queued completes `flat`: `arrived` waits for that as well."""

    def download(self, tensor: torch.Tensor) -> Download:
        """Begin to copy `tensor`, as the calling thread's stream leaves it, to host memory."""

    def room_for_downloads(self, *shares: Ledger) -> None:
        """Memory of downloads that are used up may stay for the next ones, as far as `shares` have room."""

    def prepare(self, nbytes: int, count: int) -> bool:
        """Have memory made for `count` downloads of `nbytes` each; whether there is any for one now. Where
        there is not, `download` makes more: in the steady state the caller waits instead.
        """

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` contiguous and in host memory (itself where it is)."""

    def synchronize(self) -> None:
        """Return when every copy begun so far is over."""

    def close(self) -> None:
        """Synchronize, and undo every `pin`. Nothing is copied afterwards."""


class CpuDevice:
    """The CPU computes."""

    def __init__(self) -> None:
        """Nothing to open."""
        self.torch_device = torch.device("cpu")
        self.is_host = True
        self.pageable_reason = ""

    def pin(self, address: int, nbytes: int) -> None:
        """No device reads host memory behind the CPU's back."""

    def unpin(self, address: int) -> None:
        """Nothing was pinned."""

    def allocated(self, flat: torch.Tensor) -> None:
        """Memory that is given out is used by nobody."""

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> Transfer:
        """One copy in memory."""
        kernels.copy(flat.itemsize * numel, flat.data_ptr() + flat.itemsize * start, address)
        return DONE

    def arrived(self, flat: torch.Tensor | None = None) -> None:
        """Copies on the CPU are over when they return."""

    def leaving(self, flat: torch.Tensor) -> None:
        """Copies on the CPU are over when they return."""

    def enter_thread(self) -> None:
        """Threads of the CPU queue nothing."""

    def assembled(self, flat: torch.Tensor) -> None:
        """What was done on the CPU is done."""

    def download(self, tensor: torch.Tensor) -> Download:
        """Return `tensor`, made contiguous if it is not."""
        return Download(tensor.contiguous(), DONE)

    def room_for_downloads(self, *shares: Ledger) -> None:
        """Nothing is copied."""

    def prepare(self, nbytes: int, count: int) -> bool:
        """Nothing is copied."""
        return True

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, made contiguous if it is not."""
        return tensor.contiguous()

    def synchronize(self) -> None:
        """Copies on the CPU are over when they return."""

    def close(self) -> None:
        """Nothing was opened."""


class _Copy:
    """A copy on a stream, over when its event is: a Transfer. It began when it was queued, and ended when the
    host first saw that it was over.
    """

    def __init__(self, event: Event) -> None:
        self.began_s = time.perf_counter()
        self._event = event
        self._ended_s: float | None = None

    @property
    def done(self) -> bool:
        if self._ended_s is None and self._event.query():
            self._ended_s = time.perf_counter()
        return self._ended_s is not None

    @property
    def ended_s(self) -> float | None:
        return self._ended_s if self.done else None

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None and not self.done:
            self._event.synchronize()
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.done:
            if time.monotonic() >= end_s:
                raise TimeoutError(f"a copy between host and device is not over after {timeout_s} s")
            time.sleep(_POLL_S)


@dataclass(slots=True)
class _Residence:
    """What orders the uses of one unit's memory."""

    stream: Any
    """The one that allocated it."""
    free: Event
    """compute -> upload, or whatever else fills it"""
    uploaded: Event | None = None
    """upload -> compute: behind the last tile so far."""


class CudaDevice:
    """One CUDA device computes; see [Note: who waits for whom]. Unproven on a GPU."""

    def __init__(self, torch_device: torch.device, streams: Streams) -> None:
        """Open one stream for each direction."""
        self.torch_device = torch_device
        self.is_host = False
        self.memory = HostMemory(streams)
        self._streams = streams
        self._up, self._down = self.memory.up, self.memory.down
        self._residences: Any = WeakIdKeyDictionary()  # flat -> _Residence

    @property
    def pageable_reason(self) -> str:
        """See Device."""
        return self.memory.pageable_reason

    def pin(self, address: int, nbytes: int) -> None:
        """See Device; the first failure is logged."""
        self.memory.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        """See Device."""
        self.memory.unpin(address)

    def allocated(self, flat: torch.Tensor) -> None:
        """See Device."""
        stream = self._streams.current()
        self._residences[flat] = _Residence(stream, self._streams.record(stream))

    def upload(self, flat: torch.Tensor, start: int, address: int, numel: int) -> Transfer:
        """See Device."""
        residence: _Residence | None = self._residences.get(flat)
        if residence is None:
            raise AssertionError("upload to memory that `allocated` was not told of")
        if residence.uploaded is None:
            self._streams.wait(self._up, residence.free)
        host = torch.frombuffer(view(address, numel * flat.itemsize), dtype=flat.dtype)
        self._streams.copy(self._up, flat[start : start + numel], host)
        residence.uploaded = self._streams.record(self._up)
        return _Copy(residence.uploaded)

    def arrived(self, flat: torch.Tensor | None = None) -> None:
        """See Device."""
        stream = self._streams.current()
        if flat is None:
            self._streams.wait(stream, self._streams.record(self._up))
            return
        residence: _Residence | None = self._residences.get(flat)
        if residence is None:
            return
        if residence.uploaded is not None:
            self._streams.wait(stream, residence.uploaded)
        elif stream != residence.stream:  # a rank whose share is padding: what it gathers comes here
            self._streams.wait(stream, residence.free)
        if stream != residence.stream:
            self._streams.keep(stream, flat)

    def leaving(self, flat: torch.Tensor) -> None:
        """See Device."""
        residence: _Residence | None = self._residences.pop(flat, None)
        if residence is not None and residence.uploaded is not None:
            self._streams.wait(residence.stream, residence.uploaded)

    def enter_thread(self) -> None:
        """See Device."""
        self._streams.enter(self._streams.open())

    def assembled(self, flat: torch.Tensor) -> None:
        """See Device."""
        residence: _Residence | None = self._residences.get(flat)
        if residence is not None:
            residence.uploaded = self._streams.record(self._streams.current())

    def download(self, tensor: torch.Tensor) -> Download:
        """See Device; the buffer is from `memory`."""
        source = tensor.detach().contiguous()
        if not source.numel():
            return Download(torch.empty(source.shape, dtype=source.dtype), DONE)
        host = self.memory.lend(source.numel(), source.dtype).view(source.shape)
        self._streams.wait(self._down, self._streams.record(self._streams.current()))
        self._streams.copy(self._down, host, source)
        self._streams.keep(self._down, source)
        return Download(host, _Copy(self._streams.record(self._down)))

    def room_for_downloads(self, *shares: Ledger) -> None:
        """See Device."""
        self.memory.share(*shares)

    def prepare(self, nbytes: int, count: int) -> bool:
        """See Device."""
        return self.memory.prepare(nbytes, count)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Device."""
        download = self.download(tensor)
        download.wait()
        return download.tensor

    def synchronize(self) -> None:
        """See Device."""
        self.memory.synchronize()

    def close(self) -> None:
        """See Device."""
        self.synchronize()
        self.memory.close()


def choose_device(config: Config) -> str:
    """Return where a model of these settings computes: what they name, else the accelerator that torch sees.

    Raises: ConfigError for a device that is not supported, or does not go with the other settings.
    """
    device = config.device or os.environ.get("INFINITY_DEVICE")
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cuda" if found is not None and found.type == "cuda" else "cpu"
        _say_device(device, found.type if found else "no accelerator")
    config.check_place(device)
    return device


@functools.cache
def _say_device(device: str, found: str) -> None:
    """Log the choice, once in a process."""
    logger.info("computing on %r: torch sees %s; Config(device=...) names another", device, found)


def open_device(name: str) -> Device:
    """Return the device called `name`.

    Raises: ConfigError for a CUDA device that is not there.
    """
    if name == "cpu":
        return CpuDevice()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.device(name).index
    if (index or 0) >= count:
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} sees {count} CUDA devices; use device='cpu'"
        )
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return CudaDevice(device, TorchStreams(device))


def choose_cores(device: Device) -> tuple[int, ...]:
    """Run the kernels on the cores that torch's own threads leave, where they leave any, and, with several
    ranks on this machine, on this rank's own, which are returned; see cores.

    Torch's number of threads is the user's: it changes results.
    """
    here = cores.here()
    share = cores.share(here, torch.get_num_threads() if device.is_host else 1)
    if kernels.threads() == len(here.allowed):  # else somebody has chosen
        kernels.set_threads(share.threads)
        kernels.bind_threads(share.cpus)
    return share.cpus
