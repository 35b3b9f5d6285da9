"""The steps of a piece of a tile whose gradients are zeros, and where gradients lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infinity import kernels
from infinity.planning.layout import TilePiece
from infinity.records.update_rules import Kernel, UpdateSpan
from infinity.records.weights import KERNEL_DTYPE


def miss(step: Kernel, piece: TilePiece, state: dict[str, int], steps: Sequence[tuple[Any, int]]) -> None:
    """Make steps, by their scalars and keys, whose gradients are zeros."""
    if steps:
        zeros = zeros_of(piece.numel)
        for scalars, key in steps:
            step(UpdateSpan(piece.numel, state, *address_of(zeros), key, piece.element), scalars)


def zeros_of(numel: int) -> torch.Tensor:
    """Return a gradient of zeros."""
    return torch.zeros(numel, dtype=torch.bfloat16, device="cpu")


def address_of(gradient: torch.Tensor, element: int = 0) -> tuple[int, kernels.AnyGradientDtype]:
    """Return the address of an element of a gradient, and its type."""
    return gradient.data_ptr() + element * gradient.element_size(), KERNEL_DTYPE[gradient.dtype]
