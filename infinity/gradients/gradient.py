"""Gradients after they have accumulated: where they are kept until they are used.

[Note: who owns a gradient]
`p.grad` is an `OffloadedGradient`, and it owns the stored gradient: when it goes (zero_grad), so does the
gradient. step() reads it and leaves it there, as torch does. A gradient of one backward is kept as it came,
in 16 bits; a second backward turns the stored one into fp32 and adds. It lies in host memory while
the kept share has room, else in its unit's record.

[Note: nothing that p.grad holds may hold the parameter]
Python's collector does not see the way from a parameter to its `grad`, which is torch's: a cycle through
it is never collected, and with it the engine, its memory and its files. So the unit, the pass that measures,
and (in `OffloadedGradient`) the store are known weakly: the engine keeps them, which the model's hooks hold.
"""

from __future__ import annotations

import weakref
from enum import Enum

import numpy as np
import torch

from infinity.errors import NotResidentError, UnsupportedError
from infinity.lane.passes import SpillPart
from infinity.lane.queue import Pass
from infinity.records.weights import ACCUMULATE, WIDEN
from infinity.storage.memory import Ledger
from infinity.storage.store import DONE, Transfer
from infinity.units.unit import Unit

ONE = np.float32(1)
GONE = "a gradient was used after its model and optimizer are gone, and its values with them"


class Form(Enum):
    """Where a stored gradient is."""

    HOST = "in host memory"
    OUTGOING = "in host memory, on its way to the record"
    SPILLED = "in its unit's record"
    ZERO = "nowhere: it is zero"
    LOCAL = "whole, of this rank alone: the ranks have not summed theirs yet"
    APPLIED = "gone: it was applied in the backward"


class Gradient:
    """One parameter's stored gradient."""

    __slots__ = (
        "__weakref__",
        "_charged",
        "_job",
        "_ledger",
        "_unit",
        "arriving",
        "checked",
        "field",
        "form",
        "index",
        "parts",
        "scale",
        "tensor",
    )

    def __init__(self, unit: Unit, index: int, ledger: Ledger) -> None:
        """Describe the gradient of `unit.parameters[index]`, zero so far."""
        self._unit = weakref.ref(unit)
        self.index = index
        self.form = Form.ZERO
        self.tensor: torch.Tensor | None = None
        self.arriving: Transfer = DONE
        """Of `tensor`, which may be read when this is over."""
        self.field = "grad16"
        """The record's field that holds it while spilled."""
        self.parts: SpillPart | None = None
        """The sum of squares; filled in by `job` where a pass computes it."""
        self._job: weakref.ref[Pass] | None = None
        self.scale = ONE
        """The fp32 factor that clipping recorded; applied in the update."""
        self.checked = False
        """Whether somebody has seen that it is finite, as a scaled loss needs."""
        self._ledger = ledger
        self._charged = 0

    @property
    def unit(self) -> Unit:
        """The unit of the parameter.

        Raises: NotResidentError where the model is gone, and with it the gradient.
        """
        unit = self._unit()
        if unit is None:
            raise NotResidentError(GONE)
        return unit

    @property
    def job(self) -> Pass | None:
        """The pass that fills in `parts`; None where there is none, or it is over and forgotten."""
        return None if self._job is None else self._job()

    def check(self, what: str) -> None:
        """Raises: UnsupportedError where the values are gone that `what` needs."""
        if self.form is Form.APPLIED:
            raise UnsupportedError(applied_message(self.unit, what))

    def measured_by(self, parts: SpillPart, job: Pass) -> None:
        """Let `job` fill in the sum of squares."""
        self.parts, self._job = parts, weakref.ref(job)

    def fresh(self) -> Gradient:
        """Return a gradient of zeros for the same parameter."""
        return Gradient(self.unit, self.index, self._ledger)

    def leaves(self, form: Form) -> None:
        """Let go of the tensor: the gradient has, or will have, another form."""
        self.form, self.tensor, self.arriving = form, None, DONE

    def charge(self, nbytes: int) -> bool:
        """Make the gradient pay for `nbytes` in all of the kept share; False if they are not to be had."""
        if nbytes > self._charged and not self._ledger.try_reserve(nbytes - self._charged):
            return False
        if nbytes < self._charged:
            self._ledger.release(self._charged - nbytes)
        self._charged = nbytes
        return True

    def __del__(self) -> None:
        """Give back what was charged."""
        if self._charged:
            self._ledger.release(self._charged)


def applied_message(unit: Unit, what: str) -> str:
    """Return the message for what update="backward" cannot do."""
    return (
        f'{unit.name}: {what} needs the gradient, but update="backward" has applied it in the backward '
        "already. "
        'Use AdamW(..., update="forward") for clipping, gradient accumulation or code that reads gradients.'
    )


def total_of(stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return fp32(stored) + fp32(new); in place where the stored one is fp32 already."""
    if stored.is_cuda:
        return stored.float().add_(new)
    total = stored
    if stored.dtype != torch.float32:
        total = torch.empty(stored.shape, dtype=torch.float32)
        WIDEN[stored.dtype](stored.numel(), stored.data_ptr(), total.data_ptr())
    ACCUMULATE[new.dtype](new.numel(), total.data_ptr(), new.data_ptr())
    return total
