"""What the updates of one pass need of whole matrices: see [Note: two walks].

[Note: two walks]
Muon's update of a weight needs the whole matrix of its momentum; see [Note: the muon step] in
records/matrix_steps.py. A pass with such updates walks over the tiles that hold such weights twice. The first
walk reads and writes the momentum alone, and keeps of each matrix what is to be orthogonalized, two bytes an
element. When the last tile of a matrix was worked on, it is orthogonalized, on the thread of the pass. The
second walk reads and writes the weights, with the result in the place of the gradient; its reads go on while
the first walk computes. Nothing is moved twice: 8 bytes for the momentum, 8 for the weights.

A tile may hold momentum of other updates beside that of a matrix, such as a bias's, and so may tiles that
share blocks of the drive (see packing): it is read again by the second walk, which then begins when all the
writes of the first are over. With several ranks it begins when the ranks have orthogonalized: each rank has a
part of the matrix. Until then the pass is paused, and holds no slot: see `Queue.admissible`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from infinity import kernels
from infinity.planning.layout import TilePiece, pieces
from infinity.planning.queue import Job
from infinity.records.record import Record
from infinity.records.update_rules import UpdateSpan
from infinity.records.updates import Update


class MatrixOwners(Protocol):
    """What several ranks do together for matrices of which each has a part."""

    def orthogonalize(self, matrices: WholeMatrices) -> Job:
        """Have the ranks orthogonalize these, as soon as each has gathered its parts. Every rank calls it at
        the same point.
        """


class WholeMatrices:
    """The matrices of a pass, from their momentum to their directions: [Note: two walks]. Made by the thread
    that computes, used by that of the pass, and by that of `MatrixOwners` once this rank has `gathered`.
    """

    def __init__(self, record: Record, updates: Mapping[int, Update]) -> None:
        """Take those of `updates` that need whole matrices."""
        self.record = record
        self.updates = {index: one for index, one in updates.items() if one.recipe.matrices is not None}
        self.fields = tuple(
            dict.fromkeys(name for one in self.updates.values() for name in one.recipe.fields(record.schema))
        )
        """The fields of the record that the first walk works on: those of the momentum."""
        self.parts: dict[int, Tensor] = {}
        """By parameter, this rank's part of what is orthogonalized, then of the result: [numel] in bf16."""
        self.gathered = threading.Event()
        """Set when this rank has all of its parts of what is to be orthogonalized."""
        self._others = updates.keys() - self.updates.keys()
        segments = record.shard.segments
        self._left = {index: segments[index].numel for index in self.updates if segments[index].numel}
        if not self._left:
            self.gathered.set()
        if any(one.missed or one.after for one in self.updates.values()):
            raise AssertionError(f"{record.name}: expected one step of whole matrices at a time, got several")
        self._job: Job | None = None
        self._first: dict[int, int] = {}
        """Starts and stops of the tiles of the first walk."""
        self._admitted = self._worked = 0
        self._mixed = self._second = False
        self._threads = torch.get_num_threads()

    @staticmethod
    def any(updates: Mapping[int, Update]) -> bool:
        """Whether any of these updates needs a whole matrix."""
        for one in updates.values():  # noqa: SIM110 - any() takes twice as long, and each update asks
            if one.recipe.matrices is not None:
                return True
        return False

    def wait_for(self, job: Job) -> None:
        """Leave it to `job` to orthogonalize: of several ranks each has a part."""
        self._job = job

    def settle(self) -> None:
        """Return when the directions are there."""
        if self._job is not None:
            self._job.wait()

    # The walks

    def first_walk(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return those of a record's tiles that hold parts of matrices."""
        self._mixed = bool(self._others) and not self.record.packed.isdisjoint(self.fields)
        for start, stop in ranges:
            here = {piece.index for piece in pieces(self.record.shard, start, stop)}
            if here & self.updates.keys():
                self._first[start] = stop
                self._mixed |= bool(here & self._others)
        return list(self._first.items())

    def admits_first(self) -> bool:
        """Whether the tile that is admitted now is one of the first walk. Called once for each tile."""
        self._second = self._admitted == len(self._first)
        self._admitted += not self._second
        return not self._second

    def works_on_first(self) -> bool:
        """The same, of the tile that is worked on now."""
        first = self._worked < len(self._first)
        self._worked += first
        return first

    def was_walked(self, start: int) -> bool:
        """Whether the first walk has a tile that begins at this element."""
        return start in self._first

    def pauses(self, open_tiles: int) -> bool:
        """Whether the second walk may not begin yet. open_tiles: those whose writes are not over."""
        if self._second or self._admitted < len(self._first) or (self._left and not self._first):
            return False
        if self._job is not None and not self._job.done:
            return True
        return open_tiles > 0 and (self._mixed or self._job is not None)

    # What is gathered

    def gather(
        self, piece: TilePiece, at: Mapping[str, int], gradient: tuple[int, kernels.AnyGradientDtype]
    ) -> None:
        """Update the momentum of a part of a matrix, by the addresses of its fields; orthogonalize the matrix
        when that was the last one. gradient: its address and type.
        """
        update = self.updates[piece.index]
        rule, part = update.recipe.matrices, self._part(piece.index)
        if rule is None:
            raise AssertionError(f"{self.record.name}: expected an update of whole matrices")
        into = part[piece.within : piece.within + piece.numel]
        span = UpdateSpan(piece.numel, at, *gradient, update.key, piece.element)
        rule.gather(span, self.record.schema, update.scalars, into)
        left = self._left[piece.index] - piece.numel
        if left:
            self._left[piece.index] = left
            return
        if self._job is None:
            self.orthogonalize(piece.index, part.view(self.shape(piece.index)))
        del self._left[piece.index]
        if not self._left:
            self.gathered.set()

    def _part(self, index: int) -> Tensor:
        if index not in self.parts:
            numel = self.record.shard.segments[index].numel
            self.parts[index] = torch.empty(numel, dtype=torch.bfloat16, device="cpu")
        return self.parts[index]

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a whole parameter."""
        return self.record.shard.segments[index].shape

    def orthogonalize(self, index: int, stack: Tensor) -> None:
        """Replace each matrix of `stack`, [..., rows, columns] of a parameter, by its direction."""
        rule = self.updates[index].recipe.matrices
        if rule is not None:
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(
                    self._threads
                )  # this thread has its own number, and results depend on it
            rule.orthogonalize(stack, self.updates[index].scalars)

    def take(self, index: int, part: Tensor) -> None:
        """Take this rank's part of the directions of a parameter."""
        self.parts[index] = part
