"""Gradients as autograd accumulates them: taken over, reduced over the ranks, then kept or applied.

[Note: from loss.backward() to the record]
1. Autograd accumulates a parameter's gradient, and calls `accumulated` here. `GradientStore.arrive` brings it
   to host memory; of several ranks each keeps its own first (`Reduction.arrive`). `p.grad` becomes an
   `OffloadedGradient`, which owns what is stored.
2. When the last gradient of a unit has come, the ranks sum theirs (`Reduction.reduce`). Then, with
   update="backward", the optimizer decides, and a pass over the record, queued there and then, applies the
   update (`GradientStore.apply`). Else gradients stay in host memory as far as the budget's kept share has
   room, and a `SpillPass` writes the others to the record, as the field grad16 or grad32
   (`GradientStore.settle`).
3. step() puts an update, with the gradient's tensor or field, with its unit (`_decide` in optim/base.py), and
   begins the first fetches of the next step (`Engine.close_step`). A unit's next fetch takes its update and
   computes hi, lo, m and v, tile by tile (lane/fetch.py); the lane writes each tile that was worked on
   (`_begin_writes` in lane/lane.py).

[Note: gradients of experts on other ranks]
Where ranks divide experts, autograd brings gradients of a rank's own experts to it alone. `p.grad` is there
on every rank all the same, so that norms, clipping and steps are the same everywhere: at the end of each
backward the ranks agree which experts have gradients, and one that has no part of such an expert gets a
gradient of no elements. A norm counts what each rank holds, so each expert once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from infinity.autograd.hooks import Hooks, graph_task
from infinity.autograd.slice_watch import SliceWatch
from infinity.durable.committer import Durable
from infinity.errors import UnsupportedError
from infinity.gradients.early import EarlyUpdates
from infinity.gradients.grad_tensor import OffloadedGradient, plain
from infinity.gradients.gradient import Form, Gradient, applied_message
from infinity.gradients.speculation import Foreseer, Speculation
from infinity.gradients.store import GradientStore
from infinity.lane.lane import StreamLane
from infinity.lane.outgoing import OutgoingShare
from infinity.ranks.group import Ranks
from infinity.records.updates import Update
from infinity.tensors import is_distributed, part_of
from infinity.units.meeting import MeetingOfRanks
from infinity.units.unit import Unit

_UNORDERED = (
    "a schedule of torch.distributed.pipelining that computes gradients of weights apart from those of "
    "inputs "
    "(InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) brings them in an order that differs between ranks, "
    "which therefore cannot sum them. Use Schedule1F1B or ScheduleInterleaved1F1B where each stage has "
    "several "
    "data ranks, or give each rank a process_group of its own."
)


_unguarded = torch._C.DisableTorchFunctionSubclass
"""Named once: each gradient enters it thrice."""


class Updater(Protocol):
    """An optimizer, which may decide updates in the backward."""

    max_norm: float | None
    """The norm that gradients are clipped to, all of them together; None for no clipping."""
    update: str
    """"backward": a unit's gradients are applied as soon as they are complete; "auto": so are those of some
    units; else after step().
    """

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is its own."""

    def applied(self, parameter: nn.Parameter) -> bool:
        """Whether it has decided an update of a parameter in a backward since the last step."""

    def steps_whole(self, parameter: nn.Parameter) -> bool:
        """Whether its step of a parameter needs the whole matrix, of which each rank has a part."""

    def units_with_gradients(self, arrivals: Arrivals) -> list[Unit]:
        """Return the units of one engine, in order, of whose parameters any has a gradient."""

    def decide_now(self, gradient: Gradient) -> Update:
        """Decide the update of a gradient's parameter, which is applied in the backward."""

    def note_options(self) -> None:
        """Remember the options of param groups: a backward has ended that may have used them."""


def _check_dense(grad: torch.Tensor, unit: Unit, index: int) -> None:
    if grad.layout != torch.strided:
        name = unit.layout.segments[index].name
        raise UnsupportedError(f"{name}: sparse gradients are not supported; use sparse=False")


def _plain_part(grad: torch.Tensor, unit: Unit, index: int) -> torch.Tensor:
    if unit.distributed or is_distributed(grad):
        grad = part_of(unit.parameters[index], grad, f"{unit.name}: a gradient")
    return plain(grad)


class Arrivals:
    """Takes every gradient of one engine's units. Called from the thread that computes."""

    def __init__(
        self,
        units: list[Unit],
        unit_of: Callable[[nn.Parameter], tuple[Unit, int]],
        hooks: Hooks,
        gradients: GradientStore,
        outgoing_share: OutgoingShare,
        lane: StreamLane,
        durable: Durable | None,
        speculation: Speculation,
        early: EarlyUpdates,
        ahead: EarlyUpdates,
    ) -> None:
        """Take those of `units`, a list that the engine fills, from autograd to `gradients`. unit_of: says
        where a parameter is. durable: has to know before records change. early: decides for update="auto";
        ahead: for speculate="auto".
        """
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that have parameters of the engine; see `join`."""
        self._takers: dict[Unit, list[weakref.ref[Any]]] = {}
        self._taken: defaultdict[Unit, set[int]] = defaultdict(set)
        """Parameters whose gradients `take` has taken in since the unit was last complete."""
        self._meeting: MeetingOfRanks | None = None
        self._divided: list[tuple[Unit, int]] = []
        self._ranks: Ranks | None = None
        self.stacks: list[Sequence[nn.Parameter]] = []
        """The slices of each parameter that is kept in such."""
        self.slices = SliceWatch()
        self._units = units
        self._unit_of = unit_of
        self._hooks = hooks
        self._gradients = gradients
        self._outgoing_share = outgoing_share
        self._lane = lane
        self._durable = durable
        self._speculation = speculation
        self.early, self.ahead = early, ahead
        self._told: list[Callable[[nn.Parameter], None]] = []
        """Called with each parameter whose gradient comes: of these, those that are used."""
        for one in (early, ahead):
            hooks.inputs_came.append(one.forward_began)
        hooks.backward_ended.append(self._backward_ended)

    def join(self, optimizer: Any) -> None:
        """Note that an optimizer has taken parameters of the engine, which does not keep it alive."""
        self.optimizers.add(optimizer)
        if optimizer.update == "auto":
            self.early.want()
            self._tell(self.early.gradient_came)
        if optimizer.speculation.decides and not self._speculation.never:
            self.ahead.want()
            self._tell(self.ahead.gradient_came)
        self._takers.clear()

    def _tell(self, call: Callable[[nn.Parameter], None]) -> None:
        if call not in self._told:
            self._told.append(call)

    def leave(self, optimizer: Any) -> None:
        """Note that an optimizer has lost its parameters to a later one."""
        self.optimizers.discard(optimizer)
        self._takers.clear()

    def catch(self, parameter: nn.Parameter) -> None:
        """Take over the gradients of a parameter as soon as autograd has accumulated them."""
        arrivals = weakref.ref(self)  # and no unit: torch would keep it, and its parameters, for ever

        def caught(parameter: Any) -> None:
            alive = arrivals()
            if alive is not None:
                alive.accumulated(parameter)

        required = parameter.requires_grad
        parameter.requires_grad = True  # torch refuses the hook on a parameter that is frozen for now
        parameter.register_post_accumulate_grad_hook(caught)
        parameter.requires_grad = required

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Take over a parameter's gradient, which autograd has just accumulated."""
        unit, index = self._unit_of(parameter)
        with _unguarded():  # a gradient is no value: no guard need be asked
            grad = parameter.grad
        if grad is None:
            return
        self._note(parameter, unit, index)
        updater = self.updater(unit)
        if updater is not None and self._durable is not None:
            self._durable.before_change()
        if not isinstance(grad, OffloadedGradient):
            _check_dense(grad, unit, index)
            if updater is not None and updater.applied(parameter):
                raise self._gradients.refusal(unit)
            grad = _plain_part(grad, unit, index)
            with _unguarded():  # as above
                parameter.grad = None  # should it be refused
            gradient = self._gradients.arrive(
                unit, index, self._gradients.received(grad), keep=updater is None
            )
            shown = OffloadedGradient(unit.parameters[index], gradient, self._gradients)
            with _unguarded():  # as above
                parameter.grad = shown
        if not self._hooks.accumulated(unit, index):
            return
        if self._meeting is not None and unit in self._meeting.chosen:
            self._meeting.owes(unit)
        elif updater is None and self._speculates(unit):
            return
        else:
            self._gradients.reduce(unit, at_once=updater is not None)
            if updater is not None and self._may_wait(unit):
                # Many updates at once take less time: after each operation of torch its threads look for
                # work for a while, on the cores that the update needs.
                self._outgoing_share.defer(partial(self._use_gradients, unit, updater))
            else:
                self._use_gradients(unit, updater)
        self._hooks.end_unit(unit)

    def _note(self, parameter: nn.Parameter, unit: Unit, index: int) -> None:
        for call in self._told:
            call(parameter)
        if unit.slice_numbers and (number := unit.slice_numbers[index]) >= 0:
            self.slices.gradient_came(number)

    def _speculates(self, unit: Unit) -> bool:
        """Begin to make a complete unit's updates before they are decided, and end the unit's use; False, and
        nothing is done, where they are not to be made.
        """
        if self._speculation.never:
            return False
        optimizer = self._foreseer(unit)
        if optimizer is None or not self._hooks.used_once(unit):
            return False
        decides = optimizer.speculation.decides
        if decides and not self.ahead.has(unit):
            self._speculation.leave(self.ahead.why_not)
            return False
        if not self._speculation.begin(unit, optimizer):
            if decides and not optimizer.speculation.decides:
                self.ahead.stop("the disk has no room for them")
            return False
        self._hooks.end_unit(unit)
        self._speculation.must_have_begun(unit)
        self._gradients.settle(unit)  # its writes are queued behind that pass
        return True

    def _foreseer(self, unit: Unit) -> Foreseer | None:
        """Return the optimizer of a unit's first parameter, if it is to say what it will decide."""
        for taker in self._takers_of(unit):
            optimizer: Foreseer | None = taker()
            if optimizer is None or not optimizer.has(unit.parameters[0]):
                continue
            if optimizer.speculation.speculates:
                return optimizer
            if optimizer.speculation.rests:
                self._speculation.rest()
        return None

    def assigned(self, parameter: nn.Parameter, name: str, *, by_pipeline: bool) -> None:
        """See released.Owner."""
        self.slices.assigned(parameter, name)
        if by_pipeline:
            self.take(parameter)

    def take(self, parameter: nn.Parameter) -> None:
        """Take in a gradient that torch's pipelining has assigned: see [Note: zero bubbles] in
        units/pipelines.py.

        Raises: UnsupportedError with several ranks, whose orders differ.
        """
        unit, index = self._unit_of(parameter)
        grad = parameter.grad
        if self._gradients.shared:
            parameter.grad = None
            raise UnsupportedError(_UNORDERED)
        if grad is not None and not isinstance(grad, OffloadedGradient):
            _check_dense(grad, unit, index)
            parameter.grad = None  # should it be refused
            grad = plain(part_of(parameter, grad, f"{unit.name}: a gradient"))
            gradient = self._gradients.arrive(unit, index, self._gradients.received(grad), keep=True)
            parameter.grad = OffloadedGradient(parameter, gradient, self._gradients)
        taken = self._taken[unit]
        taken.add(index)
        if all(at in taken or not one.requires_grad for at, one in enumerate(unit.parameters)):
            taken.clear()
            self._gradients.settle(unit)

    def meet_by(self, meeting: MeetingOfRanks) -> None:
        """Have the ranks meet before they sum what only some may have: see [Note: ranks that choose] in
        units/meeting.py.
        """
        self._meeting = meeting
        meeting.reduce_by(self._reduce_chosen)

    def know_divided(self, units: Sequence[Unit], ranks: Ranks) -> None:
        """Take `units` as experts that `ranks` divide among them: see [Note: gradients of experts on other
        ranks].
        """
        self._divided = [(unit, index) for unit in units for index in range(len(unit.parameters))]
        self._ranks = ranks

    def _agree_on_divided(self) -> None:
        """Have each rank know which experts have gradients, of those that ranks divide."""
        if self._ranks is None or not self._divided:
            return
        having = [number for number, one in enumerate(self._divided) if self._has_gradient(*one)]
        for number in self._ranks.union(having, len(self._divided), "compare gradients of experts"):
            unit, index = self._divided[number]
            if unit.record.is_elsewhere and not self._has_gradient(unit, index):
                gradient = self._gradients.be_elsewhere(unit, index)
                unit.parameters[index].grad = OffloadedGradient(
                    unit.parameters[index], gradient, self._gradients
                )

    def _has_gradient(self, unit: Unit, index: int) -> bool:
        """Whether a parameter has a gradient that is not just set to zeros."""
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            grad = unit.parameters[index].grad
        if isinstance(grad, OffloadedGradient) and grad.is_of(unit, index):
            return grad.gradient.form is not Form.ZERO
        return False

    def _reduce_chosen(self, unit: Unit) -> None:
        """Sum the gradients of a unit that some ranks have; this one's are zeros where it has none."""
        updater = self.updater(unit)
        for index, parameter in enumerate(unit.parameters):
            with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
                trained, grad = parameter.requires_grad, parameter.grad
            if not trained or self._gradients.has_local(unit, index):
                continue
            shape = unit.layout.segments[index].shape
            zeros = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            if isinstance(grad, OffloadedGradient) and grad.is_of(unit, index):
                self._gradients.add(grad.gradient, zeros)
                continue
            gradient = self._gradients.arrive(unit, index, zeros, keep=updater is None)
            parameter.grad = OffloadedGradient(parameter, gradient, self._gradients)
        self._gradients.reduce(unit, at_once=updater is not None)
        self._use_gradients(unit, updater)

    def gradient_of(self, parameter: nn.Parameter) -> Gradient | None:
        """Return the stored gradient behind `p.grad`, None where there is none. A plain tensor that the user
        has put there, with several ranks this rank's, is taken in first.
        """
        unit, index = self._unit_of(parameter)
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            grad = parameter.grad
        if grad is None:
            return None
        if isinstance(grad, OffloadedGradient) and grad.is_of(unit, index):
            return grad.gradient
        _check_dense(grad, unit, index)
        if not unit.record.holders.are_all:
            raise UnsupportedError(
                f"{unit.layout.segments[index].name}: a tensor was assigned to the gradient of an expert "
                "that ranks divide among them (expert_parallel), of which not all have a part. Change in "
                "place the gradient that the backward has brought"
            )
        name = unit.layout.segments[index].name
        given = part_of(parameter, grad, f"{name}: a gradient that was assigned").detach().clone()
        gradient = self._gradients.arrive(unit, index, given, keep=True)
        gradient.was_asked_for()
        parameter.grad = OffloadedGradient(parameter, gradient, self._gradients)
        self._gradients.settle_ranks([unit])
        self._gradients.settle(unit)
        return gradient

    def have_slices(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take parameters as slices of one: see [Note: slices that are not used] in engine/routing.py."""
        self.stacks.append(parameters)
        self.slices.follow(parameters)
        for one in parameters:
            unit, index = self._unit_of(one)
            unit.watch_by(self.slices, index, self.slices.number(one))

    def _may_wait(self, unit: Unit) -> bool:
        """Whether a unit's update needs no I/O, and no later use in this backward can add to its gradients.

        With several ranks never: records may lie elsewhere on each, but all must fetch in the same order.
        """
        if self._gradients.shared:
            return False
        record = unit.record
        return record.all_in_host and self._lane.runs_here(record) and self._hooks.used_once(unit)

    def _use_gradients(self, unit: Unit, updater: Updater | None) -> None:
        """Apply a complete unit's gradients, if no further use in this backward can bring more; else keep
        them. Matrices that the ranks orthogonalize together wait for the end of the backward where not all
        ranks have used the unit, so that each knows of other uses.
        """
        if updater is None:
            self._gradients.settle(unit)
            return
        outgoing = self._gradients.outgoing_of(unit)
        together = self._meeting is not None and unit in self._meeting.chosen
        if (
            not (together and any(map(updater.steps_whole, unit.parameters)))
            and self._hooks.used_once(unit)
            and all(
                updater.has(unit.parameters[index]) and one.form is Form.OUTGOING and one.is_current
                for index, one in outgoing.items()
            )
        ):
            self._gradients.apply(unit, list(outgoing.values()), updater.decide_now)
        else:
            self._gradients.settle(unit)

    def updater(self, unit: Unit) -> Updater | None:
        """Return the optimizer that applies this unit's gradients in the backward, as soon as they are
        complete.
        """
        for taker in self._takers_of(unit):
            optimizer: Updater | None = taker()
            if optimizer is not None and self._applies(optimizer, unit):
                return optimizer
        return None

    def _takers_of(self, unit: Unit) -> list[weakref.ref[Any]]:
        """Return the optimizers that have any of a unit's parameters."""
        takers = self._takers.get(unit)
        if takers is None:
            found = [one for one in self.optimizers if any(map(one.has, unit.parameters))]
            takers = self._takers[unit] = [weakref.ref(one) for one in found]
        return takers

    def _applies(self, optimizer: Updater, unit: Unit) -> bool:
        """Whether an optimizer applies a unit's gradients in the backward."""
        if optimizer.update == "auto":
            return optimizer.max_norm is None and self.early.has(unit)
        return optimizer.update == "backward"

    def _backward_ended(self) -> None:
        self.slices.note_once()
        if self._meeting is not None:
            self._meeting.before(None)
        self._agree_on_divided()
        self._gradients.end_backward(self._units)
        self._outgoing_share.use_deferred()
        for unit in self._gradients.units_outgoing():
            if self._gradients.outgoing_of(unit):  # what came before may have applied it
                self._gradients.settle(unit)
        for updater in [one for one in self.optimizers if one.update in ("backward", "auto")]:
            for unit in updater.units_with_gradients(self):  # few, of many slices
                waiting = self._kept(unit, updater) if self._applies(updater, unit) else []
                if waiting:
                    self._gradients.apply(unit, waiting, updater.decide_now)
        self.ahead.backward_ended()
        if self.early.backward_ended():
            for updater in [one for one in self.optimizers if one.update == "auto"]:
                updater.note_options()

    def _kept(self, unit: Unit, updater: Updater) -> list[Gradient]:
        """Return the stored gradients of a unit's parameters that `updater` has, and that have not been
        applied.

        Raises: UnsupportedError for one that was assigned behind an update of its parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            grads = [parameter.grad for parameter in unit.parameters]
        found = []
        for parameter, grad in zip(unit.parameters, grads, strict=True):
            applied = isinstance(grad, OffloadedGradient) and grad.gradient.form is Form.APPLIED
            if grad is not None and not applied and updater.has(parameter):
                gradient = self.gradient_of(parameter)
                if gradient is not None and gradient.form in (Form.HOST, Form.SPILLED):
                    if updater.applied(parameter):
                        raise UnsupportedError(applied_message(unit, "a gradient that was assigned"))
                    found.append(gradient)
        return found

    def finish_backward(self) -> None:
        """Settle what a backward that raised has left. Called before a step is decided."""
        if graph_task() == -1:
            self._hooks.end_backward()
            self._gradients.settle_ranks(self._units)
        if self._durable is not None:
            self._durable.before_step()
