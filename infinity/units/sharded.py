"""Parameters that are DTensors: their guards while they are released, and while they are attached.

[Note: distributed parameters]
Of a DTensor (torch.distributed.tensor) a rank has one tensor, its local one, beside what says of which whole
it is a part: its mesh and its placements. A record holds local tensors, as it holds whole ordinary
parameters; and the DTensor stays the same object, of which the local tensor is a placeholder, or a view of
the unit's memory. Its shape, strides and placements are those of the whole in any case. So torch computes
with it as ever, and its gradient arrives as a DTensor, which is brought to the parameter's placements before
its local tensor is stored.

torch.distributed.tensor takes a second to import: this file is imported when there is a DTensor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from infinity.tensors import is_distributed, local, part_of, spread_as
from infinity.units.attached import DATA, Watched
from infinity.units.released import Guarded, brought


class ReleasedShard(Guarded, DTensor):
    """The class of a DTensor while it is released; see [Note: distributed parameters]."""

    @property
    def __tensor_flatten__(self) -> Any:
        """None, which says that it has no parts to hand out: torch swaps what has, in module.to(), where an
        ordinary parameter that is where it should be stays as it is.
        """
        raise AttributeError("__tensor_flatten__")

    def to_local(self, **options: Any) -> torch.Tensor:
        """As ever, where the owner brings the values back."""
        return cast("torch.Tensor", brought(self, "to_local").to_local(**options))

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """As ever, where the owner brings the values back."""
        return cast("torch.Tensor", brought(self, "full_tensor").full_tensor(**options))

    def redistribute(self, *places: Any, **options: Any) -> DTensor:
        """As ever, where the owner brings the values back."""
        return cast("DTensor", brought(self, "redistribute").redistribute(*places, **options))


class AttachedShard(Watched, DTensor):
    """The class of a DTensor while a step uses it, or an edit."""

    def has_memory_of(self, values: torch.Tensor) -> bool:
        """Whether the local tensors of both are the same memory, seen the same way."""
        return is_distributed(values) and local(self).is_set_to(local(values))

    def be_set_to(self, values: torch.Tensor) -> None:
        """Be `values`, which are redistributed if they are placed otherwise.

        Raises: UnsupportedError for an ordinary tensor.
        """
        set_local(self, part_of(self, values, "parameter.data"))


KINDS: dict[str, Any] = {"plain": DTensor, "attached": AttachedShard, "released": ReleasedShard}
"""The classes of a DTensor, by what is done with it."""
_LOCAL: Any = DTensor._local_tensor
_SPEC: Any = DTensor._spec


def set_local(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Let the DTensor's local tensor be `values`; their type becomes its own."""
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.dtype != values.dtype:
            whole = spread_as(parameter, values)
            DATA.__set__(parameter, whole)  # which sets what torch's own code sees alone
            _SPEC.__set__(parameter, _SPEC.__get__(whole))
    _LOCAL.__set__(parameter, values)
