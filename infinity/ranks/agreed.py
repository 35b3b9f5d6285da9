"""What ranks have agreed on before, so that they need not agree on each part of it again. Pure: no torch.

[Note: agreement once a step]
In a step that goes as the last one, every rank does what it did, in the same order. So the ranks compare
once, when a step begins, its plan and a chain of hashes of all that each has queued before: if these are the
same on all, so is what followed the last time that a step with this plan began. As long as the collectives of
a channel are those, in that order, they are *foreseen*, and begin without a question.

A collective that was not foreseen is agreed on before its data moves, in a group of its own, and so is all
that follows until the next step begins. A rank that goes on as foreseen while another does something else
waits for data that do not come, and takes part in nothing else: sizes, order and members of what is foreseen
are the same on every rank, so no data are mixed. The rank that does something else says so in the store
through which the processes met; the one that waits looks there, comes to the agreement, and both get the
error that names what each is about to do. It may wait at a later place of the step than the other left it at:
the rank that gives a unit to the others does not wait for them, and nobody does for one without elements.
"""

from __future__ import annotations

import enum

_MOST = 1 << 16
"""Collectives of a step that are remembered: where more follow, no step is."""
_KEPT = 8
"""Orders that are remembered: a training and its evaluations have two."""


class Agreement(enum.Enum):
    """What has to be done before a collective begins."""

    FORESEEN = "foreseen"
    """Nothing: all ranks have agreed that it comes now."""
    ASK = "ask"
    """Agree: no rank takes anything for foreseen."""
    ASK_ALOUD = "ask aloud"
    """Agree, and tell ranks that may have taken something else for foreseen."""


class AgreedOrder:
    """The collectives of one channel, by the names of what they do; see [Note: agreement once a step]."""

    def __init__(self) -> None:
        """Foresee nothing: all is to be agreed on, until a step has begun that was begun before."""
        self.place = 0
        """Collectives since the start: the number of the one that came last."""
        self.begun_at = 0
        """The place at which the step began: up to there all ranks have queued the same."""
        self._known: dict[int, list[str]] = {}
        self._plan: int | None = None
        self._done: list[str] = []
        self._ahead: list[str] | None = None
        self._aloud = False

    def begin(self, plan: int | None) -> None:
        """A step begins. plan: the hash of its plan; None where the ranks have not queued the same before."""
        if plan is not None and self._plan is not None and len(self._done) < _MOST:
            self._known.pop(self._plan, None)
            self._known[self._plan] = self._done
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        self._plan, self._aloud, self.begun_at = plan, plan is None, self.place
        self._done = []
        self._ahead = None if plan is None else self._known.get(plan)

    def come(self, what: str) -> Agreement:
        """A collective comes; return what has to be done first."""
        self.place += 1
        ahead, number = self._ahead, len(self._done)
        if number < _MOST:
            self._done.append(what)
        if ahead is not None and number < len(ahead) and ahead[number] == what:
            return Agreement.FORESEEN
        self._ahead = None
        return Agreement.ASK_ALOUD if ahead is not None or self._aloud else Agreement.ASK
