"""What uses of units found: hits, misses, stalls, and how many steps and plans there were."""

from __future__ import annotations

from dataclasses import dataclass, field

STALLS = ("read", "slot", "update")
"""Why computing waits for a unit: it is being read; its read waits for a free slot; it is being updated."""


@dataclass(slots=True)
class Counts:
    """What happened since the start: uses, and how they were met."""

    uses: int = 0
    hits: int = 0
    """Uses that found the unit resident, or on its way."""
    misses: int = 0
    """Uses that had to ask for it."""
    divergences: int = 0
    """Uses that were not the next one of the plan."""
    stalls_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STALLS, 0.0))
    """Seconds that computing waited for a unit, by cause."""
    steps: int = 0
    rounds: int = 0
    """Forwards without gradients."""
    plans: int = 0

    def count_plan(self) -> None:
        """A plan was made."""
        self.plans += 1

    def count_step(self) -> None:
        """A step was closed."""
        self.steps += 1

    def count_round(self) -> None:
        """A forward without gradients has begun."""
        self.rounds += 1

    def count_use(self) -> None:
        """A unit was used."""
        self.uses += 1

    def count_met(self, *, missed: bool = False) -> None:
        """A use found its unit resident or on its way, or had to ask for it."""
        self.misses += missed
        self.hits += not missed

    def note_divergences(self, so_far: int) -> None:
        """So many uses were not the next one of the plan."""
        self.divergences = so_far

    def stalled(self, cause: str, seconds: float) -> None:
        """Computing waited for a unit."""
        self.stalls_s[cause] += seconds
