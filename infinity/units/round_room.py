"""What rounds have beside steps: memory that gradients would take on their way, and cores that torch's
threads leave to the lane.

Gradients come in steps alone. So in rounds, where the CPU computes, the share of those on their way is room
for more units that wait. A KV cache on NVMe brings keys and values through that share: then it stays.

Where a round reads, the thread that computes waits for the disk most of the time, and meanwhile torch's other
threads look for work on cores that reading needs: so these sleep. Where all is in memory they are quicker
awake.
"""

from __future__ import annotations

from infinity import kernels
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.plan import Plan
from infinity.storage.memory import Ledger


class RoundRoom:
    """Lends both to rounds. Used by the residency, on the thread that computes."""

    def __init__(self, window: Ledger, outgoing: OutgoingShare | None, *, on_host: bool) -> None:
        """window: of units that wait. outgoing: None where none is lent. on_host: the CPU computes."""
        self._window, self._outgoing, self._on_host = window, outgoing, on_host
        self._threads = kernels.SleepingThreads()
        self._lent_nbytes = 0

    def begin(self) -> None:
        """A round begins."""
        if self._outgoing is None or (self._lent_nbytes > 0) is not self._outgoing.used_in_rounds:
            return
        if self._lent_nbytes:
            self._give_back()
        else:
            self._lent_nbytes = self._outgoing.lend()
            self._window.resize(self._window.limit_nbytes + self._lent_nbytes)

    def follow(self, plan: Plan) -> None:
        """The round that begins goes by this plan."""
        self._threads.set(asked=self._on_host and plan.reads)

    def end(self) -> None:
        """No round follows, for now."""
        self._threads.set(asked=False)
        self._give_back()

    def _give_back(self) -> None:
        if self._lent_nbytes and self._outgoing is not None:
            self._window.resize(self._window.limit_nbytes - self._lent_nbytes)
            self._outgoing.give_back(self._lent_nbytes)
            self._lent_nbytes = 0
