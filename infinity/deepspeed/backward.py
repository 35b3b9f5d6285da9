"""The scale and the division of gradients in a DeepSpeedEngine's backwards.

[Note: any backward]
engine.backward(loss) is engine.scale(loss).backward(): the gradient that enters the graph at the loss is
multiplied by the loss scale, and divided by the accumulation steps. A script may also call loss.backward(),
or output.backward(gradient). Such gradients are divided when they arrive at the parameters, not at the
model's outputs: this divides each gradient once, whatever its path (a second loss, one that a module has
kept, a penalty on the weights, another engine's model). If the accumulation steps are a power of two, the
bits are those of engine.backward; otherwise they are those of dividing every gradient. Gradients that
underflow in fp16 without a loss scale are lost: such a backward is refused at its first gradient.

[Note: which backward is running]
The hook at a scaled loss writes a note. The note has to vanish when that backward ends, also when it raises.
So only a callback of the running graph task holds it: it is freed with the task.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.config.loss_scale import LossScale
from infinity.engine.engine import Engine
from infinity.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class Running:
    """A running backward of an engine: its loss was multiplied by `scale`, and divided by `divisor`."""

    by: Backwards
    divisor: int
    scale: float


_running: weakref.ref[Running] | None = None


def running() -> Running | None:
    """Return the running backward, if it began at a loss that an engine has scaled."""
    return None if _running is None else _running()


def _free(_note: Running) -> None:
    """Do nothing, with the note as an argument: see [Note: which backward is running]."""


class Backwards:
    """Divides and checks the gradients of one DeepSpeedEngine's model; see [Note: any backward]."""

    def __init__(
        self, engines: Sequence[Engine], divisor: int, scaling: LossScale | None, *, applies: bool
    ) -> None:
        """Receive the gradients of the model's `engines`. divisor: accumulation steps. applies: whether the
        optimizer applies gradients in the backward.
        """
        self._scaling = scaling
        self.count = 0
        """Backwards with gradients in this step."""
        self.divisor = divisor
        """Accumulation steps."""
        self._applies = applies
        self._engines = [weakref.ref(engine) for engine in engines]
        self._came = self._plain = False
        self._other: str | None = None
        for engine in engines:
            engine.gradients.receive_by(self._received)
            engine.hooks.backward_ended.append(self._ended)

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return 1.0 if self._scaling is None else self._scaling.value

    def begin_step(self) -> None:
        """Restart the count of backwards."""
        self.count = 0

    def divide_by(self, steps: int) -> None:
        """Change the number of accumulation steps."""
        self.divisor = steps

    def close(self) -> None:
        """Stop receiving gradients."""
        for engine in (one() for one in self._engines):
            if engine is None:
                continue
            if self._ended in engine.hooks.backward_ended:
                engine.hooks.backward_ended.remove(self._ended)
            engine.gradients.receive_plainly(self._received)

    def root(self, loss: torch.Tensor, divisor: int) -> torch.Tensor:
        """Return the tensor whose backward() to call: `loss`, scaled, with gradients divided by `divisor`."""
        if loss.numel() != 1 or not loss.requires_grad:
            graph = "" if loss.requires_grad else ", without a graph"
            raise ValueError(
                f"a loss of shape {tuple(loss.shape)}{graph}: expected one number that was computed from "
                "parameters, with gradients enabled. For other tensors call output.backward(gradient)."
            )
        scale = self.scale

        def begin(grad: torch.Tensor) -> torch.Tensor | None:
            global _running  # noqa: PLW0603 - one backward runs at a time
            note = Running(self, divisor, scale)
            _running = weakref.ref(note)
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_free, note))
            return grad / divisor if divisor > 1 else None

        alias = loss.view_as(loss)
        alias.register_hook(begin)
        return alias if scale == 1 else alias.float() * scale

    def _received(self, grad: torch.Tensor) -> torch.Tensor:
        """Divide a gradient that arrives at its parameter, unless its loss was divided."""
        note = running()
        if not self._came or self._plain != (note is None):
            self._begun(note)
        return grad / self.divisor if note is None and self.divisor > 1 else grad

    def _begun(self, note: Running | None) -> None:
        """Check the backward whose first gradient arrives."""
        if note is None and self.scale != 1:
            raise UnsupportedError(
                "loss.backward() with fp16, whose gradients need a loss that is multiplied by "
                f"{self.scale:g}: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        if self._other is not None and not any(one.grad is not None for one in self._parameters()):
            self._other = None
        if (
            note is not None
            and (note.divisor, note.scale) != (self.divisor, self.scale)
            and note.by is not self
        ):
            self._other = (
                "gradients are from another engine's backward, with a loss scale of "
                f"{note.scale:g} and {note.divisor} accumulation steps; here they are {self.scale:g} and "
                f"{self.divisor}"
            )
        if note is not None and note.by is not self and self._applies:
            raise UnsupportedError(
                "another engine's backward has reached this model, whose optimizer applies gradients in the "
                'backward: give initialize(optimizer=lambda p: infinity.AdamW(p, ..., update="forward")), or '
                "freeze the model meanwhile (requires_grad_(False))"
            )
        self._came, self._plain = True, note is None

    def _parameters(self) -> list[torch.nn.Parameter]:
        engines = [engine for one in self._engines if (engine := one()) is not None]
        return [parameter for engine in engines for unit in engine.units for parameter in unit.parameters]

    def _ended(self) -> None:
        self.count += self._came
        self._came = False

    def forget(self) -> None:
        """Note that the gradients were dropped."""
        self._other = None

    def check(self) -> None:
        """Check that the gradients have this engine's scale and divisor.

        Raises: UnsupportedError.
        """
        if self._other is not None:
            raise UnsupportedError(
                f"step(): {self._other}. Call zero_grad() before this engine's own backward, or give both "
                "engines the same settings."
            )
