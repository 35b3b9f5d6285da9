"""How large tiles are to be, where nobody has said so: from the budgets, and from what tiling costs. Pure.

[Note: the size of a tile]
A tile is fetched ahead of its use, and its gradient leaves while the next one computes: each has a share of
host_memory that is an eighth at least (see memory). So a tile of an eighth is the largest that moves without
anybody waiting. Where units live on a device with a budget of its own, a quarter of that holds the tile in
use, the next one and a gradient.

Smaller tiles than LEAST_NBYTES save little, and cost time: each is a call of its own, whose gradient is made
and let go of by itself. Measured, a weight of 32 MiB with 16 tokens, forward and backward, by the size of its
tiles: 8 MiB 0.94 times the time in one piece, 4 MiB 1.30, 2 MiB 1.55, 0.5 MiB 4.57 (2 cores, torch on both):

    infinity bench tiles --kind linear --hidden 2048 --tokens 16 --sweep tiles=1,4,8,16,64 --rounds 7

[Note: the size of a slice]
Experts and rows of embeddings are slices by what they are, since only those in use move: a slice that is not
used saves 26 bytes for each of its parameters. A use of a unit takes about half a millisecond of a CPU, in
which a disk of 2 GB/s moves the state of 40,000 parameters. Slices of fewer share a unit.

[Note: blocks of rows]
Experts exist as such; how many rows of an embedding are a slice is ours to say. A batch of few tokens uses
few blocks, and moves the less the smaller they are; one of many tokens uses all of them, and then each block
only costs its use, as above. So a block has at least the bytes that take four times as long to move as to
follow. A batch that uses every row then takes a quarter longer for the embedding, which is a tenth or less of
a model's parameters and waits for the disk while others compute. Measured, 65,536 x 256 in 105 blocks, on a
2-core machine, NVMe for all: 20,000 rows a step 0.58 s and 27.0 B per parameter, 0.46 s and 27.9 B whole.

Of an embedding of fewer than MANY_ROWS, as language models of one language have, some hundred tokens use most
blocks in every step, so that many small ones cost more than they save: 128 blocks of a 32,000 x 768 in a
model of 134 million parameters made a step of 512 tokens a tenth longer, and one of 16 a seventh shorter. So
its blocks have at least LEAST_FEW_ROWS_NBYTES.

There are at most MOST_BLOCKS: eight rows anywhere are then in a thirtieth of the blocks, and 26 bytes per
parameter come to less than one. An embedding of fewer than LEAST_BLOCKS blocks stays whole: a sentence would
use most of them, and all of it is moved in a few milliseconds. So it does where host memory holds all of the
model: nothing is moved then, and 128 blocks of a 32,000 x 768 made a step of 125 million parameters and 16
tokens a seventh longer (measured).
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.sizes import format_size

LEAST_NBYTES = 8 << 20
"""Of a weight that is cut at all, as it computes."""

LEAST_SLICE_NBYTES = 64 << 10
"""Of a slice, as it computes: see [Note: the size of a slice]."""

LEAST_ROWS_NBYTES = 4 * LEAST_SLICE_NBYTES
"""Of a block of an embedding's rows, as it computes: see [Note: blocks of rows]."""
LEAST_FEW_ROWS_NBYTES = 8 * LEAST_ROWS_NBYTES
"""Of a block of an embedding that has fewer than MANY_ROWS."""
MANY_ROWS = 65_536
"""Of an embedding of which a step leaves most unused."""
MOST_BLOCKS = 256
"""Of an embedding that is cut by its rows."""
LEAST_BLOCKS = 16
"""An embedding of fewer stays whole."""


def rows_of_block(rows: int, row_nbytes: int) -> int | None:
    """Return how many rows of an embedding are fetched together, where a row computes in `row_nbytes`; None
    where it stays whole. See [Note: blocks of rows].
    """
    least_nbytes = LEAST_ROWS_NBYTES if rows >= MANY_ROWS else LEAST_FEW_ROWS_NBYTES
    together = max(-(-least_nbytes // max(1, row_nbytes)), -(-rows // MOST_BLOCKS))
    return together if -(-rows // together) >= LEAST_BLOCKS else None


@dataclass(frozen=True, slots=True)
class TileChoice:
    """Above how many bytes a weight is cut, as it is resident; and why, for people."""

    nbytes: int
    reason: str

    def of_built(self, itemsize: int, width: int = 2) -> int:
        """Return the same limit for a weight that is built in elements of `itemsize` bytes, and computes in
        elements of `width`.
        """
        return self.nbytes * itemsize // width


def tile_choice(host_nbytes: int, device_nbytes: int | None = None) -> TileChoice:
    """Choose the size of tiles for these budgets: see [Note: the size of a tile]."""
    nbytes, reason = host_nbytes // 8, f"an eighth of host_memory={format_size(host_nbytes)}"
    if device_nbytes is not None and device_nbytes // 4 < nbytes:
        nbytes, reason = device_nbytes // 4, f"a quarter of device_memory={format_size(device_nbytes)}"
    if nbytes < LEAST_NBYTES:
        least = format_size(LEAST_NBYTES)
        return TileChoice(LEAST_NBYTES, f"{least}, as smaller tiles cost more time than they save memory")
    return TileChoice(nbytes, f"{format_size(nbytes)}, {reason}")
