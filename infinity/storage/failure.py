"""Keeps the error that stopped an engine, without its traceback.

[Note: errors and the collector]
An error holds its traceback, whose frames hold the variables of the training loop: a loss, and with it
autograd's graph, which holds our hooks and so the engine. Python's garbage collector cannot follow references
through the graph, so an engine that kept such an error would never be freed. An error that has been raised is
therefore replaced by an equal one without a traceback.
"""

from __future__ import annotations

import copy

from infinity.errors import EngineFailedError


def without_frames(error: BaseException) -> BaseException:
    """Return an error of the same type, message and causes, without tracebacks.

    If the type cannot be copied, an EngineFailedError with its text takes its place.
    """
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001 - a constructor that takes other arguments than `args` may raise anything
        twin = None
    if type(twin) is not type(error) or str(twin) != str(error):
        twin = EngineFailedError(f"{type(error).__name__}: {error}")
    if error.__cause__ is not None:
        twin.__cause__ = without_frames(error.__cause__)
    return twin


class Failure:
    """The first error that stopped something: raised once as it is, then as the cause of further errors."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        """A copy of the first error: see [Note: errors and the collector]."""
        self._unraised: BaseException | None = None

    def note(self, error: BaseException, *, raised: bool) -> None:
        """Keep `error`, unless an earlier one is known.

        raised: the caller raises it itself. An internal thread that cannot raise to the user passes False;
        the next `check` then raises the first error.
        """
        if self.cause is None:
            self.cause = without_frames(error)
            self._unraised = None if raised else error
        elif not raised and self._unraised is None:
            self._unraised = without_frames(self.cause)

    def check(self) -> None:
        """Raise the error if it has not been raised yet; after that EngineFailedError, caused by it."""
        error, self._unraised = self._unraised, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # this frame is in its traceback
        if self.cause is not None:
            why = str(self.cause) or type(self.cause).__name__
            raise EngineFailedError(f"the engine stopped at an earlier error: {why}") from self.cause
