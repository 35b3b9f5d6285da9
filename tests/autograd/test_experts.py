"""Experts that are modules of their own: what is not routed to costs nothing, and what is lies higher.

Real training on a real disk, against the reference recipe in memory; nothing is faked.
"""

import contextlib
from collections import Counter

import pytest
import torch
from torch import nn

import models
from covers import matrix
from infinity import AdamW, Init, stats
from infinity.engine.engine import engine_of_model
from infinity.optim import missed as optim
from infinity.records.record import Record
from infinity.reference import ReferenceAdamW, prepare

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]

TOKENS = 256
EXPERTS = 8
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        return torch.relu(x @ self.up) @ self.down


class Router(nn.Module):
    """Sends each token to one expert, always the same: the largest of a fixed random projection of it."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.register_buffer("scores", torch.randn(TOKENS, EXPERTS, generator=generator))
        self.register_buffer("popularity", torch.randn(EXPERTS, generator=generator))

    def forward(self, ids):
        return (self.scores[ids] + self.popularity).argmax(-1)


class Routed(nn.Module):
    """A language model with one layer of experts, each run on the tokens that are routed to it."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.router = Router()
        self.experts = nn.ModuleList(Expert(width) for _ in range(EXPERTS))
        self.head = nn.Linear(width, TOKENS, bias=False)

    def forward(self, ids):
        x, routed = self.embed(ids), self.router(ids)
        out = torch.zeros_like(x)
        for expert in routed.unique().tolist():
            chosen = routed == expert
            out[chosen] = self.experts[expert](x[chosen])
        return nn.functional.cross_entropy(self.head(x + out).float(), ids)


def both(width, **init):
    """Return (model, optimizer) offloaded, and the same in memory."""
    torch.manual_seed(0)
    plain = prepare(Routed(width))
    torch.manual_seed(0)
    with Init(**init):
        model = Routed(width)
    state_dtype = init.get("state_dtype", "fp32")
    reference = ReferenceAdamW(plain.parameters(), **SETTINGS, state_dtype=state_dtype)
    return (model, AdamW(model.parameters(), **SETTINGS)), (plain, reference)


def routed_to(*experts):
    """Return the tokens that are routed to one of these experts."""
    ids = torch.arange(TOKENS)
    return ids[torch.isin(Router()(ids), torch.tensor(experts))]


def step(ours, plain, ids, *, set_to_none=False):
    """Train both for a step and compare their losses."""
    losses = []
    for model, optimizer in (ours, plain):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item())
    assert losses[0] == losses[1]


def skewed(number):
    """Return a batch of which most goes to few experts, and to others now and then."""
    generator = torch.Generator().manual_seed(number)
    often = torch.randint(0, 12, (6,), generator=generator)
    rarely = torch.randint(0, TOKENS, (2,), generator=generator)
    return torch.cat([routed_to(2, 3)[often], rarely])


@contextlib.contextmanager
def counted(model):
    """Count the bytes read and written of each expert's record, and of nothing else."""
    engine_of_model(model).lane.drain()
    moved, real = Counter(), {"read": Record.read, "write_to": Record.write_to}

    def read(record, name, start, stop, *rest, **named):
        moved[record.name] += record.tile_nbytes(name, stop - start)
        return real["read"](record, name, start, stop, *rest, **named)

    def write_to(record, extent, hashes, name, start, stop, *rest):
        moved[record.name] += record.tile_nbytes(name, stop - start)
        return real["write_to"](record, extent, hashes, name, start, stop, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "read", read)
        patch.setattr(Record, "write_to", write_to)
        yield moved
        engine_of_model(model).lane.drain()


def moved_experts(moved):
    """Return the experts that moved, by number."""
    return {int(name.removeprefix("experts.")) for name in moved if name.startswith("experts.")}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_expert_that_nobody_is_routed_to_is_neither_read_nor_written(folder, set_to_none):
    ours, plain = both(32, nvme=folder, host_memory="256KiB")
    everything = torch.cat([routed_to(expert)[:3] for expert in range(6)])
    for _ in range(2):
        step(ours, plain, everything, set_to_none=set_to_none)
    two = torch.cat([routed_to(expert)[:3] for expert in (1, 4)])
    step(ours, plain, two, set_to_none=set_to_none)  # what the others owed was planned, or is applied
    with counted(ours[0]) as moved:
        for _ in range(4):
            step(ours, plain, two, set_to_none=set_to_none)
    assert moved_experts(moved) == {1, 4}
    step(ours, plain, everything, set_to_none=set_to_none)
    models.assert_same_state(*ours, *plain)


@pytest.mark.parametrize(
    *matrix(together=1, state_dtype=["int8", "fp32", "bf16"], memory=["256KiB", "64MiB"])
)
def test_steps_that_an_expert_missed_are_replayed_exactly_when_it_is_next_used(folder, memory, state_dtype):
    ours, plain = both(32, nvme=folder, host_memory=memory, state_dtype=state_dtype)
    missed = Counter()
    for number in range(24):
        ids = skewed(number)
        for unit in engine_of_model(ours[0]).units:
            for update in unit.pending.values():
                steps = len(update.missed) + len(update.after)
                missed[unit.name] = max(missed[unit.name], steps)
        step(ours, plain, ids)
    assert max(missed.values(), default=0) >= 3, "nobody missed a step"
    models.assert_same_state(*ours, *plain)


def test_a_record_is_fetched_for_the_steps_it_missed_when_they_are_too_many(folder, monkeypatch):
    monkeypatch.setattr(optim, "MISSED_LIMIT", 3)
    ours, plain = both(32, nvme=folder, host_memory="256KiB")
    engine_of_model(ours[0]).pins = None  # a change of the placement would move records, too
    rare, often = routed_to(1)[:3], routed_to(3)[:3]
    step(ours, plain, rare)
    step(ours, plain, often)  # applies the gradient that the first step left
    fetched_in = []
    for number in range(9):
        with counted(ours[0]) as moved:
            step(ours, plain, often)
        if 1 in moved_experts(moved):
            fetched_in.append(number)
    assert fetched_in == [2, 5, 8]
    models.assert_same_state(*ours, *plain)


def placed(model):
    """Return the share of its record that each expert has in host memory."""
    units = [unit for unit in engine_of_model(model).units if unit.name.startswith("experts.")]
    host = [unit.record.nbytes("host") for unit in units]
    return [there / (there + unit.record.nbytes("nvme")) for there, unit in zip(host, units, strict=True)]


def test_hot_experts_lie_in_host_memory_and_the_placement_follows_when_others_become_hot(folder):
    ours, plain = both(128, nvme=folder, host_memory="4MiB")

    def train(steps, hot):
        for number in range(steps):
            rare = [expert for expert in range(1, 6) if expert not in hot][number // 4 % 3]
            used = [*hot, rare] if number % 4 == 0 else hot
            step(ours, plain, torch.cat([routed_to(expert)[:3] for expert in used]))

    train(26, hot=[2, 3])
    before, first = placed(ours[0]), stats(ours[0])
    assert before[2] == before[3] == 1
    assert before[6] == before[7] == 0
    assert max(before[4], before[5]) < 1
    train(8, hot=[4, 5])
    after, second = placed(ours[0]), stats(ours[0])
    assert after[4] == after[5] == 1
    assert min(after[2], after[3]) < 1
    assert second.since(first).placement_revisions >= 1
    assert second.budget_held_nbytes <= second.budget_nbytes
    models.assert_same_state(*ours, *plain)
