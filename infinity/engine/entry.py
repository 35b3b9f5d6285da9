"""One parameter of a model that is being built; see construction."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from infinity.engine.asked import KEPT
from infinity.errors import UnsupportedError
from infinity.planning.layout import Format
from infinity.records.record import Record
from infinity.records.weights import WEIGHTS


class ParameterEntry:
    """One parameter under construction."""

    __slots__ = ("asked", "dtype", "index", "module", "name", "parameter", "record")

    def __init__(
        self, parameter: nn.Parameter, module: nn.Module, name: str, asked: torch.dtype | None
    ) -> None:
        self.parameter = weakref.ref(parameter)
        self.module = weakref.ref(module)
        self.name = name
        self.dtype = parameter.dtype
        self.asked = asked
        """The type that it is to compute in; None for Config's."""
        self.record: Record | None = None
        """Where it was evicted to; None as long as it never was."""
        self.index = 0

    def lie_in(self, record: Record, index: int) -> None:
        """Its values are those of a parameter of `record`."""
        self.record, self.index = record, index

    def take(self, parameter: nn.Parameter, asked: torch.dtype | None, form: Format) -> None:
        """Look at what `p.data = ...` made of it: another dtype, or what needs another record than it has.

        asked: the type that it is to compute in now, in a record of this format.
        """
        if parameter.dtype not in KEPT:
            raise UnsupportedError(other_dtype(self.module(), self.name, parameter))
        self.dtype = parameter.dtype
        if self.record is not None and (
            self.record.form is not form
            or self.record.shard.segments[self.index].shape != tuple(parameter.shape)
        ):
            self.record = None
        self.asked = asked

    @property
    def nbytes(self) -> int:
        """Bytes while real."""
        parameter = self.parameter()
        return 0 if parameter is None else parameter.numel() * self.dtype.itemsize


def other_dtype(module: nn.Module | None, name: str, parameter: torch.Tensor) -> str:
    """Say why a parameter cannot be offloaded in its type, and what to do."""
    what = f"{type(module).__name__}.{name}"
    message = f"{what} is {parameter.dtype}, which a record with an fp32 master cannot hold: "
    if parameter.is_complex():
        return (
            f"{message}keep its real and imaginary parts, nn.Parameter(torch.view_as_real({name})), and let "
            f"forward compute with torch.view_as_complex(self.{name})"
        )
    return f"{message}make it torch.float32, or a buffer (register_buffer) where it is not trained"


def computes_in(record: Record) -> torch.dtype:
    """Return the type of what computes."""
    return WEIGHTS[record.form.dtype].dtype


def _shares(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = _shares(nn.Parameter(torch.zeros(1)))


def has_views(parameter: torch.Tensor | None) -> bool:
    """Whether other tensors share a real parameter's memory."""
    return parameter is not None and _shares(parameter) > _ALONE
