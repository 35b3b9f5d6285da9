"""A unit at run time: the parameters that are fetched, used and released together.

[Note: the forms of a parameter]
master   fp32, never stored as such            the optimizer's truth = join(hi, lo)
hi, lo   bf16 + 16 bits, flat, in the record   what a step computes with is hi
flat     bf16, on the device                   hi, while the unit is resident; one torch storage
view     bf16, a parameter's shape             into flat; `parameter.data` while the unit is attached
Where fp16 or fp32 computes, hi, flat and view are that; see weights.

Where the CPU computes and `hi` is pinned, or an accelerator computes and the whole record lives there, flat
is that very memory: nothing is copied, and the update changes the weights where they are used.

[Note: abandoned storage]
Reusing a storage of which a view still exists would change the values of that view: a module may cache
`self.weight.t()`, return its weight, or keep it in a graph of its own. So a release counts the tensors that
share the storage. If there are others than the unit's own, they keep it, with the values it has, and the unit
goes on in other memory. That costs memory, never a wrong value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from mmap import mmap
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.device.blocks import Blocks, wrap
from infinity.errors import UnsupportedError
from infinity.lane.fetch import UpdatePass
from infinity.planning.layout import FlatLayout
from infinity.planning.residence import Residence
from infinity.records.in_files import skew_nbytes
from infinity.records.record import Record
from infinity.records.updates import MissedUpdates, PendingUpdates
from infinity.records.weights import compute_dtype
from infinity.sizes import BLOCK
from infinity.storage.memory import framed_nbytes
from infinity.tensors import is_distributed
from infinity.units.attached import DATA, Attached, set_changes
from infinity.units.changes import Changes
from infinity.units.forms import become_all, release
from infinity.units.released import Released, placeholder

logger = logging.getLogger("infinity")
_set_data = DATA.__set__
"""What forms.py does, without a call for each ordinary parameter: see `attach`."""
_shares: Callable[[int], int] = torch._C._storage_Use_Count


class AttachedWatch(Protocol):
    """What looks at parameters that may have been assigned to while they were attached."""

    attached: set[Unit]
    """Those that are attached now."""

    def look(self, unit: Unit) -> None:
        """See slice_watch.SliceWatch."""


class _Opened(NamedTuple):
    """What `open` has told a unit: where it becomes resident."""

    blocks: Blocks
    by_storage: dict[int, Unit]
    """Where it enters its storage's key, so that the unit of any tensor can be found."""
    placeholders: list[torch.Tensor]
    in_place: bool


class Unit:
    """The state of one unit. Owned by the residency; guarded by the lane's lock where the lane reads it."""

    def __init__(
        self,
        index: int,
        parameters: list[nn.Parameter],
        record: Record,
        base: int = 0,
        *,
        straight: bool = False,
    ) -> None:
        """Describe `parameters`, which lie in `record` and are not resident.

        base: the unit's element at which the record, a rank's share of the unit, begins. straight: what lies
        in files is read straight to the unit's memory, if it pays; see in_files.
        """
        self.index = index
        self.parameters = parameters
        self.distributed = any(map(is_distributed, parameters))
        """Whether any parameter is a DTensor: see [Note: distributed parameters] in sharded."""
        self.record = record
        self.base = base
        self.in_parts = len(record.holders.members) > 1
        """Whether its record is a part of it, and other ranks have the rest."""
        nbytes = record.schema.width * record.unit_layout.numel
        framed = framed_nbytes(nbytes) if straight else 0
        self._skew_nbytes = skew_nbytes(record) if framed else 0
        """How far behind the begin of a block its memory begins while its record lies in files."""
        self.resident_nbytes = framed if self._skew_nbytes else nbytes
        """Bytes on the device while resident."""
        self.flat = self._nothing = torch.empty(0, dtype=compute_dtype(record.schema), device="cpu")
        """`hi` in the memory that computes, while the unit is resident; else without elements."""
        self.storage_key = int(self.flat.untyped_storage()._cdata)
        """Identifies the storage: any tensor that shares it shows the same number."""
        self._opened: _Opened
        self._memory: mmap | torch.Tensor | None = None
        """The memory of the record that `flat` lies in; None where it is a block."""
        self._views: list[torch.Tensor] = []
        self._own_shares = 0
        self._abandoned: list[StorageWeakRef] = []
        self._accumulators: dict[int, object] = {}
        """By parameter, the node in which graphs on the CPU accumulate its gradient: it lives on between
        graphs, as it does for DistributedDataParallel, so that `_is_saved` need not look for it at each use.
        """
        self.changes = Changes(parameters, record)
        self.residence: Residence[UpdatePass] = Residence()
        """Whether the unit is on the device, and who uses it; written by the residency."""
        self.attached = self.aside = False
        """Whether the parameters are their real values, else they are released; and whether they are so for a
        use that is no part of a step.
        """
        self._changed = 0
        self._pending = PendingUpdates()
        self._watch: AttachedWatch | None = None
        self.slice_numbers: tuple[int, ...] = ()
        """Of each parameter that is a slice its number, by which `watch_by` has it known; -1 of the others.
        Empty where none is.
        """

    @property
    def pending(self) -> PendingUpdates:
        """Updates that step() decided, by parameter, to be applied when the record next passes. Looking at
        them adds those that slices have missed, so that only the thread that computes looks before a commit
        is marked.
        """
        pending = self._pending
        if pending.owes:
            pending.tell()
        return pending

    @property
    def untold(self) -> PendingUpdates:
        """The same, without what slices have missed: for those of many units to be told together."""
        return self._pending

    def may_miss(self, index: int, missed: MissedUpdates, number: int) -> PendingUpdates:
        """Have `missed`, which knows a parameter by `number`, asked what the parameter has missed when
        somebody looks at what is pending; return what is pending, to be told when it begins to miss steps.
        """
        self._pending.may_miss(index, missed, number)
        return self._pending

    @property
    def version(self) -> int:
        """Counts the changes of the values that the user can see (an update counts at step(), not when it is
        applied).
        """
        return self._changed + self._pending.begun

    @property
    def must_update(self) -> bool:
        """Whether any update that is pending does not wait for a use of the unit."""
        return any(one.tensor is not None for one in self._pending.values())

    @property
    def owes_all(self) -> bool:
        """Whether all that is pending is of parameters that miss more steps meanwhile."""
        return self._pending.owes_all

    @property
    def name(self) -> str:
        """The module's name, as in `model.named_modules()`."""
        return self.record.name

    @property
    def layout(self) -> FlatLayout:
        """How the parameters lie in `flat`."""
        return self.record.unit_layout

    @property
    def part_of_rank(self) -> torch.Tensor:
        """This rank's share of `flat`."""
        return self.flat[self.base : self.base + self.record.shard.numel]

    @property
    def trainable(self) -> bool:
        """Whether any parameter will get a gradient."""
        for parameter in self.parameters:  # noqa: SIM110 - any() takes twice as long, and each use asks
            if parameter.requires_grad:
                return True
        return False

    @property
    def trains_whole(self) -> bool:
        """Whether every parameter will get a gradient."""
        for parameter in self.parameters:  # noqa: SIM110 - as in `trainable`
            if not parameter.requires_grad:
                return False
        return True

    def values_changed(self) -> None:
        """Count a change of the values that the user can see."""
        self._changed += 1

    def open(
        self, blocks: Blocks, device: torch.device, by_storage: dict[int, Unit], *, in_place: bool
    ) -> None:
        """Release the parameters; from now on the unit becomes resident in `blocks`, or, if `in_place` and
        `hi` lies in host memory, right there, and enters its storage's key in `by_storage`.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            placeholders = [
                placeholder(segment.shape, self.flat.dtype, device) for segment in self.layout.segments
            ]
        self._opened = _Opened(blocks, by_storage, placeholders, in_place)
        for parameter, stand_in in zip(self.parameters, placeholders, strict=True):
            release(parameter, stand_in)
            set_changes(parameter, self.changes)

    def watch_by(self, watch: AttachedWatch, index: int, number: int) -> None:
        """Have `watch` look at what is assigned while the parameters are attached. number: by which it knows
        the slice at `index`.
        """
        numbers = list(self.slice_numbers or (-1,) * len(self.parameters))
        numbers[index] = number
        self.slice_numbers, self._watch = tuple(numbers), watch
        if self.attached:
            watch.attached.add(self)

    def live_in(self, blocks: Blocks) -> None:
        """Become resident in other blocks than it was opened with, before it has been."""
        self._opened = self._opened._replace(blocks=blocks)

    @property
    def in_place(self) -> bool:
        """Whether the unit is always where it computes: being resident takes no memory and no transfer."""
        record = self.record  # asked several times for each use
        return (self._opened.in_place and record.in_host("hi")) or (record.on_device and not self.in_parts)

    @property
    def on_device(self) -> bool:
        """Whether it is used, on an accelerator, where its record lies."""
        return self.record.on_device and not self.in_parts

    @property
    def comes_in_place(self) -> bool:
        """Whether the next fetch puts `hi` where it computes, to stay."""
        return self._opened.in_place and "hi" in self.record.targets

    @property
    def window_nbytes(self) -> int:
        """Bytes that being resident takes beyond what is pinned."""
        return 0 if self.in_place else self.resident_nbytes

    def allocate(self) -> None:
        """Give the unit memory: with its values, if `in_place`, else undefined. A block that it has already,
        since a Ctrl-C came before anybody knew of the fetch that fills it, it keeps: copies may be under way.
        """
        memory = self._place_of_hi()
        skew = self._skew_nbytes if self.record.in_files is not None else 0
        if memory is None and self._has_block and (skew or not self.framed):
            pass
        elif memory is None:
            flat = self._opened.blocks.come(self.layout.numel, self.flat.dtype, skew)
            self._bind(flat, None)
        elif memory is not self._memory:
            self._bind(wrap(memory, self.layout.numel, self.flat.dtype), memory)
        if self.record.on_device and self.on_device:
            self.record.arrived("hi")

    def _place_of_hi(self) -> mmap | torch.Tensor | None:
        """Return the memory of `hi` in which the unit is resident, to stay; None where there is none."""
        record = self.record
        if record.on_device and not self.in_parts:
            return record.tensor("hi")
        return record.memory("hi") if self._opened.in_place else None

    def make_private(self) -> None:
        """Move a resident unit to memory of its own, where changes do not change the record."""
        if self._memory is not None:
            flat = self._opened.blocks.take(self.layout.numel, self.flat.dtype)
            flat.copy_(self.flat)
            if self.record.on_device and self.on_device:
                self.record.used("hi")
            if self._pinned and self._is_shared():
                self.record.give_new_memory("hi")
            self._bind(flat, None)

    def stop_sharing(self) -> None:
        """Go on in a copy where others share the unit's memory, which is about to change; see
        [Note: abandoned storage].
        """
        if not self._is_shared():
            return
        if self._pinned:
            self.record.give_new_memory("hi")
            self.allocate()
        else:
            self._go_on_in_copy()

    def _go_on_in_copy(self) -> None:
        flat = self._opened.blocks.take(self.layout.numel, self.flat.dtype)
        flat.copy_(self.flat)
        self._bind(flat, None)

    def lend_to(self, job: UpdatePass) -> None:
        """Have an update start from the unit's values, in memory that the unit shares with no one, and that
        the disk can write from: a record that is updated lies in files no more.
        """
        self.stop_sharing()
        if self.framed:
            self._go_on_in_copy()
        job.start_from(self.flat)

    @property
    def _pinned(self) -> bool:
        """Whether `hi` lies in the memory that the unit is resident in."""
        return self._memory is not None and self._place_of_hi() is self._memory

    @property
    def resident_in_place(self) -> bool:
        """Whether changing the parameters, which are attached, would change the record."""
        return self.attached and self._memory is not None

    def _is_shared(self) -> bool:
        if self.shares() == self._own_shares:
            return False
        logger.info(
            "%s: a view of its parameters outlives their use; it keeps their present values and their memory",
            self.name,
        )
        self._abandoned.append(StorageWeakRef(self.flat.untyped_storage()))
        if self._has_block:
            self._opened.blocks.outlived(self.flat)
        return True

    def _bind(self, flat: torch.Tensor, memory: mmap | torch.Tensor | None) -> None:
        self._leave_memory()
        self.flat, self._memory = flat, memory
        self.storage_key = int(flat.untyped_storage()._cdata)
        with torch.inference_mode(mode=False):  # `flat` asks for no gradients
            segments = self.layout.segments
            if len(segments) == 1 and segments[0].numel == flat.numel():  # one operation, not two
                self._views = [flat.view(segments[0].shape)]
            else:
                self._views = [flat[one.start : one.stop].view(one.shape) for one in segments]
            if self.distributed:
                self._views = self.changes.counted(self._views)
        self._own_shares = self.shares()
        self._opened.by_storage[self.storage_key] = self

    @property
    def framed(self) -> bool:
        """Whether the blocks in which the memory of `flat` begins and ends are its own: see Request."""
        return self._skew_nbytes > 0 and self._memory is None and self.flat.data_ptr() % BLOCK > 0

    @property
    def _has_block(self) -> bool:
        """Whether the unit has memory that is a block."""
        return self._memory is None and self.flat.numel() > 0

    def unbind(self) -> None:
        """Drop the references to the memory."""
        self._leave_memory()
        self.flat, self._memory = self._nothing, None
        self.storage_key = int(self.flat.untyped_storage()._cdata)
        self._views = []

    def _leave_memory(self) -> None:
        if self._has_block:
            self._opened.blocks.leaving(self.flat)
        self._opened.by_storage.pop(self.storage_key, None)

    def deallocate(self) -> None:
        """Give the unit's memory back, unless `hi` lies in it; tensors that share it keep it, see
        [Note: abandoned storage].
        """
        shared = _shares(self.storage_key) != self._own_shares and self._is_shared()
        if self._pinned:
            if self.record.on_device and self.on_device:
                self.record.used("hi")
            if not shared:
                return
            self.record.give_new_memory("hi")
        self.unbind()

    def shares(self) -> int:
        """Return how many tensors share the unit's storage."""
        return _shares(self.storage_key)

    def attach(self, *, aside: bool = False) -> None:
        """Let the parameters be their values: `aside`, for a use that is no part of a step, as nothing but
        nn.Parameters.
        """
        kind = nn.Parameter if aside else Attached
        if self.distributed:
            become_all(self.parameters, "plain" if aside else "attached", self._views)
        for parameter, values in () if self.distributed else zip(self.parameters, self._views, strict=True):
            parameter.__class__ = kind
            _set_data(parameter, values)
        self.changes.begin(self._views)
        if self._watch is not None:
            self._watch.attached.add(self)  # first: after an interrupt it knows
        self.attached, self.aside = True, aside

    def guard(self) -> None:
        """Have `changes` asked, from now on, before an attached parameter is assigned to."""
        become_all(self.parameters, "attached")

    def check_is_here(self) -> None:
        """See that this rank has a part of it.

        Raises: UnsupportedError for an expert that other ranks have.
        """
        if self.record.is_elsewhere:
            raise UnsupportedError(
                f"{self.name}: rank {list(self.record.holders.members)} has this expert (expert_parallel), "
                "and this rank was about to compute with it. The tokens go to the experts in the forward of "
                "their layer alone: let no other module use its weights, do not tile the model's batches or "
                "sequences (tile_batch, tile_sequence), and read weights in `with infinity.gathered(...)`"
            )

    def changed(self) -> str | None:
        """Return the name of a parameter that changed while it was attached, None if none did, when the last
        use ends: `guard` is over.
        """
        if self.distributed:
            become_all(self.parameters, "plain")
        for parameter in () if self.distributed else self.parameters:
            parameter.__class__ = nn.Parameter  # each look at an Attached takes torch twice as long
        return self.changes.found()

    def detach(self) -> None:
        """Put the guard on the parameters; the storage stays as it is."""
        saved = self.saved()
        self.attached = self.aside = False  # first: after an interrupt here all of them are attached again
        if self._watch is not None:
            self._watch.attached.discard(self)
            for parameter in self.parameters:  # torch answers for them: later each would be a cache missed
                if parameter.grad is not None or not parameter.requires_grad:
                    self._watch.look(self)
                    break
        self.changes.end()
        if self.distributed:
            become_all(self.parameters, "released", self._opened.placeholders)
        pairs = zip(self.parameters, self._opened.placeholders, strict=True)
        for parameter, stand_in in () if self.distributed else pairs:
            parameter.__class__ = nn.Parameter
            _set_data(parameter, stand_in)
            parameter.__class__ = Released
        if self._abandoned:
            self._abandoned = [storage for storage in self._abandoned if not storage.expired()]
        raised = saved and self.shares() == self._own_shares and not self._abandoned
        if raised:
            torch.autograd.graph.increment_version([self.parameters[index] for index in saved])
        if raised or self.distributed:
            self.changes.left()

    def saved(self) -> list[int]:
        """Return the parameters that graphs hold themselves, and read again, not views of their values."""
        found, known = [], self._accumulators
        for index, one in enumerate(self.parameters):
            if one._use_count() > 1 + (index in known) and self._is_saved(index, one):  # type: ignore[attr-defined]
                found.append(index)
        return found

    def _is_saved(self, index: int, parameter: nn.Parameter) -> bool:
        holders: Callable[[], int] = parameter._use_count  # type: ignore[attr-defined]
        if torch.is_inference_mode_enabled():
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        if index in self._accumulators or not parameter.requires_grad:
            return True
        node = _accumulator_of(parameter)
        if self.flat.device.type == "cpu":  # elsewhere it would keep the stream that it was made on
            self._accumulators[index] = node
        return holders() > 1 + (node is not None)

    def __repr__(self) -> str:
        """Name and state."""
        residence = self.residence
        state = "attached" if self.attached else "resident" if residence.fetch else "released"
        uses = f"{residence.users} users, {len(self._pending)} pending"
        return f"<Unit {self.name}, {self.layout.numel} elements, {state}, {uses}>"


def _accumulator_of(parameter: nn.Parameter) -> object:
    """Return the node in which graphs accumulate a parameter's gradient, as get_gradient_edge finds it."""
    with torch.enable_grad():
        leads: Any = parameter.view_as(parameter).grad_fn
    return leads.next_functions[0][0]
