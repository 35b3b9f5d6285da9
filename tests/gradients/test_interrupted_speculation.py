"""A Ctrl-C while updates are made ahead or begin to count; training goes on. Trusted: the recipe in memory.
Faked: the Ctrl-C, a KeyboardInterrupt that a call raises.
"""

import pytest
import torch

import infinity
from deep import WIDTH, Deep
from infinity import AdamW, Init
from infinity.gradients import speculation
from infinity.lane.ahead import AheadPass
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.queue import Queue
from infinity.planning.residence import Residency
from infinity.reference import ReferenceAdamW, prepare
from parity import differences, engine_in

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "max_norm": 1e9}


class Both:
    """A model offloaded, whose updates are made ahead, and the same in memory, trained alike."""

    def __init__(self, folder, *, memory="1MiB", durable=False):
        torch.manual_seed(0)
        self.plain = prepare(Deep())
        torch.manual_seed(0)
        with Init(nvme=folder, host_memory=memory, durable=durable):
            self.model = Deep()
        self.reference = ReferenceAdamW(self.plain.parameters(), **SETTINGS)
        self.optimizer = AdamW(self.model.parameters(), speculate=True, **SETTINGS)
        self.engine = engine_in(self.model)
        if durable:
            infinity.resume(self.model, self.optimizer)

    def loss(self, model, number):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        return model(x).square().mean()

    def backward(self, number):
        for model in (self.model, self.plain):
            self.loss(model, number).backward()

    def decide(self):
        for optimizer in (self.optimizer, self.reference):
            optimizer.step()
            optimizer.zero_grad()

    def check(self):
        assert differences(self.plain.state_dict(), self.model.state_dict()) == []
        for ours, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(self.optimizer.state[ours]["exp_avg"], self.reference.state[theirs]["exp_avg"])


@pytest.mark.parametrize(
    ("memory", "owner", "name"),
    [
        ("2MiB", Queue, "add"),
        pytest.param("1MiB", Residency, "lend_when_free", marks=pytest.mark.slow),
        pytest.param("1MiB", OutgoingShare, "lease", marks=pytest.mark.slow),
    ],
)
def test_an_update_that_is_kept_from_the_queue_is_made_after_all(folder, monkeypatch, memory, owner, name):
    both = Both(folder, memory=memory)
    for number in range(3):
        both.backward(number)
        both.decide()
    real, left = getattr(owner, name), [1]

    def strike(self, *given, **named):
        ahead = [one for one in given if isinstance(one, AheadPass)]
        if owner is Queue:  # of hi in host memory: an interrupt while memory is lent ends the engine
            ahead = [one for one in ahead if one.own_memory is None]
        if (ahead or owner is OutgoingShare) and left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return real(self, *given, **named)

    monkeypatch.setattr(owner, name, strike)
    with pytest.raises(KeyboardInterrupt):
        both.loss(both.model, 3).backward()
    both.loss(both.plain, 3).backward()
    for ours, theirs in zip(both.model.parameters(), both.plain.parameters(), strict=True):
        theirs.grad = None if ours.grad is None else theirs.grad
    both.decide()
    both.check()
    for number in range(4, 6):
        both.backward(number)
        both.decide()
    both.check()
    both.engine.lane.drain()
    units = both.engine.units
    assert not any(unit.record.watchers for unit in units)
    assert 0 < both.engine.speculation.nbytes <= 12 * sum(unit.record.shard.numel for unit in units)


@pytest.mark.parametrize(
    ("name", "late", "memory", "durable"),
    [
        ("confirm", False, "1MiB", False),
        ("queue_move", True, "2MiB", False),  # of hi in host memory
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("queue_move", False, "2MiB", False),
                ("confirm", True, "2MiB", False),
                ("confirm", False, "1MiB", True),
                ("_replace", True, "1MiB", False),
                ("_replace", True, "1MiB", True),
            )
        ),
    ],
)
def test_an_update_whose_confirmation_is_interrupted_counts_once(
    folder, monkeypatch, name, late, memory, durable
):
    both = Both(folder, memory=memory, durable=durable)
    both.backward(0)
    both.decide()
    if durable:
        infinity.commit(both.model)
    both.backward(1)
    both.engine.lane.drain()
    real, left = getattr(speculation._Ahead, name), [2]

    def strike(self, *given):
        left[0] -= 1
        if late or left[0]:
            real(self, *given)
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(speculation._Ahead, name, strike)
    with pytest.raises(KeyboardInterrupt):
        both.optimizer.step()
    both.reference.step()
    for optimizer in (both.optimizer, both.reference):
        optimizer.zero_grad()
    both.check()
    both.backward(2)
    both.decide()
    both.check()
    assert memory == "1MiB" or both.engine.lane.passes["MoveHiPass"]
