"""Gradients that are not kept since moments tell them: who needs one gets it. Trusted: the recipe in memory.
Faked: that gradients find no room in host memory.
"""

import pytest
import torch

import deep
import infinity
from deep import LAYERS, SETTINGS, Deep
from infinity import AdamW, Init, stats
from infinity.gradients.gradient import Gradient
from infinity.kernels import ToldGradient
from infinity.lane.told import UNTOLD
from infinity.reference import ReferenceAdamW, prepare
from parity import differences, engine_in

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable", "no_room")]

NEVER = 1e9  # a norm that is never reached
READ = "its gradients were kept: the program reads them"


@pytest.fixture
def no_room(monkeypatch):
    """Have gradients find no room in host memory."""
    monkeypatch.setattr(Gradient, "charge", lambda self, nbytes: not nbytes)


class Both(deep.Both):
    """Both, whose updates are made ahead where the model is offloaded, and gradients find no room."""

    def __init__(self, folder, **settings):
        super().__init__(folder, ours={"speculate": True}, **settings)
        self.speculation = self.engine.speculation

    def decide(self):
        for _, optimizer in self:
            optimizer.step()
            optimizer.zero_grad()

    @property
    def passes(self):
        return self.engine.lane.passes

    @property
    def moved(self):
        """Bytes of gradients that were written, and read."""
        self.engine.lane.drain()
        found = stats(self.model)
        return tuple(one.get(("nvme", "grad16"), 0) for one in (found.written_nbytes, found.read_nbytes))

    def gradients_are_the_same(self):
        for ours, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(ours.grad.clone(), theirs.grad)


def test_gradients_of_steps_that_are_confirmed_are_never_moved(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(4):
        both.backward(number)
        both.decide()
    both.check()
    assert both.moved == (0, 0)
    assert both.speculation.counts == {"confirmed": 4 * LAYERS, "dropped": 0}
    assert both.passes["SpillUntoldPass"] == 4 * LAYERS
    assert not both.passes["RecoverPass"]


def test_those_of_steps_that_are_clipped_are_recovered(folder):
    both = Both(folder, max_norm=0.1)
    for number in range(7):
        both.backward(number, 100.0 if number in (3, 5) else 1.0)
        both.decide()
    both.check()
    assert both.passes["RecoverPass"] == 2 * LAYERS
    written, read = both.moved
    assert written == read > 0


def test_where_most_steps_are_clipped_they_are_kept_as_ever(folder):
    both = Both(folder, max_norm=0.1)
    for number in range(4):
        both.backward(number, 100.0)
        both.decide()
    both.check()
    assert both.passes["RecoverPass"] == LAYERS, "of the first step"
    assert both.passes["SpillPass"] == 3 * LAYERS


def test_they_are_read_with_their_bits_before_step_and_after_it(folder):
    both = Both(folder, max_norm=NEVER)
    both.backward(0)
    both.decide()
    for number, after in ((1, False), (2, True)):
        both.engine.gradients.unkept._read.clear()  # as if it were the first time
        both.backward(number)
        if not after:
            both.gradients_are_the_same()
        for _, optimizer in both:
            optimizer.step()
        both.gradients_are_the_same()
        for _, optimizer in both:
            optimizer.zero_grad()
    both.check()
    assert both.speculation.counts == {"confirmed": 3 * LAYERS, "dropped": 0}
    assert both.passes["RecoverPass"] == 2 * LAYERS
    both.backward(3)
    both.decide()
    both.check()
    assert both.speculation.counts[READ] == LAYERS, "they will be read again"


def test_one_that_the_program_holds_has_its_values_when_its_parameter_has_another(folder):
    both = Both(folder, max_norm=NEVER)
    both.backward(0)
    held, expected = both.model.layers[1].weight.grad, both.plain.layers[1].weight.grad.clone()
    both.decide()
    for number in (1, 2):
        both.backward(number)
        both.decide()
    both.check()
    assert torch.equal(held.clone(), expected)


def test_one_that_is_added_to_is_recovered_first(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(2):
        for micro in range(2):
            both.backward(10 * number + micro)
        both.decide()
    both.check()
    assert both.passes["RecoverPass"] == LAYERS, "of the first step: then it is known"


def test_one_that_is_replaced_or_dropped_leaves_its_neighbours(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(3):
        both.backward(number)
        for model, _ in both:
            if number == 1:
                weight = model.layers[2].weight
                weight.grad = torch.full(weight.shape, 0.25, dtype=torch.bfloat16)
            elif number == 2:
                model.layers[0].bias.grad = None
        both.decide()
    both.check()


def test_state_that_is_loaded_between_leaves_them(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(3):
        both.backward(number)
        if number == 1:
            both.optimizer.load_state_dict(both.optimizer.state_dict())
        both.decide()
    both.check()
    assert both.passes["RecoverPass"] == LAYERS


def test_those_that_are_not_finite_reach_weights_as_ever(folder):
    both = Both(folder, max_norm=NEVER)
    both.backward(0)
    both.decide()
    both.backward(1, float("inf"))
    for _, optimizer in both:
        optimizer.step()
    assert both.speculation.dropped == LAYERS
    for ours, theirs in zip(both.model.parameters(), both.plain.parameters(), strict=True):
        with infinity.gathered(ours):
            assert torch.equal(ours.isnan(), theirs.isnan())


def test_where_moments_tell_too_little_they_are_kept(folder, monkeypatch):
    both = Both(folder, max_norm=NEVER)
    for number in range(3):
        if number == 2:
            both.engine.lane.drain()
            monkeypatch.setattr(ToldGradient, "is_told", False)
        both.backward(number)
        both.decide()
    both.check()
    assert both.speculation.counts == {"confirmed": 3 * LAYERS, "dropped": 0, UNTOLD: LAYERS}
    written, read = both.moved
    assert written > read == 0


def test_moments_that_do_not_tell_them_are_told_in_stats(folder):
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory="1MiB", state_dtype="bf16"):
        model = Deep()
    optimizer = AdamW(model.parameters(), max_norm=NEVER, speculate=True, **SETTINGS)
    model(torch.ones(1, deep.WIDTH, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    why = "its gradients were kept: moments of this optimizer, or of this type, do not tell them"
    assert engine_in(model).speculation.counts[why] == LAYERS


def test_in_a_durable_run_they_are_recovered_from_both_sides(folder):
    torch.manual_seed(0)
    plain = prepare(Deep())
    reference = ReferenceAdamW(plain.parameters(), max_norm=0.1, **SETTINGS)
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory="1MiB", durable=True):
        model = Deep()
    optimizer = AdamW(model.parameters(), max_norm=0.1, speculate=True, **SETTINGS)
    infinity.resume(model, optimizer)
    engine = engine_in(model)
    for number in range(6):
        for one in (model, plain):
            x = torch.randn(3, deep.WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
            (one(x).square().mean() * (100.0 if number == 2 else 1.0)).backward()
        for its in (optimizer, reference):
            its.step()
        if number == 4:  # confirmed: the twins have turned
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad.clone(), theirs.grad)
        for its in (optimizer, reference):
            its.zero_grad()
        infinity.commit(model)
    assert engine.lane.passes["RecoverPass"] == 2 * engine.speculation.dropped > 0, "half are read"
    assert differences(plain.state_dict(), model.state_dict()) == []
