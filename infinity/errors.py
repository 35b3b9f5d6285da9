"""The errors that Infinity raises: each says what, where, the numbers, the likely cause and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InfinityError(Exception):
    """The base of all errors that Infinity raises itself (errors of the operating system stay OSError)."""


class ConfigError(InfinityError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class HostMemoryError(InfinityError, MemoryError):
    """A request that can never fit the host memory budget, or the machine's memory."""


class DeviceMemoryError(InfinityError, MemoryError):
    """A request that does not fit the budget of device memory, or what is free on the device."""


class NotResidentError(InfinityError, RuntimeError):
    """A parameter was used outside forward and backward, while its values are in host memory or on NVMe."""


class CorruptionError(InfinityError, RuntimeError):
    """Bytes read back from storage are not the bytes that were written."""


class EngineFailedError(InfinityError, RuntimeError):
    """An earlier error left the engine without a trustworthy state; `__cause__` is that error."""


class UnsupportedError(InfinityError, RuntimeError):
    """An operation that does not work with offloaded parameters; the message names it."""


class RanksError(InfinityError, RuntimeError):
    """The ranks of a run did not run the same operations in the same order, or some of them have ended, or a
    process that weights are streamed to or from.
    """


def meant(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f". It has {', '.join(names)}"
