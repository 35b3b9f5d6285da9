"""What a rank that waits for others says, in seconds: for what, who has not come, and why that may be.

[Note: who has not come]
A collective that takes seconds puts down in the store what it is, and so does a rank that does something
alone for which the others wait (see Ranks.together). Who has waited a little longer looks there. A rank that
waits at the same place has come; one that does something alone comes when it is done; whoever has put down
nothing of the kind, or waits elsewhere, is named in a warning, one for all that waits at the time. The wait
goes on: the rank may only be slow. Ranks that meet about different things at once get an error at once (see
Channel.agree), and so do those that lose one that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from infinity.ranks.groups import store

logger = logging.getLogger("infinity")

TELLS_S = 2.0
"""Seconds after which a wait is put down."""
LOOKS_S = 5.0
"""Seconds after which a wait looks for who has not come."""
_APART_S = 60.0
"""Seconds from one warning to the next: several threads may wait for the same rank."""


class Waiting:
    """The waits of one rank, on any of its threads; see [Note: who has not come]."""

    def __init__(self, key: str, rank: int, size: int, timeout_s: float) -> None:
        """Know the ranks; `key` begins their names in the store."""
        self._key, self._rank, self._size = f"{key} at", rank, size
        self._timeout_s, self._told_s = timeout_s, -_APART_S
        self._lock = threading.Lock()
        self._waits: list[str] = []
        self._alone: list[str] = []

    def until(self, work: Any, what: str) -> None:
        """Return when a collective over gloo is done.

        Raises: what it does.
        """
        if _done_within(work, TELLS_S):
            return
        with self._put_down(self._waits, what):
            if _done_within(work, LOOKS_S - TELLS_S):
                return
            self._look(what)
            work.wait()

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Note that this rank does something for which the others may wait."""
        if self._size == 1:
            yield
            return
        with self._put_down(self._alone, what):
            yield

    @contextlib.contextmanager
    def _put_down(self, among: list[str], what: str) -> Iterator[None]:
        self._change(among.append, what)
        try:
            yield
        finally:
            self._change(among.remove, what)

    def _change(self, change: Callable[[str], None], what: str) -> None:
        with self._lock, contextlib.suppress(Exception):  # the store may have died with its process
            change(what)
            text = "\n".join(
                [*(f"waits {one}" for one in self._waits), *(f"does {one}" for one in self._alone)]
            )
            store().set(f"{self._key} {self._rank}", text)

    def _look(self, what: str) -> None:
        """Warn of the ranks that have not come."""
        missing = []
        try:
            for rank in range(self._size):
                said = self._said(rank) if rank != self._rank else [f"waits {what}"]
                if f"waits {what}" in said or any(one.startswith("does ") for one in said):
                    continue
                others = [one.removeprefix("waits ") for one in said]
                missing.append(f"rank {rank} " + (f"waits at {others[0]}" if others else "has not come"))
        except Exception as error:
            logger.debug("asking who has not come", exc_info=error)
        if missing and time.monotonic() - self._told_s > _APART_S:
            self._told_s = time.monotonic()
            logger.warning(
                "rank %d of %d has waited %.0f s at %s: %s. Likely cause: evaluation, generation or "
                "state_dict on some ranks alone (`if rank == 0: model(x)`), while others wait in a barrier "
                "or go on. Whatever reads parameters is for every rank: let all of them run it. A rank that "
                "is only slow may yet come; the wait goes on, to the timeout of %.0f s.",
                *(self._rank, self._size, LOOKS_S, what, "; ".join(missing), self._timeout_s),
            )

    def _said(self, rank: int) -> list[str]:
        meeting, key = store(), f"{self._key} {rank}"
        text = meeting.get(key).decode(errors="replace") if meeting.check([key]) else ""
        return [line for line in text.split("\n") if line]


def _done_within(work: Any, seconds: float) -> bool:
    """Whether a collective is done within some seconds.

    Raises: what it does.
    """
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed() or time.monotonic() - began < seconds / 2:  # it failed
            raise
        return False
    return True
