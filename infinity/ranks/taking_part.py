"""Which of several ranks take part in what some of them have nothing for.

[Note: taking part]
A stage of a pipeline that trains nothing makes no optimizer and clips nothing, so nobody calls it when the
others sum a norm. But it runs a forward, and before its first one with gradients it says in the store of the
processes whether it trains; so does every other. A schedule runs all stages' forwards before any of them has
all its gradients, so that what is asked for then is there, or that rank will not come at all. Ranks that take
part are connected by themselves where not all do. What a rank has said holds: which parameters train is
settled before the first step.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from datetime import timedelta

from infinity.errors import RanksError, UnsupportedError
from infinity.ranks.group import Ranks
from infinity.ranks.groups import store

_before: Counter[tuple[int, ...]] = Counter()
"""How many of these this process has had of the same ranks: part of their name, as of an engine's groups."""


class TakingPart:
    """See [Note: taking part]."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        """Know the ranks that may take part. timeout_s: how long to wait for what they say."""
        self._ranks, self._timeout_s = ranks, timeout_s
        members = tuple(ranks.members)
        self._key = f"infinity/taking part/{'-'.join(map(str, members))}/{_before[members]}"
        _before[members] += 1
        self._said: bool | None = None
        self._those: Ranks | None = None

    @property
    def has_said(self) -> bool:
        """Whether this rank has said if it takes part."""
        return self._said is not None

    def say(self, *, takes_part: bool) -> None:
        """Tell the others whether this rank takes part; the first answer holds."""
        if self._said is None and self._ranks.size > 1:
            self._said = takes_part
            store().set(f"{self._key} {self._ranks.rank}", str(int(takes_part)))

    def those(self, what: str) -> Ranks:
        """Return the ranks that take part, connected. Each of them calls it.

        Raises: UnsupportedError on a rank that has said it does not; RanksError naming those that have said
        nothing.
        """
        self.say(takes_part=True)
        if self._said is False:
            raise UnsupportedError(
                f"{what}: {self._ranks.names} trained no parameter in its first "
                "forward, and the others count on that. Say which parameters train (requires_grad_) before "
                "the first step, or build the model anew"
            )
        if self._those is None:
            numbers = [number for number, takes in enumerate(self._answers(what)) if takes]
            if len(numbers) == self._ranks.size:
                self._those = self._ranks
            else:
                self._those = self._ranks.some(numbers)
                self._ranks.closing.append(self._those.close)
        return self._those

    def _answers(self, what: str) -> list[bool]:
        """Return what each rank has said."""
        if self._ranks.size == 1:
            return [True]
        keys, meeting = [f"{self._key} {rank}" for rank in range(self._ranks.size)], store()
        with contextlib.suppress(RuntimeError):  # torch's error names no ranks
            meeting.wait(keys, timedelta(seconds=self._timeout_s))
            return [meeting.get(one) == b"1" for one in keys]
        late = [rank for rank, key in enumerate(keys) if not meeting.check([key])]
        raise RanksError(
            f"{self._ranks.names}: {what}: {self._ranks.names.of(*late)} did not begin a "
            f"forward, nor ask for it, within {self._timeout_s:.0f} s. Likely cause: it has ended, or its "
            "schedule is another one"
        )
