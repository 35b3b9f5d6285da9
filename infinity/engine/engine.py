"""The engine of one `Init`: owns the budget, the stores, the lane and the units, and wires them to modules,
autograd and optimizers.

Only the hooks on the model's modules, and optimizers, refer to it: when they are gone, so are the engine, its
thread, its memory and its files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.activations.boundaries import Boundaries
from infinity.activations.by_budget import ActivationBudget
from infinity.activations.partitioned import CopyHolders, PartitionedBoundaries, open_parts
from infinity.autograd.arrivals import Arrivals
from infinity.autograd.foreign import ForeignParameters, ForeignSteps
from infinity.autograd.hooks import Hooks
from infinity.autograd.module_calls import Entering, Leaving
from infinity.autograd.rounds import Rounds
from infinity.config.settings import Config
from infinity.device.computing import that_computes
from infinity.device.device import choose_device, open_device
from infinity.device.direct import read_directly
from infinity.device.room import note_download
from infinity.durable.committer import TrainingStateSource
from infinity.durable.tiers import open_nvme_tier
from infinity.engine.device_needs import device_needs
from infinity.engine.ending import Ending
from infinity.engine.expert_ranks import DividedExperts, ExpertRanks
from infinity.engine.foresight import NONE, Foresight, foresight_of
from infinity.engine.lanes import open_lane
from infinity.engine.parameters import Parameters
from infinity.engine.partition import Partition, open_partition
from infinity.engine.rank_features import RankFeatures, rank_features
from infinity.engine.routing import Routing
from infinity.engine.shortage import Shortage
from infinity.engine.state_dict import Exchange
from infinity.errors import UnsupportedError
from infinity.gradients.early import EarlyUpdates
from infinity.gradients.speculation import Speculation, why_never
from infinity.gradients.store import GradientStore
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.budget import divide, divide_device, least_total
from infinity.planning.layout import Holders, RecordSchema, lay_out, schema_beside
from infinity.ranks.group import Ranks
from infinity.ranks.machine_memory import share_of
from infinity.ranks.uses import compare_uses
from infinity.records.record import Record, Traffic
from infinity.records.weights import WEIGHTS, Weights
from infinity.storage.checkpoint_store import CheckpointStore
from infinity.storage.memory import Ledger, map_large_blocks, reuse_large_blocks
from infinity.storage.packed import FileRange, Packed
from infinity.storage.paths import of_rank
from infinity.storage.store import HostStore, Store
from infinity.storage.stripes import StripedStore
from infinity.tensors import local
from infinity.tiling import Routed, Tiled
from infinity.timeline import Timeline
from infinity.units import advice
from infinity.units.aside import Aside
from infinity.units.changes import tell_versions_apart
from infinity.units.device_tier import DeviceTier, Records
from infinity.units.device_updates import DeviceUpdates
from infinity.units.kept_aside import kept_aside
from infinity.units.meeting import MeetingOfRanks
from infinity.units.pinning import Pins
from infinity.units.released import CONVERSIONS, not_converted, not_resident, owner_of, set_owner
from infinity.units.residency import UnitResidency
from infinity.units.stages import Stages, open_with_stages
from infinity.units.unit import Unit

logger = logging.getLogger("infinity")

Touch = Callable[[Sequence[nn.Parameter], str, Sequence[Any]], object]


class Groups(NamedTuple):
    """Process groups, as torch has them, or meshes; None for all ranks, or for none."""

    process_group: Any
    copies: Any
    """Which ranks hold copies of activations, to be divided (CopyHolders)."""
    pipeline_group: Any
    """Those that have the other stages of a pipeline."""


class Engine:
    """See the module's docstring."""

    def __init__(self, config: Config, groups: Groups, *, frozen: bool = False) -> None:
        """Check the configuration against the machine, meet the other ranks, open the stores and start the
        lanes.

        frozen: nothing but reads of weights is expected.

        Raises: ConfigError, HostMemoryError, RanksError, or an OSError naming the path.
        """
        self.config = config
        self.ranks, self.stages = self._meet(groups)
        self.schema = config.schema
        self.device = read_directly(that_computes(open_device(self.ranks.device), self.weights.dtype), config)
        self.rank_features: RankFeatures = rank_features(config, self.ranks, self.device)
        self.expert_ranks = self._divide_experts()
        """How ranks divide experts; None where each computes with all."""
        self._on_device = not self.device.is_host
        budget_in = partial(divide, schema=self.schema, on_device=self._on_device, frozen=frozen)
        self.timeline, self.traffic = Timeline(), Traffic()
        self.units: list[Unit] = []
        self._cut: set[int] = set()
        """The id() of each parameter that is a tile of a matrix."""
        self._building: Touch | None = None
        self._training: TrainingStateSource | None = None
        self.pins: Pins | None = None
        """What decides which fields are pinned, and which units live on the device; None where there is one
        tier alone, and while a model is built.
        """
        self.tier: DeviceTier | None = None
        """The device as a tier; None where the CPU computes, and while a model is built."""
        # From the tiers up: each is given what it needs of those before it.
        mine = of_rank(config.nvme_folders, self.ranks.local_rank, self.ranks.local_size)
        self.durable, self.nvme_store, self.budget = open_nvme_tier(
            config, *mine, self.stages.everyone, partial(budget_in, share_of(config.host_nbytes, self.ranks))
        )
        self._divide = partial(budget_in, tile_numel=self.budget.tile_numel)
        self.kept = Ledger(self.budget.kept_nbytes)
        self.host_store = HostStore(self.kept, self.device)
        self.store: Store = self.durable.store if self.durable else self.nvme_store or self.host_store
        self.lane = open_lane(self.budget, self.device, self.nvme_store, self.host_store, self.timeline)
        self.outgoing_share = OutgoingShare(self.device, self.timeline)
        self.partition = self._open_partition()
        """What several ranks do together; None where there is one."""
        self.residency = UnitResidency(
            self.lane, self.device, self.timeline, self.partition, self.outgoing_share
        )
        self.parameters = Parameters(self.lane, self.residency, self.partition, self.durable, self.store)
        self.checkpoint_store: CheckpointStore | None = None
        """The files that weights are read from where they lie; None where there are none."""
        self.exchange = Exchange(self.parameters, config.frozen_dtype)
        self.gradients = self._open_gradients()
        self.boundaries = self._open_boundaries()
        """What offloads the inputs of checkpoints; None where they stay."""
        self.parts = self._open_parts(groups.copies)
        """What divides them among ranks first; None where each rank keeps its own."""
        self.activations: ActivationBudget | None = None
        """What decides which blocks are recomputed; None where their models do."""
        self.hooks = Hooks(self.residency, self.parts or self.boundaries)
        if self.boundaries is not None:
            self.hooks.backward_ended.append(self.boundaries.backward_ended)
        self.speculation = self._open_speculation()
        self.arrivals = self._open_arrivals()
        self.optimizers = self.arrivals.optimizers
        store = self.durable or self.nvme_store
        self.ending = Ending(self.lane, self.ranks, self.partition, self.parts, self.device, store)

    def _meet(self, groups: Groups) -> tuple[Ranks, Stages]:
        """Connect the ranks that share the parameters, and those with the other stages of a pipeline."""
        durable, place = bool(self.config.durable_steps), choose_device(self.config)
        return open_with_stages(
            groups.process_group, groups.pipeline_group, place, self.config.timeout_s, durable=durable
        )

    def _divide_experts(self) -> ExpertRanks | None:
        """Connect the ranks that divide experts, if any do."""
        if self.config.expert_parallel == 1:
            return None
        expert_ranks = ExpertRanks(self.ranks, self.config.expert_parallel)
        self.ranks.closing.append(expert_ranks.close)
        return expert_ranks

    def _open_partition(self) -> Partition | None:
        parts = self.ranks, self.lane, self.device, self.timeline, self.units, self.expert_ranks
        return open_partition(self.rank_features, self.outgoing_share, *parts)

    def _open_gradients(self) -> GradientStore:
        if self.partition is not None:
            self.partition.change_after(self.parameters.before_change)
        return GradientStore(
            self.lane,
            self.device,
            self.kept,
            self.nvme_store or self.host_store,
            self.outgoing_share,
            self.residency,
            self.least_total,
            self.ranks,
            self.stages,
            self.partition,
            deferred=self.config.stage == 1,
            bucket_nbytes=self.config.reduce_bucket_nbytes,
        )

    def _open_arrivals(self) -> Arrivals:
        seen = self.units, self.residency, self.traffic, self.outgoing_share, self.lane.times, self.ranks
        early = EarlyUpdates(*seen, on_host=self.device.is_host)
        ahead = EarlyUpdates(*seen, on_host=self.device.is_host, foreseen=self.speculation.may)
        parts = self.gradients, self.outgoing_share, self.lane, self.durable, self.speculation, early, ahead
        return Arrivals(self.units, self.parameters.unit_of, self.hooks, *parts)

    def _open_speculation(self) -> Speculation:
        parts = self.lane, self.device, self.residency, self.store, self.outgoing_share, self.gradients.unkept
        return Speculation(*parts, why_never(self.ranks.size, self.config.stage))

    def _open_parts(self, copies: CopyHolders | None) -> PartitionedBoundaries | None:
        """Return what divides the inputs of checkpoints among ranks that hold copies of them."""
        if copies is None:
            return None
        ranks = copies.connected(self.stages.mesh.ranks, self.ranks.device, self.config.timeout_s)
        return open_parts(copies, ranks, self.device.torch_device, self.boundaries)

    def _open_boundaries(self) -> Boundaries | None:
        """Return what offloads the inputs of checkpoints, if anything is to."""
        if self.config.offload_activations is None and self.config.activation_memory is None:
            return None
        parts = self.lane, self.device, self.outgoing_share, self.kept, self.nvme_store, self.traffic
        return Boundaries(self.config.offload_activations, *parts, verify=str(self.config.verify))

    @property
    def weights(self) -> Weights:
        """How weights are kept; its `dtype` is the type that computes."""
        return WEIGHTS[self.schema.dtype]

    def schema_of(self, dtype: torch.dtype) -> RecordSchema:
        """Return the schema of records that compute in `dtype`."""
        name = next(name for name, one in WEIGHTS.items() if one.dtype == dtype)
        return self.schema if name == self.schema.dtype else schema_beside(name)

    # Building

    @property
    def is_building(self) -> bool:
        """Whether its model is not finished."""
        return self._building is not None

    def build_with(self, touch: Touch | None) -> None:
        """Send uses of released parameters to `touch`, from now until this is called with None: while a
        model is built.
        """
        if touch is not None:
            map_large_blocks()
        else:
            reuse_large_blocks(self.budget.outgoing_nbytes)
        self._building = touch

    def new_record(
        self, parameters: Sequence[nn.Parameter], name: str, schema: RecordSchema, part: int | None = None
    ) -> Record:
        """Make a record of this schema for the weights of `parameters`, which have no room yet. part: of the
        experts that ranks divide, the part that it is of; None where all ranks have parts of it.

        Raises: HostMemoryError where its blocks do not fit the slots.
        """
        holders = Holders(self.ranks.size)
        if part is not None and self.expert_ranks is not None:
            holders = self.expert_ranks.holders(part)
        shapes = [(str(index), local(parameter).shape) for index, parameter in enumerate(parameters)]
        whole = lay_out(shapes, schema.align_numel, len(holders.members))
        return Record(
            holders.shard_of(whole, self.ranks.rank),
            self.budget.tile_of(schema),
            self.traffic,
            verify=str(self.config.verify),
            schema=schema,
            unit_layout=whole,
            name=name,
            holders=holders,
        )

    def lay_in_files(self, record: Record, ranges: Sequence[FileRange | Packed]) -> None:
        """Let the weights of a record be ranges of a checkpoint's files; see Record.lie_in."""
        if self.checkpoint_store is None:
            nvme = self.nvme_store
            shared = nvme.stores[0] if isinstance(nvme, StripedStore) else nvme
            engine = shared.engine if shared is not None else None
            self.checkpoint_store = CheckpointStore(engine, self.config.engine_kind)
            self.ending.close_first(self.checkpoint_store.close)
        record.lie_in(self.checkpoint_store, ranges)

    def open(
        self,
        records: Mapping[Record, list[nn.Parameter]],
        routed: Mapping[Record, bool] = MappingProxyType({}),
        chosen: Iterable[Record] = (),
    ) -> dict[Record, Unit]:
        """Take over a finished model: the parameters in each record, in the order of its modules. Return the
        unit that each record is of.

        routed: records of slices alone, of which the data decides whether they are used, and whether a
        backward uses them again. chosen: records of modules that each rank's data chooses among.
        """
        self.lane.drain()
        for record, parameters in records.items():
            base = (record.holders.place(self.ranks.rank) or 0) * record.shard.numel
            in_place = self.device.is_host and self.ranks.size == 1
            unit = Unit(len(self.units), parameters, record, base, straight=in_place)
            place = self.device.torch_device
            unit.open(self.residency.blocks, place, self.hooks.by_storage, in_place=in_place)
            self.units.append(unit)
            self.parameters.add(unit)
            for parameter in parameters:
                set_owner(parameter, self)
                self.arrivals.catch(parameter)
        tell_versions_apart([unit.changes for unit in self.units])
        if self.partition is not None:
            self.partition.open(self.residency.blocks, self.config.timeout_s)
        largest = max((unit.resident_nbytes for unit in self.units), default=0)
        self.budget = self._divide(self.budget.total_nbytes, largest)
        self.kept.resize(self.budget.kept_nbytes)
        if self.partition is not None:
            self._keep_second_parts(self.partition)
        self.tier = self._open_device_tier(largest)
        ahead = self.tier.budget.window_nbytes if self.tier is not None else self.budget.ahead_nbytes
        if whole := self.config.stage < 3:
            ahead = sum(unit.resident_nbytes for unit in self.units)
        of_record = {unit.record: unit for unit in self.units}
        met = self._meet_for([of_record[one] for one in chosen])
        of_data = {of_record[one]: again for one, again in routed.items()} | dict.fromkeys(met, True)
        self.arrivals.know_divided(
            [unit for unit in self.units if not unit.record.holders.are_all], self.ranks
        )
        self.residency.open(self.units, ahead, keep_resident=whole, routed=of_data)
        self.outgoing_share.open(self.budget.outgoing_nbytes)
        self.gradients.open(self.budget, self.units)
        if self.boundaries is not None:
            self.boundaries.open(self.budget.tile_numel)
        self._open_pins()
        # A durable run moves fields between its steps alone, which it commits.
        rounds = Rounds(self.residency, self.pins if self.durable is None else None)
        self.hooks.round_began.append(rounds.forward_began)
        self.hooks.forward_began.append(rounds.step_goes_on)
        self.stages.watch(self._all_frozen)
        self.hooks.forward_began.append(self.stages.look)
        if self.partition is not None:
            looks = ForeignParameters(self.parameters.keeps).look, self.ranks.waiting.forward_begins
            self.hooks.forward_began.extend(looks)
        if self.durable is None:
            steps = ForeignSteps(self.close_step, self._all_frozen)
            self.hooks.backward_ended.append(steps.backward_ended)
            self.hooks.forward_began.append(steps.forward_began)
        else:
            self.hooks.forward_began.append(self.durable.forward_began)
            cut = self.budget.tile_numel, self.schema.name
            self.durable.open(self.units, self.lane, self.residency.flush, cut)
        logger.info("%d units, %s; %s", len(self.units), self.config, self.budget)
        return of_record

    def _keep_second_parts(self, partition: Partition) -> None:
        tile_numel, verify = self.budget.tile_numel, str(self.config.verify)
        record_of = partial(Record, tile_numel=tile_numel, traffic=self.traffic, verify=verify)
        partition.keep_second_parts(self.host_store, self.least_total, self.nvme_store, record_of)

    def _open_pins(self) -> None:
        """Let a placement decide where fields lie, if there is more than one place for them."""
        lodges = self.tier if self._lodges else None
        if self.nvme_store is not None or self.checkpoint_store is not None or self.tier is not None:
            stores = (self.host_store, self.store)
            frequencies = self.residency.frequencies
            same = self.ranks.same if self.partition is not None else None
            self.pins = Pins(self.units, frequencies, self.lane, self.kept, stores, lodges, same)
            if self.durable is None:
                self.residency.before_routed_fetch.append(self.pins.admit)
        if self.pins is not None and lodges is not None and self.partition is None:  # else others are lost
            look = Shortage(self.device, self.pins.empty_device).look
            self.hooks.forward_began.append(look)
            self.hooks.round_began.append(look)
        if self.pins is not None and (lodges is not None or self.durable is None):
            self.hooks.forward_began.append(self.pins.forward_began)

    def _meet_for(self, chosen: list[Unit]) -> list[Unit]:
        """Have the ranks, if there are several, meet for units that each one's data chooses among; return
        these.
        """
        if self.ranks.size == 1 or not chosen:
            return []
        meeting = MeetingOfRanks(self.ranks, self.units, chosen, self.residency.join_in)
        self.residency.meet_by(meeting)
        self.arrivals.meet_by(meeting)
        return chosen

    def foresight(
        self, named: Sequence[tuple[str, nn.Module]], units_of: Mapping[int, Sequence[Unit]]
    ) -> dict[int, Foresight]:
        """Return what guesses experts, by the id() of their layers. units_of: modules' own, by their id()."""
        pays = self.ranks.size == 1 and self.device.is_host and self.nvme_store is not None
        return foresight_of(named, self.residency, units_of) if pays else {}

    def route(
        self, module: Routed, name: str, units_of: dict[int, list[Unit]], foresight: Foresight = NONE
    ) -> None:
        """Follow a module that uses those of its tiles alone that its input needs.

        units_of: the units of each tile, by its id(), in their order.
        """
        division = None
        if self.expert_ranks is not None and any(
            not unit.record.holders.are_all for units in units_of.values() for unit in units
        ):
            division = DividedExperts(self.expert_ranks, self.residency, name)
        routing = Routing(self.residency, self.ranks, name, list(units_of.values()), division)
        routing.foresee(foresight)
        module.follow(routing)
        self.hooks.know_chosen(units_of)
        for whole in module.wholes().values():
            self.arrivals.have_slices(whole.pieces())

    def _open_device_tier(self, largest_nbytes: int) -> DeviceTier | None:
        """Divide the memory of an accelerator; None where the CPU computes. Raises: DeviceMemoryError where
        the model cannot run in it.
        """
        room, free = self.device.room, self.device.free_nbytes()
        if room is None:
            return None
        total = self.ranks.least(self.config.device_nbytes or free // 2, "divide device_memory")
        several = self.partition is not None
        needs = device_needs(
            self.units, room.nbytes, self.gradients.device_nbytes, self.config.stage, several=several
        )
        budget = divide_device(total, free, room.nbytes(largest_nbytes), needs.largest, needs.fixed)
        room.open(budget.total_nbytes, self._one_gives_way)
        room.over.append(partial(note_download, self.timeline))
        room.take(needs.placeholders, "placeholders")
        records = self._open_records()
        return DeviceTier(self.residency, room, budget, self.lane, records, self.ranks)

    @property
    def _lodges(self) -> bool:
        """Whether units may live on the device: in stages 1 and 2 all are there anyway."""
        return not self.config.stage < 3

    def _open_records(self) -> Records | None:
        """Let whole records live on the device, where units may."""
        store = self.device.open_store() if self._lodges else None
        if store is None:
            return None
        updates = DeviceUpdates(store, self.device, self.lane, self.timeline)
        for one in (self.residency, self.gradients.on_device):
            one.update_on_device_by(updates)
        return Records(
            store,
            updates,
            self.gradients.on_device.staying_nbytes,
            self.gradients.leave_device,
            self._steps_on_device,
            self._steps_need_scratch,
            self.device.failure_was_handled,
        )

    def _steps_need_scratch(self) -> bool:
        """Whether any of these steps needs memory for intermediate values there."""
        return any(optimizer.needs_scratch(self.device.torch_device) for optimizer in self.optimizers)

    def _steps_on_device(self) -> bool:
        """Whether every optimizer can make its steps on a device."""
        return all(optimizer.steps_on_device for optimizer in self.optimizers)

    def _one_gives_way(self) -> bool:
        """Make room on the device; False where nothing can leave."""
        return self.residency.one_gives_way() or (self.pins is not None and self.pins.one_record_leaves())

    def hook(
        self, module: nn.Module, units: list[Unit], below: list[Unit], covers: frozenset[int] = frozenset()
    ) -> None:
        """Follow a module's forward, which uses `units`, its state_dict and load_state_dict; `below` are the
        units of all modules in it. covers: see [Note: covered modules] in autograd/hooks.py.
        """
        entering = Entering(self, self.hooks, units, below, covers)
        module.register_forward_pre_hook(entering, prepend=True, with_kwargs=True)
        module.register_forward_hook(Leaving(self.hooks), with_kwargs=True, always_call=True)
        self.exchange.hook(module)
        if isinstance(module, Tiled):
            for whole in module.wholes().values():
                pieces = whole.pieces() if whole.dim() == 2 else []
                self._cut.update(id(one) for one in pieces if one.shape != whole.shape)

    def share_buffers(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Have what modules keep beside parameters once on the machine, where ranks share its memory."""
        if self.partition is not None:
            self.partition.share_buffers(named, self.config.timeout_s)

    def is_cut(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one of several tiles of a matrix."""
        return id(parameter) in self._cut

    def follow_activations(self, budget: ActivationBudget) -> None:
        """Tell `budget` of the forwards of the models, whose blocks it decides on."""
        self.activations = budget
        self.hooks.followers.append(budget)
        self.hooks.inputs_came.append(budget.began)

    def follow(self, training: TrainingStateSource, step: int, *, resumed: bool) -> None:
        """Have a durable run, if this is one, commit what `training` captures; it lives with the engine."""
        if self.durable is not None:
            self._training = training
            self.durable.follow(training, step, resumed=resumed)

    # Uses of released parameters

    def touch(self, parameters: Sequence[nn.Parameter], operation: str, args: Sequence[Any]) -> object:
        """See released.Owner."""
        if self._building is not None:
            return self._building(parameters, operation, args)
        if self.hooks.in_forward:
            for parameter in parameters:
                self.hooks.touch(self.parameters.unit_of(parameter)[0])
            return None
        answer = self.exchange.answer(parameters[0], operation, args)
        if answer is not None:
            return answer
        if advice.makes_adapter():
            units = [self.parameters.unit_of(one)[0] for one in parameters]
            return Aside(partial(kept_aside, self.residency, units))
        name = self.parameters.name_of(parameters[0])
        if operation in CONVERSIONS:
            where = f"{self.ranks.device!r} in {self.weights.dtype}"
            raise not_converted(name, operation, where)
        if advice.shards():
            raise UnsupportedError(f"{name}: {advice.PARTITIONED}")
        raise not_resident(parameters[0], operation, name)

    def assigned(self, parameter: nn.Parameter, name: str, *, by_pipeline: bool) -> None:
        """See released.Owner."""
        self.arrivals.assigned(parameter, name, by_pipeline=by_pipeline)

    # Steps

    def _all_frozen(self) -> bool:
        return not self.optimizers and not any(unit.trainable for unit in self.units)

    def close_step(self) -> None:
        """The optimizer has decided a step. Raises: RanksError where ranks beside have used other modules."""
        if self.stages.mesh.several:
            compare_uses(self.stages.mesh.ranks, self.residency.cursor.trace, lambda n: self.units[n].name)
        pending = any(one.update != "backward" for one in self.optimizers) and not self.speculation.made_all
        if self.residency.close_step(updates_at_fetch=pending):
            self.hooks.begin_step()
            if self.pins is not None:
                self.pins.close_step()
            if self.durable is not None:
                self.durable.step_closed()
        self.residency.begin_step()

    def least_total(self, field: str | None = None, more_nbytes: int = 0) -> int:
        """Return the host_memory, in bytes, that holds what is held now, `more_nbytes`, and every gradient,
        in `field` or as one backward yields it.
        """
        held_nbytes = self.kept.held_nbytes + more_nbytes + self.gradients_nbytes(field)
        largest = max(unit.resident_nbytes for unit in self.units)
        least = least_total(held_nbytes, largest, self.schema, on_device=self._on_device)
        return least * self.ranks.local_size

    def gradients_nbytes(self, field: str | None = None) -> int:
        """Bytes of the gradients of all trainable units: as one backward yields them, or, where that is more,
        in `field` of their records.
        """
        records = [unit.record for unit in self.units if unit.trainable]
        least = [one.field_nbytes(one.schema.gradient) for one in records]
        wanted = [one.field_nbytes(field) for one in records] if field else least
        return sum(map(max, least, wanted))

    def held_nbytes(self) -> int:
        """Bytes of host_memory in use now."""
        slots = self.budget.slots * self.budget.slot_nbytes
        ahead = self.residency.ahead_nbytes if self.device.is_host else 0
        return slots + self.kept.held_nbytes + ahead + self.outgoing_share.held_nbytes

    def close(self) -> None:
        """Stop the lane and give memory and files back. The parameters' values are gone."""
        self.ending.close()


def engine_of(parameter: torch.Tensor) -> Engine | None:
    """Return the engine that keeps `parameter`, None for an ordinary one."""
    owner = owner_of(parameter)
    return owner if isinstance(owner, Engine) else None


def engine_of_model(model: nn.Module) -> Engine:
    """Return the engine that keeps a model's parameters.

    Raises: ValueError for a model that was not built in Init.
    """
    for parameter in model.parameters():
        engine = engine_of(parameter)
        if engine is not None:
            return engine
    names = [name for name, _ in model.named_parameters()]
    kind = type(model).__name__
    if not names:
        raise ValueError(f"{kind} has no parameters: there is nothing that Infinity would keep for it")
    more = f" and {len(names) - 1} more" if names[1:] else ""
    raise ValueError(
        f"{kind} has no parameter built inside `with infinity.Init(config):`: {names[0]}{more} are ordinary "
        "ones. Build the model there."
    )
