"""How many bytes ranks send of values that they send in fewer bits. Pure."""

from __future__ import annotations

CODE_BLOCK = 256
"""Elements that share an fp32 scale: as the kernels have it."""
BITS = {"int8": 8, "int4": 4}
"""Of an element, by the types that Config names."""


def scales_nbytes(numel: int) -> int:
    """Return the bytes of the scales of so many elements."""
    return 4 * -(-numel // CODE_BLOCK)


def coded_nbytes(numel: int, bits: int) -> int:
    """Return the bytes of so many elements' scales and codes."""
    return scales_nbytes(numel) + -(-numel * bits // 8)


def sent_nbytes(numel: int, kind: str | None, width: int) -> int:
    """Return the bytes of so many elements as they are sent: in `kind`, or, for None, of `width` bytes."""
    return numel * width if kind is None else coded_nbytes(numel, BITS[kind])
