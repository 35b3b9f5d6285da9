"""Memory that the ranks of one machine have in common, without a name.

[Note: nameless memory]
One rank of a machine makes a file in memory (memfd), and passes its descriptor to the others over a socket
in the abstract namespace: no folder has either, so nothing is left behind, whatever ends a rank. Each rank
maps it whole, to write its own part. What it computes with it maps once more, privately: such a mapping shows
what is in common until this rank changes it, and from then on a copy of that page. So no rank changes what
another one computes with, by whatever way past torch. Neither is inherited by forks, and no core dump has
them: one for each rank would have all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import secrets
import socket
import struct
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from infinity.errors import RanksError
from infinity.sizes import format_size

if TYPE_CHECKING:
    from infinity.ranks.group import Ranks

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_REMOVE = 9
_PEER = struct.Struct("3i")
"""Of SO_PEERCRED: process, user, group."""
_RANK = struct.Struct("=q")
_CURE = "Config(shared_memory=False) needs none"
_PEER_S = 5.0
"""Seconds in which one that has connected says which rank it is."""
PAGE = mmap.PAGESIZE
_BOOT, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


def has_nameless_memory() -> bool:
    """Whether this system makes files in memory, and passes descriptors: Linux, unless what limits this
    process (seccomp, the sysctl vm.memfd_noexec=2) forbids it.
    """
    if not (hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")):
        return False
    try:
        os.close(os.memfd_create("infinity", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True


def why_no_room() -> str:
    """Return what limits files of this process, also those in memory; nothing where nothing does."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return "" if limit == resource.RLIM_INFINITY else f"RLIMIT_FSIZE={limit} (ulimit -f)"


def why_not_here() -> str:
    """Return why this process could have no memory in common with others of its machine; nothing where it
    could: what would pass between two of them passes from this one to itself.
    """
    if not has_nameless_memory():
        return "this system makes no files in memory (memfd_create)"
    if limit := why_no_room():
        return limit
    try:
        memory = SharedMemory(make_file(PAGE), PAGE)
        with contextlib.closing(memory), contextlib.ExitStack() as opened:
            listening = opened.enter_context(_listens(secrets.token_hex(16).encode(), 1))
            peer = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            peer.settimeout(_PEER_S)
            peer.connect(listening.getsockname())
            memory.send(opened.enter_context(listening.accept()[0]))
            _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
            with contextlib.closing(SharedMemory(descriptors[0], PAGE)) as other:
                memory.part(0, 1)[0] = b"!"
                seen = other.private(0, PAGE)[0] == b"!"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return "" if seen else "what one process writes another does not see"


def place_number() -> int:
    """Return a number of 63 bits: processes with the same one reach each other's sockets and memory. They run
    on one kernel, in one network namespace, as one user.
    """
    with contextlib.suppress(OSError):
        place = f"{_BOOT.read_text()} {os.readlink(_NETWORK)} {os.geteuid()}"
        return xxhash.xxh3_64_intdigest(place.encode()) >> 1
    return secrets.randbits(63)


class SharedMemory:
    """A file in memory, mapped; see [Note: nameless memory]. It lives as long as any rank's mapping of it."""

    def __init__(self, descriptor: int, nbytes: int, cure: str = _CURE) -> None:
        """Map the file whole. descriptor: closed by `close`. cure: for the errors of mappings."""
        self.nbytes, self._cure = nbytes, cure
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._closing.atexit = False
        self._descriptor = descriptor
        _OPEN.add(self)
        self._whole = _mapped(descriptor, 0, nbytes, mmap.MAP_SHARED, cure)
        self.address = ctypes.addressof(self._whole)
        """Where this rank writes."""

    @property
    def descriptor(self) -> int:
        """Of the file, until `close`."""
        return self._descriptor

    def part(self, offset: int, nbytes: int) -> Any:
        """Return a part of it as a buffer, to write what all see. The caller keeps this object alive."""
        return (ctypes.c_char * nbytes).from_address(self.address + offset)

    def private(self, offset: int, nbytes: int, *, forks: bool = False) -> Any:
        """Return a part of it, from a page on, as a buffer of which changes are this rank's own. Its mapping
        ends when nothing refers to the buffer. forks: whether forked processes have it, too.

        Raises: OSError; ValueError once it is closed.
        """
        if not self._closing.alive:
            raise ValueError("the memory that ranks share is closed, and nothing is brought there any more")
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        return _mapped(self._descriptor, offset, nbytes, flags, self._cure, forks=forks)

    def numbers(self, count: int) -> Any:
        """Return the first 64-bit integers of it. The caller keeps this object alive."""
        return (ctypes.c_uint64 * count).from_address(self.address)

    def drop(self, offset: int, nbytes: int) -> None:
        """Give the memory of a part back, whole pages, which are zero from then on.

        Raises: OSError.
        """
        _advise(self.address + offset, nbytes, _MADV_REMOVE)

    def send(self, peer: socket.socket) -> None:
        """Pass the descriptor to a process."""
        socket.send_fds(peer, [b"."], [self._descriptor])

    def close(self) -> None:
        """Close the descriptor; what is mapped stays."""
        self._closing()


def make_private(buffer: Any) -> None:
    """Have every page of a private mapping be a copy, of what it shows now."""
    for place in range(0, ctypes.sizeof(buffer), PAGE):
        buffer[place] = buffer[place]  # the write makes the copy


def let_be_zeros(buffer: Any, offset: int, nbytes: int) -> None:
    """Have whole pages of a private mapping be zeros that take no memory until this rank writes there: what
    is read through a mapping of a file takes memory, also where nothing was written to the file.

    Raises: OSError.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    place = ctypes.addressof(buffer) + offset
    if _LIBC.mmap(place, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == _FAILED:
        raise _error(f"cannot map {nbytes} bytes of zeros")


def is_zeros(address: int, nbytes: int) -> bool:
    """Whether bytes of memory are all zero."""
    first = ctypes.c_char.from_address(address).value == b"\0"
    return first and not _LIBC.memcmp(address, address + 1, nbytes - 1)


def _mapped(descriptor: int, offset: int, nbytes: int, flags: int, cure: str, *, forks: bool = False) -> Any:
    """Map a part of a file. Raises: OSError."""
    address = _LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if address == _FAILED:
        raise _error(
            f"cannot map {nbytes} bytes of shared memory (vm.max_map_count limits the mappings of a process, "
            f"of which ranks have one for each layer that is there). {cure}"
        )
    buffer = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(buffer, _unmap, os.getpid(), address, nbytes).atexit = False
    if not forks:
        _advise(address, nbytes, mmap.MADV_DONTFORK)
    _advise(address, nbytes, mmap.MADV_DONTDUMP)
    return buffer


def _advise(address: int, nbytes: int, advice: int) -> None:
    if _LIBC.madvise(address, nbytes, advice):
        raise _error(f"madvise {advice} of {nbytes} bytes of shared memory")


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _unmap(pid: int, address: int, nbytes: int) -> None:
    if os.getpid() == pid:  # a forked child has not inherited it, and may have its own memory there
        _LIBC.munmap(address, nbytes)


_OPEN: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _close_in_child() -> None:
    """A fork has inherited descriptors, and would keep the memory after its parent's end."""
    for memory in list(_OPEN):
        memory.close()


os.register_at_fork(after_in_child=_close_in_child)


def open_shared(ranks: Ranks, nbytes: int, timeout_s: float) -> SharedMemory:
    """Return memory of `nbytes`, zero at first, that the ranks on this machine have in common. Every rank
    calls it.

    Raises: OSError where this machine has none; RanksError where that is so on another rank, or where a rank
    does not come for it within the timeout.
    """
    first, what = ranks.near[0], "making the memory that ranks share"
    memory, name = None, b""
    with contextlib.ExitStack() as listens:
        with ranks.together(what):
            if ranks.rank == first:
                memory, name = SharedMemory(make_file(nbytes), nbytes), secrets.token_hex(16).encode()
                listening = listens.enter_context(_listens(name, len(ranks.near)))
        name = ranks.each(name, what)[first]
        with ranks.together(what):
            if memory is None:
                return SharedMemory(_received(name, ranks.rank, timeout_s), nbytes)
            _pass_on(listening, memory, set(ranks.near[1:]), timeout_s)
    return memory


def make_file(nbytes: int, what: str = "memory that ranks share", cure: str = _CURE) -> int:
    """Make a file in memory. what, cure: for errors. Raises: OSError with its size, and what limits it."""
    descriptor = os.memfd_create("infinity", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        limit = why_no_room()
        why = f" ({limit} limits files of this process, those in memory too: raise it)" if limit else ""
        raise OSError(
            error.errno,
            f"{what}, of {format_size(nbytes)} ({nbytes} bytes, of which what is in use takes memory), "
            f"cannot be made: {error.strerror}{why}. {cure}",
        ) from error
    return descriptor


def _listens(name: bytes, most: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(b"\0infinity-" + name)
        listening.listen(most)
    except BaseException:
        listening.close()
        raise
    return listening


def _pass_on(listening: socket.socket, memory: SharedMemory, ranks: set[int], timeout_s: float) -> None:
    """Give the descriptor to these ranks, as they come; to no other user.

    Raises: RanksError naming those that have not come.
    """
    end_s = time.monotonic() + timeout_s
    while ranks:
        try:
            listening.settimeout(max(end_s - time.monotonic(), 0.001))
            peer, _ = listening.accept()
            with peer:
                peer.settimeout(_PEER_S)
                ranks.discard(_answer(peer, memory))
        except TimeoutError:
            names = ", ".join(map(str, sorted(ranks)))
            raise RanksError(
                f"rank {names} did not come for the memory that the machine's ranks share within "
                f"{timeout_s:.0f} s. Likely cause: it has ended, or runs in a container with a network of "
                "its own; Config(shared_memory=False) has none"
            ) from None


def process_of(peer: socket.socket) -> tuple[int, int]:
    """Return the process at the other end of a socket, and its user."""
    process, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process, user


def _answer(peer: socket.socket, memory: SharedMemory) -> int:
    """Give one that has connected the descriptor; return its rank, -1 for one that is no rank."""
    _, user = process_of(peer)
    with contextlib.suppress(OSError):
        said = peer.recv(_RANK.size) if user == os.geteuid() else b""
        if len(said) == _RANK.size:
            memory.send(peer)
            return int(_RANK.unpack(said)[0])
    return -1


def _received(name: bytes, rank: int, timeout_s: float) -> int:
    """Return the descriptor that the first rank of this machine passes on.

    Raises: OSError where it cannot be reached.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
        first.settimeout(timeout_s)
        first.connect(b"\0infinity-" + name)
        first.sendall(_RANK.pack(rank))
        _, descriptors, _, _ = socket.recv_fds(first, 1, 1)
    if len(descriptors) != 1:
        raise OSError(f"rank {rank} was given {len(descriptors)} descriptors of shared memory; expected one")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]
