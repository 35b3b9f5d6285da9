"""What an engine did and where everything is: a frozen snapshot, cheap enough to take every step."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import Any

from torch import nn

from infinity.engine.engine import Engine, engine_of_model
from infinity.planning.bottleneck import Load, Speed
from infinity.planning.forecast import EngineLimits, predict_step
from infinity.planning.simulator import Rates
from infinity.planning.trace import Phase
from infinity.planning.use_counts import Counts
from infinity.sizes import format_size
from infinity.units.device_tier import lives_on_device
from infinity.units.moves import moves_of
from infinity.units.unit import Unit

_WIDTH = 100
"""Characters of a value in a summary."""

_TOTAL = {"total": True}
"""Marks a field that grows from the start on: `since` takes away what an earlier snapshot had."""


@dataclass(frozen=True, slots=True)
class UnitStats:
    """One unit: where its record lies and how often it was used."""

    name: str
    numel: int
    """Elements, padding included."""
    tiers: tuple[tuple[str, str], ...]
    """(field, tier) of its record, now."""
    uses: int = field(metadata=_TOTAL)
    fetches_per_step: float = 0.0
    """Uses expected per step that find the unit gone since its use before; see frequency."""
    updates_per_step: float = 0.0
    """Updates expected per step."""
    steps_used: int = field(default=0, metadata=_TOTAL)
    """In how many steps it was used."""
    routed: bool = False
    """Whether it is a slice: experts, or rows of an embedding, which the data decides to use or not; with
    expert_parallel, experts of this rank.
    """
    step_nbytes: int = 0
    """Bytes that a step which uses it reads and writes of its record, wherever that lies."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one engine. Uses, bytes moved and seconds count from when the model was built, or, in
    what `since` returns, from the earlier snapshot; all else holds now. Printed, and in a notebook, it is a
    summary of about ten lines; its attributes, and `dataclasses.asdict`, have all of it.
    """

    parameters: int
    """Elements, of all parameters of the engine."""
    nvme_nbytes: int
    """Bytes of records on NVMe now."""
    host_nbytes: int
    """Bytes of records in host memory now."""
    budget_nbytes: int
    """host_memory."""
    budget_held_nbytes: int
    """Bytes of the budget in use now: slots, units that wait for their use, gradients, pinned fields."""
    io_engine: str
    """The I/O engine, or "none" without an NVMe tier."""
    plan: str
    """The schedule of a step, as text."""
    units: tuple[UnitStats, ...] = field(metadata=_TOTAL)
    read_nbytes: dict[tuple[str, str], int] = field(metadata=_TOTAL)
    """Bytes read, by (tier, field)."""
    written_nbytes: dict[tuple[str, str], int] = field(metadata=_TOTAL)
    """Bytes written, by (tier, field)."""
    steps: int = field(metadata=_TOTAL)
    plans: int = field(metadata=_TOTAL)
    """Schedules made: a guess at first, one from the first step, and one whenever steps had changed."""
    uses: int = field(metadata=_TOTAL)
    hits: int = field(metadata=_TOTAL)
    """Uses that found the unit resident, or on its way."""
    misses: int = field(metadata=_TOTAL)
    divergences: int = field(metadata=_TOTAL)
    """Uses that were not the next one of the plan."""
    stalls_s: dict[str, float] = field(metadata=_TOTAL)
    """Seconds that computing waited, by cause: for a "read" of a unit, for a free "slot" to read it through,
    for its "update", for "gradients" to leave.
    """
    lane_s: dict[str, float] = field(metadata=_TOTAL)
    """Seconds of the record lane's thread: "read_wait", "work", "write_wait", "idle"; and "inline", of other
    threads that worked on records in host memory.
    """
    passes: dict[str, int] = field(metadata=_TOTAL)
    """Walks over records, by kind."""
    rank: int = 0
    ranks: int = 1
    """How many divide the state, and which of them this is. Bytes and seconds are of this rank alone."""
    rounds: int = field(default=0, metadata=_TOTAL)
    """Forwards without gradients, each with all that such a forward reads: the tokens of a generation, the
    batches of an evaluation.
    """
    exchanged_nbytes: dict[str, int] = field(default_factory=dict, metadata=_TOTAL)
    """Bytes that the ranks exchanged, of what was exchanged as a whole: units to "gather", gradients to
    "reduce", parameters to "read" by state_dict and the like, matrices of Muon's to "orthogonalize"; and,
    with secondary_shard, units to "gather near", which neighbours assembled again; with expert_parallel, of
    "tokens" that this rank has sent to experts and back. Where several machines
    have several ranks each, what this rank has sent to others "between machines".
    """
    collectives: dict[str, int] = field(default_factory=dict, metadata=_TOTAL)
    """Collectives of the ranks, by the kinds of `exchanged_nbytes`; and, as "agree", how often they had to
    agree on the next one, which was not foreseen.
    """
    shared_nbytes: int = field(default=0, metadata=_TOTAL)
    """Bytes of units that were put together in memory that the machine's ranks share, and not sent; see
    Config.shared_memory.
    """
    memory_in_common: str = ""
    """Why ranks share memory so, or why not; empty on one rank."""
    placement_revisions: int = field(default=0, metadata=_TOTAL)
    """How often it was decided anew which fields lie in host memory, and something moved."""
    placement_reason: str = ""
    """Of the last such decision, also of one to leave all as it is."""
    device_budget_nbytes: int = 0
    """device_memory; 0 where the CPU computes, as the next ones."""
    device_held_nbytes: int = 0
    """Bytes of it in use now."""
    device_peak_nbytes: int = 0
    """The most that was in use at once."""
    device_nbytes: int = 0
    """Bytes of the units that live on the device now."""
    uploaded_nbytes: int = field(default=0, metadata=_TOTAL)
    """Bytes copied from host memory to the device."""
    downloaded_nbytes: int = field(default=0, metadata=_TOTAL)
    """Bytes copied from the device to host memory."""
    activations: str = ""
    """What blocks keep by Config(activation_memory=...), and why; empty without it."""
    speculated: dict[str, int] = field(default_factory=dict, metadata=_TOTAL)
    """Updates of units that were made before step() had decided them: "confirmed" or "dropped" by it; and, by
    the reason, how often one could not be made while they were, or was with gradients that had to be kept.
    """
    updates: str = ""
    """Which units have their updates in the backward by update="auto", and how busy the disk is then; empty
    without it.
    """
    second_nbytes: int = 0
    """Bytes on NVMe, beside those of records, to which such updates are written."""
    predicted_step_s: float | None = None
    """Seconds that a step should take, by its plan and what was measured; None where that is not known."""

    @property
    def nvme_read_nbytes(self) -> int:
        """Bytes read from NVMe."""
        return sum(nbytes for (tier, _), nbytes in self.read_nbytes.items() if tier == "nvme")

    @property
    def nvme_written_nbytes(self) -> int:
        """Bytes written to NVMe."""
        return sum(nbytes for (tier, _), nbytes in self.written_nbytes.items() if tier == "nvme")

    @property
    def checkpoint_read_nbytes(self) -> int:
        """Bytes read from the checkpoint's own files, in which frozen weights lie; see Init."""
        return sum(nbytes for (tier, _), nbytes in self.read_nbytes.items() if tier == "checkpoint")

    @property
    def stall_s(self) -> float:
        """Seconds that computing waited, for any cause."""
        return sum(self.stalls_s.values())

    @property
    def slices(self) -> tuple[UnitStats, ...]:
        """Experts and rows of embeddings that are fetched by themselves, the most used first."""
        routed = [unit for unit in self.units if unit.routed]
        return tuple(sorted(routed, key=lambda unit: (-unit.steps_used, -unit.uses)))

    @property
    def unmoved_nbytes(self) -> int:
        """Bytes of slices that would have been read and written, were each used in every step."""
        return sum((self.steps - unit.steps_used) * unit.step_nbytes for unit in self.units if unit.routed)

    @property
    def frequency(self) -> dict[str, float]:
        """Uses per step, by unit; uses, where no step has ended."""
        return {unit.name: unit.uses / max(1, self.steps) for unit in self.units}

    def since(self, earlier: Stats) -> Stats:
        """Return what happened between an earlier snapshot of the same engine and this one."""
        difference: Stats = _since(self, earlier)
        return difference

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary that is printed, as (what, value): as many rows for a model of any size."""
        moved = f"read {format_size(self.nvme_read_nbytes)}, written {format_size(self.nvme_written_nbytes)}"
        if self.steps and self.parameters:
            share = self.parameters / self.ranks * self.steps
            moved += (
                f"; {(self.nvme_read_nbytes + self.nvme_written_nbytes) / share:.1f} B per parameter and step"
            )
        elif self.rounds and self.parameters:
            nbytes = self.nvme_read_nbytes / (self.parameters / self.ranks * self.rounds)
            moved += f"; {nbytes:.2f} B read per parameter and round"
        if self.checkpoint_read_nbytes:
            moved += f"; from the checkpoint {format_size(self.checkpoint_read_nbytes)}"
        held = f"{format_size(self.budget_nbytes)}, {format_size(self.budget_held_nbytes)} of it in use now"
        where = f"{format_size(self.nvme_nbytes)} on NVMe (I/O engine: {self.io_engine}), "
        uses = f"{self.hits:,} hits, {self.misses:,} misses, {self.divergences:,} out of the plan's order"
        rounds = f", {self.rounds:,} rounds without gradients" if self.rounds else ""
        rows = [
            (
                "steps",
                f"{self.steps:,}"
                + rounds
                + (f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""),
            ),
            ("parameters", f"{self.parameters:,} in {len(self.units):,} units"),
            ("state now", f"{where}{format_size(self.host_nbytes)} in host memory"),
            ("host_memory", held),
            ("NVMe moved", moved),
            ("computing waited", f"{self.stall_s:.1f} s: {_seconds(self.stalls_s)}"),
            ("record lane", _seconds(self.lane_s)),
            ("uses of units", f"{uses}; plans: {self.plans:,}"),
            (
                "placement",
                f"{self.placement_revisions:,} revisions; {self.placement_reason or 'none decided'}",
            ),
        ]
        if self.device_budget_nbytes:
            now = f"{format_size(self.device_held_nbytes)} of it in use now"
            live = f"{format_size(self.device_nbytes)} of units that live there"
            rows.insert(4, ("device_memory", f"{format_size(self.device_budget_nbytes)}, {now}, {live}"))
            up, down = format_size(self.uploaded_nbytes), format_size(self.downloaded_nbytes)
            rows.insert(6, ("link moved", f"to the device {up}, from it {down}"))
        rows += self._rows_of_slices()
        rows += self._rows_of_updates()
        if self.activations:
            rows.append(("activations", self.activations))
        if self.ranks > 1:
            exchanged = (f"{kind} {format_size(nbytes)}" for kind, nbytes in self.exchanged_nbytes.items())
            rows.append(("ranks exchanged", ", ".join(exchanged)))
            if self.shared_nbytes:
                shared = f"{format_size(self.shared_nbytes)} of weights, not sent"
                rows.append(("in shared memory", f"{shared} ({self.memory_in_common})"))
            else:
                rows.append(("ranks share memory", self.memory_in_common))
            counted = (f"{kind} {number:,}" for kind, number in self.collectives.items())
            rows.append(("collectives", ", ".join(counted)))
        if self.predicted_step_s is not None:
            rows.append(("predicted step", f"{self.predicted_step_s:.2f} s"))
        rows.append(("more", ".units, .frequency, .plan, .since(earlier); dataclasses.asdict(...)"))
        return [(what, textwrap.shorten(value, _WIDTH, placeholder=" ...")) for what, value in rows]

    def _rows_of_updates(self) -> list[tuple[str, str]]:
        rows = []
        if any(self.speculated.values()):
            counted = (f"{number:,} {kind}" for kind, number in self.speculated.items())
            rows.append(("made ahead", ", ".join(counted)))
        if self.updates:
            rows.append(("updates", self.updates))
        return rows

    def _rows_of_slices(self) -> list[tuple[str, str]]:
        slices, steps = self.slices, max(1, self.steps)
        if not slices:
            return []
        used = sum(unit.steps_used for unit in slices) / steps
        unmoved = f"{format_size(self.unmoved_nbytes)} were not moved for want of use"
        named = [f"{unit.name} ({unit.steps_used / steps:.2f} of the steps)" for unit in slices]
        return [
            ("slices", f"{len(slices):,}, {used:,.1f} of them used in a step; {unmoved}"),
            ("hottest, coldest", f"{named[0]}, {named[-1]}"),
        ]

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:{width}}  {value}" for what, value in rows)

    def _repr_html_(self) -> str:
        """Return the summary as a table, for a notebook."""
        cells = (f"<tr><th>{escape(what)}</th><td>{escape(value)}</td></tr>" for what, value in self.rows())
        return f"<table>{''.join(cells)}</table>"


def _seconds(spent: Mapping[str, float]) -> str:
    """Name what seconds went into, most first."""
    by_length = sorted(spent.items(), key=lambda one: -one[1])
    return ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in by_length)


def _since(later: Any, earlier: Any) -> Any:
    """Take an earlier total away from a later one: numbers, or dicts, tuples and dataclasses of them."""
    if isinstance(later, dict):
        return {key: value - earlier.get(key, 0) for key, value in later.items()}
    if isinstance(later, tuple):
        return tuple(_since(*pair) for pair in zip(later, earlier, strict=True))
    if isinstance(later, Stats | UnitStats):
        totals = [one.name for one in fields(later) if one.metadata.get("total")]
        return replace(
            later, **{name: _since(getattr(later, name), getattr(earlier, name)) for name in totals}
        )
    return later - earlier


def _unit_stats(engine: Engine) -> Iterator[UnitStats]:
    frequencies = engine.residency.frequencies
    for unit in engine.units:
        yield UnitStats(
            unit.name,
            unit.layout.numel,
            _tiers(unit),
            unit.residence.uses,
            frequencies.fetches(unit.index),
            frequencies.updates(unit.index),
            frequencies.steps_used(unit.index),
            unit in engine.residency.routed and not unit.record.is_elsewhere,
            _step_nbytes(unit),
        )


def _step_nbytes(unit: Unit) -> int:
    """Return what one forward and backward read of a record, and the update reads and writes."""
    fields = {name: unit.record.field_nbytes(name) for name in unit.record.fields}
    hi_nbytes = fields.get("hi", 0)
    return hi_nbytes + 2 * sum(fields.values()) if unit.trainable else 2 * hi_nbytes


def _tiers(unit: Unit) -> tuple[tuple[str, str], ...]:
    """Return (field, tier), the highest in which a field is."""
    device = lives_on_device(unit)
    return tuple((name, "device" if device and name == "hi" else tier) for name, tier in unit.record.tiers())


def predicted_step_s(engine: Engine, load: Load, done: Stats, speed: Speed) -> float | None:
    """Return what a typical step should take: the engine's plan, walked on a simulated machine; see forecast.

    load: of such a step, for the seconds that it computes. done: what `since` tells of several of them, for
    the rate of the updates. speed: of the disk. None without a plan.
    """
    plan, steps = engine.residency.cursor.plan, max(1, done.steps)
    if plan is None or not plan.steps:
        return None
    # a backward computes two gradients where a forward computes one output
    shares = [
        engine.units[one.use.unit].layout.numel * (2 if one.use.phase is Phase.BACKWARD else 1)
        for one in plan.steps
    ]
    seconds = [load.compute_s * share / sum(shares) for share in shares]
    worked_s = (done.lane_s["work"] + done.lane_s["inline"]) / steps
    updated = sum(unit.record.shard.numel for unit in engine.units if unit.trainable)
    rates = Rates(speed, update=updated / worked_s if worked_s > 0 else math.inf, shared=False)
    budget, host = engine.budget, engine.device.is_host
    ahead = done.speculated.get("confirmed", 0) > done.speculated.get("dropped", 0)
    split = (engine.arrivals.ahead if ahead else engine.arrivals.early).split
    at_fetch = engine.residency.updates_at_fetch and not (ahead and split is None)
    limits = EngineLimits(
        budget.tile_numel,
        budget.slots,
        engine.residency.window_nbytes,
        budget.outgoing_nbytes,
        on_host=host,
        update="forward" if at_fetch else "backward",
        early=frozenset(split.early if split is not None else ()),
    )
    return predict_step(plan, seconds, [moves_of(unit) for unit in engine.units], limits, rates).seconds


def stats(model: nn.Module) -> Stats:
    """Return what the engine of `model` did so far and where its state is.

    Raises: ValueError for a model that was not built in Init.
    """
    engine = engine_of_model(model)
    counts: Counts = engine.residency.counts
    tier, (uploaded_nbytes, downloaded_nbytes) = engine.tier, engine.device.moved_nbytes
    ledger = engine.device.room.ledger if engine.device.room is not None and tier is not None else None
    return Stats(
        parameters=sum(segment.numel for unit in engine.units for segment in unit.layout.segments),
        nvme_nbytes=sum(unit.record.nbytes("nvme") for unit in engine.units),
        host_nbytes=sum(unit.record.nbytes("host") for unit in engine.units),
        budget_nbytes=engine.budget.total_nbytes,
        budget_held_nbytes=engine.held_nbytes(),
        io_engine=engine.nvme_store.kind if engine.nvme_store else "none",
        plan=str(engine.residency.cursor.plan or ""),
        units=tuple(_unit_stats(engine)),
        read_nbytes=dict(engine.traffic.read),
        written_nbytes=dict(engine.traffic.written),
        steps=counts.steps,
        rounds=counts.rounds,
        plans=counts.plans,
        uses=counts.uses,
        hits=counts.hits,
        misses=counts.misses,
        divergences=counts.divergences,
        stalls_s={**counts.stalls_s, "gradients": engine.outgoing_share.stall_s},
        lane_s={name.removesuffix("_s"): spent for name, spent in asdict(engine.lane.times).items()},
        passes=dict(engine.lane.passes),
        rank=engine.ranks.rank,
        ranks=engine.ranks.size,
        exchanged_nbytes=engine.partition.nbytes if engine.partition is not None else {},
        collectives=engine.partition.collectives if engine.partition is not None else {},
        shared_nbytes=engine.partition.shared_nbytes if engine.partition is not None else 0,
        memory_in_common=engine.partition.memory if engine.partition is not None else "",
        placement_revisions=engine.pins.revisions if engine.pins is not None else 0,
        placement_reason=engine.pins.reason if engine.pins is not None else "",
        device_budget_nbytes=ledger.limit_nbytes if ledger is not None else 0,
        device_held_nbytes=ledger.held_nbytes if ledger is not None else 0,
        device_peak_nbytes=ledger.peak_nbytes if ledger is not None else 0,
        device_nbytes=tier.held_nbytes if tier is not None else 0,
        speculated=engine.speculation.counts,
        second_nbytes=engine.speculation.nbytes,
        updates=engine.arrivals.early.told or engine.arrivals.ahead.told,
        activations=engine.activations.told if engine.activations is not None else "",
        uploaded_nbytes=uploaded_nbytes,
        downloaded_nbytes=downloaded_nbytes,
    )
