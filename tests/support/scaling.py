"""GradScaler beside the reference. It refuses gradients of fp16 weights, so it sees fp32 copies of them, and
decides whether the reference steps.
"""

import torch

from infinity.reference import recipe as reference


class Beside(torch.optim.Optimizer):
    """Shows GradScaler the reference's gradients in fp32, and steps the reference when it is stepped."""

    def __init__(self, plain, optimizer):
        self.pairs = [(one, torch.nn.Parameter(one.detach().float())) for one in plain.parameters()]
        self.reference = optimizer
        super().__init__([shadow for _, shadow in self.pairs], {})

    def look(self):
        for one, shadow in self.pairs:
            shadow.grad = None if one.grad is None else reference._stored(one)[0].detach().float().clone()

    def unscaled(self, inverse):
        for one, shadow in self.pairs:
            if one.grad is not None:
                value, factor = reference._stored(one)
                reference._store(one, value, factor * inverse)
                assert torch.equal((value.float() * inverse).nan_to_num(), shadow.grad.nan_to_num())

    def step(self):
        self.reference.step()
