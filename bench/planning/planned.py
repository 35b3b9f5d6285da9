"""The result of planning one model at one setting."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.errors import ConfigError, HostMemoryError
from infinity.planning.activations import Method
from infinity.planning.capacity import CONTEXT_NBYTES, Capacity, Need, needs
from infinity.planning.crossing import BETWEEN, WITHIN, Crossing, crossings
from infinity.planning.demand import Demand, as_recomputed, demand, least_host_nbytes
from infinity.planning.expert_tokens import TokenTraffic, token_traffic
from infinity.planning.forecast import Forecast, forecast
from infinity.planning.lookups import in_blocks_of_rows
from infinity.planning.outline import Act, Outline, timed
from infinity.planning.setting import Setting
from infinity.planning.shared_units import in_shared_units
from infinity.planning.simulator import Rates
from infinity.planning.split import UpdateSplit, split_updates
from infinity.planning.trace import Phase
from infinity.sizes import format_size


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned, with which machines."""

    outline: Outline
    setting: Setting
    machine: Capacity = field(default_factory=Capacity)
    seconds: float | None = None
    """That forward and backward of a step compute, with recomputation; None for no forecast."""
    rates: Rates | None = None
    """Of one rank; None for no forecast."""
    links: tuple[float | None, float | None] = (None, None)
    """Bytes a second between ranks of one machine, and of several; None: as in `rates`."""
    whole: Outline | None = None
    """The model of which the outline is what one rank has; None where it has all of it."""
    fills_gpu: bool = True
    """Whether parameters may have what the GPU has left, at most the setting's device memory, and not exactly
    that.
    """

    def changed(self, **changes: Any) -> Question:
        """Return the same question with other fields of Setting, or of its Method: computing takes as much
        longer as there is more of it.
        """
        names = Method.__dataclass_fields__
        of_method = {name: value for name, value in changes.items() if name in names}
        others = {name: value for name, value in changes.items() if name not in names}
        method = replace(self.setting.method, **of_method)
        setting = replace(self.setting, **others, method=method)
        more = _operations(self.outline, setting) / max(_operations(self.outline, self.setting), 1.0)
        seconds = None if self.seconds is None else self.seconds * more
        return replace(self, setting=setting, seconds=seconds)


def flops(outline: Outline, tokens: int, sequence: int, micro_batches: int = 1) -> float:
    """Return the operations of a step's forwards and backwards, with recomputation where there is some."""
    script = outline.script(tokens, sequence, micro_batches)
    return sum(act.amount for act in script if act.verb == "compute")


def _operations(outline: Outline, setting: Setting) -> float:
    method = setting.method
    taken = as_recomputed(outline, setting)
    return flops(taken, method.tokens, method.sequence, setting.micro_batches)


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to one question."""

    question: Question
    least_host_nbytes: int
    """Of each machine."""
    demand: Demand | None
    """None where host_memory is too small; `refusal` says why."""
    refusal: str
    needs: tuple[Need, ...]
    forecast: Forecast | None
    """None if a rate of the disk, or of computing, is not known; also of a training that does not fit."""
    planning_s: float
    split: UpdateSplit | None = None
    """Of updates between backward and forward, by update="auto"; None without a forecast."""

    @property
    def outline(self) -> Outline:
        """What was planned."""
        return self.question.outline

    @property
    def whole(self) -> Outline:
        """The model, all of it."""
        return self.question.whole or self.question.outline

    @property
    def setting(self) -> Setting:
        """As it was planned: on a GPU with the device memory that is left for parameters."""
        return self.demand.setting if self.demand is not None else self.question.setting

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one rank."""
        return self.setting.method.tokens

    @property
    def short(self) -> bool:
        """Whether something that is known is too small."""
        return self.demand is None or any(need.short_nbytes for need in self.needs)

    @property
    def uncounted(self) -> str:
        """What cannot be counted, and why; "" where everything is."""
        if self.demand is None or self.demand.activations is not None:
            return ""
        return f"the activations of {self.outline.name} ({self.outline.uncounted or 'they are not known'})"

    @property
    def fits(self) -> bool:
        """Whether everything is counted, and nothing that is known is too small."""
        return not (self.short or self.uncounted)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it does not fit, with numbers."""
        short = tuple(str(need) for need in self.needs if need.short_nbytes)
        large = too_large_layer(self)
        short += (large,) if large else ()
        return (self.refusal, *short) if self.refusal else short

    @property
    def sent(self) -> TokenTraffic | None:
        """What a rank sends of tokens to experts in a step; None where they are not divided among ranks."""
        return token_traffic(self.outline, self.setting)

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """What a rank sends to others in a step."""
        return crossings(self.outline, self.setting)

    def link(self, place: str) -> float | None:
        """Return the bytes a second of collectives of ranks that lie so; None if it is not known."""
        rates, known = self.question.rates, self.question.links[place != WITHIN]
        return known if known is not None or rates is None else rates.link

    def crossing_s(self, one: Crossing) -> float | None:
        """Return how long a crossing takes; None if the speed of a link that it needs is not known."""
        near, far = self.link(WITHIN), self.link(BETWEEN)
        if (one.nbytes > one.between_nbytes and not near) or (one.between_nbytes and not far):
            return None
        return one.seconds(near or math.inf, far or math.inf)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; activations on NVMe, and what is not weights or gradients between ranks, are
        taken to be moved while nothing else is.
        """
        told, rates = self.forecast, self.question.rates
        if told is None or rates is None or self.demand is None:
            return None
        moved = 2 * self.demand.offloaded_nbytes * self.setting.micro_batches
        sent = sum(
            seconds
            for one in self.crossings
            if one.by != "data" and (seconds := self.crossing_s(one))  # the forecast has that
        )
        return told.seconds + moved / rates.disk.mixed + sent

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together; None without a forecast."""
        seconds = self.step_s
        trained = self.setting.data_ranks * self.setting.micro_batches * self.tokens
        return trained / seconds if seconds else None

    @property
    def written_nbytes(self) -> int:
        """Bytes that a step writes to the NVMe of one machine."""
        if self.demand is None:
            return 0
        activations = self.demand.offloaded_nbytes * self.setting.micro_batches
        return (self.demand.written_nbytes + activations) * self.setting.local_ranks


def answer(question: Question) -> Planned:
    """Plan one question: see demand, capacity and forecast."""
    outline, setting, machine = question.outline, question.setting, question.machine
    began = time.perf_counter()
    need, refusal, told, split = None, "", None, None
    try:
        outline = in_shared_units(in_blocks_of_rows(outline, setting), setting)
        need = demand(outline, setting)
        if question.fills_gpu and machine.gpu_nbytes is not None and setting.device_nbytes is not None:
            left = machine.gpu_nbytes - need.working_nbytes - CONTEXT_NBYTES
            if left < setting.device_nbytes:
                need = demand(outline, replace(setting, device_nbytes=max(left, 1)))
    except (HostMemoryError, ConfigError) as error:
        refusal = str(error)
    found = needs(need, machine) if need is not None else ()
    planning_s = time.perf_counter() - began
    if need is not None and question.seconds is not None and question.rates is not None:
        method = setting.method
        taken = as_recomputed(outline, setting)
        script = taken.script(method.tokens, method.sequence, setting.micro_batches)
        script = timed(script, question.seconds)
        split = split_of(need, script, question.rates)
        limits = need.limits if split is None else replace(need.limits, early=frozenset(split.early))
        told = forecast(script, need.plan, need.units, limits, question.rates)
    least = least_host_nbytes(outline, setting)
    return Planned(question, least, need, refusal, found, told, planning_s, split)


def split_of(need: Demand, script: Sequence[Act], rates: Rates) -> UpdateSplit | None:
    """Divide updates between the halves of a step, where the setting leaves that to the run."""
    if not need.setting.may_split_updates:
        return None
    computes = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
    for act in script:
        if act.verb == "compute":
            computes[act.phase] += act.amount
    halves = computes[Phase.FORWARD], computes[Phase.BACKWARD]
    candidates = [index for index, unit in enumerate(need.units) if unit.trainable]
    return split_updates(halves, need.plan, need.units, candidates, rates)


def too_large_layer(planned: Planned) -> str:
    """Say which layer alone is more than a GPU holds, if one is: its weights and their gradient."""
    gpu, width = planned.question.machine.gpu_nbytes, 4 if planned.setting.dtype == "fp32" else 2
    parts = in_blocks_of_rows(planned.outline, planned.setting).parts  # a lookup uses blocks, not the whole
    largest = max((part for part in parts if not part.idle), key=lambda part: part.numel)
    nbytes = 2 * width * largest.numel
    if gpu is None or planned.setting.device_nbytes is None or nbytes <= gpu:
        return ""
    return (
        f"{largest.name} alone takes {format_size(nbytes)} with its gradient, more than the GPU's "
        f"{format_size(gpu)}"
    )
