"""The end of an engine: what it gives back when nothing refers to it any more.

[Note: what lives for ever]
A thread that runs, and weakref's registry of finalizers, are never collected, nor is anything they reach. Of
an engine they may reach what they work with, and no more: never the engine itself, a model, or an error,
whose traceback has the frames, and so the variables, of the code that trains. While a thread waits, its
frames refer to no work. The end of an engine needs nearly all of it; so it is not a finalizer but a
`__del__`, which no registry holds, and which the garbage collector calls while all that it reaches is whole.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from infinity.activations.partitioned import PartitionedBoundaries
from infinity.device.device import Device
from infinity.durable.tiers import NvmeTier
from infinity.engine.partition import Partition
from infinity.lane.lane import StreamLane
from infinity.ranks.group import Ranks


class Ending:
    """Ends an engine, once: at `close`, when it is collected itself, or when the interpreter exits."""

    def __init__(
        self,
        lane: StreamLane,
        ranks: Ranks,
        partition: Partition | None,
        parts: PartitionedBoundaries | None,
        device: Device,
        store: NvmeTier | None,
    ) -> None:
        """Close these at the end."""
        self._lane, self._partition, self._parts = lane, partition, parts
        self._ranks = ranks
        self._device, self._store = device, store
        self._first: Callable[[], None] = _nothing
        self._pid = os.getpid()
        # For the exit of the interpreter alone. It keeps the folders of a run: collected in one go with this,
        # their own finalizers would close them before `close` can remove a run without commit.
        weakref.finalize(self, _close, weakref.ref(self), getattr(store, "folders", ()))

    def close_first(self, close: Callable[[], None]) -> None:
        """Call this, too, once the lanes have stopped, before the stores are closed."""
        self._first = close

    def close(self) -> None:
        """Stop the lanes and give memory, connections and files back. A forked child has none of them."""
        pid, self._pid = self._pid, 0
        if os.getpid() != pid:
            return
        if self._parts is not None:
            self._parts.close()
        if self._partition is not None:
            self._partition.settle()
        self._lane.close()
        self._ranks.close()  # a rank that shares with none may have connections to other stages
        self._device.close()
        self._first()
        if self._store is not None:
            self._store.close()

    def __del__(self) -> None:
        """Close, when nothing refers to the engine any more."""
        self.close()


def _nothing() -> None:
    """Close nothing."""


def _close(ending: weakref.ref[Ending], _folders: object) -> None:
    alive = ending()
    if alive is not None:
        alive.close()
