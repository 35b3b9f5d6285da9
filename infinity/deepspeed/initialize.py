"""infinity.deepspeed.initialize: from a DeepSpeed script's arguments to an engine.

[Note: when updates happen]
In the backward, if no step needs the norm of all gradients: gradient_clipping 0, bf16.check_grad_overflow
false (or fp32), and one backward per step, or one for all its micro-batches (accumulate_by_block). Otherwise
with the next forward, but for those that are made ahead of what step() decides, in the backward, as
speculate="auto" has it; "infinity": {"speculate": true} has it in the first case, too, and false in none. A
script sees no difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from infinity.activations.blocks import blocks_of
from infinity.config.deepspeed_recipe import OPTIONS, halves_of_muon
from infinity.deepspeed.engine import DeepSpeedEngine
from infinity.deepspeed.groups import Divided, by_configuration, divided
from infinity.deepspeed.launch import Settings, init_distributed, settings_of
from infinity.deepspeed.schedules import make_schedule
from infinity.deepspeed.zero import take_in
from infinity.engine.engine import engine_of_model
from infinity.engine.further_fetches import tell_of_accumulation
from infinity.engine.sequences import models_of_transformers, sequence_parallel
from infinity.errors import ConfigError, UnsupportedError
from infinity.optim import optimizers
from infinity.optim.base import OffloadedOptimizer
from infinity.optim.muon import MUONS, Muon, split_groups
from infinity.optim.one_bit import OneBitAdam
from infinity.sequences.loader import SequenceParallelLoader
from infinity.sequences.random_ltd import RandomLTD
from infinity.sequences.sparse_attention import SparseAttention
from infinity.sequences.tokens import KNOWN
from infinity.sequences.warmup import SequenceWarmup
from infinity.units.released import expect_optimizers_of_torch

logger = logging.getLogger("infinity")

_NOT_OURS = ("amsgrad", "maximize")
_TOGETHER = (
    'For causal language models of transformers, "infinity": {"accumulate_by_block": true} in the '
    "configuration lets them share one fetch"
)
"""What micro-batches that fetch the weights one by one are told."""

Source = str | Path | Mapping[str, Any] | Settings


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], Any] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
    *,
    strict: bool = True,
) -> tuple[DeepSpeedEngine, OffloadedOptimizer | None, Any, Any]:
    """Return (engine, optimizer, data loader, learning rate scheduler), as deepspeed.initialize does.

    model: built in infinity.deepspeed.zero.Init or infinity.Init, and so never held as a whole; a model that
    was built outside is offloaded now. config: DeepSpeed's JSON, its content, or the result of launch.read
    (config_params and args.deepspeed_config are other ways to give it). optimizer: one of infinity's; one of
    torch's (AdamW, Adam, SGD, Adagrad) that has not stepped yet, which is replaced by infinity's with the
    same groups; or a function of the parameters that returns one; None for the configuration's.
    model_parameters: parameters or groups for it; None for all. lr_scheduler: a scheduler of that optimizer,
    or a function of it that returns one; None for the configuration's. training_data: the data set of the
    data loader, whose collation is collate_fn. mpu: Megatron's functions, which say which ranks share data,
    divide layers and have other stages; mesh_param: (data, sequences), the number of sequences and of the
    ranks that share each, or a DeviceMesh with names: as zero.Init was given them; see [Note: who divides
    what] in groups. strict: refuse unsupported keys of the configuration; False
    warns of them and leaves them out.

    Raises: ConfigError; UnsupportedError; what infinity.Init and the optimizer raise.
    """
    if model is None:
        raise ValueError("initialize(model=...): no model was given")
    if dist_init_required:
        init_distributed(distributed_port=distributed_port)
    given = [
        one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one is not None
    ]
    if len(given) > 1 and any(one != given[0] for one in given):
        raise ConfigError("config, config_params and args.deepspeed_config name different ones; give one")
    said = divided(mpu, mesh_param)
    count, sharers = (len(said.data), said.sequences) if said is not None else (None, None)
    settings = settings_of(given[0] if given else None, strict=strict, data_ranks=count, sequences=sharers)
    place = by_configuration(said, settings, builds=False)
    if settings.dump:
        logger.info("%s", settings.report)
    _take_in(model, settings, place)
    ours, replaced = _optimizer(model, optimizer, model_parameters, settings)
    scheduler = _scheduler(lr_scheduler, ours, replaced, settings)
    loader, warmup = _loader(training_data, collate_fn, settings, model, place)
    if settings.batches.steps > 1 and not settings.by_block:
        tell_of_accumulation(model, settings.batches.steps, _TOGETHER)
    changes = _changes(model, settings)
    try:
        engine = DeepSpeedEngine(model, ours, scheduler, settings, loader, warmup, changes, place.data)
    except BaseException:
        for one in changes:
            one.remove()
        raise
    return engine, ours, loader, scheduler


def _take_in(model: nn.Module, settings: Settings, place: Divided) -> None:
    try:
        engine = engine_of_model(model)
    except ValueError:
        logger.info(
            "%s was built in memory and is offloaded now; built inside `with "
            "infinity.deepspeed.zero.Init(...)` it is never held as a whole",
            type(model).__name__,
        )
        take_in(model, settings.config, frozen=settings.freezes)
        return
    if engine.is_building:
        raise UnsupportedError(
            f"{type(model).__name__} is still being built, inside an Init: call initialize after the `with`"
        )
    wanted, found = settings.config.nvme_folders, engine.config.nvme_folders
    if wanted and wanted != found:
        raise ConfigError(
            f"the model was built in Init with nvme={found or None}, but the configuration says {wanted}; "
            "give Init the same configuration"
        )
    place.check(engine)
    if settings.config.sequence_parallel > engine.config.sequence_parallel == 1:
        for one in models_of_transformers([model]):  # zero.Init was not told of it
            sequence_parallel(one, settings.config.sequence_parallel)


def _changes(model: nn.Module, settings: Settings) -> list[SparseAttention | RandomLTD]:
    """Change the model as the configuration says: both, or, with an error, neither."""
    changes: list[SparseAttention | RandomLTD] = []
    if settings.sparsity is not None:
        changes.append(SparseAttention(model, settings.sparsity.mode, **settings.sparsity.options))
    try:
        routing = _routing(model, settings)
    except BaseException:
        for one in changes:
            one.remove()
        raise
    return changes if routing is None else [*changes, routing]


def _routing(model: nn.Module, settings: Settings) -> RandomLTD | None:
    """Let the layers that the configuration names leave tokens out."""
    asked = settings.random_ltd
    if asked is None:
        return None
    found = len(list(blocks_of(model)))
    if asked.of_layers not in (None, found):
        raise ConfigError(
            f"random_ltd.total_layer_num={asked.of_layers}, but {type(model).__name__} has {found} layers"
        )
    masks = {} if asked.mask is None else {asked.mask: KNOWN["attention_mask"]}
    return RandomLTD(
        model,
        asked.schedule.shortest,
        asked.schedule.longest,
        steps=asked.schedule.steps,
        multiple=asked.schedule.multiple,
        layers=asked.layers,
        seq_first=asked.seq_first,
        arguments=masks,
    )


def _optimizer(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
    parameters: Iterable[Any] | None,
    settings: Settings,
) -> tuple[OffloadedOptimizer | None, Optimizer | None]:
    """Return the optimizer, and torch's that it replaces."""
    chosen = list(model.parameters() if parameters is None else parameters)
    if optimizer is None:
        if settings.optimizer is None:
            return None, None
        if settings.optimizer.kind == Muon.__name__:
            groups = split_groups(model, chosen, *halves_of_muon(settings.optimizer.options))
            return Muon(groups, **_when(settings)), None
        if settings.optimizer.kind == OneBitAdam.__name__:
            return _one_bit(chosen, settings), None
        kind = getattr(optimizers, settings.optimizer.kind)
        return kind(chosen, **settings.optimizer.options, **_when(settings)), None
    if not isinstance(optimizer, Optimizer):
        expect_optimizers_of_torch(engine_of_model(model))
        optimizer = optimizer(chosen)
    if isinstance(optimizer, OffloadedOptimizer):
        if optimizer.max_norm is not None and settings.gradient_clipping:
            raise ConfigError(
                f"{type(optimizer).__name__} has max_norm={optimizer.max_norm}, the configuration "
                f"gradient_clipping={settings.gradient_clipping} (1.0 by default); use one of the two"
            )
        return optimizer, None
    return _in_place_of(optimizer)(_groups(optimizer), **_when(settings)), optimizer


def _one_bit(parameters: list[Any], settings: Settings) -> OneBitAdam:
    """Return the optimizer of that name.

    Raises: ConfigError where the file has gradients clipped, or ranks sum them several times in a step.
    """
    if settings.gradient_clipping:
        raise ConfigError(
            f"OneBitAdam with gradient_clipping={settings.gradient_clipping} (1.0 by default): after "
            'freeze_step ranks exchange momenta, and no gradients whose norm could be clipped: "gradient_'
            'clipping": 0; or AdamW'
        )
    batches = settings.batches
    if batches.steps > 1 and batches.ranks > 1 and settings.config.stage != 1:
        raise ConfigError(
            f"OneBitAdam with gradient_accumulation_steps={batches.steps}: after freeze_step ranks exchange "
            'momenta once in a step, of the sum of its backwards: "zero_optimization": {"stage": 1} keeps '
            "that until the step; or gradient_accumulation_steps of 1"
        )
    options = settings.optimizer.options if settings.optimizer is not None else {}
    return OneBitAdam(parameters, **options)


def _when(settings: Settings) -> dict[str, Any]:
    """Return the optimizer's arguments that say so: see [Note: when updates happen]."""
    one = settings.by_block or (settings.batches.steps == 1 and settings.managed_accumulation)
    early = one and not settings.gradient_clipping and not settings.check_overflow
    if early and not settings.speculate:
        return {"update": "backward"}
    return {"update": "forward", "speculate": False if settings.speculate is False else "auto"}


def _in_place_of(optimizer: Optimizer) -> Any:
    """Return infinity's class for a torch optimizer."""
    kind = type(optimizer)
    if kind is torch.optim.Adam and not any(group["weight_decay"] for group in optimizer.param_groups):
        return optimizers.AdamW  # the same arithmetic, for every state_dtype
    for ours in (optimizers.AdamW, optimizers.Adam, optimizers.SGD, optimizers.Adagrad, Muon):
        if kind is getattr(torch.optim, ours.__name__, None):  # Muon since torch 2.9
            return ours
    raise UnsupportedError(
        f"{kind.__module__}.{kind.__name__} cannot be replaced: give torch's AdamW, Adam, SGD, Adagrad or "
        "Muon, or one of infinity's"
    )


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a torch optimizer's param groups, for infinity's."""
    kind = type(optimizer)
    if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad's begins with 0
        raise UnsupportedError(f"{kind.__name__} has stepped already; call initialize before the first step")
    for group in optimizer.param_groups:
        for name in _NOT_OURS:
            if group.get(name):
                raise UnsupportedError(f"{kind.__name__}({name}=True) is not supported")
    own = MUONS if kind.__name__ == Muon.__name__ else OPTIONS[kind.__name__]
    kept = ("params", "initial_lr", *own, "initial_accumulator_value")
    groups = [{name: group[name] for name in kept if name in group} for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = float(group["lr"])
    return groups


def _scheduler(
    scheduler: Any, optimizer: OffloadedOptimizer | None, replaced: Optimizer | None, settings: Settings
) -> Any:
    if scheduler is None:
        if settings.scheduler is None or optimizer is None:
            return None
        return make_schedule(*settings.scheduler, optimizer)
    if not hasattr(scheduler, "step"):
        return scheduler(optimizer)
    of = getattr(scheduler, "optimizer", optimizer)
    if of is replaced and optimizer is not None and replaced is not None:
        scheduler.optimizer = optimizer
        _KeepsRates(optimizer)  # as torch's schedulers do, it patches the optimizer that it is made for
    elif of is not optimizer:
        raise ConfigError(
            f"{type(scheduler).__name__} belongs to another optimizer than initialize was given"
        )
    return scheduler


class _KeepsRates(LRScheduler):
    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _loader(
    data: Dataset[Any] | None,
    collate_fn: Callable[[Any], Any] | None,
    settings: Settings,
    model: nn.Module,
    place: Divided,
) -> tuple[Any, SequenceWarmup | None]:
    """Return the data loader, with batches of the step's length, in parts where ranks share a sequence; and
    what in it decides the lengths.
    """
    lengths, sharers = settings.curriculum, settings.config.sequence_parallel
    if data is None:
        if lengths is not None:
            raise ConfigError(
                "curriculum_learning needs initialize(training_data=...), whose loader it is for. For a "
                "loader of your own leave it out, and wrap that: infinity.SequenceWarmup(loader, "
                f"{lengths.shortest}, {lengths.longest}, schedule={lengths.schedule!r}, ...)"
            )
        return None, None
    if settings.batches.micro is None:
        raise ConfigError("training_data needs train_batch_size or train_micro_batch_size_per_gpu")
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(
            cast("Any", data), num_replicas=len(place.data) // sharers, rank=place.rank // sharers
        )
    loader: Any = DataLoader(
        data,
        settings.batches.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=settings.drop_last,
    )
    warmup: SequenceWarmup | None = None
    if lengths is not None:
        loader = warmup = SequenceWarmup.of(loader, lengths, settings.batches.steps)
    return (SequenceParallelLoader(loader, model) if sharers > 1 else loader), warmup
