"""Matrices of which each rank has a part, orthogonalized by one rank each.

[Note: owners of matrices]
A matrix lies in the ranks' shards in consecutive parts. The ranks exchange what is to be orthogonalized, two
bytes an element; each matrix has one owner, which computes its direction; the owner sends it to the others,
and each rank keeps its part. So all ranks use the same bits, whatever their processors, and the work is
divided: the matrices of a unit, of a stack of experts above all, have different owners.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from infinity.gradients.collectives import Collective
from infinity.lane.lane import StreamLane
from infinity.lane.matrices import WholeMatrices
from infinity.planning.layout import Segment, shard_of
from infinity.ranks.group import Channel

_LOOKS_S = 0.5


class Orthogonalizing(Collective):
    """The matrices of one pass, on all ranks: [Note: owners of matrices]."""

    kind = "orthogonalize"

    def __init__(self, matrices: WholeMatrices, lane: StreamLane) -> None:
        """Orthogonalize `matrices`, of which this rank gathers its parts in the pass."""
        record = matrices.record
        names = ", ".join(record.shard.segments[index].name for index in sorted(matrices.updates))
        super().__init__(f"orthogonalize {record.name}, {names}", lane)
        self._matrices: WholeMatrices | None = matrices
        self._stream_lane = lane
        whole = [record.unit_layout.segments[index].numel for index in matrices.updates]
        self.nbytes = 4 * sum(whole)  # what is gathered, and what is sent: two bytes an element each

    def ready(self) -> None:
        """Wait until this rank has gathered its parts."""
        matrices = self._matrices
        while matrices is not None and not matrices.gathered.wait(_LOOKS_S):
            self._stream_lane.check_open()

    def run(self, channel: Channel) -> None:
        """Gather each parameter, orthogonalize this rank's matrices of it, and spread them."""
        matrices, self._matrices = self._matrices, None
        if matrices is None:
            return
        for index in sorted(matrices.updates):
            stack = _gathered(matrices, index, channel)
            owned = list(_owned(stack, matrices, index, channel.ranks.size))
            for owner, matrix in owned:
                if owner == channel.ranks.rank:
                    matrices.orthogonalize(index, matrix)
            for owner, matrix in owned:
                channel.spread(matrix, owner, self.what)
            segment = matrices.record.shard.segments[index]
            flat = stack.view(-1)
            matrices.take(index, flat[segment.first : segment.first + segment.numel].clone())


def _owned(stack: Tensor, matrices: WholeMatrices, index: int, ranks: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each matrix of a parameter, a view, with the rank that owns it: they take turns, from one that
    the unit's name decides.
    """
    first = zlib.crc32(matrices.record.name.encode()) + index
    for number, matrix in enumerate(stack.view(-1, *stack.shape[-2:])):
        yield (first + number) % ranks, matrix


def _gathered(matrices: WholeMatrices, index: int, channel: Channel) -> Tensor:
    """Return what is to be orthogonalized of a parameter, whole, on every rank."""
    record, size = matrices.record, channel.ranks.size
    parts: list[Segment] = [shard_of(record.unit_layout, rank, size).segments[index] for rank in range(size)]
    most = max(part.numel for part in parts)
    mine = torch.zeros(most, dtype=torch.bfloat16, device="cpu")
    if (part := matrices.parts.get(index)) is not None:
        mine[: part.numel()] = part
    rows = torch.empty(size * most, dtype=torch.bfloat16, device="cpu")
    channel.gather(rows, mine, f"gather {record.name}")
    shape = matrices.shape(index)
    whole = torch.empty(math.prod(shape), dtype=torch.bfloat16, device="cpu")
    for part_of, row in zip(parts, rows.view(size, most), strict=True):
        whole[part_of.first : part_of.first + part_of.numel] = row[: part_of.numel]
    return whole.view(shape)
