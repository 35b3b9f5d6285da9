"""What training a model takes of memory and NVMe, and what a step moves: decided by the functions that decide
it in training. Pure: no torch, no I/O.

[Note: the order of decisions]
As in a run: the budget is divided for the largest unit, a first plan says what is fetched how often, that and
what gradients take says which fields are pinned, and what is pinned changes the plan once more. A run revises
its choice later, if uses turn out otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from infinity.errors import HostMemoryError
from infinity.planning.activations import PeakMoment, Usage, kept_by_budget, peak_moments, usage
from infinity.planning.budget import Budget, divide, least_budget, least_that
from infinity.planning.exchange import Exchanges, Links
from infinity.planning.first_step import fetches_of_first_step
from infinity.planning.forecast import EngineLimits, Moves
from infinity.planning.offloaded import offloaded_nbytes
from infinity.planning.outline import Act, Outline, Stage, trace_of
from infinity.planning.placement import Placement, opening
from infinity.planning.plan import Plan, make_plan
from infinity.planning.planned_tiers import (
    is_in_place,
    is_lodged,
    is_part,
    is_record,
    lodged_nbytes,
    place_fields,
    without_records,
)
from infinity.planning.recomputation import InputTiers
from infinity.planning.setting import Setting
from infinity.planning.unit_sizes import UnitSizes, unit_sizes, with_stored
from infinity.sizes import format_size

Spills = Mapping[int, tuple[tuple[int, int], ...]]
"""Bytes read and written of a gradient in each micro-batch, by unit; the update reads the last."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one rank needs and does."""

    setting: Setting
    budget: Budget
    plan: Plan
    placement: Placement
    """What is pinned in host memory, all of it without an NVMe tier, and which units live on the device."""
    units: tuple[Moves, ...]
    moved: Mapping[tuple[str, str], int]
    """Bytes of NVMe in a step, by field and direction ("read", "written")."""
    nvme_nbytes: int
    """The most that is ever on NVMe: in the first step, before anything is pinned. Both generations of a
    durable run and of speculative updates, and offloaded activations, are counted.
    """
    stored_gradients_nbytes: int
    """Of `nvme_nbytes`, places of gradients that wait there for their update."""
    activations: Usage | None
    """None for a model whose activations are not known."""
    offloaded_nbytes: int
    """Of activations, that go to NVMe and come back in each micro-batch."""
    pinned_nbytes: int
    kept_gradients_nbytes: int
    gradients_nbytes: int
    """Of all gradients of a step, wherever they wait."""
    in_use_nbytes: int
    """Units in use at once and a gradient, beside host_memory and what waits in device_memory."""
    moments: tuple[PeakMoment, ...]
    """What computing takes while each stage does."""
    uses: int
    lodged_nbytes: int = 0
    """Of the units that live on the device, out of `Setting.device_nbytes`."""
    records_nbytes: int = 0
    """Of these, whole records, with their gradients and what their updates need."""
    second_nbytes: int = 0
    """Of host_memory, for second parts of weights."""
    in_common_nbytes: tuple[int, int] = (0, 0)
    """Of weights in use, and of those that wait, that lie once on a machine for all of its ranks."""

    @property
    def working_nbytes(self) -> int:
        """Bytes that a rank takes where it computes, beside its budgets: units in use and activations."""
        return self.moment.nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of a rank's host_memory that it takes at most: a model may be smaller than its budget. Where
        the CPU computes: in the moment when all together takes most.
        """
        return self._held_nbytes(gradients=self.setting.device_nbytes is not None or self.moment.after_loss)

    def _held_nbytes(self, *, gradients: bool) -> int:
        budget = self.budget
        waiting = sum(one.waiting_nbytes for one in self.units) if self.setting.device_nbytes is None else 0
        leaving = self.activations.leaving_nbytes if self.activations else 0
        offloaded = leaving - self.offloaded_nbytes
        taken = min(budget.ahead_nbytes, waiting) + self.pinned_nbytes + max(0, offloaded)
        if self.setting.nvme:  # else nothing passes through slots, and their pages are never touched
            taken += budget.slots * budget.slot_nbytes
        waits = gradients or self.setting.micro_batches > 1
        # buffers of gradients that are gone are kept for the next step, as far as the outgoing share has room
        of_gradients = budget.outgoing_nbytes + (self.kept_gradients_nbytes if waits else 0)
        taken += min(of_gradients, self.gradients_nbytes)
        return min(budget.total_nbytes, taken) + self.second_nbytes

    @property
    def moment(self) -> PeakMoment:
        """When computing, with the budgets that lie in the same memory, takes most."""
        if self.setting.device_nbytes is not None:
            return max(self.moments, key=lambda one: one.nbytes)
        return max(
            self.moments,
            key=lambda one: one.nbytes + self._held_nbytes(gradients=one.after_loss) + self._lent_nbytes(one),
        )

    @property
    def lent_nbytes(self) -> int:
        """Bytes beside the budget of units that are in use no more, from whose values the backward's updates
        start: see _lent_nbytes.
        """
        return self._lent_nbytes(self.moment)

    def _lent_nbytes(self, moment: PeakMoment) -> int:
        """As many as their gradients, which fill the outgoing share where updates take longer than computing;
        the last of them stays until all of it is written.
        """
        setting = self.setting
        on_host = setting.nvme and setting.device_nbytes is None and setting.data_ranks == 1
        if not (on_host and moment.after_loss) or setting.update == "forward":
            return 0
        units = [one.waiting_nbytes for one in self.units if one.trainable]
        return min(self.budget.outgoing_nbytes + max(units, default=0), sum(units))

    @property
    def read_nbytes(self) -> int:
        """Bytes read in a step."""
        return sum(nbytes for (_, way), nbytes in self.moved.items() if way == "read")

    @property
    def written_nbytes(self) -> int:
        """Bytes written in a step."""
        return sum(nbytes for (_, way), nbytes in self.moved.items() if way == "written")

    @property
    def limits(self) -> EngineLimits:
        """What the forecast of a step has to keep to."""
        budget, setting = self.budget, self.setting
        waits = budget.ahead_nbytes if setting.device_nbytes is None else setting.device_nbytes
        window = waits - self.lodged_nbytes
        on_host = setting.device_nbytes is None
        device = None if setting.device_nbytes is None else setting.device_nbytes + self.in_use_nbytes
        outgoing = budget.outgoing_nbytes
        update = "backward" if setting.update == "backward" else "forward"
        return EngineLimits(budget.tile_numel, budget.slots, window, outgoing, on_host, update, device)


def as_recomputed(outline: Outline, setting: Setting) -> Outline:
    """Return the outline with those blocks recomputed that the setting's method recomputes."""
    if outline.activations is None or setting.method.activation_nbytes is None:
        return outline if setting.method.checkpointing else outline.not_recomputed()
    width, on_gpu = setting.schema.width, setting.device_nbytes is not None
    return outline.keeping(kept_by_budget(outline.activations, setting.method, width, gpu=on_gpu))


def demand(outline: Outline, setting: Setting) -> Demand:
    """Decide what a run would decide: see [Note: the order of decisions].

    Raises: HostMemoryError, with the smallest host_memory that works, where this one does not.
    """
    outline = as_recomputed(outline, setting)
    sizes = unit_sizes(outline, setting)
    _check_host(outline, sizes, setting, least_host_nbytes(outline, setting))
    on_gpu = setting.device_nbytes is not None
    budget = divide(setting.rank_host_nbytes, max(sizes.resident), sizes.schema, on_device=on_gpu)
    sizes = with_stored(sizes, budget) if setting.nvme else sizes
    budget = replace(budget, total_nbytes=budget.total_nbytes - sum(sizes.second))
    window = budget.ahead_nbytes if setting.device_nbytes is None else setting.device_nbytes
    script = outline.script(micro_batches=setting.micro_batches)
    trace = trace_of(script)
    if on_gpu:
        fetches = fetches_of_first_step(trace, sizes.resident, window)
    else:
        once = make_plan(trace_of(outline.script()), sizes.resident, window, hides=sizes.resident)
        fetches = [setting.micro_batches * one for one in _fetches(once, len(sizes.numels))]
    placement = place_fields(sizes, setting, budget, fetches, opening(trace))
    living_nbytes, records_nbytes = lodged_nbytes(sizes, setting, budget, placement)
    window -= living_nbytes
    of_host = without_records(sizes, placement)
    kept_nbytes = sum(
        sizes.field(*key, budget.tile_numel) for key, tier in placement.items() if tier == "host"
    )
    kept_nbytes += 0 if setting.nvme else sum(sizes.workers)
    stored = setting.nvme and setting.update != "backward"
    spills = _spills(script, of_host, budget.kept_nbytes - kept_nbytes) if stored else {}
    in_first = _spills(script, sizes, budget.kept_nbytes) if stored else {}
    fetched = _fetched_sizes(sizes, setting, placement)
    plan = make_plan(trace, fetched, window, hides=sizes.resident)
    kept_gradients = _kept_gradients(of_host, setting, spills)
    room = budget.kept_nbytes - kept_nbytes - kept_gradients
    used = None
    if outline.activations is not None:
        tiers = InputTiers(max(room, 0), setting.nvme)
        width = sizes.schema.width
        used = usage(outline.activations, setting.method, width, gpu=on_gpu, tiers=tiers)
    offloaded = offloaded_nbytes(used, setting, room)
    in_place = [is_in_place(sizes, setting, placement, unit) for unit in range(len(sizes.numels))]
    in_use = [_in_use(stage, sizes, in_place) for stage in outline.stages]
    gradients_there = _stored_gradients(outline, sizes, setting, in_first)
    return Demand(
        setting=setting,
        budget=budget,
        plan=plan,
        placement=placement,
        units=tuple(_moves(outline, sizes, setting, budget, placement, spills)),
        moved=_moved(outline, sizes, setting, budget, placement, spills, plan),
        nvme_nbytes=_stored(sizes, setting, budget) + gradients_there + offloaded,
        stored_gradients_nbytes=gradients_there,
        activations=used,
        offloaded_nbytes=offloaded,
        pinned_nbytes=kept_nbytes,
        kept_gradients_nbytes=kept_gradients,
        gradients_nbytes=sum(sizes.gradients),
        in_use_nbytes=max(in_use),
        moments=tuple(peak_moments(in_use, [stage.recomputed for stage in outline.stages], used)),
        lodged_nbytes=living_nbytes,
        records_nbytes=records_nbytes,
        second_nbytes=sum(sizes.second),
        in_common_nbytes=_in_common(outline, sizes, setting, budget),
        uses=len(trace),
    )


# The smallest budgets


def _check_host(outline: Outline, sizes: UnitSizes, setting: Setting, least: int) -> None:
    """Raises: HostMemoryError where host_memory is too small. least: that works."""
    on_gpu = setting.device_nbytes is not None
    if setting.host_nbytes < least and setting.nvme:
        raise HostMemoryError(
            f"host_memory={format_size(setting.host_nbytes)} cannot work: moving records needs at least "
            f"{format_size(least)} on each machine with {setting.local_ranks} ranks. Give more; a few "
            "hundred MiB is fast."
        )
    if not setting.nvme and not _holds(sizes, setting.rank_host_nbytes, on_gpu=on_gpu):
        raise HostMemoryError(
            f"{outline.name}: without an NVMe tier all state stays in host memory, and "
            f"host_memory={format_size(setting.host_nbytes)} does not hold it. The smallest that works is "
            f"{format_size(least)}; or plan with NVMe."
        )


def least_host_nbytes(outline: Outline, setting: Setting) -> int:
    """Return the smallest host_memory of a machine, in bytes, that Init and AdamW accept: with NVMe what
    moves records at all, without it (to the MiB for each rank) what holds all state and a step's gradients.
    """
    sizes, on_gpu = unit_sizes(outline, setting), setting.device_nbytes is not None
    if setting.nvme:
        return setting.local_ranks * least_budget(sizes.schema)
    return setting.local_ranks * least_that(partial(_holds, sizes, on_gpu=on_gpu), sizes.schema)


def _holds(sizes: UnitSizes, total_nbytes: int, *, on_gpu: bool) -> bool:
    """Whether a host_memory holds a model without NVMe: its weights while it is built, and then everything,
    as checks.check_fits adds it up.
    """
    if total_nbytes < least_budget(sizes.schema):
        return False
    building = divide(total_nbytes, schema=sizes.schema, on_device=on_gpu)
    weights = sizes.fields(sizes.schema.weights, building.tile_numel)
    training = divide(total_nbytes, max(sizes.resident), sizes.schema, on_device=on_gpu)
    moments = sizes.fields(sizes.schema.moments_of(("m", "v")), building.tile_numel)
    needed = weights + moments + sum(sizes.gradients) + sum(sizes.second) + sum(sizes.workers)
    return weights <= building.kept_nbytes and needed <= training.kept_nbytes


# What is pinned


def _fetches(plan: Plan, units: int) -> list[int]:
    """Count, per unit, the uses in a step that find it gone since its use before."""
    counts = [0] * units
    kept: set[int] = set()
    for step in plan.steps:
        unit = step.use.unit
        counts[unit] += unit not in kept
        (kept.add if step.keep else kept.discard)(unit)
    return counts


def _spills(script: Sequence[Act], sizes: UnitSizes, room_nbytes: int) -> Spills:
    """Return what each micro-batch reads and writes of the gradients that find no room in host memory, in the
    order in which they come: in the type that computes at first, and of 32 bits from the second on, by which
    some have to go that had room. So do those of units that are seldom used, even if there is room.
    """
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    came: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for act in script:
        if act.verb != "gradient":
            continue
        unit = act.unit
        came[unit] += 1
        width = min(sizes.schema.width * came[unit], 4)
        more = width * sizes.gradient_numels[unit] - held[unit]
        rests = 6 * sizes.shares[unit] < 5  # as GradientStore.rests has it
        if unit not in found and more <= room_nbytes and not rests:
            room_nbytes -= more
            held[unit] += more
            continue
        room_nbytes += held.pop(unit, 0)
        before = found.get(unit, ((0, 0),) * (came[unit] - 1))
        stored = before[-1][1] if before else 0
        found[unit] = (*before, (stored, width * sizes.numels[unit]))
    return found


def _fetched_sizes(sizes: UnitSizes, setting: Setting, placement: Placement) -> list[int]:
    """Return what the residency plans with: nothing for a unit that is, and is updated, where it computes."""
    fields = sizes.schema.fields
    backward = setting.update == "backward"

    def never_fetched(unit: int) -> bool:
        if is_lodged(sizes, placement, unit):
            return True
        return is_in_place(sizes, setting, placement, unit) and (
            backward or all((unit, name) in placement for name in fields)
        )

    return [0 if never_fetched(unit) else nbytes for unit, nbytes in enumerate(sizes.resident)]


# What is moved, and what is stored


def _moves(
    outline: Outline,
    sizes: UnitSizes,
    setting: Setting,
    budget: Budget,
    placement: Placement,
    spills: Spills,
) -> Iterator[Moves]:
    for unit, part in enumerate(outline.parts):
        away = {
            name: sizes.field(unit, name, budget.tile_numel)
            for name in sizes.schema.fields
            if (unit, name) not in placement and (part.trainable or name in sizes.schema.weights)
        }
        of_gradient = spills.get(unit, ())
        in_place = is_in_place(sizes, setting, placement, unit)
        gathered, again, reduced = _exchanged(sizes, setting, unit)
        workers = sizes.workers[unit] * _exchanges(setting) if setting.nvme else 0
        yield Moves(
            numel=sizes.numels[unit],
            hi_nbytes=away.get("hi", 0),
            state_nbytes=sum(away.values()) - away.get("hi", 0) + workers,
            state_fields=len(away.keys() - {"hi"}) + (workers > 0),
            waiting_nbytes=0 if in_place else sizes.resident[unit],
            gathered_nbytes=gathered.nbytes,
            again_nbytes=again.nbytes if again is not None else None,
            second_nbytes=sizes.stored[unit],
            reduced_nbytes=reduced.nbytes,
            coded=_is_coded(sizes, setting, unit),
            in_place=in_place,
            trainable=part.trainable and not is_record(sizes, placement, unit),
            width=sizes.schema.width,
            derived=bool(sizes.schema.derived),
            spills=of_gradient,
            spilled_nbytes=of_gradient[-1][1] if of_gradient else 0,
            lodged=is_lodged(sizes, placement, unit),
            part_there=is_part(sizes, placement, unit),
        )


def _exchanges(setting: Setting) -> int:
    """Return how often a step reads and writes what is kept of what ranks send: momenta once."""
    return setting.micro_batches if setting.error_feedback else 1


def _is_coded(sizes: UnitSizes, setting: Setting, unit: int) -> bool:
    """Whether ranks compute with what comes of a unit's coded weights, from which no update can start."""
    return setting.quantized_weights is not None and sizes.holders[unit] > 1


def _exchanged(sizes: UnitSizes, setting: Setting, unit: int) -> tuple[Links, Links | None, Links]:
    """Return what others send of a unit when it is assembled, when it is once more, and when its gradient is
    summed.
    """
    width, ranks = sizes.schema.width, sizes.holders[unit]
    share, between = sizes.resident[unit] // width // ranks, Exchanges(setting, width, ranks)
    return between.gathered(share), between.gathered_again(share), between.reduced(share)


def _moved(
    outline: Outline,
    sizes: UnitSizes,
    setting: Setting,
    budget: Budget,
    placement: Placement,
    spills: Spills,
    plan: Plan,
) -> Mapping[tuple[str, str], int]:
    """Return a step's NVMe bytes by field and direction. `hi` is read as often as its unit is fetched, and
    once more where the update cannot start from what is resident.
    """
    moved: Counter[tuple[str, str]] = Counter()
    used_last = {step.use.unit: step.use.phase.value for step in plan.steps}
    for unit, fetches in enumerate(_fetches(plan, len(sizes.numels))):
        trainable = outline.parts[unit].trainable
        if outline.parts[unit].idle:
            continue
        starts_there = used_last.get(unit) == "B" and not _is_coded(sizes, setting, unit)
        again = setting.update == "backward" and trainable and not starts_there
        reads = fetches
        if sizes.second[unit] + sizes.stored[unit]:  # which are what further uses assemble it from
            moved["second", "read"] += sizes.stored[unit] * max(fetches - 1, 0)
            moved["second", "written"] += sizes.stored[unit] if trainable else 0
            reads = min(fetches, 1)
        for name in sizes.schema.fields:
            if (unit, name) in placement or not (trainable or name == "hi"):
                continue
            nbytes = sizes.field(unit, name, budget.tile_numel)
            anew = trainable and name in sizes.schema.derived
            moved[name, "read"] += nbytes * (reads + again - anew if name == "hi" else 1)
            moved[name, "written"] += nbytes if trainable else 0
        if sizes.workers[unit] and setting.nvme:
            moved["workers", "read"] += sizes.workers[unit] * _exchanges(setting)
            moved["workers", "written"] += sizes.workers[unit] * _exchanges(setting)
        if of_gradient := spills.get(unit):
            moved["grad", "read"] += sum(read for read, _ in of_gradient) + of_gradient[-1][1]
            moved["grad", "written"] += sum(written for _, written in of_gradient)
    return MappingProxyType(dict(moved))


def _stored(sizes: UnitSizes, setting: Setting, budget: Budget) -> int:
    if not setting.nvme:
        return 0
    generations = 2 if setting.durable or setting.speculate else 1
    of_records = sizes.fields(sizes.schema.fields, budget.tile_numel) + sum(sizes.workers)
    return generations * of_records + sum(sizes.stored)


def _stored_gradients(outline: Outline, sizes: UnitSizes, setting: Setting, spills: Spills) -> int:
    if not setting.nvme:
        return 0
    wide = sizes.schema.width
    if setting.micro_batches > 1 and wide < 4:
        wide += 4  # from the second on sums are kept in fp32, beside the first's place
    in_turn = {unit for unit, part in enumerate(outline.parts) if part.idle and setting.update != "backward"}
    return sum(wide * sizes.numels[unit] for unit in {*spills, *in_turn})  # each has its turn


def _kept_gradients(sizes: UnitSizes, setting: Setting, spills: Spills) -> int:
    if setting.update == "backward":
        return 0
    return sum(nbytes for unit, nbytes in enumerate(sizes.gradients) if unit not in spills)


def _in_use(stage: Stage, sizes: UnitSizes, in_place: Sequence[bool]) -> int:
    """Return the bytes of the units that a stage holds at once, with the largest gradient among them; weights
    that compute where they are pinned are counted there.
    """
    own = {unit: 0 if in_place[unit] else sizes.resident[unit] for unit in stage.units}
    if stage.recomputed:
        return sum(own.values()) + max(sizes.resident[unit] for unit in stage.units)
    return max(own[unit] + sizes.resident[unit] for unit in stage.units)


def _in_common(outline: Outline, sizes: UnitSizes, setting: Setting, budget: Budget) -> tuple[int, int]:
    """Return the bytes of weights that lie once on a machine: of the stage that uses most, and that wait."""
    if not setting.shared_memory or setting.near(setting.data_ranks) == 1:
        return 0, 0
    used = [
        (sum if one.recomputed else max)(sizes.resident[unit] for unit in one.units) for one in outline.stages
    ]
    return max(used), min(budget.ahead_nbytes, sum(sizes.resident))
