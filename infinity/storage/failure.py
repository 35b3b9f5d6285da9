"""Why an engine has stopped, without the frames of those who were told.

[Note: errors and the collector]
An error holds its traceback, whose frames hold the variables of whoever trains: a loss, and with it
autograd's graph, which holds our hooks, and so the engine, where Python's collector cannot follow. An engine
that kept such an error would never be freed. So an error is not kept once it has been raised: an equal one
without a traceback stands for it.
"""

from __future__ import annotations

import copy

from infinity.errors import EngineFailedError


def without_frames(error: BaseException) -> BaseException:
    """Return an error of the same type and message, and its causes, all without a traceback; an
    EngineFailedError with its text where one of that type cannot be made.
    """
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001 - whatever a constructor raises that takes other arguments than `args`
        twin = None
    if type(twin) is not type(error) or str(twin) != str(error):
        twin = EngineFailedError(f"{type(error).__name__}: {error}")
    if error.__cause__ is not None:
        twin.__cause__ = without_frames(error.__cause__)
    return twin


class Failure:
    """The first error that stopped something: raised once as it is, and from then on told of."""

    def __init__(self) -> None:
        """Nothing has failed."""
        self.cause: BaseException | None = None
        """The error, or one that stands for it: see [Note: errors and the collector]."""
        self._unraised: BaseException | None = None

    def note(self, error: BaseException, *, raised: bool) -> None:
        """Keep `error`, unless an earlier one is known. `raised`: whoever caught it raises it; where a thread
        of the engine's own was told, and does not, the next to ask gets the first error.
        """
        if self.cause is None:
            self.cause = without_frames(error)
            self._unraised = None if raised else error
        elif not raised and self._unraised is None:
            self._unraised = without_frames(self.cause)

    def check(self) -> None:
        """Raise the error the first time, if nobody has; EngineFailedError because of it from then on."""
        error, self._unraised = self._unraised, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # this frame is in its traceback
        if self.cause is not None:
            why = str(self.cause) or type(self.cause).__name__
            raise EngineFailedError(f"the engine stopped at an earlier error: {why}") from self.cause
