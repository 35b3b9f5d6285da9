"""What stands for packed weights of a checkpoint from when they are offered until they are registered."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.errors import UnsupportedError
from infinity.storage.packed import Packed, Stack4
from infinity.units.released import placeholder


class StandIns:
    """Tensors without values, each of which a packed weight is known by."""

    def __init__(self) -> None:
        """Know none."""
        self._weights: dict[int, tuple[StorageWeakRef, Packed]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return int(tensor.untyped_storage()._cdata) in self._weights

    def stand_for(self, weight: Packed, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this shape and type that stands for a weight.

        Raises: UnsupportedError for a shape that the weight has not.
        """
        if weight.numel != shape.numel():
            raise UnsupportedError(f"{list(shape)} is not a shape of the {weight.numel} packed values")
        stand_in = placeholder(shape, dtype, "cpu")
        if isinstance(weight, Stack4):  # each matrix stands for itself: slices of the stack are taken
            stand_in = stand_in.flatten()[: shape[0]].clone().view(-1, 1, 1).expand(shape)
        storage = stand_in.untyped_storage()
        self._weights[int(storage._cdata)] = StorageWeakRef(storage), weight
        return stand_in

    def of(self, parameter: torch.Tensor) -> Packed | None:
        """Return the packed weight that a parameter stands for, or a slice of a stack of them; None for none.

        Raises: UnsupportedError for a part of a packed weight that has no place of its own in the file.
        """
        known = self._weights.get(int(parameter.untyped_storage()._cdata)) if self._weights else None
        if known is None:
            return None
        found = known[1]
        if isinstance(found, Stack4) and parameter.shape[1:] == (found.cols, found.rows):
            found = found.matrices(int(parameter.storage_offset()), len(parameter))
        if found.numel != parameter.numel():
            raise UnsupportedError(
                f"a parameter of shape {tuple(parameter.shape)} is a part of the {found.numel} packed values "
                f"of a weight in {found.ranges[0].path}: only whole weights, and experts of a stack, are "
                "read in place"
            )
        return found
