"""Weights to another process of this machine, through a ring in shared memory.

[Note: the ring]
The receiver listens at a name in the abstract namespace of Unix sockets, and the sender connects from a name
of its own, so that neither is there twice; each sees that the other one is a process of the same user. The
sender makes a file in memory and passes its descriptor (see ranks.shared_memory, [Note: nameless memory]). A
message has a tensor's name, type and shape; its bytes follow in slots of the ring: the sender fills one and
says so, the receiver copies it and says so, and no more are on their way than there are slots. Both wait at
the socket alone, whose other end the kernel closes when a process ends, however that comes. No folder has
anything of it, and nothing outlives the two.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from infinity.errors import RanksError, UnsupportedError
from infinity.ranks.shared_memory import SharedMemory, has_nameless_memory, make_file, process_of

SLOTS, SLOT_NBYTES = 4, 2 << 20
_PROTOCOL = 1
_DONE = b"."
"""Of the sender: a slot is filled. Of the receiver: it is copied; at the end: all were taken."""
_LONGEST = 1 << 16
"""Bytes of a message."""
_LONGEST_NAME = 64
"""Bytes: a socket's name has 108 at most."""
_LOOKS_S = 0.01
"""Seconds from one look to the next whether a receiver listens."""
_CURE = "Give stream_weights a function"
_ABSENT = (
    "See that it runs, and has not ended: on this machine, as this user, and in this network namespace (a "
    "container may have one of its own). timeout_s= waits longer"
)

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """A fork would keep a connection that its parent, or the parent's end, has closed."""
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def sends_to(name: str, timeout_s: float) -> Iterator[Callable[[str, torch.Tensor], None]]:
    """Context with a function that sends a tensor, in host memory, to the process that calls
    `receives_from(name)`. At its end all are taken; what it raises is told to that process.

    Raises: RanksError where none comes, or it takes nothing more; UnsupportedError.
    """
    with contextlib.closing(_connected(name, timeout_s)) as line:
        memory = _memory_for(line)
        filled = taken = 0

        def send(what: str, values: torch.Tensor) -> None:
            nonlocal filled, taken
            line.at(what)
            values = values.detach().cpu().contiguous()
            head = {"name": what, "dtype": str(values.dtype).removeprefix("torch."), "shape": [*values.shape]}
            line.send(json.dumps(head).encode())
            for place, nbytes in _pieces(values.nbytes, SLOT_NBYTES):
                if filled - taken == SLOTS:
                    line.receive()
                    taken += 1
                slot = memory.address + filled % SLOTS * SLOT_NBYTES
                ctypes.memmove(slot, values.data_ptr() + place, nbytes)
                line.send(_DONE)
                filled += 1

        try:
            yield send
        except BaseException as error:
            line.tell_of(error)
            raise
        line.send(json.dumps({"end": True}).encode())
        for _ in range(filled - taken + 1):
            line.receive()


def receives_from(name: str, timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what `sends_to(name)` of another process sends, in host memory.

    Raises: RanksError where none comes, or it has ended, or says what it has failed of; UnsupportedError.
    """
    with contextlib.closing(_accepted(name, timeout_s)) as line:
        memory, slots, slot_nbytes = _memory_from(line)
        taken = 0
        while "end" not in (head := line.receive_head()):
            line.at(head["name"])
            values = torch.empty(head["shape"], dtype=getattr(torch, head["dtype"]), device="cpu")
            for place, nbytes in _pieces(values.nbytes, slot_nbytes):
                line.receive_done()
                slot = memory.address + taken % slots * slot_nbytes
                ctypes.memmove(values.data_ptr() + place, slot, nbytes)
                with contextlib.suppress(RanksError):  # what comes next says why the sender has gone
                    line.send(_DONE)
                taken += 1
            yield head["name"], values
            del values  # the next one takes its place in memory
        line.send(_DONE)


def check_name(name: str, timeout_s: float) -> None:
    """Raises: ValueError for a name that no socket can have, and for a time that is none."""
    if not 0 < len(name.encode()) <= _LONGEST_NAME or "\0" in name:
        raise ValueError(f"{name!r}: expected a name of 1 to {_LONGEST_NAME} bytes")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s!r}: expected a number of seconds above 0")


class _Line:
    """The connection of a sender and a receiver, as one of them sees it."""

    def __init__(self, peer: socket.socket, call: str, other: str, timeout_s: float) -> None:
        """call: of this process, and other: of the other one, for errors."""
        self._peer, self._call, self._other, self._timeout_s = peer, call, other, timeout_s
        self._tensors, self._last = 0, ""
        peer.settimeout(timeout_s)
        _open.add(peer)

    def close(self) -> None:
        """End it, also for forks that have it. What was sent is still received."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
            while self._peer.recv(_LONGEST):  # what is left unread would be an error for the other one
                pass
        self._peer.close()

    def at(self, name: str) -> None:
        """Note the tensor that moves, for errors."""
        self._tensors, self._last = self._tensors + 1, name

    def send(self, message: bytes) -> None:
        """Raises: RanksError."""
        with self._named():
            self._peer.sendall(message)

    def send_with(self, message: bytes, descriptor: int) -> None:
        """Pass a descriptor with a message. Raises: RanksError."""
        with self._named():
            socket.send_fds(self._peer, [message], [descriptor])

    def tell_of(self, error: BaseException) -> None:
        """Tell the other process, if it is there, why no more comes."""
        text = f"{type(error).__name__}: {error}"[:1000]
        with contextlib.suppress(OSError):
            self._peer.settimeout(1.0)
            self._peer.sendall(json.dumps({"error": text}).encode())

    def receive(self) -> bytes:
        """Raises: RanksError."""
        with self._named():
            if message := self._peer.recv(_LONGEST):
                return message
            raise ConnectionResetError

    def receive_with(self) -> tuple[dict[str, Any], int]:
        """Return a message, and the descriptor that is passed with it. Raises: RanksError."""
        with self._named():
            message, descriptors, _, _ = socket.recv_fds(self._peer, _LONGEST, 1)
            if not descriptors:
                raise ConnectionResetError
        os.set_inheritable(descriptors[0], False)
        return json.loads(message), descriptors[0]

    def receive_head(self) -> dict[str, Any]:
        """Return what comes next. Raises: RanksError, also where the sender says that it has failed."""
        return self._head(self.receive())

    def receive_done(self) -> None:
        """Wait until a slot is filled. Raises: as receive_head."""
        if (message := self.receive()) != _DONE:
            self._head(message)

    def _head(self, message: bytes) -> dict[str, Any]:
        head: dict[str, Any] = json.loads(message)
        if "error" in head:
            raise RanksError(f"{self._call}: {self._other}, {self._where()}, has failed: {head['error']}")
        return head

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Raises: RanksError for the end of the connection, and for a wait that is too long."""
        try:
            yield
        except TimeoutError:
            raise RanksError(
                f"{self._call}: {self._other} has said nothing for {self._timeout_s:g} s, {self._where()}. "
                "See what it waits for; timeout_s= waits longer"
            ) from None
        except ConnectionError:
            raise RanksError(
                f"{self._call}: {self._other} has ended, or has closed the stream, {self._where()}. See what "
                "it says, and `dmesg` for 'Out of memory'"
            ) from None

    def _where(self) -> str:
        if not self._tensors:
            return "before the first tensor"
        earlier = "those before it are of another update than the rest, until a stream is whole"
        return f"at tensor {self._tensors}, {self._last!r} ({earlier})"


def _connected(name: str, timeout_s: float) -> _Line:
    """Return the line to the process that receives at a name, once it does. Raises: RanksError."""
    call = f"stream_weights(model, {name!r})"
    with contextlib.ExitStack() as opened:
        peer = opened.enter_context(_bound(call, "sends", name))
        _reach(peer, call, name, timeout_s)
        pid, user = process_of(peer)
        if user != os.geteuid():
            raise RanksError(
                f"{call}: process {pid} of user {user} receives there, and weights are sent to processes of "
                f"this one's user alone, {os.geteuid()}. Choose another name, or run both as one user"
            )
        opened.pop_all()
    return _Line(peer, call, f"the process that receives, {pid},", timeout_s)


def _reach(peer: socket.socket, call: str, name: str, timeout_s: float) -> None:
    """Connect, once a process receives at a name. Raises: RanksError."""
    end_s = time.monotonic() + timeout_s
    peer.setblocking(False)
    while True:
        try:
            return peer.connect(_address("receives", name))
        except (ConnectionRefusedError, BlockingIOError):  # it does not listen yet, or hears another one
            if time.monotonic() > end_s:
                raise RanksError(
                    f"{call}: no process has called receive_weights({name!r}) for {timeout_s:g} s. {_ABSENT}"
                ) from None
        time.sleep(_LOOKS_S)


def _accepted(name: str, timeout_s: float) -> _Line:
    """Return the line from the process that sends to a name, once it does. Raises: RanksError."""
    call, end_s = f"receive_weights({name!r})", time.monotonic() + timeout_s
    with _bound(call, "receives", name) as listening:
        listening.listen(1)
        while True:
            listening.settimeout(max(end_s - time.monotonic(), 0.001))
            try:
                peer, _ = listening.accept()
            except TimeoutError:
                raise RanksError(
                    f"{call}: no process has called stream_weights(model, {name!r}) for {timeout_s:g} s. "
                    f"{_ABSENT}"
                ) from None
            pid, user = process_of(peer)
            if user == os.geteuid():
                return _Line(peer, call, f"the process that sends, {pid},", timeout_s)
            peer.close()


def _bound(call: str, side: str, name: str) -> socket.socket:
    """Return a socket that has a name, which no other one has, as long as it is open.

    Raises: RanksError where another one has it; UnsupportedError.
    """
    if not (has_nameless_memory() and hasattr(socket, "SOCK_SEQPACKET")):
        raise UnsupportedError(
            f"{call}: this system makes no files in memory (memfd_create), which processes could share. "
            f"{_CURE}, or a group of torch.distributed"
        )
    own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _open.add(own)
    try:
        own.bind(_address(side, name))
    except OSError as error:
        own.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise RanksError(
            f"{call}: another process {side} there at the moment. A name is of one sender and one receiver; "
            "of several ranks one streams to it, and the others to None"
        ) from None
    return own


def _address(side: str, name: str) -> bytes:
    return f"\0infinity-{side}-{os.geteuid()}-{name}".encode()


def _memory_for(line: _Line) -> SharedMemory:
    """Make the ring, and pass it to the receiver. Raises: RanksError, OSError."""
    nbytes = SLOTS * SLOT_NBYTES
    memory = SharedMemory(make_file(nbytes, "memory for a stream of weights", _CURE), nbytes, _CURE)
    hello = {"protocol": _PROTOCOL, "slots": SLOTS, "slot_nbytes": SLOT_NBYTES}
    line.send_with(json.dumps(hello).encode(), memory.descriptor)
    memory.close()  # it is mapped
    return memory


def _memory_from(line: _Line) -> tuple[SharedMemory, int, int]:
    """Return the sender's memory, and the slots that it has. Raises: RanksError."""
    hello, descriptor = line.receive_with()
    if hello.get("protocol") != _PROTOCOL:
        os.close(descriptor)
        raise RanksError("the process that sends weights has another release of Infinity: use one in both")
    slots, nbytes = hello["slots"], hello["slot_nbytes"]
    memory = SharedMemory(descriptor, slots * nbytes, _CURE)
    memory.close()
    return memory, slots, nbytes


def _pieces(nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    for place in range(0, nbytes, most):
        yield place, min(most, nbytes - place)
