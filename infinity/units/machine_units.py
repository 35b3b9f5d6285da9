"""Units whose values the ranks of one machine have in common: see [Note: places in common].

[Note: places in common]
Every unit has two places in the memory that the ranks share (ranks/shared_memory.py), which take memory only
while they are used. A fetch is to the place that the last one of the unit was not to: each rank brings its
share there, and when all have done so, they compute with what is there. No rank fetches to a place that
another one still uses: before its fetch it has let go of the unit, and before that it has met all others at
the last fetch, which they begin only after they have let go of the one before. That they count alike, they
compare when they meet.

What a rank sees of a place is its own, private mapping. So an update in the backward, which starts from the
values of the unit and works in their memory, changes no other rank's; nor does a program's change of weights
past autograd, which is found as ever. Views that outlive a use keep its values, as a copy.

When all ranks have let go of a place, each may give the memory back that it has brought: nobody else
writes that, so no two ranks have to agree on when. Each keeps as much of it as its window has free bytes, as
buffers do, for the next fetch.

Of several machines each has a memory of its own. A rank brings its share there, and the shares of the ranks
that have its number on the other machines, which it gets from them: each byte crosses between two machines
once, and then all of the machine see it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from infinity import kernels
from infinity.device.blocks import Blocks, HostBlocks
from infinity.ranks.group import Ranks
from infinity.ranks.shared_memory import PAGE, SharedMemory, make_private, open_shared
from infinity.records.record import Record
from infinity.records.updates import PendingUpdates
from infinity.sizes import round_up
from infinity.units.unit import Unit

_LOOKED_AT = 16
"""Shares that are looked at, of those kept longest, when memory is to be given back."""


class _Releases:
    """Who has let go of what. Each rank writes its own numbers alone, in memory that all have in common: the
    last fetch of each unit of which nothing uses the place any more, nor of any before.
    """

    def __init__(self, memory: SharedMemory, units: int, ranks: int, own: int, spare: HostBlocks) -> None:
        """Know of `units` on `ranks`, of which this is number `own`. spare: has the window's free bytes."""
        self.memory = memory
        self._numbers = memory.numbers(units * ranks)
        self._ranks, self._own = ranks, own
        self._buffers = spare.buffers
        self._kept: dict[tuple[MachinePlace, int], int] = {}
        """Bytes of this rank's shares of places that it has let go of, by their fetch, the oldest first."""
        self._closed = False
        self._kept_nbytes = 0
        self.lock = threading.RLock()  # reentrant: a tensor may be collected at any moment
        self._pid = os.getpid()

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child, which has not inherited the memory, and lets go of nothing."""
        return os.getpid() != self._pid

    def note(self, unit: int, generation: int) -> None:
        """This rank uses no place of a unit any more, of fetches up to this one."""
        self._numbers[unit * self._ranks + self._own] = generation

    def all_have(self, unit: int, generation: int) -> bool:
        """Whether no rank uses the place of this fetch of a unit."""
        first = unit * self._ranks
        return all(one >= generation for one in self._numbers[first : first + self._ranks])

    def keep(self, place: MachinePlace, generation: int, nbytes: int) -> None:
        """Keep a share for the next fetch, as far as the window has room."""
        if self._closed:
            return
        self._kept[place, generation] = nbytes
        self._kept_nbytes += nbytes
        self.trim()

    def take_back(self, place: MachinePlace, generation: int) -> None:
        """The share of this fetch is kept no longer."""
        self._kept_nbytes -= self._kept.pop((place, generation), 0)

    def trim(self) -> None:
        """Give back what was kept longest, beyond the window's free bytes."""
        if self._kept_nbytes <= self._buffers.spare_nbytes:
            return
        for place, generation in list(islice(self._kept, _LOOKED_AT)):
            if place.give_back(generation):
                self.take_back(place, generation)
            if self._kept_nbytes <= self._buffers.spare_nbytes:
                return

    def close(self) -> None:
        """Nothing is fetched any more: keep nothing. What is mapped goes back with the last mapping."""
        with self.lock:
            self._closed = True
            self._kept.clear()
        self.memory.close()


class MachinePlace:
    """The blocks of one unit whose values ranks have in common; see [Note: places in common]."""

    def __init__(
        self,
        releases: _Releases,
        number: int,
        offset: int,
        unit: Unit,
        nbytes: int,
        within: Blocks,
        brings: Sequence[int],
    ) -> None:
        """Have the two places of unit `number` from `offset` on, each of `nbytes`. within: has the memory
        that this rank alone needs. brings: the ranks whose shares this one brings there, itself among them.
        """
        self._releases, self._number, self._offset = releases, number, offset
        self._nbytes, self._within = nbytes, within
        width = unit.record.schema.width
        size = width * unit.record.shard.numel
        self._share = range(width * unit.base, width * unit.base + size)
        self._brought = [range(rank * size, (rank + 1) * size) for rank in brings]
        """Bytes of a place that this rank writes: its share, and those that it gets from other machines."""
        self.generation = 0
        """Counts fetches; the last one's."""
        self._users: Counter[int] = Counter()
        self._shown_at = 0
        """Where the unit's memory begins while it is a place; else 0."""
        self._buffer: Any = None

    def come(self, numel: int, dtype: torch.dtype, skew_nbytes: int = 0) -> torch.Tensor:
        """Return what this rank sees of the place of the next fetch."""
        with self._releases.lock:
            self._begin()
            at = self._place(self.generation)
            buffer = self._releases.memory.private(at, self._nbytes)
            self._buffer, self._shown_at = weakref.ref(buffer), ctypes.addressof(buffer)
            self._users[self.generation] += 1
        with torch.inference_mode(mode=False), torch.no_grad():
            return torch.frombuffer(buffer, dtype=dtype, count=numel)

    def share(self, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's share of that place, to be written: all ranks see it."""
        memory = self._releases.memory
        buffer = memory.part(self._place(self.generation) + self._share.start, len(self._share))
        with self._releases.lock:
            self._users[self.generation] += 1
        weakref.finalize(buffer, _left, memory, self, self.generation).atexit = False
        with torch.inference_mode(mode=False), torch.no_grad():
            return torch.frombuffer(buffer, dtype=dtype)

    def brought(self) -> list[int]:
        """Return where, in the place of the last fetch, the shares begin that this rank brings."""
        place = self._releases.memory.address + self._place(self.generation)
        return [place + one.start for one in self._brought]

    def again(self, flat: torch.Tensor) -> None:
        """Other ranks fetch a unit that this one has: go on with a copy, and come to the place of that fetch,
        in which nothing lies on this rank but its share.
        """
        self.outlived(flat)
        self.leaving(flat)
        with self._releases.lock:
            self._begin()

    def _begin(self) -> None:
        self.generation += 1
        self._releases.take_back(self, self.generation - 2)
        self._releases.trim()

    def _is_used_again(self, generation: int) -> bool:
        """Whether a later fetch is to the place of this one."""
        return generation <= self.generation - 2

    def _place(self, generation: int) -> int:
        return self._offset + generation % 2 * self._nbytes

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that is this rank's alone."""
        return self._within.take(numel, dtype)

    def leaving(self, flat: torch.Tensor) -> None:
        """The unit drops its memory: nothing shows the place any more."""
        if not self._shows(flat):
            self._within.leaving(flat)
            return
        self._shown_at, self._buffer = 0, None
        self.left(self.generation)

    def outlived(self, flat: torch.Tensor) -> None:
        """Let views that keep the memory keep its values, as a copy."""
        if not self._shows(flat):
            self._within.outlived(flat)
        elif not self._releases.in_child and (buffer := self._buffer()) is not None:
            make_private(buffer)

    def _shows(self, flat: torch.Tensor) -> bool:
        return self._shown_at != 0 and flat.data_ptr() == self._shown_at

    def left(self, generation: int) -> None:
        """Count a user less of the place of a fetch."""
        if self._releases.in_child:
            return
        with self._releases.lock:
            self._users[generation] -= 1
            if self._users[generation]:
                return
            del self._users[generation]
            over = min(self._users, default=self.generation + 1) - 1
            self._releases.note(self._number, over)
            if not self._is_used_again(generation):
                self._releases.keep(self, generation, sum(map(len, self._brought)))

    def give_back(self, generation: int) -> bool:
        """Give back the memory that this rank has brought shares to, if no rank uses what a fetch has
        brought; return whether that was so.
        """
        if self._is_used_again(generation):
            return True
        if not self._releases.all_have(self._number, generation):
            return False
        at = self._place(generation)
        for one in self._brought:
            start, stop = round_up(at + one.start, PAGE), (at + one.stop) // PAGE * PAGE
            if stop > start:
                self._releases.memory.drop(start, stop - start)
        return True


def _left(_memory: SharedMemory, place: MachinePlace, generation: int) -> None:
    place.left(generation)


class MachineShare:
    """Where this rank's share of a unit is fetched that all ranks of a machine see. A
    lane.fetch.FetchTarget.
    """

    base, framed = 0, False

    def __init__(self, unit: Unit, place: MachinePlace) -> None:
        """Be that of the unit's last fetch."""
        self.record: Record = unit.record
        self.pending: PendingUpdates = unit.pending
        self.generation = place.generation
        """Which fetch of the unit it is: the same on all ranks."""
        self.flat = place.share(unit.flat.dtype)
        self.brought = place.brought()
        """Addresses of the shares of the ranks that have this one's number on their machines, by machine."""


class MachineUnits:
    """All units of an engine, in memory that the ranks of the machine share."""

    def __init__(self, releases: _Releases, places: dict[Unit, MachinePlace]) -> None:
        """Have these places in it."""
        self._releases, self._places = releases, places
        self.nbytes = 0
        """Bytes of weights that ranks have put together in it."""

    def share_of(self, unit: Unit) -> MachineShare | None:
        """Return where this rank's share of a unit is fetched; None for one without elements."""
        place = self._places.get(unit)
        if place is None:
            return None
        self.nbytes += unit.flat.nbytes
        return MachineShare(unit, place)

    def share_again(self, unit: Unit) -> MachineShare | None:
        """Give other ranks, which fetch a unit that this one has, its share once more."""
        place = self._places.get(unit)
        if place is None:
            return None
        place.again(unit.flat)
        part, share = unit.part_of_rank, MachineShare(unit, place)
        kernels.copy(part.nbytes, share.flat.data_ptr(), part.data_ptr())
        return share

    def close(self) -> None:
        """Nothing is fetched any more."""
        self._releases.close()


def needs_of(units: Sequence[Unit]) -> tuple[int, int]:
    """Return the bytes of memory that two places of each of these units take, without what ranks note of
    them, and how many units have some.
    """
    sizes = [round_up(unit.resident_nbytes, PAGE) for unit in units if unit.resident_nbytes]
    return 2 * sum(sizes), len(sizes)


def open_machine_units(ranks: Ranks, units: Sequence[Unit], blocks: Blocks, timeout_s: float) -> MachineUnits:
    """Let units become resident in memory that the ranks of a machine share. Every rank calls it, with the
    same units. blocks: has the memory that a rank needs for itself.

    Raises: as `open_shared`.
    """
    if not isinstance(blocks, HostBlocks):
        raise TypeError(f"expected units in host memory, got {type(blocks).__name__}")
    on_machine = len(ranks.near)
    brings = range(ranks.rank % on_machine, ranks.size, on_machine)
    some = [unit for unit in units if unit.resident_nbytes]
    offset = round_up(8 * len(some) * on_machine, PAGE)
    sizes = [round_up(unit.resident_nbytes, PAGE) for unit in some]
    memory = open_shared(ranks, max(offset + 2 * sum(sizes), PAGE), timeout_s)
    releases = _Releases(memory, len(some), on_machine, ranks.near.index(ranks.rank), blocks)
    places = {}
    for number, (unit, nbytes) in enumerate(zip(some, sizes, strict=True)):
        places[unit] = MachinePlace(releases, number, offset, unit, nbytes, blocks, brings)
        unit.live_in(places[unit])
        offset += 2 * nbytes
    return MachineUnits(releases, places)
