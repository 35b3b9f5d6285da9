"""The kinds of optimizer state in a checkpoint, and which elements of a tensor in files a parameter's are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from infinity.planning.layout import STATE_BLOCK

KINDS = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "m4": "exp_avg_alone",
    "v4": "exp_avg_sq_alone",
    "mv": "exp_avg_both",
    "scale": "exp_avg_scale",
}
"""The kinds by field of the record: Adam's names, for all optimizers."""

CODES_4BIT = frozenset(KINDS[field] for field in ("m4", "v4", "mv"))
"""Those that are codes of 4 bits."""

_PER = {KINDS["m4"]: (2, 1), KINDS["v4"]: (2, 1), KINDS["scale"]: (STATE_BLOCK, 2)}
"""So many elements of a parameter are so many in files: two codes to a byte, two scales for each block."""


def first_of(kind: str, element: int) -> int:
    """Return the element of a tensor in files that a parameter's element, the first of a part, is in."""
    of, numel = _PER.get(kind, (1, 1))
    return element // of * numel


def behind(kind: str, element: int) -> int:
    """Return the element of a tensor in files behind a part that ends before a parameter's element."""
    of, numel = _PER.get(kind, (1, 1))
    return -(-element // of) * numel


def shape_of(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the tensor in files of a parameter of this shape."""
    of, numel = _PER.get(kind, (1, 1))
    count = -(-math.prod(shape) // of)
    return tuple(shape) if of == 1 else (count,) if numel == 1 else (count, numel)
