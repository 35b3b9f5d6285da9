"""The pass in which a worker of 1-bit Adam updates its momentum and its error, and codes what it sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from infinity.lane.base import Pass
from infinity.lane.passes import clear, piece_address
from infinity.planning.layout import FlatLayout, pieces, tiles
from infinity.records.one_bit import floats, send, worker_fields
from infinity.records.record import Record


class WorkerPass(Pass):
    """Walks over the fields of what goes to one worker: [Note: fields of workers] in records/one_bit.py."""

    def __init__(
        self,
        record: Record,
        worker: int,
        share: FlatLayout,
        gradients: torch.Tensor,
        divisor: int,
        betas: Mapping[int, float],
        into: np.ndarray[Any, Any],
    ) -> None:
        """share: how parameters lie in the part that goes there; gradients: of that part, to be divided by
        `divisor`; betas: of the parameters that have some, by their index; into: the zeroed memory of what is
        sent.
        """
        super().__init__(record)
        self._names = worker_fields(worker)
        self._share, self._gradients, self._divisor = share, gradients, divisor
        self._betas, self._into = betas, into

    def touched(self) -> Iterable[str]:
        """Both fields."""
        return self._names

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile."""
        return tiles(self.record.shard.numel, self.record.tile_numel)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Read what was ever written."""
        return tuple(name for name in self._names if self.record.written(name, start)), self._names

    @property
    def computes(self) -> bool:
        """See QueuedPass."""
        return True

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Work on each parameter's piece."""
        for name in self._names:
            if not self.record.written(name, start):
                clear(self.record, addresses, name, stop - start)
        for piece in pieces(self._share, start, stop):
            beta1 = self._betas.get(piece.index)
            if beta1 is None:
                continue
            at = (
                piece_address(self.record, addresses[name], piece.start, start, name) for name in self._names
            )
            w, e = (floats(address, piece.numel) for address in at)
            g = self._gradients[piece.start : piece.start + piece.numel].float()
            if self._divisor > 1:
                g /= torch.tensor(float(self._divisor), device="cpu")
            send(self._into, self.record.shard.numel, piece.start, (w, e), g, beta1)

    def done_processing(self) -> None:
        """Drop the memory."""
        super().done_processing()
        self._gradients, self._into = torch.empty(0, device="cpu"), np.empty(0, np.uint8)
