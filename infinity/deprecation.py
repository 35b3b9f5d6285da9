"""What still works for one release, under an old name or in an old way: a warning says what to write now."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PACKAGE = "infinity"


def users_stacklevel() -> int:
    """Return the stacklevel by which the caller's warnings.warn names the first line outside this package."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    return level


def warn_deprecated(what: str, instead: str) -> None:
    """Warn, at the user's line, that `what` goes with the next release, and say what takes its place."""
    warnings.warn(
        f"{what} goes with the next release: {instead}", DeprecationWarning, stacklevel=users_stacklevel()
    )
