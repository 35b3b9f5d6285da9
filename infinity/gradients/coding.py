"""What ranks send in 8 or 4 bits an element: ZeRO++'s qwZ, of weights, and qgZ, of gradients.

[Note: coded shares]
A *row* is what one rank sends to another, or to all: its shares of the units of a bucket, one behind the
other, each with the fp32 scales of its blocks first, then its codes; see [Note: coded blocks] in kernels.h.
A share begins on a whole block, and so does every parameter in it (FlatLayout): a parameter's blocks are
counted from its own first element, whatever goes with it, and on any number of ranks. A rank's own share is
coded as the others are, so that the bits do not depend on whose it is. Values are coded and decoded in pieces
that stay in the caches: in fp32 there is never more than a piece of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from infinity import kernels
from infinity.planning.coded import coded_nbytes, scales_nbytes
from infinity.records.weights import KERNEL_DTYPE, NARROW

_PIECE = 1 << 16
"""Elements that are decoded at once, of whole blocks."""


def _scratch() -> torch.Tensor:
    return torch.empty(_PIECE, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, slots=True)
class Coding:
    """How many bits an element takes: 8 or 4."""

    bits: int
    feeds_back: bool = False
    """Whether what is left out of gradients is added to those that are sent next: see feedback."""

    def share_nbytes(self, numel: int) -> int:
        """Return the bytes of a share of so many elements."""
        return coded_nbytes(numel, self.bits)

    def row_nbytes(self, numels: Sequence[int]) -> int:
        """Return the bytes of a row of shares of so many elements."""
        return sum(map(self.share_nbytes, numels))

    def places(self, numels: Sequence[int]) -> list[int]:
        """Return the byte of a row at which each of its shares begins."""
        return [0, *accumulate(map(self.share_nbytes, numels))][:-1]

    def encode(self, values: torch.Tensor, numel: int, start: int, to: int) -> None:
        """Code elements, contiguous in host memory, of a share of `numel` at address `to`, from its element
        `start` on, where a block begins.
        """
        codes = to + scales_nbytes(numel) + start * self.bits // 8
        scales = to + scales_nbytes(start)
        dtype = KERNEL_DTYPE[values.dtype]
        kernels.encode(values.numel(), values.data_ptr(), dtype, self.bits, codes, scales)

    def as_sent(self, values: torch.Tensor) -> torch.Tensor:
        """Return what comes, in fp32, of values of whole blocks, contiguous in host memory."""
        numel, came = values.numel(), torch.empty(values.numel(), dtype=torch.float32, device="cpu")
        coded = torch.empty(self.share_nbytes(numel), dtype=torch.uint8, device="cpu")
        self.encode(values, numel, 0, coded.data_ptr())
        self._decode_piece(coded.data_ptr(), numel, 0, came)
        return came

    def _decode_piece(self, came: int, numel: int, start: int, f32: torch.Tensor) -> None:
        codes = came + scales_nbytes(numel) + start * self.bits // 8
        scales = came + scales_nbytes(start)
        kernels.decode(f32.numel(), self.bits, codes, scales, f32.data_ptr())

    def decode(self, came: int, numel: int, dtype: torch.dtype, to: int) -> None:
        """Fill `numel` elements at address `to` from a share at address `came`, rounded to their type. The
        copies are not torch's: what torch changes counts as a change of the weights.
        """
        scratch = _scratch()
        for start in range(0, numel, _PIECE):
            piece = scratch[: min(numel - start, _PIECE)]
            self._decode_piece(came, numel, start, piece)
            NARROW[dtype](piece.numel(), piece.data_ptr(), to + dtype.itemsize * start)

    def _sums(self, came: Sequence[int], numel: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the sums of the shares at the addresses `came`, in fp32, from the first to the last, in
        pieces, with the first element of each.
        """
        total, one = _scratch(), _scratch()
        for start in range(0, numel, _PIECE):
            size = min(numel - start, _PIECE)
            self._decode_piece(came[0], numel, start, total[:size])
            for row in came[1:]:
                self._decode_piece(row, numel, start, one[:size])
                kernels.accumulate_f32(size, total.data_ptr(), one.data_ptr())
            yield start, total[:size]

    def code_sum(self, came: Sequence[int], numel: int, to: int) -> None:
        """Code the sum of the shares at the addresses `came` at another, unrounded."""
        for start, total in self._sums(came, numel):
            self.encode(total, numel, start, to)

    def mean(self, came: Sequence[int], into: torch.Tensor, count: int) -> None:
        """Put the sum of the shares at the addresses `came`, divided by `count`, into `into`, rounded once to
        its type.
        """
        divisor = torch.tensor(float(count), dtype=torch.float32, device="cpu")
        for start, total in self._sums(came, into.numel()):
            torch.div(total, divisor, out=total)
            to = into.data_ptr() + into.itemsize * start
            NARROW[into.dtype](total.numel(), total.data_ptr(), to)
