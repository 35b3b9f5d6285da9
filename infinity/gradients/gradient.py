"""One stored gradient: its form, where its values lie, and what it has taken of the budget.

[Note: who owns a gradient]
`p.grad` is an `OffloadedGradient`, and it owns the stored gradient: when it goes (zero_grad), so does the
gradient. step() reads it and leaves it there, as torch does. Whatever else refers to a gradient (a sum over
ranks, an update in the backward) asks the parameter before it uses it: `is_current`. A gradient of one
backward is kept as it came, in 16 bits; a second backward turns the stored one into fp32 and adds. It lies in
host memory while the kept share has room, else in its unit's record. Where the unit's whole record lives on
an accelerator, it stays there, as far as device_memory has room.

[Note: who frees its memory]
Nothing has to be freed by hand, whatever fails. Its memory is a buffer, or on the CPU torch's own, if it is
small, or malloc has mapped it by itself; it comes back when nothing refers to the tensor any more: neither
the gradient nor a pass or an update that has taken the tensor (device/buffers.py). Its bytes of the kept
share go back with the gradient itself (`__del__` here). Its bytes of the outgoing share are a lease: whoever
takes the tensor takes the lease with it, and the lease ends by itself when nothing refers to it
(lane/outgoing.py). So a read or a write of the record that fails frees nothing by itself: it stops the lane,
which raises the error in the next call that waits for it (storage/failure.py). The pass that failed and those
that wait in the lane's queue keep their tensors until the engine goes.

[Note: nothing that p.grad holds may hold the parameter]
Python's collector does not see the way from a parameter to its `grad`, which is torch's: a cycle through
it is never collected, and with it the engine, its memory and its files. So the unit, the pass that measures,
and (in `OffloadedGradient`) the store are known weakly: the engine keeps them, which the model's hooks hold.
"""

from __future__ import annotations

import math
import weakref
from enum import Enum

import numpy as np
import torch
from torch import nn

from infinity import kernels
from infinity.errors import NotResidentError, UnsupportedError
from infinity.lane.base import Pass
from infinity.lane.outgoing import Lease
from infinity.lane.passes import SquareSum
from infinity.records.weights import ACCUMULATE, KERNEL_DTYPE, WIDEN
from infinity.storage.memory import Ledger
from infinity.storage.store import DONE, Future
from infinity.units.unit import Unit

ONE = np.float32(1)
GONE = "a gradient was used after its model and optimizer are gone, and its values with them"


class Form(Enum):
    """Where a stored gradient is."""

    HOST = "in memory"
    """The host's; or the device's, where `on_device` says so."""
    OUTGOING = "in host memory, on its way to the record"
    SPILLED = "in its unit's record"
    ZERO = "nowhere: it is zero"
    LOCAL = "whole, of this rank alone: the ranks have not summed theirs yet"
    APPLIED = "gone: it was applied in the backward"
    __hash__ = object.__hash__  # Enum's own hashes the name, in Python, at each change


_NEXT = {
    Form.ZERO: {Form.LOCAL, Form.HOST, Form.OUTGOING},
    Form.LOCAL: {Form.HOST, Form.OUTGOING},
    Form.HOST: {Form.HOST, Form.OUTGOING, Form.APPLIED},
    Form.OUTGOING: {Form.HOST, Form.SPILLED, Form.APPLIED},
    Form.SPILLED: {Form.HOST, Form.SPILLED, Form.APPLIED},
    Form.APPLIED: set[Form](),
}
"""The forms that may follow each one."""


_FINITE, _ASKED = 1, 2
"""What has been done with its values. Numbers, as a Flag is combined in Python."""


class Gradient:
    """One parameter's stored gradient."""

    __slots__ = (
        "__weakref__",
        "_charged",
        "_job",
        "_lease",
        "_ledger",
        "_noted",
        "_unit",
        "additions",
        "arriving",
        "field",
        "form",
        "index",
        "on_device",
        "scale",
        "square_sum",
        "tensor",
    )

    def __init__(self, unit: Unit, index: int, ledger: Ledger) -> None:
        """Describe the gradient of `unit.parameters[index]`, zero so far."""
        self._unit = weakref.ref(unit)
        self.index = index
        self.form = Form.ZERO
        self.tensor: torch.Tensor | None = None
        self.arriving: Future = DONE
        """Of `tensor`, which may be read when this is over."""
        self.on_device = False
        """Whether `tensor` is on the device, where the unit's record lives, to be applied there."""
        self.field = "grad16"
        """The record's field that holds it while spilled."""
        self.square_sum: SquareSum | None = None
        """Filled in by `job` where a pass computes it."""
        self._job: weakref.ref[Pass] | None = None
        self.additions = 0
        """How often something was added to its values, unless it was zero."""
        self.scale = ONE
        """The fp32 factor that clipping recorded; applied in the update."""
        self._noted = 0
        self._ledger = ledger
        self._charged = 0
        self._lease: Lease | None = None

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
    def parameter(self) -> nn.Parameter:
        """The parameter."""
        return self.unit.parameters[self.index]

    @property
    def is_current(self) -> bool:
        """Whether its parameter's `p.grad` stands for it: zero_grad() may have dropped it meanwhile. The
        parameter decides, not references to the gradient: so ranks that run the same code agree.
        """
        with torch._C.DisableTorchFunctionSubclass():  # a gradient is no value: no guard need be asked
            grad = self.unit.parameters[self.index].grad
        return getattr(grad, "gradient", None) is self

    @property
    def job(self) -> Pass | None:
        """The pass that fills in `square_sum`; None where there is none, or it is over and forgotten."""
        return None if self._job is None else self._job()

    def check(self, what: str) -> None:
        """Note that `what` needs the values.

        Raises: UnsupportedError where they are gone.
        """
        if self.form is not Form.ZERO:
            self._noted |= _ASKED
        if self.form is Form.APPLIED:
            raise UnsupportedError(applied_message(self.unit, what))

    @property
    def checked(self) -> bool:
        """Whether somebody has seen that it is finite, as a scaled loss needs."""
        return bool(self._noted & _FINITE)

    @property
    def asked(self) -> bool:
        """Whether its values were read, set, clipped or added to."""
        return bool(self._noted & _ASKED)

    def measured_by(self, square_sum: SquareSum, job: Pass) -> None:
        """Let `job` fill in the sum of squares."""
        self.square_sum, self._job = square_sum, weakref.ref(job)

    def measure(self, tensor: torch.Tensor) -> SquareSum:
        """Sum the squares of `tensor`, the gradient's values, and return them."""
        dtype = KERNEL_DTYPE[tensor.dtype]
        value, finite = kernels.sum_squares(tensor.numel(), tensor.data_ptr(), dtype)
        self.square_sum, self._job = SquareSum(value, finite), None
        return self.square_sum

    def was_measured(self, square_sum: float) -> None:
        """Note the sum of squares, as the device has computed it."""
        self.square_sum, self._job = SquareSum(square_sum, math.isfinite(square_sum)), None

    def multiply(self, factor: float) -> None:
        """Record a factor of clipping, in fp32."""
        self._noted |= _ASKED
        self.scale = np.float32(self.scale * np.float32(factor))

    def was_seen_finite(self) -> None:
        """Note that somebody has seen that it is finite, or skips the step where it is not."""
        self._noted |= _FINITE

    def was_asked_for(self) -> None:
        """Note that its values are the user's: assigned, or changed by an operation of torch."""
        self._noted |= _ASKED

    def fresh(self) -> Gradient:
        """Return a gradient of zeros for the same parameter."""
        return Gradient(self.unit, self.index, self._ledger)

    # From form to form

    def _become(self, form: Form) -> None:
        if form not in _NEXT[self.form]:
            raise AssertionError(f"a gradient that is {self.form.value} cannot become {form.value}")
        self.form = form

    def be_local(self) -> None:
        """Be this rank's alone, until the ranks sum theirs."""
        self._become(Form.LOCAL)

    def comes(self, arriving: Future) -> None:
        """Its tensor, which follows, may be read when `arriving` is over."""
        self.arriving = arriving

    def await_tensor(self) -> torch.Tensor:
        """Return the tensor, which may be read now."""
        self.arriving.wait()
        return self.in_memory

    @property
    def in_memory(self) -> torch.Tensor:
        """The tensor in memory, which may be read when `arriving` is over."""
        if self.tensor is None:
            raise AssertionError(f"expected a gradient in memory, got one that is {self.form.value}")
        return self.tensor

    def keep(self, tensor: torch.Tensor) -> None:
        """Stay in host memory, as `tensor`, which the kept share has paid for."""
        self._become(Form.HOST)
        self.tensor, self.on_device = tensor, False
        self.end_lease()

    def stay(self, tensor: torch.Tensor, lease: Lease) -> None:
        """Stay on the device, as `tensor`, with `lease` of device_memory."""
        self._become(Form.HOST)
        self.tensor, self.on_device, self.square_sum = tensor, True, None
        self.end_lease()
        self._lease = lease

    def wait_on_device(self, tensor: torch.Tensor, lease: Lease) -> None:
        """Wait on the device, as `tensor`, for the other gradients of the unit."""
        self.send(tensor, lease)
        self.on_device = True

    def is_added_to(self) -> None:
        """Note that something is about to be added to its values: to none where it is zero."""
        self.additions += self.form is not Form.ZERO

    def was_changed(self) -> None:
        """Note that the tensor has other values than those that were measured."""
        self.square_sum = None

    def stay_on_device(self) -> None:
        """Wait no more: stay on the device."""
        self._become(Form.HOST)

    def leave_device(self) -> torch.Tensor:
        """Give up the tensor on the device, which is returned, to be placed anew."""
        tensor = self.await_tensor()
        self.on_device = False
        return tensor

    def send(self, tensor: torch.Tensor, lease: Lease) -> None:
        """Wait, as `tensor`, for the other gradients of the unit; if it is spilled already, `tensor` is to be
        added to what is stored.
        """
        if self.form is not Form.SPILLED:
            self._become(Form.OUTGOING)
        self.tensor, self._lease = tensor, lease

    def spill(self, field: str) -> Lease | None:
        """Let a pass write the tensor, if there is one, to a field of the record; return its lease."""
        self._become(Form.SPILLED)
        self.field = field
        return self._give_tensor()

    def bring_back(self, values: torch.Tensor) -> None:
        """Be in host memory again, like a copy that the user made where the kept share has no room for it."""
        self._become(Form.HOST)
        self._give_tensor()
        self.tensor = values
        self.charge(values.nbytes)

    def apply(self) -> Lease | None:
        """Belong to an update that is decided; return the lease of its tensor, if it has one."""
        self._become(Form.APPLIED)
        self.charge(0)
        return self._give_tensor()

    def _give_tensor(self) -> Lease | None:
        self.tensor, self.arriving, self.on_device = None, DONE, False
        lease, self._lease = self._lease, None
        return lease

    def end_lease(self) -> None:
        """End the lease of the tensor, if it has one: the tensor is not on its way out any more."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end()

    def charge(self, nbytes: int) -> bool:
        """Take `nbytes` in all of the kept share; False, and nothing changes, if it has no room."""
        if nbytes > self._charged and not self._ledger.try_reserve(nbytes - self._charged):
            return False
        if nbytes < self._charged:
            self._ledger.release(self._charged - nbytes)
        self._charged = nbytes
        return True

    def __del__(self) -> None:
        """Give back what was charged, and the tensor before its lease."""
        self.tensor = None
        if self._charged:
            self._ledger.release(self._charged)


def applied_message(unit: Unit, what: str) -> str:
    """Return the message for what update="backward" cannot do."""
    return (
        f'{unit.name}: {what} needs the gradient, but update="backward" has applied it in the backward '
        'already, as "auto" does with those of some units. '
        'Use AdamW(..., update="forward") for clipping, gradient accumulation or code that reads gradients.'
    )


def total_of(stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return fp32(stored) + fp32(new); in place where the stored one is fp32 already."""
    if stored.device.type != "cpu":
        return stored.float().add_(new)
    total = stored
    if stored.dtype != torch.float32:
        total = torch.empty(stored.shape, dtype=torch.float32, device="cpu")
        WIDEN[stored.dtype](stored.numel(), stored.data_ptr(), total.data_ptr())
    ACCUMULATE[new.dtype](new.numel(), total.data_ptr(), new.data_ptr())
    return total
