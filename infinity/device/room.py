"""What Infinity holds of an accelerator's memory, counted to the byte, and how room is made there.

[Note: one ledger]
Everything of ours on the device is counted in one ledger, for as long as it takes memory: units, gradients
until they have left, what ranks exchange, boundaries that come back, and the parameters' placeholders. Bytes
are taken before memory is allocated, and given back when it is free. The memory of a unit that is dropped is
used again by later work on the same stream, so it is free at once; what other streams do with it, that one
waits for. The memory of a copy to the host is free when the copy is over, which the host sees by its event:
until then it is held here, beside its bytes, so both go at once, and torch's allocator, which would look for
other streams' work by events of its own, and later, has nothing to look for. So the host waits for the oldest
such copy where it would run further ahead of the device than the budget allows.

Memory that a view of the program's keeps after a unit is released is the program's, and not counted.

[Note: in the order of the program]
Only the thread that computes takes bytes. Bytes of work that runs by itself come back when that thread looks,
oldest first; and before a unit gives way, all such work is waited for. So what gives way does not depend on
timing, and ranks, whose units are fetched in one order, agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from infinity.errors import DeviceMemoryError
from infinity.sizes import DEVICE_BLOCK, format_size, round_up
from infinity.storage.memory import Ledger
from infinity.storage.store import Future
from infinity.timeline import Timeline


class DeviceRoom:
    """Counts our bytes on one accelerator; see [Note: one ledger]. Called from the thread that computes."""

    def __init__(self) -> None:
        """Begin without a limit; `open` sets it."""
        self.ledger = Ledger(1 << 62)
        self.lacked_nbytes = 0
        """The most bytes for which, at once, units that waited have had to give way since `open`."""
        self.waits = 0
        """How often the host has waited for what leaves, since it would else run too far ahead."""
        self._leaving: deque[tuple[Future, int, tuple[object, ...]]] = deque()
        self._uncounted: deque[tuple[Future, tuple[object, ...]]] = deque()
        """Copies whose memory somebody else counts, and what has it."""
        self._give_way: Callable[[], bool] = _nobody
        self.over: list[Callable[[Future, int], None]] = []
        """Called with all that has left, and its bytes."""

    def open(self, limit_nbytes: int, give_way: Callable[[], bool]) -> None:
        """Set the limit. give_way: takes one unit off the device; False where none can go."""
        self.ledger.resize(limit_nbytes)
        self._give_way = give_way

    @staticmethod
    def nbytes(nbytes: int) -> int:
        """Return what a tensor of `nbytes` takes."""
        return round_up(nbytes, DEVICE_BLOCK)

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for a tensor of `nbytes`, after waiting for what leaves if need be."""
        needed = self.nbytes(nbytes)
        self.collect()
        while needed > self.ledger.free_nbytes and self._leaving:
            self._await_oldest()
        return needed <= self.ledger.free_nbytes

    def take(self, nbytes: int, what: str) -> int:
        """Count a tensor of `nbytes`, for which room is made; return the bytes to give back. what: names it.

        Raises: DeviceMemoryError where nothing more can go.
        """
        needed, lacked = self.nbytes(nbytes), 0
        while not self.fits(nbytes):
            lacked = max(lacked, needed - self.ledger.free_nbytes)
            if not self._give_way():
                raise DeviceMemoryError(
                    f"{what}: {format_size(nbytes)} do not fit device_memory="
                    f"{format_size(self.ledger.limit_nbytes)}, of which "
                    f"{format_size(self.ledger.held_nbytes)} are in use at once, and nothing that waits is "
                    f"left to give way. At least {self.ledger.held_nbytes + needed} bytes are needed. Give "
                    "Config a larger device_memory, or cut large layers with tile_above."
                )
        self.lacked_nbytes = max(self.lacked_nbytes, lacked)
        self.ledger.reserve_anyway(needed)
        return needed

    def empty(self) -> bool:
        """Take all that waits off the device, and return whether there was anything: the device has no memory
        left, whatever the budget says.
        """
        found = False
        while self._give_way():
            found = True
        while self._leaving:
            self._await_oldest()
        for future, _ in tuple(self._uncounted):
            future.wait()
        self.let_go()
        return found

    def take_all(self, parts: Sequence[int], what: str) -> int:
        """Count tensors of so many bytes each, or none of them; return the bytes to give back.

        Raises: DeviceMemoryError as `take` does.
        """
        taken = 0
        try:
            for nbytes in parts:
                taken += self.take(nbytes, what)
        except BaseException:
            self.give_back(taken)
            raise
        return taken

    def give_back(self, nbytes: int) -> None:
        """Count bytes that `take` returned no more."""
        self.ledger.release(nbytes)

    def leaves(self, nbytes: int, future: Future, *held: object) -> None:
        """Give bytes that `take` returned back when `future` is over. held: what has the memory, kept until
        then; with no bytes, somebody else counts it.
        """
        if nbytes:
            self._leaving.append((future, nbytes, held))
        elif held:
            self._uncounted.append((future, held))

    def let_go(self) -> None:
        """Let go of memory that somebody else counts and whose copy is over, in whatever order."""
        for _ in range(len(self._uncounted)):
            try:
                one = self._uncounted.popleft()
            except IndexError:  # another thread that computes, or the garbage collector, has looked as well
                return
            if not one[0].done:
                self._uncounted.append(one)
            del one

    def collect(self) -> None:
        """Give back what has left by now."""
        self.let_go()
        while self._leaving and self._leaving[0][0].done:
            self._await_oldest()

    def close(self) -> None:
        """Hold nothing any more. No copy is under way."""
        while self._leaving:
            _, nbytes, held = self._leaving.popleft()
            del held
            self.ledger.release(nbytes)
        self._uncounted.clear()

    def _await_oldest(self) -> None:
        future, nbytes, held = self._leaving.popleft()
        self.waits += not future.done
        try:
            future.wait()
        finally:
            del held  # first: what is not counted is free
            self.ledger.release(nbytes)
        for call in self.over:
            call(future, nbytes)


def _nobody() -> bool:
    return False


def note_download(timeline: Timeline, copy: Future, nbytes: int) -> None:
    """Put what has left an accelerator into the timeline."""
    began_s, ended_s = getattr(copy, "began_s", None), getattr(copy, "ended_s", None)
    if began_s is not None and ended_s is not None:  # a reduction has its own place there
        timeline.span("download", "gradients", began_s, ended_s, nbytes)
