"""The pass that adds to a gradient what coding left out of those before, and notes what it leaves out now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from infinity.lane.base import Pass
from infinity.lane.passes import clear, piece_address
from infinity.planning.layout import FlatLayout, pieces, tiles
from infinity.records.one_bit import floats
from infinity.records.record import Record


class FeedbackPass(Pass):
    """Walks over one field of errors: [Note: errors of codes] in gradients/feedback.py."""

    def __init__(
        self,
        record: Record,
        name: str,
        share: FlatLayout,
        gradients: torch.Tensor,
        indices: Collection[int],
        as_sent: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """name: of the field; share: how parameters lie in the part that it is of; gradients: of that part,
        fp32, changed in place; indices: of the parameters that have some; as_sent: gives what comes of values
        that are coded.
        """
        super().__init__(record)
        self._name, self._share, self._gradients = name, share, gradients
        self._indices, self._as_sent = indices, as_sent

    def touched(self) -> Iterable[str]:
        """The field."""
        return (self._name,)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Every tile."""
        return tiles(self.record.shard.numel, self.record.tile_numel)

    def reads_and_writes(self, start: int, stop: int) -> tuple[Sequence[str], Sequence[str]]:
        """Read what was ever written."""
        return (self._name,) * self.record.written(self._name, start), (self._name,)

    @property
    def computes(self) -> bool:
        """See QueuedPass."""
        return True

    def process(self, start: int, stop: int, addresses: dict[str, int]) -> None:
        """Work on each parameter's piece. Where a value is not finite, its error stays as it was."""
        if not self.record.written(self._name, start):
            clear(self.record, addresses, self._name, stop - start)
        for piece in pieces(self._share, start, stop):
            if piece.index not in self._indices:
                continue
            at = piece_address(self.record, addresses[self._name], piece.start, start, self._name)
            errors = floats(at, piece.numel)
            gradient = self._gradients[piece.start : piece.start + piece.numel]
            gradient += errors
            left = gradient - self._as_sent(gradient)
            errors.copy_(torch.where(left.isfinite(), left, errors))

    def done_processing(self) -> None:
        """Drop the memory."""
        super().done_processing()
        self._gradients = torch.empty(0, device="cpu")
