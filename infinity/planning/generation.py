"""How many sequences of a batch a layer computes at a time, and how much of a prompt. Pure: no torch, no I/O.

While a layer computes, memory holds beside its weights what its products make of the tokens, about twice (a
result and what is made of it), and the keys and values of these sequences, twice: as they are kept, and in
one piece with the newest. Both are counted for the longest that a sequence gets.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_CHUNK = 256
"""Tokens: what a pass over the weights has to compute at least to be worth it."""


@dataclass(frozen=True, slots=True)
class LayerWidths:
    """What the widest layer of a model makes of one token, in elements."""

    products: int
    """Of the results of its linear layers together."""
    keys: int
    """Of keys and values."""
    itemsize: int
    """Bytes of an element."""

    def sequence_nbytes(self, prompt: int, tokens: int) -> int:
        """Bytes for a sequence with so many tokens in a prompt, or a chunk of it, and so many in all."""
        return 2 * self.itemsize * (self.products * prompt + self.keys * tokens)

    def sequences(self, batch: int, prompt: int, tokens: int, limit_nbytes: int) -> int:
        """Return how many sequences of a batch fit `limit_nbytes` together; at least 1."""
        return max(1, min(batch, limit_nbytes // self.sequence_nbytes(prompt, tokens)))

    def chunk(self, prompt: int, limit_nbytes: int) -> int | None:
        """Return the tokens of a prompt that one sequence may bring at a time; None for all. Each chunk is a
        pass over the weights, so it has LEAST_CHUNK at least; keys and values are there at any chunk.
        """
        chunk = max(LEAST_CHUNK, limit_nbytes // (2 * self.itemsize * self.products))
        return None if chunk >= prompt else chunk
