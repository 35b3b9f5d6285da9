"""In how many slices an MLP runs, and whether a loss makes logits: by the budget of activations. Pure.

[Note: an eighth]
A block keeps its attention's tensors and its MLP's, beside all blocks' inputs. An MLP makes two to three
times what its attention does, and the logits of a large vocabulary more than several blocks. Whole, each of
the two may take an eighth of the budget: with more, few blocks could be kept anyway, and one could hardly be
recomputed. Above that an MLP runs in the fewest slices, a power of two, of which each takes an eighth at
most, and the loss is made without logits. Slices cost one more forward of the MLP, however many they are, as
long as each is worth a matrix product; so there are no smaller ones than of FEWEST_TOKENS.

The choice goes by shapes and the budget alone, never by time or by what is free: a run with a given budget
makes the same choices, and so has the same bits, each time.
"""

from __future__ import annotations

LOGIT_NBYTES = 12
"""Of a loss, for each token and entry of the vocabulary: see [Note: logits] in activations.py."""
SHARE = 8
"""Of the budget, that an MLP or the logits may take whole: one part in so many."""
FEWEST_TOKENS = 128
"""In a slice."""
MLP_ELEMENTS = 3
"""That an MLP makes at one time for each element of its inner linear layers' results: these, what the
activation makes of them, and their gradients.
"""


def mlp_nbytes(tokens: int, width: int, itemsize: int) -> int:
    """Return the bytes that an MLP's backward has at one time; width: elements that its inner layers make of
    a token.
    """
    return MLP_ELEMENTS * tokens * width * itemsize


def slices_within(nbytes: int, tokens: int, budget_nbytes: int) -> int:
    """Return in how many slices something of `nbytes` for so many tokens is to run: see [Note: an eighth]."""
    slices = 1
    while nbytes * SHARE > slices * budget_nbytes and tokens >= 2 * slices * FEWEST_TOKENS:
        slices *= 2
    return slices


def loss_without_logits(tokens: int, vocabulary: int, budget_nbytes: int) -> bool:
    """Whether the loss of so many tokens is to be made without logits: see [Note: an eighth]."""
    return LOGIT_NBYTES * tokens * vocabulary * SHARE > budget_nbytes
