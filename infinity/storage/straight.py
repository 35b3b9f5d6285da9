"""Which bytes of a file are read straight to where they belong. Pure."""

from __future__ import annotations

from infinity.sizes import BLOCK, round_up


def straight_range(
    offset: int, nbytes: int, target: int, file_nbytes: int, *, before: bool, behind: bool
) -> range | None:
    """Return the whole blocks of a file that are read straight to where its bytes [offset, offset + nbytes)
    belong, at the address `target`; None where no block of it lies in memory as it does in the file.

    before, behind: whether the memory in which their first block begins, and their last one ends, may be
    overwritten with what the file has there.
    """
    if (offset - target) % BLOCK:
        return None
    stop = offset + nbytes
    low = offset // BLOCK * BLOCK if before else round_up(offset, BLOCK)
    high = round_up(stop, BLOCK) if behind else stop // BLOCK * BLOCK
    high = min(high, file_nbytes // BLOCK * BLOCK)
    return range(low, high) if high > low else None
