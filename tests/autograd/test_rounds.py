"""Forwards without gradients: where one ends, what they read, and that training does not notice them.
Trusted: plain PyTorch. Faked, for where rounds end: what plans them.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import Init, stats
from infinity.autograd.rounds import Rounds
from infinity.engine.engine import engine_of_model
from parity import repeatable


class Planner:
    """Writes down what it is told."""

    in_round, round_frequencies = False, None

    def __init__(self):
        self.told = []

    def close_round(self):
        self.told += ["close"] if self.in_round else []
        return self.in_round

    def begin_round(self):
        self.in_round = True
        self.told.append("begin")

    def end_rounds(self):
        self.in_round = False
        self.told.append("end")


def rounds_of(*roots):
    planner = Planner()
    rounds = Rounds(planner, None)
    for root in roots:
        rounds.forward_began(root)
    return planner.told


def test_a_round_ends_where_a_module_that_began_in_it_begins_again():
    model, other = object(), object()
    assert rounds_of(model, model) == ["begin", "close", "begin"]
    assert rounds_of(other, model, model) == ["begin", "close", "begin"], "an encoder, then its decoder twice"
    assert rounds_of(model, other, model, other) == ["begin", "close", "begin"], "blocks, one after the other"


def test_after_a_step_the_next_forward_without_gradients_begins_a_round():
    planner, model = Planner(), object()
    rounds = Rounds(planner, None)
    rounds.forward_began(model)
    rounds.step_goes_on(model)
    rounds.forward_began(model)
    assert planner.told == ["begin", "end", "begin"]


def layers(count=8):
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(count)])


def offloaded(folder, memory, build=layers):
    with Init(nvme=folder, host_memory=memory):
        return build()


X = torch.ones(4, 256, dtype=torch.bfloat16) / 16


def read_by_round(model, count=5):
    """Bytes that each of some rounds reads, and what the last one returns."""
    read = []
    with torch.no_grad():
        for _ in range(count):
            before = stats(model)
            out = model(X)
            engine_of_model(model).lane.drain()
            read.append(stats(model).since(before).nvme_read_nbytes)
    return read, out


@pytest.mark.disk
def test_where_all_fits_rounds_read_everything_once_more_and_then_nothing(folder):
    model, plain = offloaded(folder, "32MiB"), layers().to(torch.bfloat16)
    read, out = read_by_round(model)
    assert read[0] > 0
    assert read[2:] == [0, 0, 0]
    assert torch.equal(out, plain(X))
    snapshot = stats(model)
    assert (snapshot.rounds, snapshot.steps, snapshot.divergences) == (5, 0, 0)


@pytest.mark.disk
def test_where_a_part_fits_rounds_read_the_rest(folder):
    model = offloaded(folder, "4MiB", lambda: layers(24))
    read, _ = read_by_round(model, 6)
    engine = engine_of_model(model)
    sizes = [unit.record.field_nbytes("hi") for unit in engine.units]
    here = sum(size for unit, size in zip(engine.units, sizes, strict=True) if unit.in_place)
    stay = {one.use.unit for one in engine.residency.round_cursor.plan.steps if one.keep}
    assert here > 0
    assert stay
    assert read[-1] == read[-2] == sum(sizes) - here - sum(sizes[unit] for unit in stay)
    assert stats(model).divergences == 0
    assert engine.held_nbytes() <= engine.budget.total_nbytes


@pytest.mark.disk
@pytest.mark.parametrize("update", ["forward", "backward"])
def test_training_does_not_notice_the_rounds_between_its_steps_and_within_them(folder, update):
    def train(memory, *, evaluates):
        model = offloaded(folder, memory)
        # By how long steps took it would be decided whether units in place are fetched, which makes a plan.
        optimizer = infinity.AdamW(model.parameters(), lr=0.01, update=update, speculate=False)
        losses = []
        for _ in range(4):
            if evaluates:
                read_by_round(model, 3)
            loss = model(X).float().square().mean()
            if evaluates:
                read_by_round(model, 2)
            loss.backward()
            if evaluates:
                read_by_round(model, 1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        plan, steps = stats(model).plan, stats(model).steps
        weights = copy.deepcopy(model.state_dict())
        engine_of_model(model).close()
        return losses, weights, steps, plan

    with repeatable():
        expected = train("2MiB", evaluates=False)
        found = train("2MiB", evaluates=True)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], values) for name, values in expected[1].items())
    assert found[2:3] == expected[2:3]
    assert found[3].count("B") == expected[3].count("B"), "the step's plan is of steps"


class Reversed(nn.Sequential):
    """Runs its layers in another order than the one they were made in, which the first plan assumes."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


@pytest.mark.disk
def test_a_lone_round_between_steps_is_counted_and_followed_by_the_next(folder):
    model = offloaded(folder, "2MiB", lambda: Reversed(*layers()))
    optimizer = infinity.AdamW(model.parameters(), lr=0.01)
    residency = engine_of_model(model).residency
    reordered = []
    for step in range(3):
        model(X).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert residency.round_frequencies.steps == step
        read_by_round(model, 1)
        reordered.append(residency.round_cursor.reordered)
    model(X)
    assert residency.round_frequencies.steps == 3
    assert [residency.round_frequencies.uses(unit) for unit in range(8)] == [1.0] * 8
    assert reordered[0] > 0
    assert reordered[1:] == [0, 0]


@pytest.mark.disk
def test_a_reentrant_checkpoint_is_no_round(folder):
    model = offloaded(folder, "8MiB")
    x = X.clone().requires_grad_()
    for block in model:
        x = checkpoint(block, x, use_reentrant=True)
    x.float().sum().backward()
    assert stats(model).rounds == 0


def test_a_round_with_everything_in_memory_finds_changes_that_would_be_lost_as_others_do():
    class Changing(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2)
            return super().forward(x)

    with Init(nvme=None, host_memory="64MiB"):
        model = nn.Sequential(nn.Linear(256, 256), Changing(256, 256))
    with torch.no_grad(), pytest.raises(infinity.UnsupportedError, match=r"1\.weight was changed in place"):
        model(X)


def test_a_forward_with_gradients_inside_a_round_has_them():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                self.layer(x).float().sum().backward()
            return x.grad

    with Init(nvme=None, host_memory="64MiB"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(256, 256), Inner())
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(256, 256), Inner()).to(torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(X), plain(X))


def test_a_frozen_layer_multiplies_the_last_tokens_of_a_batch_without_a_copy_of_its_weight_for_each():
    with Init(host_memory="32MiB"):
        model = nn.Linear(64, 96, bias=False)
    model.requires_grad_(False)
    tokens = torch.randn(8, 5, 64).bfloat16()
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        out = model(tokens[:, -1:, :])
        expected = nn.functional.linear(tokens[:, -1, :], model.state_dict()["weight"]).unsqueeze(1)
    assert torch.equal(out, expected)
    assert "aten::bmm" not in {event.name for event in seen.events()}


@pytest.mark.disk
def test_rounds_that_repeat_read_into_memory_that_is_there(folder):
    def build():
        torch.manual_seed(3)
        sizes = [(256, 256), (256, 704), (704, 256), (256, 256)] * 4
        return nn.Sequential(*[nn.Linear(one, other) for one, other in sizes], nn.Linear(256, 2048))

    model = offloaded(folder, "6MiB", build)
    assert min(read_by_round(model)[0]) > 0
    blocks = engine_of_model(model).residency.blocks.buffers
    made = blocks.made
    read_by_round(model)
    assert blocks.made == made
