"""GPU-direct storage: reads from NVMe to an accelerator's memory, by kvikio where that is installed.

[Note: read directly]
With Config(aio="gds") a fetch that applies no update reads `hi` from NVMe to its unit's memory, and no host
memory is in between (lane/direct.py). All else (updates, which the CPU makes; what lies in host memory, or in
a checkpoint's files) goes as ever. What is read is not hashed, which the CPU does in host memory: so
verify="off" has to be given. Where that cannot be, all reads go through host memory, and one line of the log
says why.

A read may begin when what computed in that memory before is over; the event that
`AcceleratorDevice.allocated` has recorded tells that, and is looked at whenever the transfer is. Computing is
launched after the transfer has ended, so that nothing has to order it behind the read.

It was run on a GPU in kvikio's compatibility mode, and with a stand-in for kvikio; on a drive that has
GPUDirect it is unproven.
"""

from __future__ import annotations

import errno
import functools
import importlib
import logging
import time
from typing import Any

import torch

from infinity.aio import IoError
from infinity.config.settings import Config
from infinity.device.device import Device
from infinity.storage.direct import DirectTarget
from infinity.storage.store import Future

logger = logging.getLogger("infinity")

MODULE = "kvikio"


class DirectFiles:
    """Files as kvikio opens them, by their descriptors, which stay another's."""

    def __init__(self, kvikio: Any) -> None:
        """Open none so far."""
        self._kvikio = kvikio
        self._files: dict[int, Any] = {}

    def begin(self, fd: int, offset: int, memory: torch.Tensor) -> Any:
        """Begin to read to bytes of a device; return kvikio's future."""
        if fd not in self._files:
            self._files[fd] = self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r")
        return self._files[fd].pread(memory, size=memory.numel(), file_offset=offset)

    def into(self, flat: torch.Tensor, free: Future) -> IntoDevice:
        """Return a unit's memory as a target of reads; free: when it may be written."""
        return IntoDevice(self, flat, free)

    def close(self) -> None:
        """Close them."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class IntoDevice(DirectTarget):
    """One unit's memory on a device."""

    def __init__(self, files: DirectFiles, flat: torch.Tensor, free: Future) -> None:
        """See DirectFiles.into."""
        self._files, self._free = files, free
        self._bytes = flat.detach().view(torch.uint8)

    def read(self, fd: int, offset: int, address: int, nbytes: int, what: str) -> DirectRead:
        """See DirectTarget."""
        first = address - self._bytes.data_ptr()
        return DirectRead(self._files, fd, offset, self._bytes[first : first + nbytes], self._free, what)


class DirectRead:
    """A read to a device's memory: a Transfer."""

    def __init__(
        self, files: DirectFiles, fd: int, offset: int, memory: torch.Tensor, free: Future, what: str
    ) -> None:
        """Begin, if the memory is free by now."""
        self._files, self._fd, self._offset, self._what = files, fd, offset, what
        self._memory: torch.Tensor | None = memory
        self._nbytes = memory.numel()
        self._free = free
        self._future: Any = None
        self._got = 0
        self._error: Exception | None = None
        self._ended_s: float | None = None
        self.began_s = time.perf_counter()
        self._try_to_begin()

    def _try_to_begin(self) -> bool:
        if self._future is None and self._memory is not None and self._free.done:
            self._future = self._files.begin(self._fd, self._offset, self._memory)
        return self._future is not None

    @property
    def done(self) -> bool:
        """See Future."""
        if self._ended_s is None and self._try_to_begin() and self._future.done():
            self._end()
        return self._ended_s is not None

    @property
    def ended_s(self) -> float | None:
        """See Transfer."""
        return self._ended_s if self.done else None

    def wait(self, timeout_s: float | None = None) -> None:
        """See Transfer; kvikio has no timeout.

        Raises: aio.IoError where fewer bytes came than were asked for.
        """
        self._free.wait()
        self._try_to_begin()
        self._end()
        if self._got != self._nbytes:
            why = "" if self._error is None else f" ({self._error})"
            raise IoError(
                errno.EIO,
                f"{self._what}: {self._got} of {self._nbytes} B came from byte {self._offset} of a file to "
                f"the device{why}. Likely cause: the file was truncated, or {MODULE} failed. "
                "Config(aio=None) reads through host memory",
            ) from self._error

    def _end(self) -> None:
        """Take the result, which kvikio gives once."""
        if self._ended_s is not None:
            return
        try:
            self._got = self._future.get()
        except (RuntimeError, OSError, ValueError) as error:
            self._error = error
        self._memory, self._ended_s = None, time.perf_counter()


def read_directly(device: Device, config: Config) -> Device:
    """Return a device to whose memory fetches read from files, where the settings ask for it and it can be;
    else say once why they go through host memory.
    """
    if config.aio != "gds":
        return device
    kvikio, why = _found(config, on_host=device.is_host)
    if why:
        _say(why)
    else:
        device.read_files_by(DirectFiles(kvikio))
    return device


def _found(config: Config, *, on_host: bool) -> tuple[Any, str]:
    """Return kvikio, and why it cannot be used; empty where it can."""
    if on_host:
        return None, "the CPU computes"
    if config.verify != "off":
        return None, f'verify="{config.verify}" hashes what is read, in host memory: give verify="off"'
    try:
        kvikio = importlib.import_module(MODULE)
    except ImportError as error:
        return None, f"{MODULE} cannot be imported ({error})"
    if _is_compatible_only(kvikio):
        return None, f"{MODULE} is in its compatibility mode, without GPUDirect (KVIKIO_COMPAT_MODE)"
    return kvikio, ""


def _is_compatible_only(kvikio: Any) -> bool:
    """Whether kvikio reads through host memory itself."""
    ask = getattr(kvikio.defaults, "is_compat_mode_preferred", None)
    if ask is not None:
        return bool(ask())
    mode = kvikio.defaults.compat_mode()  # of older versions: a bool, or one of ON, OFF and AUTO
    return mode is True or getattr(mode, "name", "") == "ON"


@functools.cache
def _say(why: str) -> None:
    """Log it, once in a process."""
    logger.warning('aio="gds": reads go through host memory, since %s', why)
