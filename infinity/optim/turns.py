"""The part of an optimizer that looks whether its updates may be made by turns, with update="auto"."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from infinity.engine.engine import Engine
from infinity.errors import UnsupportedError
from infinity.gradients.gradient import Form, Gradient
from infinity.optim.ownership import ParameterPlace


class TakingTurns:
    """See [Note: updates by turns] in gradients/early.py."""

    param_groups: list[dict[str, Any]]
    seed: int
    max_norm: float | None
    mine: dict[int, ParameterPlace]
    _applied: set[int]
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

    def check_none_is_dropped(self, found: Container[int]) -> None:
        """See that no gradient is dropped whose update the backward has made. found: the id() of each
        parameter that has one.

        Raises: UnsupportedError naming a parameter.
        """
        dropped = next((one for one in self._applied if one not in found), None)
        if dropped is not None:
            engine, parameter = self.mine[dropped].engine, self._parameter(dropped)
            raise UnsupportedError(
                f"{engine.parameters.name_of(parameter)}: its gradient was dropped between the backward and "
                'step(), and update="auto" has made its update in the backward, as it does where the first '
                'steps drop none. Use update="forward".'
            )

    @contextlib.contextmanager
    def telling_others(self) -> Iterator[None]:
        """Let the other ranks, if there are some, know of an UnsupportedError inside the `with`: they wait
        for this one, and would else know it as one that does not come.
        """
        try:
            yield
        except UnsupportedError as error:
            for engine in self._engines.values():
                engine.ranks.post_failure(f"{type(error).__name__}: {error}", ends=False)
            raise

    def _parameter(self, key: int) -> nn.Parameter:
        parameters: Iterable[nn.Parameter] = (one for group in self.param_groups for one in group["params"])
        return next(one for one in parameters if id(one) == key)

    def look_at_turns(self, gradients: list[Gradient], found: Container[int]) -> None:
        """See in step() whether the backward may make updates, by all gradients that the step found. found:
        the id() of their parameters.

        Raises: UnsupportedError where it has made some that this step would make otherwise.
        """
        self.check_none_is_dropped(found)
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
        for engine in self._engines.values():
            early = engine.arrivals.early
            if not why and any(one in self.mine and one not in found for one in early.came):
                why = "gradients are dropped before step()"
            if why:
                early.stop(why)
