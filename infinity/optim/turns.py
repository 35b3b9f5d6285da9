"""The part of an optimizer that looks whether its updates may be made by turns, with update="auto"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from infinity.engine.engine import Engine
from infinity.errors import UnsupportedError
from infinity.gradients.gradient import Form, Gradient


class TakingTurns:
    """See [Note: updates by turns] in gradients/early.py."""

    param_groups: list[dict[str, Any]]
    seed: int
    max_norm: float | None
    _engines: dict[int, Engine]
    _options_then: Iterable[Any] = ()
    """What updates depended on when the step's backward ended; empty before that."""

    def note_options(self) -> None:
        """See arrivals.Updater."""
        self._options_then = self._options_now()

    def _options_now(self) -> list[Any]:
        """Return all that updates depend on beside gradients and state."""
        groups = [
            {
                name: one.tolist() if isinstance(one, torch.Tensor) else one
                for name, one in group.items()
                if name != "params"
            }
            for group in self.param_groups
        ]
        return [self.seed, *groups]

    def look_at_turns(self, gradients: list[Gradient]) -> None:
        """See in step() whether the backward may make updates, by all gradients that the step found.

        Raises: UnsupportedError where it has made some that this step would make otherwise.
        """
        then, self._options_then = self._options_then, ()
        changed = bool(then) and then != self._options_now()
        applied = next((one for one in gradients if one.form is Form.APPLIED), None)
        if changed and applied is not None:
            raise UnsupportedError(
                f"{applied.unit.name}: options of param groups were changed between the backward and step(), "
                'and update="auto" has made its update in the backward, as it does where the first steps '
                'change none. Change them behind step(), or use update="forward".'
            )
        why = "max_norm needs all gradients" if self.max_norm is not None else ""
        if changed:
            why = "options of param groups change between the backward and step()"
        elif any(one.asked for one in gradients):
            why = "gradients are read, set, clipped or added up before step()"
        for engine in self._engines.values() if why else ():
            engine.arrivals.early.stop(why)
