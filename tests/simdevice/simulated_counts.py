"""What the device holds at every use of a model's layers, beside the weights: in plain PyTorch, and of
Infinity beside what its ledger counts. The two are compared with `==`.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable

import torch
from torch import nn

from simulator import Simulator


class Uses:
    """What `count` says in each training forward and its backward: whenever a layer that has parameters has
    been computed, and whenever the gradient of what it has made is there.
    """

    def __init__(self, model: nn.Module, count: Callable[[], int]) -> None:
        """Begin to look."""
        self.passes: list[list[int]] = []
        """One list for each forward, with its backward."""
        self.threads: set[int] = set()
        """The kernel's numbers of the threads in which gradients came."""
        self._count = count
        model.register_forward_pre_hook(self._begin)
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(self._computed)

    def _begin(self, module, inputs):
        if torch.is_grad_enabled():
            self.passes.append([])

    def _computed(self, module, inputs, made):
        if self.passes and torch.is_tensor(made) and made.requires_grad:
            self.passes[-1].append(self._count())
            made.register_hook(self._came)

    def _came(self, grad):
        self.threads.add(threading.get_native_id())
        self.passes[-1].append(self._count())

    def beside(self, plain: list[int]) -> list[int]:
        """Return how far they differ from those of a plain pass."""
        both = itertools.chain.from_iterable(zip(one, plain, strict=False) for one in self.passes)
        return sorted({ours - theirs for ours, theirs in both})


def plain_uses(
    model: nn.Module, backward: Callable[[nn.Module], object], simulator: Simulator
) -> tuple[int, list[int]]:
    """Return the bytes that a backward takes in plain PyTorch beside the parameters, where each gradient is
    dropped as it comes: at most, and at every use. The model is on the CPU, and is moved.
    """
    simulator.delay()
    simulator.restart()
    before = simulator.counts()["allocated"]
    model.to("sim")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    parameters = simulator.counts()["allocated"] - before
    uses = Uses(model, lambda: simulator.counts()["allocated"] - before - parameters)
    for _ in range(2):  # what torch allocates once, it has after the first
        gc.collect()
        simulator.restart()
        backward(model)
    torch.accelerator.synchronize()
    return simulator.counts()["peak"] - before - parameters, uses.passes[-1]


def _drop_gradient(parameter):
    parameter.grad = None
