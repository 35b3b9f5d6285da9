"""Warnings of a rank that waits for others for seconds: for what, for which ranks, and the likely cause.

[Note: late ranks]
A rank posts in the store what it waits for once a collective takes seconds, and what it does alone while
others wait for it (see Ranks.together). After a few more seconds it reads what the others have posted. A rank
that waits at the same place has come, and one that does something alone will come; a rank that has posted
nothing, or waits elsewhere, is named in a warning, one for all waits at the time. The wait goes on: the rank
may only be slow. Ranks that meet for different operations get an error at once (see Channel.agree), and so do
ranks that lose the connection to one that has ended.

Each rank also posts how many forwards it has begun: one that is not there and has begun fewer had fewer
batches, or is behind.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from infinity.ranks.groups import store
from infinity.ranks.places import Names

logger = logging.getLogger("infinity")

TELLS_S = 2.0
"""Seconds after which a wait is posted."""
LOOKS_S = 5.0
"""Seconds after which a waiting rank looks for the late ones."""
LISTENS_S = 0.1
"""Seconds from one look to the next whether other ranks do something else; see agreed."""
_APART_S = 60.0
"""Seconds from one warning to the next: several threads may wait for the same rank."""


LONG = 240
"""Characters: names of units that are longer together are shown in part."""


def brief(what: str) -> str:
    """Return the begin and the end of the name of what is done to many units at once."""
    return what if len(what) <= LONG else f"{what[: LONG // 2]} ... {what[-LONG // 2 :]}"


def from_the_difference(texts: list[str]) -> list[str]:
    """Return what ranks are about to do, from the first unit on that differs, where the names are long."""
    parts = [text.split("; ") for text in texts]
    if max(map(len, texts)) <= LONG:
        return texts
    same = 0
    while all(len(one) > same and one[same] == parts[0][same] for one in parts):
        same += 1
    said = ["; ".join(one[same:]) or "nothing more" for one in parts]
    begin = f"{texts[0].split(' ')[0]} {same} others, then " if same else ""
    return [begin + brief(one) for one in said]


def in_one_line(error: Exception) -> str:
    """Return an error's kind and text, as ranks are told of it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]


class Waiting:
    """The waits of one rank, on all of its threads; see [Note: late ranks]."""

    def __init__(self, key: str, rank: int, size: int, timeout_s: float, names: Names) -> None:
        """key: the prefix of the ranks' keys in the store. names: what messages call them."""
        self._key, self._rank, self._size = f"{key} at", rank, size
        self._failed = key
        self._timeout_s, self._told_s, self._names = timeout_s, -_APART_S, names
        self._forwards = 0
        self._lock = threading.Lock()
        self._waits: list[str] = []
        self._alone: list[str] = []

    def forward_begins(self, _module: object = None) -> None:
        """Post that this rank begins a forward."""
        self._forwards += 1
        with contextlib.suppress(Exception):  # the store may have died with its process
            store().set(f"{self._key} forward {self._rank}", str(self._forwards))

    def forwards_of(self, ranks: Iterable[int]) -> str:
        """Return the end of a message that names ranks which are not there: which of them have begun fewer
        forwards than this one, and the likely cause.
        """
        begun = {}
        with contextlib.suppress(Exception):
            for rank in ranks:
                key = f"{self._key} forward {rank}"
                begun[rank] = int(store().get(key)) if store().check([key]) else 0
        fewer = [
            f"{self._names.of(rank)} has begun {ones}"
            for rank, ones in begun.items()
            if ones < self._forwards
        ]
        if not fewer:
            return ""
        return (
            f"; {', '.join(fewer)} forwards, this rank {self._forwards}: it may have had fewer batches "
            "(even_batches=False, or a sampler that divides unevenly); give all ranks as many"
        )

    def until(self, work: Any, what: str, listen: Callable[[], None] | None = None) -> None:
        """Wait for a collective over gloo. listen: called again and again meanwhile; its error ends the wait.

        Raises: its error.
        """
        if _done_within(work, TELLS_S, listen):
            return
        with self._posted(self._waits, what):
            if _done_within(work, LOOKS_S - TELLS_S, listen):
                return
            self._look(what)
            while not _done_within(work, _APART_S, listen):  # its own timeout ends it
                pass

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Post that this rank does something for which the others may wait."""
        if self._size == 1:
            yield
            return
        with self._posted(self._alone, what):
            yield

    @contextlib.contextmanager
    def _posted(self, among: list[str], what: str) -> Iterator[None]:
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
        """Warn of the late ranks."""
        missing, late = [], list[int]()
        try:
            for rank in range(self._size):
                said = self._said(rank) if rank != self._rank else [f"waits {what}"]
                if f"waits {what}" in said or any(one.startswith("does ") for one in said):
                    continue
                others = [one.removeprefix("waits ") for one in said]
                late.append(rank)
                missing.append(
                    f"{self._names.of(rank)} "
                    + (f"waits at {brief(others[0])}" if others else self._reason(rank) or "has not come")
                )
        except Exception as error:
            logger.debug("looking for late ranks", exc_info=error)
        if missing and time.monotonic() - self._told_s > _APART_S:
            self._told_s = time.monotonic()
            logger.warning(
                "%s has waited %.0f s at %s: %s. Likely cause: evaluation, generation or "
                "state_dict on some ranks alone (`if rank == 0: model(x)`), while others wait in a barrier "
                "or go on. All ranks have to run what reads parameters. The rank may also be slow: the wait "
                "goes on, up to the timeout of %.0f s%s.",
                *(self._names, LOOKS_S, brief(what)),
                *("; ".join(missing), self._timeout_s, self.forwards_of(late)),
            )

    def _reason(self, rank: int) -> str:
        """Return what a rank has posted of why it may not go on; nothing where it has not. See
        Ranks.post_failure.
        """
        meeting, key = store(), f"{self._failed}/{rank}"
        said = brief(meeting.get(key).decode(errors="replace")) if meeting.check([key]) else ""
        return f"has not come, and says: {said}" if said else ""

    def _said(self, rank: int) -> list[str]:
        meeting, key = store(), f"{self._key} {rank}"
        text = meeting.get(key).decode(errors="replace") if meeting.check([key]) else ""
        return [line for line in text.split("\n") if line]


def _done_within(work: Any, seconds: float, listen: Callable[[], None] | None) -> bool:
    """Wait for a collective for some seconds; return whether it is done. listen: see Waiting.until.

    Raises: its error.
    """
    if listen is None:
        return _done(work, seconds)
    until = time.monotonic() + seconds
    while not _done(work, LISTENS_S):
        listen()
        if time.monotonic() > until:
            return False
    return True


def _done(work: Any, seconds: float) -> bool:
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():  # since then, or it failed
            work.wait()
            return True
        if time.monotonic() - began < seconds / 2:  # it failed
            raise
        return False
    return True
