"""How many tokens of a row random-LTD's layers keep, by step: DeepSpeed's schedule. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infinity.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSchedule:
    """The tokens of a row that layers keep, after each number of steps ("fixed_linear" of DeepSpeed).

    shortest, longest: tokens at the beginning, and at the end. steps: how many it takes to get there, by as
    many tokens each. multiple: what the tokens are rounded down to a multiple of, until they are `longest`.

    Raises: ConfigError, with the numbers.
    """

    shortest: int
    longest: int
    steps: int
    multiple: int = 16

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("shortest", "longest", "steps", "multiple"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a whole number above 0")
        if self.shortest > self.longest:
            raise ConfigError(f"shortest={self.shortest} is above longest={self.longest}")
        if self.shortest < min(self.multiple, self.longest):  # of equal ones nothing is rounded
            raise ConfigError(
                f"shortest={self.shortest} is below multiple={self.multiple}, and would be rounded down to "
                f"no token at all; choose a shortest of {self.multiple} or more, or a smaller multiple"
            )

    def after(self, steps: int) -> int:
        """Return the tokens that are kept after so many steps: 0 for the first one."""
        if self.shortest == self.longest:
            return self.longest
        share = float(steps) / self.steps
        tokens = math.floor(share * (self.longest - self.shortest) + self.shortest)
        return min(tokens - tokens % self.multiple, self.longest)
