"""Experts that are modules of their own, of which each rank calls those that its own tokens are routed to."""

import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import recipe as reference
from plain_muon import ADAMW, MUON, PlainMuon

WIDTH, EXPERTS = 32, 8


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    """As older models of Hugging Face have it: a loop over those of the experts that have tokens."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        normed = self.norm(x)
        weights, chosen = self.gate(normed).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token = (chosen == expert).nonzero()[:, 0]
            out = out.index_add(0, token, self.experts[expert](normed[token]) * weights[token, None])
        return x + out + self.shared(normed)


class Chooser(nn.Module):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return nn.functional.cross_entropy(self.head(x).float(), ids)


def mean_with_zeros(grad, like):
    """Return the mean of the ranks' gradients, zeros where a rank has none; None where none has any."""
    mine = torch.zeros_like(like) if grad is None else grad
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine.contiguous())
    some = torch.tensor([grad is not None], dtype=torch.int32)
    dist.all_reduce(some)
    if not some.item():
        return None
    total = rows[0].float()
    for row in rows[1:]:
        total += row.float()
    return (total / len(rows)).to(mine.dtype)


def train(model, optimizer, *, steps=4):
    """Train on few tokens of this rank's own; return the losses, and the experts that it called, by step."""
    losses, called = [], set()
    for number, block in enumerate(model.blocks):
        for index, expert in enumerate(block.experts):
            expert.register_forward_pre_hook(lambda *_, at=(number, index): called.add((len(losses), *at)))
    for step in range(steps):
        own = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        loss = model(torch.randint(64, (3,), generator=own))
        loss.backward()
        losses.append(loss.item())
        if isinstance(model, Averaged):
            model.average()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(torch.arange(1 + dist.get_rank())).item())
    return losses, called


class Averaged(Chooser):
    """The reference, whose gradients become means after each backward."""

    def average(self):
        for parameter in self.parameters():
            value, factor = reference._stored(parameter) if parameter.grad is not None else (None, None)
            mean = mean_with_zeros(value, parameter)
            if mean is not None:
                reference._store(parameter, mean, factor if factor is not None else 1.0)


@functools.cache
def in_memory(options, muons):
    """Train the reference, once for all cases that differ in where what lies and what is recomputed; return
    losses, calls and weights. options: pairs; muons: the names of those parameters that are Muon's, if any.
    """
    torch.manual_seed(0)
    plain = prepare(Averaged())
    optimizer = PlainMuon(plain, muons) if muons else ReferenceAdamW(plain.parameters(), **dict(options))
    losses, called = train(plain, optimizer)
    return losses, called, plain.state_dict()


def chosen(*, checkpointed=False, options=None, muon=False, **init):
    """Train the reference and ours; return what differs, and which experts this rank called."""
    options = {"lr": 1e-2, "weight_decay": 0.1, **(options or {})}
    torch.manual_seed(0)
    with infinity.Init(**{"host_memory": "64MiB", "timeout_s": 60, **init}):
        ours = Chooser(checkpointed=checkpointed)
    muons = frozenset()
    if muon:
        groups = infinity.muon_groups(ours, ADAMW, **MUON)
        of_muon = {id(one) for one in groups[0]["params"]}
        muons = frozenset(key for key, one in ours.named_parameters() if id(one) in of_muon)
        optimizer = infinity.Muon(groups, update=options["update"])
    else:
        optimizer = infinity.AdamW(ours.parameters(), **options)
    plainly = tuple((key, one) for key, one in options.items() if key != "update")
    expected, called, weights = in_memory(plainly, muons)
    losses, ours_called = train(ours, optimizer)
    found = ours.state_dict()
    return {
        "different": [key for key, one in weights.items() if not torch.equal(one, found[key])],
        "losses": losses,
        "as expected": losses == expected and called == ours_called,
        "called": sorted(called),
    }


DISK = {"nvme": os.environ.get("RANKS_DISK"), "host_memory": int(os.environ.get("WORLD_SIZE", "1")) << 20}
CHOSEN = {
    "chosen": chosen,
    "chosen, checkpointed": lambda: chosen(checkpointed=True, options={"update": "backward"}, **DISK),
    "chosen, nvme": lambda: chosen(options={"max_norm": 0.5}, **DISK),
    "chosen, muon": lambda: chosen(muon=True, options={"update": "backward"}, **DISK),
    "chosen, muon checkpointed": lambda: chosen(
        muon=True, checkpointed=True, options={"update": "backward"}, **DISK
    ),
    "chosen, muon in memory": lambda: chosen(muon=True, options={"update": "backward"}),
    "chosen, muon forward": lambda: chosen(muon=True, options={"update": "forward"}, **DISK),
    "chosen, stage 1": lambda: chosen(stage=1),
    "chosen, stage 2": lambda: chosen(stage=2, checkpointed=True),
}
