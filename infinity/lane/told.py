"""Gradients that are not kept, since the moments around an update that was made ahead tell them.

[Note: told gradients]
An update that is made ahead leaves two generations of its record, see records/next_fields.py, and each has
the first moment. An AdamW step moves that by a part of what the gradient differs from it, so both together
tell a bf16 gradient, all bits of it, but for exceptions: see kernels.h. The pass that makes the update finds
these, and they are kept, by number, in host memory. So the gradient itself needs neither host memory nor the
4 bytes per parameter that it takes to write and to read it. Where exceptions would take more than a share of
the gradient's bytes, or host memory has no room for them, it is written as ever: by
the pass that is queued behind the update for that, and has nothing to do otherwise.

Whoever reads such a gradient from the record, changes the record, or writes to either generation's place has
it written first, by a pass that recovers it: see gradients/unkept.py. As passes over a record go in the order
in which they were queued, all of them find it where a gradient that was spilled is.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity import kernels
from infinity.lane.base import Pass
from infinity.lane.passes import SpillPart, SpillPass, clear, piece_address
from infinity.planning.layout import pieces, tiles
from infinity.records.checksums import TileChecksums
from infinity.records.record import Record
from infinity.storage.generations import OtherSides
from infinity.storage.memory import Ledger
from infinity.storage.store import Extent, Transfer

EXCEPTIONS = 16
"""One in so many of the gradient's bytes is the most that its exceptions may take."""
_FEW = 16
"""Exceptions that any parameter may have."""
_BEHIND = "v"
"""The field in whose part of a slot the moment behind the update is: of the same size, and not needed."""
TARGET = "grad16"
UNTOLD = "its gradients were kept: moments do not tell them"


def most_exceptions(numel: int) -> int:
    """Return how many exceptions a parameter with so many elements may have."""
    return max(_FEW, 2 * numel // (EXCEPTIONS * kernels.EXCEPTION_NBYTES))


class MomentHome(NamedTuple):
    """One generation of the first moment: where it lies, and its checksums."""

    extent: Extent
    hashes: array[int]


class ToldGradients:
    """The gradients of one unit that moments tell, by parameter; see [Note: told gradients]. It leads to no
    unit and no record. Changed under the lane's lock.
    """

    def __init__(
        self,
        before: MomentHome,
        behind: MomentHome,
        of: Mapping[int, kernels.ToldGradient],
        ledger: Ledger,
        counts: Counter[str],
    ) -> None:
        """Prepare for those of `of`. before, behind: the moments around the update. ledger: pays for
        exceptions. counts: gets units of which moments do not tell the gradients.
        """
        self.of = dict(of)
        self.hold = False
        """Whether they need not be kept: known when the update was made."""
        self._before, self._behind = before, behind
        self._replaced = False
        self._watchers: set[Callable[[], None]] = set()
        self._watch: Callable[[], None] | None = None
        self._ledger, self._counts, self._charged = ledger, counts, 0

    def end(self) -> None:
        """The update was made: decide whether they need not be kept."""
        told = self.of.values()
        for one in told:
            one.end()
        nbytes = sum(one.nbytes for one in told)
        if all(one.is_told for one in told) and (not nbytes or self._ledger.try_reserve(nbytes)):
            self._charged, self.hold = nbytes, True
        else:
            self._counts[UNTOLD] += 1

    def was_replaced(self) -> None:
        """The update counts: it has taken the place of the record's fields."""
        self._replaced = True

    @property
    def moments(self) -> tuple[MomentHome, MomentHome]:
        """Where the moment before the update is now, and that behind it. A twin has turned to its other sides
        with the update, and the other sides are those that it had before.
        """
        before, behind = self._before, self._behind
        if self._replaced and isinstance(behind.extent.store, OtherSides):
            return before._replace(extent=behind.extent), behind._replace(extent=before.extent)
        return before, behind

    def watch(self, watchers: set[Callable[[], None]], call: Callable[[], None]) -> None:
        """Have `call` called by those of the record as long as this is needed."""
        self._watchers, self._watch = watchers, call
        watchers.add(call)

    def stop_watching(self) -> None:
        """This is not needed any more: the gradients are in the record."""
        if self._watch is not None:
            self._watchers.discard(self._watch)

    def __del__(self) -> None:
        """Give back what was charged."""
        self.stop_watching()
        if self._charged:
            self._ledger.release(self._charged)


class SpillUntoldPass(SpillPass):
    """Write gradients to the record where moments do not tell them; else drop them."""

    def __init__(
        self, record: Record, tile_numel: int, parts: dict[int, SpillPart], told: ToldGradients
    ) -> None:
        """Prepare to write `parts`, behind the pass that makes the update."""
        super().__init__(record, tile_numel, parts, set(), None, TARGET)
        self._told: ToldGradients | None = told

    @property
    def stands_aside(self) -> bool:
        """See QueuedPass: the update before it is still being written, and others have reads to begin."""
        return True

    @property
    def moves_nothing(self) -> bool:
        """See QueuedPass: the gradients' memory is given back as soon as the update was made."""
        return self._told is not None and self._told.hold

    def tiles(self) -> Iterator[tuple[int, int]]:
        """None, or every tile."""
        return iter(()) if self.moves_nothing else super().tiles()

    def done_processing(self) -> None:
        """Drop what tells them as well."""
        self._told = None
        super().done_processing()


class RecoverPass(Pass):
    """Write gradients to the record that moments tell: what `SpillUntoldPass` has left out."""

    def __init__(self, record: Record, tile_numel: int, told: ToldGradients) -> None:
        """Prepare to write those of `told`, behind that pass."""
        super().__init__(record)
        self._tile_numel = tile_numel
        self._told: ToldGradients | None = told
        self._of: Mapping[int, kernels.ToldGradient] = {}
        self._moments = told.moments

    def touched(self) -> Iterable[str]:
        """The moment, and the gradients."""
        return ("m", TARGET)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile, or none where they have been written."""
        told = self._told
        if told is None or not told.hold:
            return iter(())
        if any(self.record.volatile(name) for name in ("m", _BEHIND)):
            raise AssertionError(f"{self.record.name}: a gradient was not recovered before its moments moved")
        self._of, self._moments = told.of, told.moments
        return tiles(self.record.shard.numel, self._tile_numel)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Both moments, the one behind the update in the place of `v`."""
        before, _ = self._moments
        was_written = before.hashes[start // self.record.span("m")] != 0
        return ("m", _BEHIND) if was_written else (_BEHIND,), (TARGET,)

    def _moment(self, name: str) -> MomentHome:
        before, behind = self._moments
        return behind if name == _BEHIND else before

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        address: int,
        owner: object,
        *,
        more: bool = False,
        window: tuple[int, int] = (0, 0),
    ) -> Transfer:
        """See Pass."""
        extent, urgent = self._moment(name).extent, self.urgent
        return self.record.read("m", start, stop, address, owner, urgent=urgent, more=more, extent=extent)

    def checksums_of(
        self, start: int, stop: int, addresses: dict[str, int], reads: Sequence[str], writes: Sequence[str]
    ) -> TileChecksums:
        """See Pass: each moment has its own."""
        kept = {TARGET: self.record.home(TARGET)[1]}
        return self.record.checksums_kept_in(start, stop, addresses, reads, kept, self._compare)

    def _compare(self, name: str, tile: int, nbytes: int, found: int) -> None:
        self.record.compare("m", tile, nbytes, found, self._moment(name))

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Recover each parameter's piece."""
        record = self.record
        clear(record, addresses, TARGET, stop - start)
        zeros = torch.zeros(0 if "m" in addresses else stop - start, dtype=torch.float32, device="cpu")
        for piece in pieces(record.shard, start, stop):
            told = self._of.get(piece.index)
            if told is None:
                continue
            before = addresses.get("m", zeros.data_ptr())
            at = (
                piece_address(record, address, piece.start, start, name)
                for address, name in ((before, "m"), (addresses[_BEHIND], "m"), (addresses[TARGET], TARGET))
            )
            first, second, to = at
            told.recover(piece.numel, first, second, piece.element, to)

    def done_processing(self) -> None:
        """Drop what tells them as well."""
        self._told, self._of = None, {}
        super().done_processing()
