"""The result of planning one model at one setting."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.planning.demand import Demand, Setting
from infinity.planning.forecast import Forecast
from infinity.planning.outline import Outline


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of one model at one setting."""

    outline: Outline
    setting: Setting
    tokens: int
    """Of a micro-batch on one rank."""
    sequence: int
    least_host_nbytes: int
    demand: Demand | None
    """None if it does not fit; `refusal` says why."""
    refusal: str
    forecast: Forecast | None
    """None if a rate of the disk, or of computing, is not known."""
    planning_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together; None without a forecast."""
        if self.forecast is None:
            return None
        return self.setting.ranks * self.setting.micro_batches * self.tokens / self.forecast.seconds

    @property
    def written_nbytes(self) -> int:
        """Bytes that a step writes to the NVMe of one machine."""
        return self.demand.written_nbytes * self.setting.local_ranks if self.demand else 0
