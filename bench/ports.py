"""Ports of this machine on which a group of processes may meet."""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST, _LAST = 20_000, 32_767
"""Below those that the kernel gives to outgoing connections (32768 and up, unless it was told otherwise): one
of these might take a port between the look at it and its use.
"""
_TRIES = 100


def free_port() -> int:
    """Return a port on which nothing listens.

    Raises: OSError if a hundred, drawn at random, are all in use.
    """
    for _ in range(_TRIES):
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise OSError(f"{_TRIES} ports from {_FIRST} to {_LAST}, drawn at random, are all in use")
