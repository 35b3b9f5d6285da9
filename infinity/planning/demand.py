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
from itertools import accumulate
from types import MappingProxyType

from infinity.errors import HostMemoryError
from infinity.planning.activations import PeakMoment, Usage, kept_by_budget, peak_moments, usage
from infinity.planning.budget import Budget, divide, least_budget, least_that, scratch_nbytes
from infinity.planning.exchange import Exchanges, Links
from infinity.planning.forecast import EngineLimits, Moves
from infinity.planning.layout import RecordSchema, lay_out
from infinity.planning.offloaded import offloaded_nbytes
from infinity.planning.outline import Act, Outline, Stage, trace_of
from infinity.planning.placement import (
    Candidate,
    Placement,
    PlacementBudget,
    is_of_most_steps,
    opening,
    revise,
)
from infinity.planning.plan import Plan, make_plan
from infinity.planning.recomputation import InputTiers
from infinity.planning.setting import Setting
from infinity.sizes import format_size, round_up

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
        return max(self.moments, key=lambda one: one.nbytes + self._held_nbytes(gradients=one.after_loss))

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


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a model's units on one rank."""

    schema: RecordSchema
    numels: tuple[int, ...]
    """Elements of this rank's share of each unit, padded."""
    resident: tuple[int, ...]
    """Bytes of whole units while resident."""
    gradient_numels: tuple[int, ...]
    """Elements of this rank's share of gradients; 0 of what is frozen."""
    gradients: tuple[int, ...]
    """Bytes of these at the end of a step, as kept in host memory."""
    shares: tuple[float, ...]
    """Of the steps, that use each unit."""
    holders: tuple[int, ...]
    """Ranks that have shares of each unit."""
    second: tuple[int, ...]
    """Bytes of this rank's second part of each unit, in host memory."""
    stored: tuple[int, ...]
    """Likewise, of those on NVMe."""
    workers: tuple[int, ...]
    """Bytes of the momenta and errors that this rank has of each unit, beside its state, for 1-bit Adam."""

    def field(self, unit: int, name: str, tile_numel: int) -> int:
        """Bytes of a field in its extent."""
        return self.schema.stored_nbytes(name, self.numels[unit], self.schema.span(name, tile_numel))

    def fields(self, names: Sequence[str], tile_numel: int) -> int:
        """Bytes of some fields of all units."""
        return sum(self.field(unit, name, tile_numel) for unit in range(len(self.numels)) for name in names)


def _sizes(outline: Outline, setting: Setting) -> _Sizes:
    schema = setting.schema
    align, wide = schema.align_numel, 4 if setting.micro_batches > 1 else schema.width
    moves = [part.trainable and not part.idle for part in outline.parts]
    holders = tuple(setting.holders(part) for part in outline.parts)
    numels = tuple(
        -(-part.numel // count) if moving else 0
        for part, moving, count in zip(outline.parts, moves, holders, strict=True)
    )
    wholes = [lay_out([("", shape) for shape in part.shapes], align).numel for part in outline.parts]
    resident = [0 if part.idle else whole for part, whole in zip(outline.parts, wholes, strict=True)]
    here = [0 if part.elsewhere else whole for part, whole in zip(outline.parts, wholes, strict=True)]
    shares = tuple(round_up(-(-whole // count), align) for whole, count in zip(here, holders, strict=True))
    nbytes = tuple(schema.width * whole for whole in resident)
    ranks = [Exchanges(setting, schema.width, count) for count in holders]
    workers = [share if moving else 0 for share, moving in zip(shares, moves, strict=True)]
    return _Sizes(
        schema,
        shares,
        nbytes,
        numels,
        tuple(wide * numel for numel in numels),
        tuple(part.share for part in outline.parts),
        holders,
        tuple(of.second_nbytes(one) for of, one in zip(ranks, nbytes, strict=True)),
        (0,) * len(nbytes),
        tuple(of.worker_nbytes(one) for of, one in zip(ranks, workers, strict=True)),
    )


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
    sizes = _sizes(outline, setting)
    _check_host(outline, sizes, setting, least_host_nbytes(outline, setting))
    on_gpu = setting.device_nbytes is not None
    budget = divide(setting.rank_host_nbytes, max(sizes.resident), sizes.schema, on_device=on_gpu)
    sizes = _with_stored(sizes, budget) if setting.nvme else sizes
    budget = replace(budget, total_nbytes=budget.total_nbytes - sum(sizes.second))
    window = budget.ahead_nbytes if setting.device_nbytes is None else setting.device_nbytes
    script = outline.script(micro_batches=setting.micro_batches)
    trace = trace_of(script)
    once = make_plan(trace_of(outline.script()), sizes.resident, window, hides=sizes.resident)
    opens = opening(step.use for step in once.steps)
    placement = _place(sizes, setting, budget, _fetches(once, len(sizes.numels)), opens)
    lodged_nbytes, records_nbytes = _lodged_nbytes(sizes, setting, budget, placement)
    window -= lodged_nbytes
    of_host = _without_records(sizes, placement)
    kept_nbytes = sum(
        sizes.field(*key, budget.tile_numel) for key, tier in placement.items() if tier == "host"
    )
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
    in_place = [_in_place(unit, setting, placement) for unit in range(len(sizes.numels))]
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
        lodged_nbytes=lodged_nbytes,
        records_nbytes=records_nbytes,
        second_nbytes=sum(sizes.second),
        in_common_nbytes=_in_common(outline, sizes, setting, budget),
        uses=len(trace),
    )


# The smallest budgets


def _check_host(outline: Outline, sizes: _Sizes, setting: Setting, least: int) -> None:
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
    sizes, on_gpu = _sizes(outline, setting), setting.device_nbytes is not None
    if setting.nvme:
        return setting.local_ranks * least_budget(sizes.schema)
    return setting.local_ranks * least_that(partial(_holds, sizes, on_gpu=on_gpu), sizes.schema)


def _holds(sizes: _Sizes, total_nbytes: int, *, on_gpu: bool) -> bool:
    """Whether a host_memory holds a model without NVMe: its weights while it is built, and then everything,
    as checks.check_fits adds it up.
    """
    if total_nbytes < least_budget(sizes.schema):
        return False
    building = divide(total_nbytes, schema=sizes.schema, on_device=on_gpu)
    weights = sizes.fields(sizes.schema.weights, building.tile_numel)
    training = divide(total_nbytes, max(sizes.resident), sizes.schema, on_device=on_gpu)
    moments = sizes.fields(sizes.schema.moments, building.tile_numel)
    needed = weights + moments + sum(sizes.gradients) + sum(sizes.second) + sum(sizes.workers)
    return weights <= building.kept_nbytes and needed <= training.kept_nbytes


def _with_stored(sizes: _Sizes, budget: Budget) -> _Sizes:
    """Return the sizes with those second parts on NVMe that host memory has no room for, the last ones."""
    fit = sum(total <= budget.kept_nbytes for total in accumulate(sizes.second))
    nothing = (0,) * len(sizes.second)
    return replace(
        sizes,
        second=sizes.second[:fit] + nothing[fit:],
        stored=nothing[:fit] + sizes.second[fit:],
    )


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


def _place(sizes: _Sizes, setting: Setting, budget: Budget, once: Sequence[int], opening: int) -> Placement:
    """Return what `pins` would put into host memory and on the device after the first step; once: fetches of
    each unit in one micro-batch, which is all that the engine plans for before it has seen a step. opening:
    units that open it.
    """
    candidates = []
    for unit, count in enumerate(once):
        opens = unit < opening and is_of_most_steps(sizes.shares[unit])
        updates = sizes.shares[unit] * (sizes.gradients[unit] > 0)
        for name in sizes.schema.fields if updates else sizes.schema.weights:
            nbytes = sizes.field(unit, name, budget.tile_numel)
            fetches = sizes.shares[unit] * count * setting.micro_batches - (
                updates if name in sizes.schema.derived else 0
            )
            reads = fetches if name == "hi" else updates
            whole = updates > 0 and sizes.schema.is_updated_on_device
            beside = _staying_nbytes(sizes, setting, unit) * (name == sizes.schema.fields[-1])
            lasts = not updates
            of_tiers = lasts, True, None, whole, beside, opens
            candidates.append(Candidate(unit, name, nbytes, reads, updates, *of_tiers))
    room = 0 if setting.device_nbytes is None or setting.data_ranks > 1 else setting.device_nbytes
    scratch = scratch_nbytes(room, max(sizes.resident)) if any(one.whole for one in candidates) else 0
    on_device = max(0, room - 2 * max(sizes.resident))
    kept = budget.kept_nbytes if setting.nvme else 0
    gradients = 0 if setting.update == "backward" else min(kept, sum(sizes.gradients))
    chosen = revise({}, candidates, PlacementBudget(on_device, kept, gradients, scratch)).placement
    if setting.nvme:
        return chosen
    keys = [(unit, name) for unit in range(len(sizes.numels)) for name in sizes.schema.fields]
    there = {key: tier for key, tier in chosen.items() if tier == "device"}
    return MappingProxyType({**dict.fromkeys(keys, "host"), **there})


def _is_record(sizes: _Sizes, placement: Placement, unit: int) -> bool:
    """Whether a unit's whole record lives on the device."""
    fields = sizes.schema.fields
    return sizes.gradients[unit] > 0 and all(placement.get((unit, name)) == "device" for name in fields)


def _staying_nbytes(sizes: _Sizes, setting: Setting, unit: int) -> int:
    """Return the bytes of a unit's gradients that stay on the device with its record."""
    return 0 if setting.update == "backward" else sizes.gradients[unit]


def _lodged_nbytes(sizes: _Sizes, setting: Setting, budget: Budget, placement: Placement) -> tuple[int, int]:
    """Return the bytes of all that lives on the device, and of whole records among it, with the gradients
    that stay there and what updates there need.
    """
    copies = records = 0
    for unit, resident_nbytes in enumerate(sizes.resident):
        if _is_record(sizes, placement, unit):
            records += sum(sizes.field(unit, name, budget.tile_numel) for name in sizes.schema.fields)
            records += _staying_nbytes(sizes, setting, unit)
        elif placement.get((unit, "hi")) == "device":
            copies += resident_nbytes
    scratch = scratch_nbytes(setting.device_nbytes or 0, max(sizes.resident)) if records else 0
    return copies + records + scratch, records + scratch


def _without_records(sizes: _Sizes, placement: Placement) -> _Sizes:
    """Return the sizes without the gradients of records that live on the device: these never leave it."""
    there = [_is_record(sizes, placement, unit) for unit in range(len(sizes.numels))]
    numels, nbytes = (
        tuple(0 if gone else one for one, gone in zip(values, there, strict=True))
        for values in (sizes.gradient_numels, sizes.gradients)
    )
    return replace(sizes, gradient_numels=numels, gradients=nbytes)


def _spills(script: Sequence[Act], sizes: _Sizes, room_nbytes: int) -> Spills:
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


def _fetched_sizes(sizes: _Sizes, setting: Setting, placement: Placement) -> list[int]:
    """Return what the residency plans with: nothing for a unit that is, and is updated, where it computes."""
    fields = sizes.schema.fields
    backward = setting.update == "backward"

    def never_fetched(unit: int) -> bool:
        if placement.get((unit, "hi")) == "device":
            return True
        return _in_place(unit, setting, placement) and (
            backward or all((unit, name) in placement for name in fields)
        )

    return [0 if never_fetched(unit) else nbytes for unit, nbytes in enumerate(sizes.resident)]


def _in_place(unit: int, setting: Setting, placement: Placement) -> bool:
    if setting.device_nbytes is not None:
        return placement.get((unit, "hi")) == "device"
    return setting.data_ranks == 1 and (unit, "hi") in placement


# What is moved, and what is stored


def _moves(
    outline: Outline,
    sizes: _Sizes,
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
        in_place = _in_place(unit, setting, placement)
        gathered, again, reduced = _exchanged(sizes, setting, unit)
        workers = sizes.workers[unit] if setting.nvme else 0
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
            trainable=part.trainable and not _is_record(sizes, placement, unit),
            width=sizes.schema.width,
            derived=bool(sizes.schema.derived),
            spills=of_gradient,
            spilled_nbytes=of_gradient[-1][1] if of_gradient else 0,
            lodged=placement.get((unit, "hi")) == "device",
        )


def _is_coded(sizes: _Sizes, setting: Setting, unit: int) -> bool:
    """Whether ranks compute with what comes of a unit's coded weights, from which no update can start."""
    return setting.quantized_weights is not None and sizes.holders[unit] > 1


def _exchanged(sizes: _Sizes, setting: Setting, unit: int) -> tuple[Links, Links | None, Links]:
    """Return what others send of a unit when it is assembled, when it is once more, and when its gradient is
    summed.
    """
    width, ranks = sizes.schema.width, sizes.holders[unit]
    share, between = sizes.resident[unit] // width // ranks, Exchanges(setting, width, ranks)
    return between.gathered(share), between.gathered_again(share), between.reduced(share)


def _moved(
    outline: Outline,
    sizes: _Sizes,
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
            moved["workers", "read"] += sizes.workers[unit]
            moved["workers", "written"] += sizes.workers[unit]
        if of_gradient := spills.get(unit):
            moved["grad", "read"] += sum(read for read, _ in of_gradient) + of_gradient[-1][1]
            moved["grad", "written"] += sum(written for _, written in of_gradient)
    return MappingProxyType(dict(moved))


def _stored(sizes: _Sizes, setting: Setting, budget: Budget) -> int:
    if not setting.nvme:
        return 0
    generations = 2 if setting.durable or setting.speculate else 1
    of_records = sizes.fields(sizes.schema.fields, budget.tile_numel) + sum(sizes.workers)
    return generations * of_records + sum(sizes.stored)


def _stored_gradients(outline: Outline, sizes: _Sizes, setting: Setting, spills: Spills) -> int:
    if not setting.nvme:
        return 0
    wide = sizes.schema.width
    if setting.micro_batches > 1 and wide < 4:
        wide += 4  # from the second on sums are kept in fp32, beside the first's place
    in_turn = {unit for unit, part in enumerate(outline.parts) if part.idle and setting.update != "backward"}
    return sum(wide * sizes.numels[unit] for unit in {*spills, *in_turn})  # each has its turn


def _kept_gradients(sizes: _Sizes, setting: Setting, spills: Spills) -> int:
    if setting.update == "backward":
        return 0
    return sum(nbytes for unit, nbytes in enumerate(sizes.gradients) if unit not in spills)


def _in_use(stage: Stage, sizes: _Sizes, in_place: Sequence[bool]) -> int:
    """Return the bytes of the units that a stage holds at once, with the largest gradient among them; weights
    that compute where they are pinned are counted there.
    """
    own = {unit: 0 if in_place[unit] else sizes.resident[unit] for unit in stage.units}
    if stage.recomputed:
        return sum(own.values()) + max(sizes.resident[unit] for unit in stage.units)
    return max(own[unit] + sizes.resident[unit] for unit in stage.units)


def _in_common(outline: Outline, sizes: _Sizes, setting: Setting, budget: Budget) -> tuple[int, int]:
    """Return the bytes of weights that lie once on a machine: of the stage that uses most, and that wait."""
    if not setting.shared_memory or setting.near(setting.data_ranks) == 1:
        return 0, 0
    used = [
        (sum if one.recomputed else max)(sizes.resident[unit] for unit in one.units) for one in outline.stages
    ]
    return max(used), min(budget.ahead_nbytes, sum(sizes.resident))
