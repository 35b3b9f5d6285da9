"""What an engine did and where everything is: a frozen snapshot, cheap enough to take every step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from infinity.engine import engine_of_model
from infinity.executor import Counts
from infinity.lanes import LaneTimes


@dataclass(frozen=True, slots=True)
class UnitStats:
    """One unit: where its record lies and how often it was used."""

    name: str
    numel: int
    """Elements, padding included."""
    uses: int
    """Uses since the model was built."""
    tiers: tuple[tuple[str, str], ...]
    """(field, tier) of its record."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one engine. Bytes and seconds since the model was built, unless it says otherwise."""

    parameters: int
    """Elements, of all parameters of the engine."""
    units: tuple[UnitStats, ...]
    nvme_nbytes: int
    """Bytes of records on NVMe now."""
    host_nbytes: int
    """Bytes of records in host memory now."""
    budget_nbytes: int
    """host_memory."""
    budget_held_nbytes: int
    """Bytes of the budget in use now: slots, what waits, gradients, pinned fields."""
    read_nbytes: dict[tuple[str, str], int]
    """Bytes read, by (tier, field)."""
    written_nbytes: dict[tuple[str, str], int]
    """Bytes written, by (tier, field)."""
    steps: int
    uses: int
    hits: int
    """Uses that found the unit resident, or on its way."""
    misses: int
    divergences: int
    """Uses that were not the next one of the plan."""
    stall_s: float
    """Seconds that computing waited for a unit."""
    gradient_stall_s: float
    """Seconds that computing waited for gradients to be written or applied."""
    lane_read_wait_s: float
    lane_work_s: float
    lane_write_wait_s: float
    lane_idle_s: float
    io_engine: str
    """The I/O engine, or "none" without an NVMe tier."""
    plan: str
    """The schedule of a step, as text."""

    @property
    def nvme_read_nbytes(self) -> int:
        """Bytes read from NVMe."""
        return sum(nbytes for (tier, _), nbytes in self.read_nbytes.items() if tier == "nvme")

    @property
    def nvme_written_nbytes(self) -> int:
        """Bytes written to NVMe."""
        return sum(nbytes for (tier, _), nbytes in self.written_nbytes.items() if tier == "nvme")


def stats(model: nn.Module) -> Stats:
    """Return what the engine of `model` did so far and where its state is.

    Raises: ValueError for a model that was not built in Init.
    """
    engine = engine_of_model(model)
    counts: Counts = engine.executor.counts
    times: LaneTimes = engine.lane.times
    units = tuple(
        UnitStats(unit.name, unit.shard.numel, unit.uses, unit.record.tiers()) for unit in engine.units
    )
    return Stats(
        parameters=sum(segment.numel for unit in engine.units for segment in unit.shard.segments),
        units=units,
        nvme_nbytes=sum(unit.record.nbytes("nvme") for unit in engine.units),
        host_nbytes=sum(unit.record.nbytes("host") for unit in engine.units),
        budget_nbytes=engine.budget.total_nbytes,
        budget_held_nbytes=engine.held_nbytes(),
        read_nbytes=dict(engine.traffic.read),
        written_nbytes=dict(engine.traffic.written),
        steps=counts.steps,
        uses=counts.uses,
        hits=counts.hits,
        misses=counts.misses,
        divergences=counts.divergences,
        stall_s=counts.stall_s,
        gradient_stall_s=engine.gradients.stall_s,
        lane_read_wait_s=times.read_wait_s,
        lane_work_s=times.work_s,
        lane_write_wait_s=times.write_wait_s,
        lane_idle_s=times.idle_s,
        io_engine=engine.nvme_store.engine.kind if engine.nvme_store else "none",
        plan=str(engine.executor.cursor.plan or ""),
    )
