"""A chain of equal layers, each of which is a unit, for tests of when their updates are made."""

import torch
from torch import nn

WIDTH, LAYERS = 256, 4


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
