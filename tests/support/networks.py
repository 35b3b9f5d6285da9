"""A small network, offloaded and in memory, with an optimizer each."""

import torch
from torch import nn

from infinity import AdamW, Init
from infinity.reference import ReferenceAdamW, prepare


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4, bias=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def pair(folder, optimizer=None, **init):
    """Return a small network offloaded and in memory, with an optimizer each."""
    torch.manual_seed(0)
    plain = prepare(Net())
    torch.manual_seed(0)
    with Init(nvme=folder, **{"host_memory": "1MiB", **init}):
        model = Net()
    update = (optimizer or {}).pop("update", "forward")
    settings = {"lr": 0.05, "weight_decay": 0.1, **(optimizer or {})}
    return (
        model,
        AdamW(model.parameters(), update=update, **settings),
        plain,
        ReferenceAdamW(plain.parameters(), **settings),
    )


def x(number=0):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(number)).bfloat16()


def same(model, plain):
    found = model.state_dict()
    return all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
