"""A chain of layers that is offloaded, with updates made ahead, beside the same in memory."""

import deep
from deep import LAYERS

UNITS = LAYERS
NEVER = 1e9  # a norm that is never reached
HI_PINNED = "2MiB"  # a budget with room for some of hi; that of the others has none


class Both(deep.Both):
    """Both, whose updates are made ahead where the model is offloaded."""

    def __init__(self, folder, *, speculate=True, **settings):
        super().__init__(folder, ours={"speculate": speculate}, **settings)
        self.speculation = self.engine.speculation

    def step(self, number, factor=1.0):
        self.backward(number, factor)
        self.decide()

    def decide(self):
        for _, optimizer in self:
            optimizer.step()
            optimizer.zero_grad()

    @property
    def counts(self):
        return self.speculation.confirmed, self.speculation.dropped
