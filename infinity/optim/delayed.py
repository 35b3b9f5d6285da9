"""update="delayed": after a warm-up each step applies the gradients of the step before.

[Note: one step stale]
ZeRO-Offload's delayed parameter update (arXiv 2101.06840, 5.2). From step `delayed_after` + 1 on, step()
keeps the gradients that it finds, and applies those that the step before has kept, with the options of param
groups as they are now, and clips those. So the first such step applies nothing, and the model of step i + 1
has the gradients of step i - 1. How many steps were made is told by the parameters' own counts, so that the
warm-up goes on where a checkpoint, or a durable run, left it.

ZeRO-Offload hides the CPU's update behind the next forward and backward so. Here update="forward" hides it
behind the next forward's fetches already, without a stale gradient: this is for who wants to compare.

Gradients that are kept stay where they are, in host memory, as those of the next backward come: that has to
have room for both. They are what `p.grad` stood for; zero_grad() drops that alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from infinity.engine.engine import Engine
from infinity.errors import HostMemoryError, UnsupportedError
from infinity.gradients.grad_tensor import OffloadedGradient
from infinity.gradients.gradient import Form, Gradient
from infinity.optim.ownership import ParameterPlace
from infinity.sizes import format_size

DELAYED_AFTER = 40
"""Steps of the warm-up, as ZeRO-Offload's authors have it."""


class Delaying(Protocol):
    """What is needed of an optimizer."""

    mine: dict[int, ParameterPlace]
    param_groups: list[dict[str, Any]]

    @property
    def steps_done(self) -> int:
        """Updates that a parameter has had, at most."""


class DelayedGradients:
    """The gradients of one optimizer's last step, which the next one applies: see [Note: one step stale].

    What a durable run commits of them is tracked: see Tracking.
    """

    def __init__(self, optimizer: Delaying, after: int) -> None:
        """Keep none so far. after: steps of the warm-up.

        Raises: ValueError.
        """
        if after < 0:
            raise ValueError(f"delayed_after={after}: expected 0 or more steps")
        self._after = after
        self._optimizer = weakref.ref(optimizer)
        self._held: list[tuple[nn.Parameter, Gradient]] = []

    def __len__(self) -> int:
        return len(self._held)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let `p.grad` be what a step applies, while that lasts.

        Raises: UnsupportedError where gradients of two steps were added up; HostMemoryError where both have
        no room.
        """
        if self._own.steps_done < self._after:
            yield
            return
        fresh = self._take()
        if not self._held:
            self._make_room(fresh)
        with self._applying(fresh, [(one, gradient) for one, _, gradient in fresh]):
            yield

    @contextlib.contextmanager
    def catch_up(self) -> Iterator[None]:
        """The same for a step that applies what is kept, and keeps nothing."""
        with self._applying(self._present(), []):
            yield

    def drop(self) -> None:
        """Keep none of them."""
        self._held = []

    @contextlib.contextmanager
    def _applying(
        self,
        fresh: list[tuple[nn.Parameter, torch.Tensor, Gradient]],
        kept: list[tuple[nn.Parameter, Gradient]],
    ) -> Iterator[None]:
        """Let a step apply what is kept, and keep `kept`; one that raises before it has decided an update
        changes nothing.
        """
        applied, self._held, done = self._held, kept, self._own.steps_done
        try:
            with self._standing_for(applied, fresh):
                yield
        except BaseException:
            if self._own.steps_done == done:
                self._held = applied
            raise

    @property
    def _own(self) -> Delaying:
        optimizer = self._optimizer()
        if optimizer is None:
            raise AssertionError("the optimizer that keeps these gradients is gone")
        return optimizer

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [one for group in self._own.param_groups for one in group["params"]]

    def _engine(self, parameter: nn.Parameter) -> Engine:
        return self._own.mine[id(parameter)].engine

    @contextlib.contextmanager
    def _standing_for(
        self,
        applied: list[tuple[nn.Parameter, Gradient]],
        fresh: list[tuple[nn.Parameter, torch.Tensor, Gradient]],
    ) -> Iterator[None]:
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            for parameter, _, _ in fresh:
                parameter.grad = None
            for parameter, gradient in applied:
                store = self._engine(parameter).gradients
                parameter.grad = OffloadedGradient(parameter, gradient, store)
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for parameter, _ in applied:
                    parameter.grad = None
                for parameter, tensor, _ in fresh:
                    parameter.grad = tensor

    def _present(self) -> list[tuple[nn.Parameter, torch.Tensor, Gradient]]:
        """Return the parameters that have a gradient, with it."""
        found = []
        for parameter in self._parameters:
            gradient = self._engine(parameter).arrivals.gradient_of(parameter)
            with torch._C.DisableTorchFunctionSubclass():
                tensor = parameter.grad
            if gradient is not None and tensor is not None:
                found.append((parameter, tensor, gradient))
        return found

    def _make_room(self, fresh: list[tuple[nn.Parameter, torch.Tensor, Gradient]]) -> None:
        """Let fields that were placed in host memory leave it, for as many gradients more as these."""
        needed: Counter[Engine] = Counter()
        for parameter, _, gradient in fresh:
            needed[self._engine(parameter)] += 0 if gradient.tensor is None else gradient.tensor.nbytes
        for engine, nbytes in needed.items():
            if engine.pins is not None and engine.kept.free_nbytes < nbytes:
                engine.pins.make_room(nbytes)

    def _take(self) -> list[tuple[nn.Parameter, torch.Tensor, Gradient]]:
        """Return the gradients that are to be kept now."""
        fresh, held = self._present(), {id(gradient) for _, gradient in self._held}
        for parameter, _, gradient in fresh:
            if id(gradient) in held:
                raise UnsupportedError(
                    f'{gradient.unit.name}: update="delayed" keeps the gradients of a step for the next one, '
                    "and this backward was added to them. Call zero_grad() behind each step()."
                )
            if gradient.form is Form.SPILLED:
                engine = self._engine(parameter)
                least = engine.least_total(more_nbytes=engine.gradients_nbytes())
                raise HostMemoryError(
                    f'{gradient.unit.name}: update="delayed" keeps the gradients of two steps in host memory,'
                    f" {format_size(2 * engine.gradients_nbytes())} in all, and "
                    f"host_memory={format_size(engine.budget.total_nbytes)} has no room for this one beside "
                    f"what else it holds. With host_memory={format_size(least)} it would; or use "
                    'update="forward".'
                )
        return fresh

    # As a durable run commits it

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the gradients that are kept, by the numbers of their parameters."""
        numbers = {id(one): number for number, one in enumerate(self._parameters)}
        return {
            str(numbers[id(parameter)]): {
                "values": None if gradient.form is Form.ZERO else gradient.await_tensor().detach().clone(),
                "scale": float(gradient.scale),
                "checked": gradient.checked,
            }
            for parameter, gradient in self._held
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep these gradients."""
        parameters = self._parameters
        self._held = []
        for number, one in state_dict.items():
            parameter = parameters[int(number)]
            engine = self._engine(parameter)
            unit, index = engine.parameters.unit_of(parameter)
            gradient = Gradient(unit, index, engine.kept)
            if one["values"] is not None:
                gradient = engine.gradients.arrive(unit, index, one["values"], keep=True)
            if one["scale"] != 1.0:
                gradient.multiply(one["scale"])
            if one["checked"]:
                gradient.was_seen_finite()
            self._held.append((parameter, gradient))


def check_delayed(engine: Engine, kind: str) -> None:
    """See that an engine's gradients can be kept for a step.

    Raises: UnsupportedError saying why not.
    """
    why = ""
    if not engine.device.is_host:
        why = "an accelerator computes"
    elif engine.ranks.size > 1:
        why = "several ranks train"
    elif engine.residency.routed:
        why = "experts, or rows of an embedding, are slices, whose gradients wait in their records"
    elif engine.weights.overflows:
        why = "fp16 leaves out steps that have overflowed"
    if why:
        raise UnsupportedError(
            f'{kind}(update="delayed"): {why}. Use update="forward", which hides the same work behind the '
            "next forward, exactly."
        )
