"""What an engine has where its state is partitioned over ranks (ZeRO): two lanes for collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from infinity.device.device import Device
from infinity.gradients.collectives import Collecting, CollectiveLane, Gathering
from infinity.gradients.matrices import Orthogonalizing
from infinity.lane.lane import StreamLane
from infinity.lane.matrices import WholeMatrices
from infinity.planning.layout import shard_of
from infinity.planning.plan import Plan
from infinity.planning.queue import Job
from infinity.ranks.group import Ranks
from infinity.records.record import Record
from infinity.timeline import Timeline
from infinity.units.unit import Unit


class Partition:
    """Assembles units and parameters from the ranks' shares, on a lane of its own, and has the lane on which
    gradients are reduced.
    """

    def __init__(
        self, ranks: Ranks, lane: StreamLane, device: Device, timeline: Timeline, units: Sequence[Unit]
    ) -> None:
        """Open two channels, for `units`, a list that the engine fills. Every rank does so."""
        self.ranks = ranks
        self.gathers = CollectiveLane("gather", ranks.channel(), lane, device, timeline)
        self.reduces = CollectiveLane("reduce", ranks.channel(), lane, device, timeline)
        self._lane = lane
        self._device = device
        self._units = units
        self._digest: tuple[Plan | None, int] = None, 0

    def assemble(self, unit: Unit, job: Job) -> Gathering:
        """See residency.Assembler."""
        gathering = Gathering(unit, job, self._lane, self._device)
        self.gathers.submit(gathering)
        return gathering

    def orthogonalize(self, matrices: WholeMatrices) -> Orthogonalizing:
        """See lane.matrices.MatrixOwners. Not on the lane of gradients: a pass that holds slots may wait for
        theirs, and this waits for passes.
        """
        job = Orthogonalizing(matrices, self._lane)
        self.gathers.submit(job)
        return job

    def collect(
        self, record: Record, index: int, part: torch.Tensor, elements: range | None = None
    ) -> torch.Tensor:
        """Return a parameter's values, or some consecutive elements of them, from the ranks' parts. Every
        rank calls it.
        """
        parts = [
            shard_of(record.unit_layout, rank, self.ranks.size).segments[index]
            for rank in range(self.ranks.size)
        ]
        numels = [one.numel if elements is None else len(one.elements_of(elements)) for one in parts]
        name = f"{record.name}.{record.unit_layout.segments[index].name}"
        job = Collecting(name, part, numels, self._lane)
        self.gathers.submit(job)
        self._lane.wait(job)
        return job.whole

    def check(self, plan: Plan) -> None:
        """See residency.Assembler. The error names the first use that differs, and what each rank has."""
        if self._digest[0] is not plan:
            self._digest = plan, xxhash.xxh3_64_intdigest(str(plan).encode()) >> 1
        if self.ranks.same(self._digest[1], "compare plans"):
            return
        uses = [f"{one.use.phase.name.lower()} {self._units[one.use.unit].name}" for one in plan.steps]
        longest = max(-self.ranks.least(-len(uses), "compare plans"), 1)
        for place in range(longest):
            use = uses[place] if place < len(uses) else "nothing more"
            self.ranks.agree(f"use {place + 1} of a step, {use}")

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes exchanged, by kind of collective; see Stats."""
        counted = self.gathers.nbytes + self.reduces.nbytes
        return {kind: counted[kind] for kind in ("gather", "reduce", "read", "orthogonalize")}

    def settle(self) -> None:
        """End the lanes of collectives, while everything that they use is still there."""
        for lane in (self.gathers, self.reduces):
            lane.close()

    def close(self) -> None:
        """Close the connections."""
        self.ranks.close()
