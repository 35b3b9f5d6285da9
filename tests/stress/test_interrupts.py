"""Ctrl-C at an awkward moment, and then the same step again, as in a notebook. Trusted: the reference.
Faked: the moment, by an exception from within a function that runs there.
"""

import threading

import pytest
import torch
from torch import nn

import infinity
import models
from covers import matrix
from infinity.lane.base import Pass
from infinity.planning.queue import Queue
from infinity.reference import prepare
from infinity.units import unit as unit_module
from infinity.units.changes import Changes
from infinity.units.unit import Unit

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]


class Moment:
    """Raises KeyboardInterrupt at the `nth` call in the main thread, once it is armed."""

    def __init__(self):
        self.armed = 0

    def __call__(self):
        if self.armed and threading.current_thread() is threading.main_thread():
            self.armed -= 1
            if not self.armed:
                raise KeyboardInterrupt


def interrupt(monkeypatch, owner, name, *, after):
    """Make `owner.name` raise at the moment: before it runs, or after."""
    moment, original = Moment(), getattr(owner, name)

    def call(*args, **named):
        if not after:
            moment()
        value = original(*args, **named)
        if after:
            moment()
        return value

    monkeypatch.setattr(owner, name, call)
    return moment


MOMENTS = {
    "a pass is made, and not yet queued": (Pass, "__init__", True),
    "it is about to be queued": (Queue, "add", False),
    "it is in the queue, its updates not yet its own": (Queue, "add", True),
    "a forward ends": (Changes, "found", False),
    "a unit is about to be attached": (Unit, "attach", False),
    "a parameter is about to be attached or released": (unit_module, "_set_data", False),
    "it has been": (unit_module, "_set_data", True),
}
"""What is called at each: its owner, its name, and whether the interrupt comes after it."""


@pytest.mark.parametrize(*matrix(together=1, moment=MOMENTS, nth=[1, 2, 5]))
@pytest.mark.usefixtures("three_layers")
def test_a_step_can_be_repeated_after_an_interrupt_of_its_forward(folder, monkeypatch, moment, nth):
    owner, name, after = moment
    fields = {"nvme": str(folder), "host_memory": "1MiB"}
    *ours, _ = models.offloaded("gpt2", {"lr": 1e-2}, fields)
    expected, *plain = models.trained_in_memory("gpt2", (("lr", 1e-2),), steps=5)
    assert models.train(*ours, 2) == expected[:2]
    armed = interrupt(monkeypatch, owner, name, after=after)
    ids = models.batch(200)
    armed.armed = nth
    with pytest.raises(KeyboardInterrupt):
        ours[0](input_ids=ids, labels=ids)
    assert models.train(*ours, 3, first=2) == expected[2:]
    models.assert_same_state(*ours, *plain)


class Right(nn.Module):
    """A matrix that autograd saves itself: `x @ weight` needs it for the gradient of x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        return x @ self.weight


class Outer(nn.Module):
    """A module that runs others, which are none of its children."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x):
        return self.inner[0](torch.tanh(self.first(x)))


@pytest.mark.parametrize("memory", ["1MiB", "16MiB"])
def test_a_model_that_runs_inside_the_forward_of_another_engines_keeps_its_own_weights(folder, memory):
    def gradients(wrap):
        torch.manual_seed(0)
        outer = wrap(Outer)
        outer.inner = [wrap(lambda: nn.Sequential(Right(), nn.Tanh(), Right()))]
        x = torch.randn(8, 64).bfloat16().requires_grad_()
        outer(x).float().square().sum().backward()
        return x.grad, outer.first.weight.grad

    def offloaded(build):
        with infinity.Init(nvme=str(folder), host_memory=memory):
            return build()

    found, expected = gradients(offloaded), gradients(lambda build: prepare(build()))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(torch.Tensor(found[1].clone()), expected[1])
