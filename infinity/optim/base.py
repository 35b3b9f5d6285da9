"""The base of optimizers over offloaded parameters: torch Optimizers whose updates are applied by the passes
over the records. What an optimizer computes is its recipe; see update_rules in records.

[Note: when an update happens]
update="forward": step() decides (norm, clip factor, this step's scalars) and returns; a unit's update is
applied when its record next passes through memory, usually in the next forward's fetch. Every read of a
parameter goes through such a fetch, so it sees the updated value. update="backward": the update is applied in
the backward, as soon as a unit's gradients are complete, and no gradient is kept; that excludes clipping (the
norm is not known yet) and a second backward before step(). Units in host memory need no transfers that an
early update could overlap with: their gradients wait in the outgoing share, and are applied when it is full,
or when the backward ends. update="auto": some units have theirs in the backward, so many that both halves of
a step are equally busy, and the others in the next forward; see gradients/early.py.
update="delayed" is "forward" with the gradients of the step before; see optim/delayed.py.

With speculate=True a unit's update is made in the backward, too, as if nothing were clipped and the gradient
scale were the usual one, but beside the record; gradients are kept. step() decides as ever, and where it
decides the same, what was made counts, and else the update is applied as ever: the bits are those of
update="forward" in any case. With "auto", the default, that is done where it would have been right in most of
the last steps, of as many units as update="auto" has early, and where the disk has room. See
gradients/speculation.py.

[Note: missed steps]
A gradient of zeros still decays weights and moments. An expert to which no token was routed has such
gradients after zero_grad(set_to_none=False). Moving its record for each would cost what routing saves. So
these updates wait, and are replayed one by one, with the same bits, by the next pass over the record. At most
MISSED_LIMIT wait; then the record is fetched to apply them. See [Note: steps of a stack] in missed.

So does an update before them whose gradient lies in the record: that of a slice which will probably not be
used in the next step is put there, see `GradientStore.rests`. It is applied, with what was missed before and
after it, by the pass that brings the slice for its next use: one pass for each use, and not two.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from infinity import kernels
from infinity.autograd.arrivals import Arrivals
from infinity.autograd.slice_watch import SliceWatch
from infinity.config.loss_scale import warn_unscaled
from infinity.engine.engine import Engine
from infinity.errors import UnsupportedError
from infinity.gradients.gradient import Form, Gradient
from infinity.optim.checks import check_record, check_room, checked_states
from infinity.optim.decided import DecidedUpdates
from infinity.optim.delayed import DELAYED_AFTER, DelayedGradients, check_delayed
from infinity.optim.joined_state import cut_state, joined_state
from infinity.optim.missed import Beginning, MissedSteps
from infinity.optim.missing import NotingMissed, check_unused
from infinity.optim.ownership import ParameterPlace, check_current, engine_for
from infinity.optim.turns import TakingTurns
from infinity.optim.with_gradients import WithGradients
from infinity.planning.speculation import SpeculationHistory
from infinity.records.update_rules import Recipe
from infinity.records.updates import Update
from infinity.records.weights import WEIGHTS
from infinity.tiling import Whole, count_update
from infinity.units.optimizer_options import check_group
from infinity.units.tracking import DELAYED, Tracking
from infinity.units.unit import Unit

When = Literal["forward", "backward", "auto", "delayed"]
"""When updates are applied: see [Note: when an update happens]."""

Speculate = bool | Literal["auto"]
"""Whether updates are made in the backward before step() decides them; "auto": where it was right lately."""

Taken = tuple[dict[str, Any], nn.Parameter, Gradient]
"""A group, one of its parameters, and the gradient that step() applies."""


class OffloadedOptimizer(NotingMissed, TakingTurns, Tracking, Optimizer):  # type: ignore[misc]  # state, on demand
    """The base of all optimizers on parameters built inside `with infinity.Init(...)`. Making one
    allocates room for their state.

    params: as for every torch Optimizer. defaults: the options of a param group. recipe: what the optimizer
    computes, and which state it keeps. max_norm: clip the global gradient norm, in fp32, inside the update
    (leave it None if you call torch.nn.utils.clip_grad_norm_). update: "forward", "backward", "auto" or
    "delayed", the last from `delayed_after` steps on; see [Note: when an update happens]. seed: of the random
    bits that round the moments of Config(state_dtype="bf16", "int8" or "int4"); the same seed gives the same
    bits. speculate: True or "auto" makes updates ahead; see the same note. `state` reads from the records;
    see ParameterState.

    Raises: ValueError for settings out of range and for parameters that were not built in Init;
    UnsupportedError for torch's options that it does not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        recipe: Recipe,
        *,
        max_norm: float | None = None,
        update: When = "forward",
        seed: int = 0,
        speculate: Speculate = "auto",
        delayed_after: int = DELAYED_AFTER,
    ) -> None:
        if update not in get_args(When):
            raise ValueError(f"update={update!r}: expected one of {', '.join(get_args(When))}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: expected a number above 0, or None")
        if max_norm is not None and update == "backward":
            raise ValueError('max_norm needs the norm of all gradients before an update: update="forward"')
        if not isinstance(speculate, bool) and speculate != "auto":  # 1 would be neither
            raise ValueError(f'speculate={speculate!r}: expected True, False or "auto"')
        if speculate is True and update != "forward":
            raise ValueError(f'speculate=True: with update="{update}" nothing is foreseen: update="forward"')
        recipe.scalars(defaults, 1, 1.0)  # checks the defaults
        self.recipe = recipe
        self.max_norm = max_norm
        self.update = update
        self.seed = seed
        self.grad_norm: float | None = None
        """The global gradient norm of the last step, if max_norm is set."""
        forced = None if speculate == "auto" and update == "forward" else speculate is True
        self.speculation = SpeculationHistory(forced)
        self._decided = DecidedUpdates()
        self.delayed = DelayedGradients(self, delayed_after) if update == "delayed" else None
        """What update="delayed" keeps for the next step; None without it."""
        if self.delayed is not None:
            self.track(**{DELAYED: self.delayed})
        self._missed, self._with_gradients = MissedSteps(), WithGradients()
        self._warned = False
        self.own_nothing()
        super().__init__(params, defaults)
        self.take([one for group in self.param_groups for one in group["params"]])
        if self.speculation.is_forced:
            self._reserve()

    def _reserve(self) -> None:
        """Allocate what updates are written to that are made before step(); see [Note: speculative updates].

        Raises: UnsupportedError where there are none; aio.StorageFullError.
        """
        units: dict[Engine, dict[Unit, None]] = {engine: {} for engine in self._engines.values()}
        for group in self.param_groups:
            for one in group["params"]:
                engine = self.mine[id(one)].engine
                units[engine][engine.parameters.unit_of(one)[0]] = None
        for engine, found in units.items():
            engine.speculation.check_possible(type(self).__name__)
            engine.speculation.reserve(list(found))

    def set_seed(self, seed: int) -> None:
        """Set the seed of the random bits that round the moments from now on."""
        self.seed = seed

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; room for their state is allocated now.

        Raises: ValueError for a parameter that was not built in Init, or belongs to another optimizer;
        UnsupportedError for a record that this optimizer cannot update; HostMemoryError, with the smallest
        budget that works, where the state has to fit host memory and does not.
        """
        check_current(self, "add_param_group()")
        check_group(type(self).__name__, self.defaults, param_group)
        super().add_param_group(_in_pieces(param_group))
        group = self.param_groups[-1]["params"]
        known = dict(self.mine)
        try:
            for parameter in group:
                engine = engine_for(parameter)
                check_record(
                    self.recipe_in(self.param_groups[-1]),
                    engine.parameters.unit_of(parameter)[0].record.schema,
                    self.update,
                )
                if self.update == "delayed":
                    check_delayed(engine, type(self).__name__)
                self.mine[id(parameter)] = ParameterPlace(engine, len(self.mine), len(self.param_groups) - 1)
            if self._made:
                self.take(group)
        except BaseException:
            self.param_groups.pop()
            self.mine = known
            raise

    def _engine(self, unit: Unit) -> Engine:
        return next(self.mine[id(one)].engine for one in unit.parameters if id(one) in self.mine)

    def _count_updates(self, units: Iterable[Unit]) -> None:
        """Count an update of each of these units, of which there may be thousands."""
        for engine in self._engines.values():
            all_its_own = len(self._engines) == 1
            own = [one.index for one in units if all_its_own or self._engine(one) is engine]
            engine.residency.frequencies.were_updated(own)

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Decide the updates of all parameters that have a gradient; see [Note: when an update happens].

        Raises: UnsupportedError if gradients were clipped by hand although max_norm is set, and if a later
        optimizer has taken the parameters over.
        """
        check_current(self, "step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.telling_others():
            for engine in self._engines.values():
                engine.arrivals.finish_backward()
            with contextlib.nullcontext() if self.delayed is None else self.delayed.turn():
                self._step_now()
        return loss

    @torch.no_grad()
    def apply_delayed(self) -> None:
        """Apply the gradients that update="delayed" keeps for the next step, in a step of its own; do nothing
        where there are none.
        """
        check_current(self, "apply_delayed()")
        if self.delayed is not None and len(self.delayed):
            with self.delayed.catch_up():
                self._step_now()

    def check_nothing_waits(self, what: str) -> None:
        """See that no gradient is kept for the next step, which `what` does not hold.

        Raises: UnsupportedError.
        """
        if self.delayed is not None and len(self.delayed):
            raise UnsupportedError(
                f'{what}: update="delayed" keeps the gradients of the last step for the next one, and they '
                "are no part of it. Call optimizer.apply_delayed() first; a durable run commits them."
            )

    def drop_delayed(self) -> None:
        """Drop the gradients that update="delayed" keeps: they are of weights that are loaded over."""
        if self.delayed is not None:
            self.delayed.drop()

    @property
    def steps_done(self) -> int:
        """See delayed.Delaying."""
        return max((one.get("step", 0) for one in self._counts.values()), default=0)

    def _step_now(self) -> None:
        """Decide the updates of all parameters that have a gradient now."""
        groups, may_have = self._having_gradients(asks=False)
        found = [
            (group, one, gradient)
            for group, one in zip(groups, may_have, strict=True)
            if (gradient := self.mine[id(one)].engine.arrivals.gradient_of(one)) is not None
        ]
        if len(found) < len(may_have):
            self._having_gradients()
        if self.update == "auto":
            self.look_at_turns([gradient for _, _, gradient in found], {id(one) for _, one, _ in found})
        beside = self._begin_to_miss()
        # Graphs with old values end.
        torch.autograd.graph.increment_version([*(one for _, one, _ in found), *beside.parameters()])
        for _, _, gradient in found:
            gradient.unit.changes.stepped(gradient.index)
        for unit, at in zip(beside.units(), beside.places(), strict=True):
            unit.changes.stepped(at)
        taken = [one for one in found if one[2].form is not Form.APPLIED]
        self._warn_of_overflow([gradient for _, _, gradient in taken])
        factor = self._clip_factor([gradient for _, _, gradient in taken])
        busy = {gradient.unit for _, _, gradient in taken if gradient.form is not Form.ZERO}
        self._flush_earlier(busy, beside)
        for group, parameter, gradient in taken:
            self._decide(group, parameter, gradient, factor)
        self._note_missed(beside, float(factor))
        self._settle_speculation(taken, factor)
        self._count_updates(busy)
        self._applied.clear()
        for engine in self._engines.values():
            if self.update == "auto":
                engine.arrivals.early.close_step()
            if self.speculation.decides:
                engine.arrivals.ahead.close_step()
            engine.close_step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
        """As every torch Optimizer's. A gradient is no value, so that no released parameter is asked."""
        if self.update == "auto":
            with self.telling_others():
                self.check_none_is_dropped(())
        may_have = self._with_gradients.that_may_have(self.param_groups, self._slices)
        with torch._C.DisableTorchFunctionSubclass():
            for one in may_have if set_to_none else ():
                if one.grad is not None:
                    one.grad = None
            if not set_to_none and any(one.grad is not None for one in may_have):
                super().zero_grad(set_to_none)
        if set_to_none:
            self._with_gradients.dropped(self._slices)

    def _having_gradients(self, *, asks: bool = True) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
        """Return the groups of the parameters that have a gradient, and these: of many slices they are few.
        asks: see WithGradients.
        """
        self.regroup()
        return self._with_gradients.as_sorted(self.param_groups, self._slices, asks=asks)

    @property
    def _slices(self) -> list[SliceWatch]:
        return [engine.arrivals.slices for engine in self._engines.values()]

    def regroup(self) -> None:
        """Know in which group each parameter is now: members of groups may have changed places.

        Raises: UnsupportedError for one that is in a group of another update rule.
        """
        sorts = self._with_gradients.sorts
        self._with_gradients.sort(self.param_groups, self._slices)
        if self._with_gradients.sorts == sorts:
            return
        rules = list(map(self.recipe_in, self.param_groups))
        for number, group in enumerate(self.param_groups):
            for one in group["params"]:
                place = self.mine.get(id(one))
                if place is None or place.group == number:
                    continue
                if place.group < len(rules) and rules[number] is not rules[place.group]:
                    self._with_gradients = WithGradients()  # so that the next call finds it again
                    raise UnsupportedError(
                        f"{place.engine.parameters.name_of(one)}: it was moved from param group "
                        f"{place.group} to {number}, whose update rule, {rules[number].name}, keeps another "
                        "state. Make a new optimizer instead."
                    )
                self.mine[id(one)] = replace(place, group=number)

    def _warn_of_overflow(self, gradients: list[Gradient]) -> None:
        """Warn, once, if fp16 gradients come without loss scaling, which checks them for overflows."""
        for gradient in gradients:
            dtype = gradient.unit.record.schema.dtype
            if WEIGHTS[dtype].overflows and not gradient.checked and not self._warned:
                self._warned = True
                warn_unscaled(gradient.unit.name, dtype)

    def _clip_factor(self, gradients: list[Gradient]) -> np.float32:
        """Return the fp32 factor that clips the global norm to max_norm, computed as in the reference recipe;
        1 without max_norm.
        """
        if self.max_norm is None:
            return np.float32(1)
        clipped = next((gradient for gradient in gradients if gradient.scale != 1), None)
        if clipped is not None:
            raise UnsupportedError(
                f"{clipped.unit.name}: gradients were scaled (clip_grad_norm_, GradScaler) although "
                f"{type(self).__name__} has max_norm={self.max_norm}. Leave max_norm out, and clip with "
                "clip_grad_norm_."
            )
        total = sum(
            engine.gradients.square_sum_of_all(one for one in gradients if self._engine(one.unit) is engine)
            for engine in self._engines.values()
        )
        norm = np.float32(math.sqrt(total))
        self.grad_norm = float(norm)
        return np.float32(np.minimum(np.float32(1), np.float32(self.max_norm) / (norm + np.float32(1e-6))))

    def _flush_earlier(self, busy: set[Unit], begin: Beginning) -> None:
        """Apply updates of earlier steps that are still pending; but see [Note: missed steps]. busy: units of
        which others are decided. begin: slices that begin to miss steps.
        """
        for unit in self._decided.that_cannot_wait(busy, begin.units(), self._missed.due()):
            self._engine(unit).residency.flush(unit)
        self._decided.expect(busy)

    def _decide(
        self, group: dict[str, Any], parameter: nn.Parameter, gradient: Gradient, factor: np.float32
    ) -> None:
        """Add one parameter's update to those that are pending for its unit."""
        unit, place = gradient.unit, self.mine[id(parameter)]
        check_unused(unit)
        self.make_room(place.engine, parameter)
        before = unit.pending.get(gradient.index)
        recipe = self.recipe_of(parameter)
        scalars, key = self._scalars(recipe, group, gradient, float(np.float32(gradient.scale * factor)))
        if unit.record.is_elsewhere:
            return  # the ranks that have it update it
        if before is not None and gradient.form is Form.ZERO:
            update = before.then_missed([(scalars, key)])
        else:
            if before is not None and before.has_gradient:
                raise AssertionError(f"{unit.name}: expected the last gradient to be applied by now")
            missed = () if before is None else (*before.missed, (before.scalars, before.key))
            update = self._update(gradient, place, recipe, (scalars, key), missed)
        if not unit.pending.put(gradient.index, update) or not update.may_miss:
            self._decided.add(unit, update)  # else it waits, as those of `busy` are expected to
        unit.values_changed()

    def _update(
        self,
        gradient: Gradient,
        place: ParameterPlace,
        recipe: Recipe,
        decided: tuple[Any, int],
        missed: tuple[tuple[Any, int], ...] = (),
    ) -> Update:
        field = gradient.field if gradient.form is Form.SPILLED else None
        tensor = gradient.tensor if field is None else None
        holder = place.engine.gradients.unkept.teller(gradient) if tensor is None else gradient
        there = field is None and gradient.on_device
        scalars, key = decided
        return Update(scalars, tensor, field, key, gradient.arriving, missed, recipe, holder, there)

    def _scalars(
        self, recipe: Recipe, group: dict[str, Any], gradient: Gradient, clip: float
    ) -> tuple[Any, int]:
        """Count a step of the gradient's parameter; return its scalars and the key of its random bits."""
        state = self._counts.setdefault(gradient.parameter, {})
        step = state.get("step", 0) + 1
        scalars = recipe.scalars(group, step, clip)
        state["step"] = step
        return scalars, self._key(gradient, step)

    def _key(self, gradient: Gradient, step: int) -> int:
        """Return the key of the random bits that round the state; 0 where nothing is rounded."""
        unit = gradient.unit
        if unit.record.schema.is_exact:
            return 0
        return kernels.state_key(self.seed, self.mine[id(unit.parameters[gradient.index])].position, step)

    # Making updates ahead: speculation.Foreseer

    def foresee(self, gradient: Gradient) -> Update | None:
        """Return the update of a gradient's parameter that step() will probably decide."""
        parameter = gradient.parameter
        if id(parameter) not in self._begun:
            return None
        place, recipe = self.mine[id(parameter)], self.recipe_of(parameter)
        step = self._counts.get(parameter, {}).get("step", 0) + 1
        scalars = recipe.scalars(self.param_groups[place.group], step, self.speculation.scale)
        return self._update(gradient, place, recipe, (scalars, self._key(gradient, step)))

    def _settle_speculation(self, taken: list[Taken], factor: np.float32) -> None:
        """Let what was made ahead count, where it is what this step has decided."""
        settled = [engine.speculation.settle(self) for engine in self._engines.values()]
        scales = {float(np.float32(gradient.scale * factor)) for _, _, gradient in taken}
        if taken:
            self.speculation.close_step(
                scales.pop() if len(scales) == 1 else math.nan,
                confirmed=sum(one[0] for one in settled),
                dropped=sum(one[1] for one in settled),
                added_up=any(gradient.additions for _, _, gradient in taken),
            )

    # Updating in the backward: arrivals.Updater

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is its own."""
        return id(parameter) in self.mine

    def steps_whole(self, parameter: nn.Parameter) -> bool:
        """Whether its step of a parameter needs the whole matrix."""
        return self.has(parameter) and self.recipe_of(parameter).matrices is not None

    def units_with_gradients(self, arrivals: Arrivals) -> list[Unit]:
        """Return the units of one engine, in order, of whose parameters any has a gradient."""
        places = [(one, self.mine[id(one)].engine) for one in self._having_gradients()[1]]
        units = {engine.parameters.unit_of(one)[0] for one, engine in places if engine.arrivals is arrivals}
        return sorted(units, key=attrgetter("index"))

    def applied(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient has been applied in a backward since the last step()."""
        return id(parameter) in self._applied

    def decide_now(self, gradient: Gradient) -> Update:
        """Decide the update of a gradient's parameter, which is applied in the backward."""
        parameter = gradient.unit.parameters[gradient.index]
        if not self._applied:  # the first since the last step: of many slices, each would take long
            self.regroup()
        place = self.mine[id(parameter)]
        self.make_room(place.engine, parameter)
        self._applied.add(id(parameter))
        count_update(parameter)
        recipe = self.recipe_of(parameter)
        decided = self._scalars(recipe, self.param_groups[place.group], gradient, 1.0)
        return self._update(gradient, place, recipe, decided)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return groups, step counts and state as torch.optim does: plain CPU tensors under its names. An
        embedding that is kept in blocks of rows is one parameter here.

        Raises: HostMemoryError, with the sizes, if the state does not fit the machine's memory.
        """
        check_current(self, "state_dict()")
        self.check_nothing_waits("state_dict()")
        packed: dict[str, Any] = super().state_dict()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        kept = [one for index, one in enumerate(parameters) if index in packed["state"]]
        check_room([(self.recipe_of(one), one) for one in kept])
        for index, parameter in enumerate(parameters):
            if index in packed["state"]:  # a hook may leave state out
                state = self.recipe_of(parameter).state
                values = self.mine[id(parameter)].engine.parameters.read(parameter, list(state))
                step = torch.tensor(float(self.counts[parameter]["step"]), device="cpu")
                named = dict(zip(state.values(), values, strict=True))
                packed["state"][index] = {"step": step, **named}
        return joined_state(packed, [group["params"] for group in self.param_groups])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups, step counts and state that `state_dict` returned, here or of torch's optimizer.

        Raises: ValueError, with nothing changed, if groups or shapes do not match.
        """
        check_current(self, "load_state_dict()")
        self._missed.tell_all()
        self.drop_delayed()
        state_dict = cut_state(state_dict, [group["params"] for group in self.param_groups])
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, parameters, strict=False))
        for group in state_dict["param_groups"]:
            check_group(type(self).__name__, self.defaults, group)
        recipes = {number: self.recipe_of(one) for number, one in by_number.items()}
        states = checked_states(recipes, state_dict["state"], by_number)
        steps = {number: {"step": int(state.get("step", 1))} for number, state in states.items()}
        super().load_state_dict({**state_dict, "state": steps})
        for number, state in states.items():
            parameter = by_number[number]
            engine = self.mine[id(parameter)].engine
            self.make_room(engine, parameter)
            self.state_assigned(parameter)
            if fields := recipes[number].state:
                engine.parameters.write(parameter, {field: state[key] for field, key in fields.items()})


def _in_pieces(group: dict[str, Any]) -> dict[str, Any]:
    """Return a param group with their slices, or tiles, in the place of weights that exist in these alone."""
    given = group["params"]
    if isinstance(given, (torch.Tensor, set)):
        given = given.pieces() if isinstance(given, Whole) else given
        return {**group, "params": given}
    params: list[Any] = []
    for one in given:
        if isinstance(one, Whole):
            params += one.pieces()
        elif isinstance(one, tuple) and isinstance(one[1], Whole):
            params += [(f"{one[0]}.{number}", piece) for number, piece in enumerate(one[1].pieces())]
        else:
            params.append(one)
    return {**group, "params": params}
