"""1-bit Adam: [Note: 1-bit Adam] in reference/one_bit.py, [Note: workers] in gradients/one_bit.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity import kernels
from infinity.engine.engine import Engine
from infinity.errors import UnsupportedError
from infinity.gradients.gradient import Form, Gradient
from infinity.lane.passes import CopyInPass
from infinity.optim.base import OffloadedOptimizer
from infinity.planning.together import Feature, features_of, why_not
from infinity.records.one_bit import FrozenScalars, all_worker_fields, recipe_of, worker_fields
from infinity.records.update_rules import Recipe
from infinity.units.optimizer_options import settle
from infinity.units.unit import Unit

_INSTEAD = 'use AdamW; Config(quantized_gradients="int4") sends gradients in a quarter of the bytes'


class OneBitAdam(OffloadedOptimizer):
    """1-bit Adam (Tang et al., arXiv 2102.02888): after `freeze_step` steps ranks send one bit an element.

    lr, betas, eps, weight_decay (decoupled): as AdamW, which it is up to step freeze_step, with its bits.
    From then on the variance stays as it is, and ranks exchange the signs of their momenta, with a scale
    for each 256 elements: 1/14 of the bytes of gradients in 16 bits. What that leaves out is added to what
    they send next. Of several machines with several ranks each, gradients are summed within each machine in
    their own type, and momenta go between machines. Momenta and errors take 8 bytes per parameter on each
    rank, of several machines on each machine, whose ranks divide them; they lie where the state lies, and
    durable runs commit them. `infinity.save` has neither: after `infinity.load`, and after any change of
    weights between steps, momenta begin with the common one, and errors with zeros. `p.grad` shows the
    momentum, once the variance is frozen. One rank exchanges nothing. seed: as AdamW; momenta and errors
    that ranks keep of what they send are fp32 with every state_dtype.

    Raises: ValueError for settings out of range, freeze_step below 1 among them, and for parameters that were
    not built in Init; UnsupportedError for fp16, masters in 24 bits, accelerators, meshes, and experts and
    rows that are built one by one.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if max_norm is not None:
            raise UnsupportedError(
                f"OneBitAdam(max_norm={max_norm}): after freeze_step ranks exchange momenta, and no "
                f"gradients whose norm could be clipped; leave it out, or {_INSTEAD}"
            )
        settle(OneBitAdam, None, options, params)
        self._versions: dict[Unit, int] = {}
        """Units whose momenta are exchanged, and their versions after the last step."""
        self._sent: dict[Unit, set[int]] = {}
        """Of these, the parameters whose momenta were exchanged since then."""
        defaults = {"lr": lr, "freeze_step": freeze_step, "betas": betas, "eps": eps}
        defaults["weight_decay"] = weight_decay
        self._alone = recipe_of(partial(self._scalars_of, exchanged=False))
        """For parameters of one rank."""
        super().__init__(params, defaults, recipe_of(partial(self._scalars_of, exchanged=True)), seed=seed)

    def recipe_of(self, parameter: torch.Tensor) -> Recipe:
        """See OffloadedOptimizer: ranks exchange momenta of their parameters, and one rank makes its own."""
        recipe = super().recipe_of(parameter)
        return recipe if self.mine[id(parameter)].engine.ranks.size > 1 else self._alone

    def _scalars_of(self, group: Mapping[str, Any], step: int, clip: float, *, exchanged: bool) -> Any:
        freeze_step = group["freeze_step"]
        if type(freeze_step) is not int or freeze_step < 1:
            raise ValueError(f"freeze_step={freeze_step!r}: expected a number of steps, 1 or more")
        beta1, beta2 = map(float, group["betas"])
        options = float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"])
        warm = kernels.AdamWScalars(*options, step, clip)
        if step <= freeze_step:
            return warm
        if clip != 1:
            raise UnsupportedError(
                f"OneBitAdam: gradients were scaled by {clip:.3g} in step {step}, after freeze_step="
                f"{freeze_step}, where ranks exchange momenta and no gradients: leave clip_grad_norm_ out "
                f"from then on, or {_INSTEAD}"
            )
        lr, _, _, eps, weight_decay = options  # a schedule may change a tensor before they are used
        own = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
        return FrozenScalars({**own, "freeze_step": freeze_step}, step, exchanged)

    # Room

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """See Owning."""
        for parameter in parameters:
            engine = self.mine[id(parameter)].engine
            _check(engine, parameter)
            engine.parameters.unit_of(parameter)[0].record.may_have(all_worker_fields(_workers(engine)))
            engine.gradients.send_momenta_of(self)
        super().take(parameters)

    def _missing(self, parameter: nn.Parameter) -> list[str]:
        engine = self.mine[id(parameter)].engine
        record = engine.parameters.unit_of(parameter)[0].record
        fields = all_worker_fields(_workers(engine))
        return [*super()._missing(parameter), *(name for name in fields if name not in record)]

    def _forget(self, engine: Engine, parameter: nn.Parameter) -> None:
        super()._forget(engine, parameter)
        self.state_assigned(parameter)

    def begin(self, parameters: Iterable[object]) -> None:
        """See OffloadedOptimizer. Momenta of workers that were committed go on."""
        super().begin(parameters)
        for parameter in (one for group in self.param_groups for one in group["params"]):
            unit = self.mine[id(parameter)].engine.parameters.unit_of(parameter)[0]
            self._versions[unit] = unit.version

    def state_assigned(self, parameter: nn.Parameter) -> None:
        """See ShowingState. Momenta of workers begin again with the next exchange."""
        self._versions.pop(self.mine[id(parameter)].engine.parameters.unit_of(parameter)[0], None)

    # gradients.one_bit.Momenta

    def sends(self, unit: Unit, indices: Collection[int]) -> bool:
        """See Momenta. Raises: UnsupportedError for parameters of one module that differ in this."""
        steps = [self._past_freeze(unit.parameters[index]) for index in indices]
        if any(steps) and not all(steps):
            raise UnsupportedError(
                f"{unit.name}: some of its parameters have made freeze_step steps, and others have not: "
                "OneBitAdam exchanges the momenta of a module's parameters together. Give them one "
                "freeze_step, and gradients from the first step on"
            )
        return any(steps)

    def _past_freeze(self, parameter: nn.Parameter) -> bool:
        if id(parameter) not in self.mine or self.superseded:
            return False
        group = self.param_groups[self.mine[id(parameter)].group]
        return self.counts.get(parameter, {}).get("step", 0) >= int(group["freeze_step"])

    def betas(self, unit: Unit, indices: Collection[int]) -> Mapping[int, float]:
        """See Momenta."""
        groups = {one: self.mine[id(unit.parameters[one])].group for one in indices}
        return {index: float(self.param_groups[group]["betas"][0]) for index, group in groups.items()}

    def check(self, unit: Unit, gradients: Sequence[Gradient]) -> None:
        """See Momenta. Momenta of workers begin here, or again."""
        if any(one.form is not Form.LOCAL for one in gradients):
            raise UnsupportedError(
                f"{unit.name}: a second backward before step(), after freeze_step={self._freeze_step(unit)}: "
                "OneBitAdam exchanges momenta once in a step. Run all backwards but the last in "
                f"`with infinity.no_sync(model):`, or {_INSTEAD}"
            )
        engine = self._engine(unit)
        engine.parameters.before_change()  # momenta and errors are those of this step from now on
        indices = {one.index for one in gradients}
        sent = self._sent.setdefault(unit, set())
        exchanged = all(
            self._counts[unit.parameters[index]]["step"] > self._freeze_step(unit) for index in indices
        )
        if not exchanged or self._versions.get(unit) != unit.version or indices & sent:
            _begin(engine, unit)  # or no step has used what was exchanged, which may not even be finite
            sent.clear()
        sent |= indices
        self._versions[unit] = unit.version

    def _freeze_step(self, unit: Unit) -> int:
        return int(self.param_groups[self.mine[id(unit.parameters[0])].group]["freeze_step"])

    def _decide(
        self, group: dict[str, Any], parameter: nn.Parameter, gradient: Gradient, factor: np.float32
    ) -> None:
        unit, frozen = gradient.unit, self._past_freeze(parameter)
        if gradient.form is Form.ZERO and frozen:
            raise UnsupportedError(
                f"{unit.name}: a gradient of zeros that no backward brought, after freeze_step="
                f"{group['freeze_step']}: call optimizer.zero_grad(), which sets gradients to None"
            )
        super()._decide(group, parameter, gradient, factor)
        if not frozen:
            self.state_assigned(parameter)  # the common momentum has gone on without them
        elif unit in self._versions:
            self._versions[unit] = unit.version
            self._sent.get(unit, set[int]()).discard(gradient.index)


def _workers(engine: Engine) -> int:
    """Return how many workers exchange momenta; 0 for one rank, which exchanges none."""
    ranks = engine.ranks
    return 0 if ranks.size == 1 else ranks.grid.machines if ranks.grid is not None else ranks.size


def _check(engine: Engine, parameter: nn.Parameter) -> None:
    """Raises: UnsupportedError where momenta of a parameter cannot be exchanged."""
    unit = engine.parameters.unit_of(parameter)[0]
    name = engine.parameters.name_of(parameter)
    used = {Feature.ONE_BIT: f"OneBitAdam of {name}"}
    if not engine.device.is_host:
        used[Feature.ACCELERATOR] = f"device={engine.ranks.device!r}"
    if engine.stages.mesh.several:
        used[Feature.MESH] = "a mesh over which the model is divided"
    if engine.stages.several:
        used[Feature.PIPELINE] = "a model in stages"
    asked = features_of(engine.config)
    if not unit.record.holders.are_all:
        used[Feature.EXPERT_PARALLEL] = asked[Feature.EXPERT_PARALLEL]
    if Feature.QUANTIZED_GRADIENTS in asked:
        used[Feature.QUANTIZED_GRADIENTS] = asked[Feature.QUANTIZED_GRADIENTS]
    why = why_not(used)
    if why is None and unit in engine.residency.routed and engine.ranks.size > 1:
        why = (
            f"OneBitAdam of {name}: the data decides whether it is used "
            '(Config(experts="whole") builds it as one parameter)'
        )
    if why is not None:
        raise UnsupportedError(f"{why}. Otherwise {_INSTEAD}")


def _begin(engine: Engine, unit: Unit) -> None:
    """Let the momenta of a worker be the common one, and its errors zeros. Every rank calls it."""
    record, ranks = unit.record, engine.ranks
    whole = torch.zeros(unit.layout.numel, dtype=torch.float32, device="cpu")
    for index, segment in enumerate(unit.layout.segments):
        common = engine.parameters.read_record(record, index, {"m": torch.float32})["m"]
        whole[segment.start : segment.stop] = common
    workers, near = _workers(engine), ranks.grid.ranks if ranks.grid is not None else 1
    share = record.shard.numel
    for worker in range(workers):
        first = (worker * near + ranks.rank % near) * share
        momentum, error = worker_fields(worker)
        begin = {momentum: whole[first : first + share].clone(), error: torch.zeros(share, device="cpu")}
        job = CopyInPass(record, record.tile_numel, 0, share, begin)
        engine.lane.submit(job, urgent=True)
        engine.lane.wait(job)
