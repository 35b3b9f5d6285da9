"""A small training with everything that a commit has to hold, and ways to run parts of it."""

from __future__ import annotations

import os
import random

import torch
from torch import nn

from infinity.checkpoint.resume import resume as resumed
from infinity.engine.engine import engine_of_model
from infinity.engine.init import Init
from infinity.optim.optimizers import AdamW

STEPS = 6


class Small(nn.Module):
    """Two tied layers, dropout, a buffer that changes, a frozen layer, one that is used only at times."""

    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks))
        self.frozen = nn.Linear(64, 64)
        self.seldom = nn.Linear(64, 64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, ids, *, seldom):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + self.dropout(torch.relu(block(x)))
        x = self.frozen(x)
        if seldom:
            x = x + self.seldom(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.float().mean((0, 1)), alpha=0.1)
                self.count += 1
        x = x - self.mean.to(x.dtype)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


class Loader:
    """Batches in an order drawn from torch's generator at each epoch, at a position that can be kept."""

    def __init__(self):
        self.order, self.at = [], 0

    def next(self):
        if self.at == len(self.order):
            self.order, self.at = torch.randperm(4).tolist(), 0
        self.at += 1
        noise = random.randrange(64)
        ids = torch.full((2, 8), noise)
        ids[:, ::2] = torch.arange(4) + self.order[self.at - 1]
        return ids

    def state_dict(self):
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = list(state["order"]), state["at"]


class Run:
    """One process's part of a training: built, resumed, trained, and dropped as if it had been killed."""

    def __init__(
        self, folder, *, update="forward", seed=0, resume=True, track=True, blocks=3, of_adamw=None, **config
    ):
        torch.manual_seed(seed)
        random.seed(seed)
        config = {"host_memory": "256KiB", "durable": True, **config}
        with Init(nvme=folder, **config):
            self.model = self.build(blocks)
        rank = int(os.environ.get("RANK", "0"))
        if rank:  # the same model, and other batches
            torch.manual_seed(seed + rank)
            random.seed(seed + rank)
        self.model.train()
        trained = self.trained()
        decayed = [one for one in trained if one.dim() > 1]
        rest = [one for one in trained if one.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = AdamW(groups, lr=1e-2, update=update, **(of_adamw or {}))
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, 5)
        self.loader = Loader()
        self.engine = engine_of_model(self.model)
        self.first = 0
        if track:
            self.optimizer.track(scheduler=self.schedule, loader=self.loader)
        if resume and config["durable"]:
            try:
                how = resume if isinstance(resume, dict) else {}
                self.first = resumed(self.model, self.optimizer, **how)
            except BaseException:
                self.kill()
                raise
        self.done = self.first

    def build(self, blocks):
        return Small(blocks)

    def trained(self):
        return list(self.model.parameters())

    def forward(self):
        return self.model(self.loader.next(), seldom=self.done % 3 == 0)

    def step(self):
        self.done += 1
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()

    def train(self, steps=STEPS):
        """Go on until `steps` steps are done; return {step: loss}."""
        losses = {}
        while self.done < steps:
            loss = self.step()
            losses[self.done] = loss
        return losses

    def state(self):
        """Every weight, master and moment, and all else that counts."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = self.engine.parameters.read(parameter, ["hi", "master"])
            if parameter in self.optimizer.state:
                found[name] += self.engine.parameters.read(parameter, ["m", "v"])
        found["buffers"] = [self.model.mean, self.model.count]
        return found

    @property
    def committed(self):
        return self.engine.durable.committed_step

    def kill(self):
        """End as a killed process would: nothing is committed for it."""
        self.engine.close()


def same(one, other):
    """Whether two states are equal bit for bit."""
    return list(one) == list(other) and all(
        len(one[name]) == len(other[name])
        and all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True))
        for name in one
    )
