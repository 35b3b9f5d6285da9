"""Lengths of sequences by step: the schedules of a warm-up by sequence length. Pure.

The four schedules are those of DeepSpeed's curriculum learning (arXiv 2108.06084), with the same lengths at
every step: "fixed_linear", "fixed_root", "fixed_discrete" and "custom".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.errors import ConfigError

SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
_TAKES = {
    "fixed_linear": ("steps", "multiple"),
    "fixed_root": ("steps", "multiple", "degree"),
    "fixed_discrete": ("lengths", "until"),
    "custom": ("function",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSchedule:
    """The tokens of a row at each step, counted from 1.

    shortest, longest: tokens at the beginning and at the end. schedule: "fixed_linear": grows by as many
    tokens each step, and is `longest` after `steps` of them; "fixed_root": with the `degree`-th root of the
    steps, fast at first; both in multiples of `multiple`. "fixed_discrete": lengths[i] up to and with step
    until[i], the last one from then on. "custom": what `function` of the step returns. A length once at
    `longest` stays there.

    Raises: ConfigError, naming what is missing, or does not belong to the schedule.
    """

    shortest: int
    longest: int
    schedule: str = "fixed_linear"
    steps: int | None = None
    multiple: int | None = None
    degree: float | None = None
    lengths: Sequence[int] | None = None
    until: Sequence[int] | None = None
    function: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        """Check what the schedule needs, and what it does not take."""
        if self.schedule not in SCHEDULES:
            expected = ", ".join(map(repr, SCHEDULES))
            raise ConfigError(f"schedule={self.schedule!r}: expected one of {expected}")
        for name in ("shortest", "longest"):
            _positive(name, getattr(self, name))
        if self.shortest > self.longest:
            raise ConfigError(f"shortest={self.shortest} is above longest={self.longest}")
        if self.schedule in ("fixed_linear", "fixed_root") and self.multiple is None:
            object.__setattr__(self, "multiple", 8)
        takes = _TAKES[self.schedule]
        for name in dict.fromkeys(one for names in _TAKES.values() for one in names):
            given = getattr(self, name) is not None
            if given and name not in takes:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: schedule={self.schedule!r} takes no {name}"
                )
            if not given and name in takes:
                raise ConfigError(f"schedule={self.schedule!r} needs {name}=...")
        for name in {"steps", "multiple", "degree"} & set(takes):
            _positive(name, getattr(self, name))
        self._check_lengths()

    def _check_lengths(self) -> None:
        if self.lengths is None or self.until is None:
            return
        if len(self.lengths) != len(self.until) + 1 or not self.until:
            raise ConfigError(
                f"lengths={list(self.lengths)}, until={list(self.until)}: expected one length more than "
                "steps, since the "
                "last one is for all further steps"
            )
        for length in self.lengths:
            _positive("lengths", length)
        if list(self.until) != sorted(set(self.until)):
            raise ConfigError(f"until={list(self.until)}: expected steps that grow")

    def after(self, length: int, step: int) -> int:
        """Return the length at a step, after one of `length`: the longest stays."""
        return self.at(step) if length < self.longest else length

    def at(self, step: int) -> int:
        """Return the length at a step, counted from 1, of a training that was not at its longest before."""
        if self.schedule == "custom" and self.function is not None:
            length = self.function(step)
            _positive(f"function({step})", length)
            return length
        if self.lengths is not None and self.until is not None:
            return next(
                (length for length, last in zip(self.lengths, self.until, strict=False) if step <= last),
                self.lengths[-1],
            )
        return self._grown(step, 1.0 if self.schedule == "fixed_linear" else float(self.degree or 1))

    def _grown(self, step: int, degree: float) -> int:
        steps, multiple = self.steps or 1, self.multiple or 1
        share: float = (float(step) / steps) ** (1.0 / degree)
        length = math.floor(share * (self.longest - self.shortest) + self.shortest)
        least = -(-self.shortest // multiple) * multiple
        return min(max(length - length % multiple, least), self.longest)


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r}: expected a number above 0")
    if name != "degree" and not isinstance(value, int):
        raise ConfigError(f"{name}={value!r}: expected a whole number")
