"""What checkpoints save, at the boundaries of blocks, on its way to host memory or NVMe and back.

[Note: boundaries]
A checkpointed block keeps its input and nothing else. Where that input is a floating tensor that requires a
gradient (hidden states, not masks or rotary tables), it is a *boundary*, and autograd keeps in its place an
object that knows where it lies. Reentrant and other checkpoints of torch and the slices of tiling save their
inputs through the hooks on saved tensors, and are known by the code that saves. What is saved outside
checkpoints stays as it is.

[Note: a boundary's life]
The newest boundary stays in memory: the backward begins with it. When the next one comes it leaves: into the
budget's kept share while that has room (offload_activations="host"), or to NVMe, through the lane, as
gradients that are on their way out, and in their share. When the backward takes one, those saved before it
begin to come back, as far as that share has room; without room they come when they are taken. A boundary goes
with the graph that holds it, whether a backward, an error or Ctrl-C ends it.

[Note: changes in place]
The tensor that a boundary is written from is released by the thread that computes, when it saves or takes the
next: no operation is running then, so the tensor's version tells whether anything changed it in the meantime.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from types import FrameType

import torch
from torch.autograd import function as functions_of_users
from torch.utils import checkpoint

from infinity.device.device import Device
from infinity.errors import HostMemoryError
from infinity.lane.base import Pass
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import Lease, OutgoingShare
from infinity.lane.whole_records import ACTIVATION, ELEMENT_NBYTES, LoadPass, SavePass
from infinity.planning.layout import lay_out
from infinity.records.record import Record, Traffic
from infinity.sizes import BLOCK, format_size
from infinity.storage.memory import Ledger
from infinity.storage.store import Future, Store
from infinity.tiling import slices

logger = logging.getLogger("infinity")

LOOKAHEAD = 2
"""Boundaries that are on their way back while one is used."""

_SAVERS = (checkpoint.__name__, slices.__name__)
"""Modules whose code saves the inputs of checkpoints."""
_between = {__name__, functions_of_users.__name__}
"""Modules whose frames may lie between the code that saves and the hook; see stands_between."""


class Boundary:
    """One saved tensor, wherever it is; see [Note: a boundary's life]."""

    __slots__ = (
        "__weakref__",
        "_all",
        "_before",
        "_charged",
        "_dtype",
        "_flat",
        "_host",
        "_lease",
        "_load",
        "_nbytes",
        "_number",
        "_passes",
        "_place",
        "_record",
        "_room_nbytes",
        "_shape",
        "_stride",
        "_tensor",
        "_version",
    )

    def __init__(
        self,
        boundaries: Boundaries,
        tensor: torch.Tensor,
        number: int,
        before: Boundary | None,
        place: str | None,
    ) -> None:
        """Save `tensor`, as yet where it is. place: "host" or "nvme", where it is to wait."""
        self._all, self._place = boundaries, place
        self._number = number
        self._before = weakref.ref(before) if before is not None else None
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._nbytes = tensor.nbytes
        self._tensor: torch.Tensor | None = tensor.detach()  # which shares its version
        self._version = tensor._version
        self._host: torch.Tensor | None = None  # in host memory, where that is not where it computes
        self._charged = 0  # bytes of the kept share
        self._record: Record | None = None
        self._passes: list[Pass] = []  # over the record
        self._load: Future | None = None
        self._flat: torch.Tensor | None = None  # what `_load` fills
        self._lease: Lease | None = None  # while it comes back ahead of its use
        self._room_nbytes = 0  # of device_memory, while it comes back

    def __repr__(self) -> str:
        """Name and size, for error messages."""
        return f"activation {self._number} {tuple(self._shape)}"

    def leave(self) -> None:
        """Move to where it waits for the backward."""
        if self._tensor is None or self._record is not None or self._charged:
            return
        self._check_version(self._tensor)
        every = self._all
        if self._place == "host" and every.kept.try_reserve(self._nbytes):
            self._charged = self._nbytes
            if not every.device.is_host:
                download = every.device.download(flattened(self._tensor), ours=False)
                self._host = download.tensor
                every.leaving.append((weakref.ref(self), download))
            return
        if every.nvme is None:
            raise HostMemoryError(
                f"{self!r}: {format_size(self._nbytes)} do not fit host memory, which holds "
                f"{format_size(every.kept.held_nbytes)} of {format_size(every.kept.limit_nbytes)}. Give "
                "Config a larger host_memory or a folder on NVMe (nvme=...), or leave out "
                "offload_activations."
            )
        self._record = every.new_record(repr(self), self._nbytes)
        self._record.add(ACTIVATION, every.nvme)
        every.write(self, self._record, flattened(self._tensor))

    def sent(self, job: SavePass) -> None:
        """Note the pass that writes it, before it is queued: its place is in use until that is over."""
        self._passes.append(job)

    def settle(self) -> None:
        """Release the tensor, which has been read; see [Note: changes in place]."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._check_version(tensor)

    def _check_version(self, tensor: torch.Tensor) -> None:
        if tensor._version != self._version:
            raise RuntimeError(
                f"{self!r}: the input of a checkpoint was changed in place after the checkpoint saved it, "
                f"{tensor._version - self._version} times. A recomputation would begin from the change: use "
                "an operation that is not in place there."
            )

    def begin(self, *, ahead: bool) -> None:
        """Start to bring it back; `ahead` of its use, only if there is room."""
        every = self._all
        gone = self._tensor is None and self._load is None
        if not gone:
            return
        room = every.device.room
        if ahead:
            if room is not None and not room.fits(2 * self._numel):
                return
            self._lease = every.outgoing_share.try_lease(self._nbytes)
            if self._lease is None:
                return
        try:
            if room is not None:
                self._room_nbytes = room.take(2 * self._numel, repr(self))
            self._flat, self._load = self._begun(urgent=not ahead)
        except BaseException:
            self._forget_load()
            raise

    def _begun(self, *, urgent: bool) -> tuple[torch.Tensor, Future]:
        every = self._all
        if self._record is not None:
            flat = every.room_for(self._numel)
            load = LoadPass(self._record, every.device, flat, every.tile_numel)
            self._passes.append(load)
            every.lane.submit(load, urgent=urgent)
            return flat, load
        if self._host is None:
            raise AssertionError(f"{self!r} is nowhere")
        flat = every.room_for(self._numel)
        return flat, every.device.upload(flat, 0, self._host.data_ptr(), flat.numel())

    def take(self) -> torch.Tensor:
        """Return the tensor where it was saved, for a backward, and let those saved before it come back.

        Raises: RuntimeError where it was changed in place; CorruptionError for bytes that are not those that
        were written; what made the lane fail.
        """
        self._all.settle()
        if self._tensor is not None:
            self._check_version(self._tensor)
            tensor = self._tensor
        else:
            self.begin(ahead=False)
            tensor = self._arrived()
        one = self
        for _ in range(LOOKAHEAD):
            before = one._before() if one._before is not None else None
            if before is None:
                break
            before.begin(ahead=True)
            one = before
        return tensor

    @property
    def _numel(self) -> int:
        """Elements, of 16 bits, of the memory that it comes back to: whole blocks if a disk reads to it."""
        if self._record is not None and self._all.device.is_host:
            return self._record.shard.numel
        return -(-self._nbytes // ELEMENT_NBYTES)

    def _arrived(self) -> torch.Tensor:
        flat, load = self._flat, self._load
        if flat is None:
            raise AssertionError(f"{self!r} was not asked for")
        if self._record is not None and load is not None:
            self._all.lane.promote(self._record)
            load.wait()
        self._all.device.arrived(flat)
        self._forget_load()
        values = flat.view(torch.uint8)[: self._nbytes].view(self._dtype)
        return values.as_strided(self._shape, self._stride)

    def _forget_load(self) -> None:
        self._load = self._flat = None
        self._all.give_back_room(self._take_room())
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end()

    def _take_room(self) -> int:
        taken, self._room_nbytes = self._room_nbytes, 0
        return taken

    def __del__(self) -> None:
        """Give back memory, shares and the place on NVMe, that one when nothing moves there any more."""
        every, record = self._all, self._record
        if os.getpid() != every.pid:
            return
        if self._charged:
            every.kept.release(self._charged)
        if record is not None:
            passes, flat, taken = self._passes, self._flat, self._take_room()
            self._forget_load()
            every.give_back(record, flat, taken, passes)
            return
        if self._flat is not None:
            every.device.leaving(self._flat)
        self._forget_load()


class Boundaries:
    """The boundaries of one engine's models. Called from the threads that compute."""

    def __init__(
        self,
        mode: str | None,
        lane: StreamLane,
        device: Device,
        outgoing_share: OutgoingShare,
        kept: Ledger,
        nvme: Store | None,
        traffic: Traffic,
        *,
        verify: str,
    ) -> None:
        """Keep boundaries in `kept` (with mode "host") and in `nvme`; with None, where `waiting_in` says."""
        self._mode, self._place = mode, mode
        self.lane, self.device, self.outgoing_share = lane, device, outgoing_share
        self.kept, self.nvme = kept, nvme
        self.tile_numel = 0
        """Elements of a slot's tile, from `open` on."""
        self.leaving: deque[tuple[weakref.ref[Boundary], Future]] = deque()
        """Those whose tensor is being read, oldest first."""
        self.pid = os.getpid()
        self._traffic, self._verify = traffic, verify
        self._newest: weakref.ref[Boundary] | None = None
        self._saved = 0
        self._told = False

    def open(self, tile_numel: int) -> None:
        """Say how many elements a slot's tile has in the finished model."""
        self.tile_numel = tile_numel

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that autograd is about to save is a boundary; asked from the hook it calls."""
        return self._place is not None and is_boundary(tensor, self.device.torch_device)

    @contextlib.contextmanager
    def waiting_in(self, place: str | None) -> Iterator[None]:
        """Let boundaries that are saved inside the `with` wait in "host" or "nvme"; None: they stay."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def can_leave(self, tensor: torch.Tensor) -> bool:
        """Whether the input of a checkpoint could wait elsewhere."""
        return is_movable(tensor, self.device.torch_device)

    def save(self, tensor: torch.Tensor) -> Boundary:
        """Return what autograd keeps in the place of a boundary; the one before it leaves."""
        self.settle()
        before = self._newest() if self._newest is not None else None
        self._saved += 1
        boundary = Boundary(self, tensor, self._saved, before, self._place)
        self._newest = weakref.ref(boundary)
        if before is not None:
            before.leave()
        return boundary

    def settle(self) -> None:
        """Let go of tensors that have been read."""
        while self.leaving and self.leaving[0][1].done:
            boundary = self.leaving.popleft()[0]()
            if boundary is not None:
                boundary.settle()
            del boundary
        if self.device.room is not None:
            self.device.room.let_go()

    def new_record(self, name: str, nbytes: int) -> Record:
        """Describe a place for `nbytes` bytes."""
        shard = lay_out([(name, (-(-nbytes // ELEMENT_NBYTES),))])
        return Record(shard, self.tile_numel, self._traffic, verify=self._verify, name=name)

    def write(self, boundary: Boundary, record: Record, tensor: torch.Tensor) -> None:
        """Begin to write a boundary."""
        most = 1 + self.outgoing_share.ledger.limit_nbytes // max(tensor.nbytes, 1)
        self.outgoing_share.await_buffer(tensor.nbytes, most)
        self.settle()  # what was written while this waited
        download = self.device.download(tensor, ours=False)
        lease = self.outgoing_share.lease(tensor.nbytes)
        job = SavePass(record, download.tensor, download.transfer, self.tile_numel, lease.end)
        boundary.sent(job)
        try:
            self.lane.submit(job)
        except BaseException:
            lease.end()
            raise
        self.outgoing_share.sent(job)
        self.leaving.append((weakref.ref(boundary), job))

    def room_for(self, numel: int) -> torch.Tensor:
        """Return memory for 16-bit elements where the device computes."""
        if self.device.is_host:
            return self.outgoing_share.buffers.take(numel, torch.bfloat16)
        with torch.inference_mode(mode=False), torch.no_grad():
            flat = torch.empty(numel, dtype=torch.bfloat16, device=self.device.torch_device)
        self.device.allocated(flat)
        return flat

    def give_back_room(self, nbytes: int) -> None:
        """Give back bytes of device_memory."""
        if nbytes and self.device.room is not None:
            self.device.room.give_back(nbytes)

    def give_back(
        self, record: Record, flat: torch.Tensor | None, room_nbytes: int, passes: list[Pass]
    ) -> None:
        """When these passes are over, give back the place of a boundary, and the memory that it came back to
        if nothing has taken it, `room_nbytes` of device_memory.
        """
        memory = [] if flat is None else [flat]
        del flat

        def over() -> None:
            record.drop(ACTIVATION)
            while memory:
                self.device.leaving(memory[-1])
                memory.pop()
            self.give_back_room(room_nbytes)

        with self.lane.lock:
            under_way = [one for one in passes if not one.finished]
            if under_way:
                under_way[-1].on_finished.append(over)
            else:
                over()

    def backward_ended(self) -> None:
        """Warn, once, if no boundary was found."""
        if self._mode is not None and not self._saved and not self._told:
            self._told = True
            logger.warning(
                'offload_activations="%s" found nothing to offload: no checkpoint saved an input of %d bytes '
                "or more that requires a gradient. Call model.activation_checkpointing_enable() (before "
                "transformers 5.24: gradient_checkpointing_enable) or infinity.tiling.tile_batch_, or leave "
                "it out.",
                self._mode,
                BLOCK,
            )


def is_boundary(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor on `device` that autograd is about to save is a boundary; see [Note: boundaries]."""
    return is_movable(tensor, device) and _saver() in _SAVERS


def is_input(tensor: torch.Tensor, device: torch.device) -> bool:
    """As `is_boundary`, of whatever size: where ranks do the same, it is the same on all of them."""
    if type(tensor) is not torch.Tensor or not tensor.requires_grad or not tensor.is_floating_point():
        return False
    return tensor.device == device and _saver() in _SAVERS


def is_movable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor on `device` is one of those that a block begins with, and worth a place elsewhere."""
    if type(tensor) is not torch.Tensor or not tensor.requires_grad or tensor.nbytes < BLOCK:
        return False
    if tensor.is_neg():  # its memory has other values
        return False
    whole = tensor.is_floating_point() and tensor.nbytes % ELEMENT_NBYTES == 0 and _is_dense(tensor)
    return whole and tensor.device == device


def stands_between(module: str) -> None:
    """Note that a module, by its `__name__`, only hands on what is saved: its callers save it."""
    _between.add(module)


def _saver() -> str:
    """Return the module whose code makes autograd save a tensor, asked in the hook that is called for it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in _between:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one piece of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's memory in one dimension."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
