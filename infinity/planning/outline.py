"""A model without its numbers: shapes of its units, and the order in which a step uses them. Pure: no torch,
no I/O.

[Note: a step as a script]
A forward uses unit after unit. Blocks whose activations are recomputed use theirs again, in the same order,
in the backward, and hold them until the gradients come, last unit first. What lies outside such blocks is
used once more where its gradient needs the weight: an embedding's does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infinity.planning.activations import Activations
from infinity.planning.trace import Phase, Trace, Use


@dataclass(frozen=True, slots=True)
class UnitOutline:
    """One unit: a module's own parameters."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    looked_up: bool = False
    """Whether rows are looked up, as in nn.Embedding: no arithmetic, and its gradient needs no weight."""
    attention: int = 0
    """Width of the attention that runs right before it; 0 for none."""
    trainable: bool = True
    active: float = 1.0
    """The share of its matrices that computes with each token; below 1 for experts."""
    idle: bool = False
    """Whether no token of a step is routed to it: it is stored, and nothing of it moves."""
    share: float = 1.0
    """The share of the steps that use it; below 1 for a slice: in another step, others are used."""
    divided: bool = False
    """Whether ranks divide it among them with others of its kind: experts, with expert_parallel. One that is
    divided and idle may be another rank's: see `elsewhere`.
    """
    elsewhere: bool = False
    """Whether another rank has it, and this one nothing of it."""
    in_tiles: bool = False
    """Whether it is a tile of a larger weight, and is cut no further."""

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        return sum(map(math.prod, self.shapes))

    def flops(self, tokens: int, sequence: int) -> float:
        """Operations of its forward for `tokens` tokens in sequences of `sequence`; attention is causal."""
        matrices = sum(math.prod(shape) for shape in self.shapes if len(shape) > 1)
        per_token = 0 if self.looked_up else self.active * matrices + self.attention * sequence
        return 2.0 * tokens * per_token


@dataclass(frozen=True, slots=True)
class Stage:
    """Units that run one after the other, by index, in this order."""

    units: tuple[int, ...]
    recomputed: bool = False
    """Whether the backward recomputes it."""


@dataclass(frozen=True, slots=True)
class Act:
    """One line of the script of a step.

    "use": the unit has to be there. "compute": `amount` of work, operations or seconds. "release": nobody
    needs the unit any more. "gradient": the same, and its gradient has come.
    """

    verb: Literal["use", "compute", "release", "gradient"]
    unit: int
    phase: Phase = Phase.FORWARD
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Outline:
    """A model: its units in the order of its modules, and its stages in the order of the forward."""

    name: str
    parts: tuple[UnitOutline, ...]
    stages: tuple[Stage, ...]
    activations: Activations | None = None
    """What it keeps of a token; None where that is not known."""
    uncounted: str = ""
    """Why it is not known."""

    def __post_init__(self) -> None:
        """Check that every unit exists.

        Raises: ValueError naming what does not, and for a model without parameters.
        """
        used = {unit for stage in self.stages for unit in stage.units}
        if not used or not self.parts:
            raise ValueError(f"{self.name}: no parameter is used by any module: there is nothing to plan")
        if strange := sorted(used - set(range(len(self.parts)))):
            raise ValueError(f"{self.name}: stages use {strange}, and there are {len(self.parts)} units")

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(part.numel for part in self.parts)

    @property
    def active_parameters(self) -> int:
        """Elements that compute with each token: of experts, those that it is routed to."""
        return round(sum(part.active * part.numel for part in self.parts))

    def not_recomputed(self) -> Outline:
        """Return the same model without activation checkpointing."""
        return replace(self, stages=tuple(replace(stage, recomputed=False) for stage in self.stages))

    def keeping(self, kept: Sequence[bool]) -> Outline:
        """Return the same model with some of its blocks not recomputed; kept: of each that is, in order."""
        left = iter(kept)
        stages = (
            replace(one, recomputed=not next(left, False)) if one.recomputed else one for one in self.stages
        )
        return replace(self, stages=tuple(stages))

    def script(self, tokens: int = 1, sequence: int = 1, micro_batches: int = 1) -> tuple[Act, ...]:
        """Return the acts of a step, with operations as amounts: see [Note: a step as a script].

        tokens: of one micro-batch.
        """
        flops = [part.flops(tokens, sequence) for part in self.parts]
        once = [*self._forward(flops), *self._backward(flops)]
        return tuple(once * micro_batches)

    def _forward(self, flops: Sequence[float]) -> Iterator[Act]:
        for stage in self.stages:
            for unit in stage.units:
                yield Act("use", unit)
                yield Act("compute", unit, amount=flops[unit])
                yield Act("release", unit)

    def _backward(self, flops: Sequence[float]) -> Iterator[Act]:
        back = Phase.BACKWARD
        left = [0] * len(self.parts)  # a gradient is complete after the last of its uses
        for stage in self.stages:
            for unit in stage.units:
                left[unit] += 1
        for stage in reversed(self.stages):
            if stage.recomputed:
                for unit in stage.units:
                    yield Act("use", unit, back)
                    yield Act("compute", unit, back, flops[unit])
            for unit in reversed(stage.units):
                part = self.parts[unit]
                if not stage.recomputed and not part.looked_up:
                    yield Act("use", unit, back)
                yield Act("compute", unit, back, flops[unit] * (2 if part.trainable else 1))
                left[unit] -= 1
                yield Act("release" if left[unit] or not part.trainable else "gradient", unit, back)


def trace_of(script: Sequence[Act]) -> Trace:
    """Return the uses of a script."""
    return tuple(Use(act.phase, act.unit) for act in script if act.verb == "use")


def timed(script: Sequence[Act], seconds: float) -> tuple[Act, ...]:
    """Return a script whose computing takes `seconds` in all, in the proportions of its amounts.

    Raises: ValueError for a script without any operations, which has no proportions.
    """
    total = sum(act.amount for act in script)
    if total <= 0:
        raise ValueError("a step without a single operation: how long it takes cannot be divided among units")
    return tuple(
        Act(act.verb, act.unit, act.phase, act.amount * seconds / total) if act.amount else act
        for act in script
    )
