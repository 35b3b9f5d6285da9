"""A peer: the kernel's native aio (which libaio wraps), through its raw system calls.

There are `depth` control blocks, one per request in flight. When events arrive, their latencies are recorded
and their control blocks refilled and submitted again, all with one system call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Iterator, Sequence

from infinity.aio import AlignedMemory
from infinity.aio.measure import MIXED, READ, WRITE, Moved, RequestStream
from infinity.bench.engine.runs import RunError

NUMBERS = {
    "x86_64": {"io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209},
    "aarch64": {"io_setup": 0, "io_destroy": 1, "io_submit": 2, "io_getevents": 4},
}
"""Numbers of the system calls, by machine."""
OPCODES = {READ: (0,), WRITE: (1,), MIXED: (0, 1)}
"""IOCB_CMD_PREAD and IOCB_CMD_PWRITE."""


class ControlBlock(ctypes.Structure):
    """struct iocb of a little-endian machine."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("resfd", ctypes.c_uint32),
    )


class IoEvent(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def call(name: str, *arguments: object) -> int:
    """Make a system call.

    Raises: RunError with the kernel's reason, or for a machine that is not in NUMBERS.
    """
    numbers = NUMBERS.get(platform.machine())
    if numbers is None:
        raise RunError(
            f"libaio: system calls are known for {' and '.join(NUMBERS)}, not {platform.machine()}"
        )
    result = int(_libc.syscall(ctypes.c_long(numbers[name]), *arguments))
    if result < 0:
        reason = os.strerror(ctypes.get_errno())
        cure = "; lower the depth, or raise fs.aio-max-nr" if name == "io_setup" else ""
        raise RunError(f"libaio: {name} failed: {reason}{cure}")
    return result


def transfers(stream: RequestStream, address: int, slots: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield (opcode, address, offset) of requests for ever, in the order of aio.measure."""
    opcodes, size = OPCODES[stream.verb], stream.request_nbytes
    each = nbytes // len(opcodes) // size * size
    count = 0
    while True:
        turn, verb = divmod(count, len(opcodes))
        yield opcodes[verb], address + count % slots * size, verb * each + turn * size % each
        count += 1


def move(fd: int, memory: AlignedMemory, stream: RequestStream, nbytes: int, seconds: float) -> Moved:
    """Move a stream over the first `nbytes` of a file that was opened with O_DIRECT, for `seconds`.

    Raises: RunError if a system call or a request fails, or a request is incomplete.
    """
    size, depth = stream.request_nbytes, stream.in_flight
    coming = transfers(stream, memory.address, len(memory) // size, nbytes)
    blocks = (ControlBlock * depth)()
    events = (IoEvent * depth)()
    context = ctypes.c_ulong(0)
    call("io_setup", ctypes.c_long(depth), ctypes.byref(context))
    try:
        return _run(context, fd, size, coming, blocks, events, seconds)
    finally:
        call("io_destroy", context)  # waits for the requests in flight


def _run(
    context: ctypes.c_ulong,
    fd: int,
    size: int,
    coming: Iterator[tuple[int, int, int]],
    blocks: ctypes.Array[ControlBlock],
    events: ctypes.Array[IoEvent],
    seconds: float,
) -> Moved:
    began_s = [0.0] * len(blocks)
    latencies_s: list[float] = []
    start_s = now_s = time.perf_counter()

    def submit(places: Sequence[int]) -> None:
        for place in places:
            block = blocks[place]
            block.data, block.fd, block.nbytes, began_s[place] = place, fd, size, now_s
            block.opcode, block.address, block.offset = next(coming)
        pointers = (ctypes.POINTER(ControlBlock) * len(places))(*(ctypes.pointer(blocks[p]) for p in places))
        taken = 0
        while taken < len(places):
            rest = ctypes.byref(pointers, taken * ctypes.sizeof(ctypes.c_void_p))
            taken += call("io_submit", context, ctypes.c_long(len(places) - taken), rest)

    submit(range(len(blocks)))
    in_flight = len(blocks)
    while in_flight:
        n = call("io_getevents", context, ctypes.c_long(1), ctypes.c_long(len(events)), events, None)
        now_s = time.perf_counter()
        for event in events[:n]:
            if event.result != size:
                raise RunError(f"libaio: a request of {size} B returned {event.result}")
            latencies_s.append(now_s - began_s[event.data])
        if now_s - start_s < seconds:
            submit([event.data for event in events[:n]])
        else:
            in_flight -= n
    return Moved(len(latencies_s) * size, time.perf_counter() - start_s, latencies_s)
