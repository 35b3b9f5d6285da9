"""What an engine has where its state is partitioned over ranks (ZeRO): two lanes for collectives."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import xxhash
from torch import nn

from infinity.device.blocks import Blocks
from infinity.device.device import Device
from infinity.engine.expert_ranks import ExpertRanks
from infinity.engine.rank_features import RankFeatures
from infinity.errors import RanksError
from infinity.gradients.collectives import Collecting, CollectiveLane, Spreading
from infinity.gradients.feedback import error_fields, feed_back, feed_back_sums, forget_errors
from infinity.gradients.gather_buckets import GatherBuckets
from infinity.gradients.machine_reducing import GradientPlaces, place_nbytes
from infinity.gradients.matrices import Orthogonalizing
from infinity.gradients.secondary import SecondaryBuckets
from infinity.lane.fetch import FetchTarget
from infinity.lane.lane import StreamLane
from infinity.lane.matrices import WholeMatrices
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.plan import Plan
from infinity.planning.queue import Job
from infinity.ranks.group import Ranks
from infinity.ranks.machine_meetings import open_meetings
from infinity.ranks.memory_trial import first_reason, in_short, why_too_large
from infinity.ranks.shared_memory import SharedMemory
from infinity.ranks.uses import agree_on_uses
from infinity.records.record import Record
from infinity.sizes import format_size
from infinity.storage.store import HostStore, Store
from infinity.timeline import Timeline
from infinity.units.machine_buffers import share_buffers
from infinity.units.machine_units import MachineUnits, needs_of, open_machine_units
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")


class Partition:
    """Assembles units and parameters from the ranks' shares, on a lane of its own, and has the lane on which
    gradients are reduced.
    """

    def __init__(
        self,
        ranks: Ranks,
        lane: StreamLane,
        device: Device,
        timeline: Timeline,
        units: Sequence[Unit],
        expert_ranks: ExpertRanks | None,
        buckets: GatherBuckets,
        features: RankFeatures,
    ) -> None:
        """Open two channels, for `units`, a list that the engine fills; and two for experts, if there are
        `expert_ranks`. Every rank does so. buckets: in which units are assembled. features: what ranks do
        together.
        """
        self.ranks, self.coding = ranks, features.gradients
        self.memory = features.memory
        """Why ranks have memory in common, or do not."""
        self._asked = features.asked
        self._exact = False
        """Whether units are fetched as their records have them, where they are sent coded."""
        self._before_change: Callable[[], None] = _nothing
        self._expert_ranks = expert_ranks

        def opened(name: str, of: Ranks, near: int = 0) -> CollectiveLane:
            channel = of.channel(foresees=of is ranks, hops=True, near=near)
            return CollectiveLane(name, channel, lane, device, timeline)

        self._secondary = buckets if isinstance(buckets, SecondaryBuckets) else None
        near = self._secondary.near if self._secondary is not None else 0
        self._gathers, self._reduces = opened("gather", ranks, near), opened("reduce", ranks)
        self._gathers_of_experts, self._reduces_of_experts = self._gathers, self._reduces
        if expert_ranks is not None:
            self._gathers_of_experts = opened("gather experts", expert_ranks.copies)
            self._reduces_of_experts = opened("reduce experts", expert_ranks.copies)
        self._buckets = buckets
        self._machine: MachineUnits | None = None
        """What ranks have in common of their machine's memory; None where each has its own."""
        self._timeout_s = 0.0
        self._meetings: SharedMemory | None = None
        """Memory in which they meet, and sum gradients; None where they do so over gloo."""
        ranks.before_together(buckets.close)
        self._lanes = dict.fromkeys(
            [self._gathers, self._reduces, self._gathers_of_experts, self._reduces_of_experts]
        )
        self._lane = lane
        self._device = device
        self._units = units
        self._digest: tuple[Plan | None, int] = None, 0

    def check_model(self) -> None:
        """See that every rank has built the same. Raises: RanksError, on every rank, where that is not so."""
        found = xxhash.xxh3_64()
        for unit in self._units:
            text = "\n".join([unit.name, *(f"{one.name} {one.shape}" for one in unit.layout.segments)])
            found.update(text.encode())
        numel = sum(unit.layout.numel for unit in self._units)
        mine = [found.intdigest() >> 1, len(self._units), numel]
        rows = self.ranks.of_all(mine, "compare models")
        if any(row != rows[0] for row in rows):
            built = ", ".join(
                f"{self.ranks.names.of(rank)} {numel:,} in {units} modules"
                for rank, (_, units, numel) in enumerate(rows)
            )
            raise RanksError(
                f"the ranks that share a model have built different ones, of parameters: {built}. All "
                "ranks of a "
                "process_group build the same. The stages of a pipeline are models of their own: "
                'Init(..., process_group=mesh["dp"], pipeline_group=mesh["pp"]).'
            )

    def open(self, blocks: Blocks, timeout_s: float) -> None:
        """Take over the units of a finished model. blocks: in which they become resident, unless the ranks
        have memory in common.
        """
        self.check_model()
        self._timeout_s = timeout_s
        if self._buckets.in_common:
            self._machine = self._open_in_common(blocks, timeout_s)

    def _open_in_common(self, blocks: Blocks, timeout_s: float) -> MachineUnits | None:
        """Have units live in memory that ranks share; or, on all ranks, not, where it was not asked for and
        does not work on one, which is said.
        """
        if self._asked:
            return open_machine_units(self.ranks, self._units, blocks, timeout_s)
        why = first_reason(self.ranks, why_too_large(*needs_of(self._units)))
        if not why:
            try:
                return open_machine_units(self.ranks, self._units, blocks, timeout_s)
            except (OSError, RanksError) as error:
                why = first_reason(self.ranks, in_short(error))
        self._buckets.share_nothing()
        self.memory = f"not possible: {why}"
        logger.info("ranks share no memory: %s. Config(shared_memory=False) does not try", why)
        return None

    def share_gradients(self, share_nbytes: int) -> GradientPlaces | None:
        """See gradients.reduction.Reducers. From now on ranks of one machine meet in memory, too."""
        ranks, size = self.ranks, self.ranks.size
        if self._machine is None or ranks.grid is not None or len(ranks.near) != size:
            return None
        nbytes = ranks.least(place_nbytes(share_nbytes), "size places of gradients") * (self.coding is None)
        try:
            (gathers, reduces), offset = open_meetings(ranks, 2, 2 * size * nbytes, self._timeout_s)
        except (OSError, RanksError) as error:
            why = first_reason(ranks, in_short(error))
            logger.info("ranks meet, and exchange gradients, over gloo: %s", why)
            return None
        self._meetings = reduces.memory
        self._buckets.meet_by(gathers)
        return GradientPlaces(reduces, offset, nbytes, ranks.rank, size) if nbytes else None

    def keep_second_parts(
        self,
        store: HostStore,
        least_total: Callable[..., int],
        nvme: Store | None,
        record_of: Callable[..., Record],
    ) -> None:
        """Make room for second parts, where there are some. store: has memory; nvme: keeps, in records that
        `record_of` makes, what that has no room for; least_total: see SecondaryBuckets.open.

        Raises: HostMemoryError; aio.StorageFullError.
        """
        if self._secondary is not None:
            self._secondary.open(self._units, self.ranks, store, least_total, nvme, record_of)

    def share_buffers(self, modules: Iterable[tuple[str, nn.Module]], timeout_s: float) -> None:
        """Have large buffers that are the same on all ranks once, where these have memory in common."""
        if not self._buckets.in_common:
            return
        try:
            nbytes = share_buffers(modules, self.ranks, timeout_s, saved=self._asked)
        except (OSError, RanksError) as error:
            if self._asked:
                raise
            why = first_reason(self.ranks, in_short(error))
            logger.info("buffers lie on each rank, though weights are in memory in common: %s", why)
            return
        logger.info("%s of buffers lie once in memory that ranks share", format_size(nbytes))

    def rounds(self, unit: Unit) -> bool:
        """See units.assembler.Assembler, as for the next ones."""
        return _is_gathered(unit) and self._buckets.codes(unit)

    @contextmanager
    def exactly(self, leave: Callable[[], None]) -> Iterator[None]:
        """See Assembler."""
        if self._buckets.coding is not None:
            leave()
        self._exact = True
        try:
            yield
        finally:
            self._exact = False

    def target_of(self, unit: Unit) -> FetchTarget:
        """See Assembler."""
        if self._machine is not None:
            return self._machine.share_of(unit) or unit
        return self._buckets.aside(unit) if self.rounds(unit) and not self._exact else unit

    def again(self, unit: Unit) -> Job | None:
        """See Assembler."""
        if self._secondary is None or (self._exact and self.rounds(unit)):
            return None
        return self._secondary.again(unit, self._gathers)

    def assemble(self, unit: Unit, job: Job, target: FetchTarget) -> Job:
        """See Assembler."""
        if not _is_gathered(unit):
            return job  # which brings all that there is of it
        if self._machine is not None and target is unit:
            target = self._machine.share_again(unit) or unit
        buckets, aside = self._buckets, None if target is unit else target
        exact = buckets.coding is not None and (self._exact or not buckets.codes(unit))
        if exact or not unit.record.holders.are_all:
            gathers = self._gathers if unit.record.holders.are_all else self._gathers_of_experts
            return buckets.alone(unit, job, gathers, aside, exact=exact)
        return buckets.assemble(unit, job, self._gathers, aside)

    def size_buckets(self, window_nbytes: int) -> None:
        """See Assembler."""
        self._buckets.size(window_nbytes)

    def orthogonalize(self, matrices: WholeMatrices) -> Orthogonalizing:
        """See lane.matrices.MatrixOwners. Not on the lane of gradients: a pass that holds slots may wait for
        theirs, and this waits for passes.
        """
        job = Orthogonalizing(matrices, self._lane)
        self._gathers.submit(job)
        return job

    def spread(self, unit: Unit) -> Job:
        """See Assembler."""
        job = Spreading(unit, self._lane, self._device)
        self._gathers.submit(job)
        return job

    def change_after(self, call: Callable[[], None]) -> None:
        """Call `call` before errors of codes are changed: a durable run first captures its step."""
        self._before_change = call

    def feed_back(self, unit: Unit, indices: Collection[int], rows: torch.Tensor) -> None:
        """See gradients.reduction.Reducers."""
        if self.coding is not None:
            self._before_change()
            feed_back(unit, indices, rows, self.coding, self._lane)

    def feed_back_sums(self, unit: Unit, indices: Collection[int], rows: torch.Tensor) -> None:
        """See gradients.reduction.Reducers."""
        if self.coding is not None and self.ranks.grid is not None:
            self._before_change()
            feed_back_sums(unit, indices, rows, self.coding, self._lane, self.ranks.grid, self.ranks.rank)

    def error_fields(self, record: Record) -> tuple[str, ...]:
        """Return the fields that a record has of errors of codes, where its gradients are trained."""
        if self.coding is None or not self.coding.feeds_back:
            return ()
        names = error_fields(record, self.ranks.grid)
        record.may_have(names)
        return names

    def forget_errors(self, record: Record) -> None:
        """Let the errors of a record be zeros: what they are of is loaded over."""
        forget_errors(record, self.error_fields(record), self._lane)

    def reduces(self, unit: Unit) -> CollectiveLane:
        """See gradients.reduction.Reducers."""
        return self._reduces if unit.record.holders.are_all else self._reduces_of_experts

    def collect(
        self, record: Record, index: int, part: torch.Tensor, elements: range | None = None
    ) -> torch.Tensor:
        """Return a parameter's values, or some consecutive elements of them, from the ranks' parts. Every
        rank calls it.
        """
        parts = [
            record.holders.shard_of(record.unit_layout, rank).segments[index]
            for rank in range(self.ranks.size)
        ]
        numels = [one.numel if elements is None else len(one.elements_of(elements)) for one in parts]
        name = f"{record.name}.{record.unit_layout.segments[index].name}"
        job = Collecting(name, part, numels, self._lane)
        self._gathers.submit(job)
        self._lane.wait(job)
        return job.whole

    def post_failure(self, why: str) -> None:
        """See Assembler."""
        self.ranks.post_failure(why)

    def check(self, plan: Plan) -> None:
        """See Assembler. The error names the first use that differs, and what each rank has."""
        self._buckets.begin_step()
        if self._digest[0] is not plan:
            self._digest = plan, xxhash.xxh3_64_intdigest(str(plan).encode()) >> 1
        lanes = (self._gathers, self._reduces)  # which experts a step fetches its data decide
        rows = self.ranks.of_all([self._digest[1], *(one.chain >> 1 for one in lanes)], "compare plans")
        if all(row[0] == rows[0][0] for row in rows):
            queued_the_same = all(row == rows[0] for row in rows)
            for one in lanes:
                one.begin_step(self._digest[1] if queued_the_same else None)
            return
        agree_on_uses(self.ranks, [one.use for one in plan.steps], lambda unit: self._units[unit].name)
        for one in lanes:
            one.begin_step(None)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes exchanged, by kind of collective; see Stats."""
        counted = sum((one.nbytes for one in self._lanes), Counter[str]())
        moved = {kind: counted[kind] for kind in ("gather", "reduce", "read", "orthogonalize")}
        if self._secondary is not None:
            moved["gather near"] = counted["gather near"]
        if self._expert_ranks is not None:
            moved["tokens"] = self._expert_ranks.nbytes
        crossed = [one.crossed_nbytes for one in self._lanes if one.crossed_nbytes is not None]
        if crossed:
            moved["between machines"] = sum(crossed)
        return moved

    @property
    def shared_nbytes(self) -> int:
        """Bytes of weights that were put together in memory that ranks share."""
        return 0 if self._machine is None else self._machine.nbytes

    @property
    def collectives(self) -> dict[str, int]:
        """Collectives, by kind, and agreements before them; see Stats."""
        return dict(sum((one.counts for one in self._lanes), Counter[str]()))

    def settle(self) -> None:
        """End the lanes of collectives, while everything that they use is still there."""
        for lane in self._lanes:
            lane.close()
        if self._machine is not None:
            self._machine.close()
        if self._meetings is not None:
            self._meetings.close()


def _nothing() -> None:
    """Nothing has to be done before a change."""


def open_partition(
    features: RankFeatures,
    outgoing_share: OutgoingShare,
    ranks: Ranks,
    lane: StreamLane,
    device: Device,
    timeline: Timeline,
    units: Sequence[Unit],
    expert_ranks: ExpertRanks | None,
) -> Partition | None:
    """Return what several ranks do together; None where there is one. Every rank calls it. outgoing_share:
    has the memory in which units are put together; see Partition.
    """
    if ranks.size == 1:
        return None
    parts = lane, device, outgoing_share, features.bucket_nbytes, features.weights
    if features.near:
        buckets: GatherBuckets = SecondaryBuckets(*parts, features.near)
    else:
        buckets = GatherBuckets(*parts, in_common=features.in_common)
    return Partition(ranks, lane, device, timeline, units, expert_ranks, buckets, features)


def _is_gathered(unit: Unit) -> bool:
    """Whether this rank assembles a unit of which others have parts as well."""
    return not unit.record.is_elsewhere and len(unit.record.holders.members) > 1
