"""A chain of equal layers, each of which is a unit, for tests of when their updates are made."""

import torch
from torch import nn

from infinity import AdamW
from infinity.reference import ReferenceAdamW
from parity import assert_same_moments, build_both, engine_in

WIDTH, LAYERS = 256, 4
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Both:
    """A model offloaded, and the same in memory, trained alike. ours: further options of the optimizer of the
    first.
    """

    def __init__(self, folder, *, memory="1MiB", build=Deep, ours, **settings):
        self.plain, self.model = build_both(build, nvme=folder, memory=memory, waits=True)
        settings = {**SETTINGS, **settings}
        self.reference = ReferenceAdamW(self.plain.parameters(), **settings)
        self.optimizer = AdamW(self.model.parameters(), **ours, **settings)
        self.engine = engine_in(self.model)

    def __iter__(self):
        yield self.model, self.optimizer
        yield self.plain, self.reference

    def backward(self, number, factor=1.0):
        for model, _ in self:
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
            (model(x).square().mean() * factor).backward()

    def check(self):
        assert_same_moments(self.model, self.optimizer, self.plain, self.reference)
