"""Warnings for names and options that still work for one release."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PACKAGE = "infinity"


def users_stacklevel() -> int:
    """Return the stacklevel with which the caller's warnings.warn names the first line outside Infinity."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    return level


def warn_deprecated(what: str, instead: str) -> None:
    """Warn, at the user's line, that the next release removes `what`, and say what to use `instead`."""
    warnings.warn(
        f"{what} will be removed in the next release: {instead}",
        DeprecationWarning,
        stacklevel=users_stacklevel(),
    )
