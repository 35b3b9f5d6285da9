"""What autograd keeps in the place of tensors that it saves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.tensors import spread_as
from infinity.units.unit import Unit


@dataclass(slots=True, eq=False)
class PackedWeight:
    """What autograd keeps in the place of a weight."""

    unit: Unit
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements
    version: int
    of: torch.Tensor | None  # where a DTensor was saved, one without values that is placed as it

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return what was saved, with these values."""
        return values if self.of is None else spread_as(self.of, values)


def where_it_is(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return what autograd keeps of a tensor that stays, and its version. An operation's result that is kept
    as itself would keep the operation, and a graph that no backward frees would never go.
    """
    return tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version


def unchanged(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a tensor that stayed; autograd does not compare versions where hooks keep what it saves.

    Raises: RuntimeError for one that was changed in place.
    """
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place after it "
            f"was saved: it is at version {tensor._version}, not {version}. Use an operation that is not in "
            "place. The inputs of a block that is recomputed (checkpointing, activation_memory) are needed, "
            "too, as they were when it began."
        )
    return tensor
