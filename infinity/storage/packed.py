"""Weights that a checkpoint's files have in fewer bits: where their bytes are, and how they are widened.

[Note: packed weights]
The bytes that are read are those of the file. They are widened when they arrive, to the type that computes,
with the bits that transformers' own conversion of the same file gives:
- e4m3 with block scales (DeepSeek's "fp8"): the value of the code times the fp32 scale of its block, rounded
  to fp32, then to the type that computes, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from infinity import kernels
from infinity.storage.memory import Arena

_CHUNK_NUMEL = 1 << 16


def _as_it_is(n: int, source: int, target: int) -> None:
    kernels.copy(4 * n, target, source)


_NARROW: Mapping[str, Callable[[int, int, int], None]] = {
    "bf16": kernels.narrow,
    "fp16": kernels.narrow_f16,
    "fp32": _as_it_is,
}
"""From fp32 to each type that computes: (n, source, target)."""

_WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}


class Block8(NamedTuple):
    """A matrix of e4m3 codes with an fp32 scale for each block of it; see [Note: packed weights]."""

    path: str
    offset: int
    """Of the first code in the file."""
    numel: int
    scales_path: str
    scales_offset: int
    blocks: kernels.ScaleBlocks

    def codes(self, first: int, numel: int) -> tuple[int, int]:
        """Return the byte of the file, and the bytes, of the codes of some elements."""
        return self.offset + first, numel

    def scales(self, first: int, numel: int) -> tuple[int, int]:
        """Return the byte of the file, and the bytes, of the rows of scales that some elements have."""
        cut = self.blocks
        row_nbytes = 4 * -(-cut.cols // cut.block_cols)
        begin, last = (element // cut.cols // cut.block_rows for element in (first, first + numel - 1))
        return self.scales_offset + begin * row_nbytes, (last + 1 - begin) * row_nbytes

    def widen(self, dtype: str, first: int, numel: int, codes: int, scales: int, target: int) -> None:
        """Convert elements [first, first + numel), whose codes and scales lie at these addresses, to the type
        that computes, at `target`.
        """
        memory, narrow, cut = Arena(4 * _CHUNK_NUMEL), _NARROW[dtype], self.blocks
        row_nbytes, begin = 4 * -(-cut.cols // cut.block_cols), first // cut.cols // cut.block_rows
        for at in range(0, numel, _CHUNK_NUMEL):
            n = min(_CHUNK_NUMEL, numel - at)
            row = (first + at) // cut.cols // cut.block_rows - begin
            kernels.widen_e4m3(first + at, n, cut, codes + at, scales + row * row_nbytes, memory.address)
            narrow(n, memory.address, target + at * _WIDTHS[dtype])
