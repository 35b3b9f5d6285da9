"""Where parameters lie, and who else holds them: views that outlive a use, writes not yet over, optimizers
that come and go. Trusted: the reference optimizer. Faked: how long a write to the disk takes, an interrupt.
"""

import gc
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
import models
from fakes import _Transfer
from infinity.engine.engine import engine_of_model
from infinity.planning.placement import Move
from infinity.reference import ReferenceAdamW, prepare
from infinity.units.residency import UnitResidency
from infinity.units.unit import Unit
from parity import build_both, differences, halves, optimizers

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]
X = halves(4, 64)
ROOM = "16MiB"
"""Host memory that has room for all of the small models here: everything ends up pinned."""


@pytest.fixture(params=["in memory", "on disk"])
def nvme(request):
    return None if request.param == "in memory" else str(request.getfixturevalue("folder"))


class Kept(nn.Module):
    """A matrix of which every forward keeps a view, and a copy of what the view showed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.keeping = True

    def forward(self, x):
        if self.keeping:
            self.view = self.weight.detach().t()
            self.seen = self.view.clone()
        return x @ self.weight


class Beside(nn.Module):
    """A matrix whose values the graph keeps once more, detached: gradients of inputs go through them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        beside = x @ self.weight.detach()
        return (x @ self.weight) * 0.01 + torch.tanh(beside * 0.01)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.parts = nn.ModuleList([Beside(), Beside()])
        self.reentrant = reentrant

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def offloaded(build, nvme=None, memory=ROOM):
    torch.manual_seed(0)
    with infinity.Init(nvme=nvme and str(nvme), host_memory=memory):
        return build()


def value(model, seed=0):
    return model(*X(torch.Generator().manual_seed(seed))).float().square().sum()


def one_step(model, *optimizers, seed=0):
    value(model, seed).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def changed(layers):
    """Return which layers' views no longer show what they showed when they were taken."""
    return [number for number, one in enumerate(layers) if not torch.equal(one.view, one.seen)]


def demote(engine, unit, field):
    """Move a field of a unit from host memory to the disk."""
    engine.residency.flush(unit)
    engine.lane.drain()
    engine.pins._leave([Move(unit.index, field, unit.record.field_nbytes(field), "host", "nvme")])


def slow_writes(engine, delay_s=0.3):
    """From now on a write reads its memory only `delay_s` after it was begun, as a busy drive does."""
    store, write = engine.nvme_store, engine.nvme_store.write

    def late(*args, **options):
        return _Transfer(lambda: write(*args, **options).wait(), delay_s, None)

    store.write = late


def keep(layers, *, keeping):
    for one in layers:
        one.keeping = keeping


def state(model):
    return {name: one.clone() for name, one in model.state_dict().items()}


def test_a_field_has_left_host_memory_only_when_its_write_is_over(folder):
    model = models.build("llama", nvme=str(folder), host_memory="64MiB")
    models.train(model.train(), infinity.AdamW(model.parameters(), lr=1e-2), 3)
    engine = engine_of_model(model)
    assert engine.units[3].record.all_in_host
    before = state(model)
    slow_writes(engine)
    demote(engine, engine.units[3], "hi")
    assert differences(before, state(model)) == []


def test_an_update_in_the_backward_leaves_the_views_that_others_hold_alone(folder):
    model = offloaded(lambda: nn.Sequential(Kept(), Kept()), folder)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, update="backward")
    for step in range(3):
        value(model, step).backward()
        engine_of_model(model).lane.drain()
        assert changed(model) == [], step
        optimizer.step()
        optimizer.zero_grad()
        assert changed(model) == [], step


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_through_a_detached_weight_are_of_the_values_before_the_update(nvme, reentrant):
    plain, ours = build_both(lambda: Checkpointed(reentrant), nvme=nvme, memory=ROOM)
    reference, optimizer = optimizers(plain, ours)
    optimizer.update = "backward"
    inputs = [[], []]
    for step in range(3):
        for model, one, shown in ((plain, reference, inputs[0]), (ours, optimizer, inputs[1])):
            x = X(torch.Generator().manual_seed(step))[0].requires_grad_()
            model(x).float().square().sum().backward()
            shown.append(x.grad)
            one.step()
            one.zero_grad()
    assert differences(*inputs) == []
    assert differences(state(plain), state(ours)) == []


def test_an_edit_right_after_a_step_waits_for_what_the_update_writes(folder):
    model = offloaded(lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), folder, "1MiB")
    optimizer, engine = infinity.AdamW(model.parameters(), lr=1e-2), engine_of_model(model)
    engine.pins.close_step = lambda: None  # nothing is pinned: the update is written to the disk
    slow_writes(engine)
    model(torch.randn(4, 256).bfloat16()).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with infinity.gathered(model[0], write=True):
        model[0].weight.data.mul_(0.5)
        expected = model[0].weight.detach().clone()
    hi, master = engine.parameters.read(model[0].weight, ["hi", "master"])
    assert torch.equal(hi, expected)
    assert torch.equal(master, expected.float())


def test_an_interrupt_inside_an_update_stops_the_engine(monkeypatch):
    model = models.build("llama", host_memory="64MiB").train()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, 2)
    kernels, calls, ids = optimizer.recipe.kernels, [], models.batch(5)
    step = kernels["bf16", "fp32"]

    def interrupted(span, scalars):
        calls.append(span)
        if len(calls) == 3:
            raise KeyboardInterrupt
        step(span, scalars)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(kernels, ("bf16", "fp32"), interrupted)
        model(input_ids=ids, labels=ids)
    with pytest.raises(infinity.EngineFailedError, match="an earlier error"), torch.no_grad():
        model(input_ids=ids, labels=ids)


def test_an_edit_inside_a_forward_that_uses_the_parameter_in_place_is_refused():
    model = offloaded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    one_step(model, infinity.AdamW(model.parameters(), lr=1e-2))
    engine_of_model(model).residency.flush(engine_of_model(model).units[0])
    before = state(model)

    def edit(module, _inputs):
        with infinity.gathered(module, write=True):
            module.weight.data.mul_(0.75)

    hook = model[0].register_forward_pre_hook(edit)
    with pytest.raises(infinity.UnsupportedError, match="inside a forward that uses it"):
        model(*X(torch.Generator()))
    hook.remove()
    assert differences(before, state(model)) == []


def test_two_optimizers_of_one_unit_both_update_it_in_a_backward_inside_gathered(folder):
    torch.manual_seed(0)
    plain = prepare(nn.Linear(64, 64))
    ours = offloaded(lambda: nn.Linear(64, 64), folder)
    one_step(plain, *(ReferenceAdamW([one], lr=1e-2) for one in plain.parameters()))
    both = [infinity.AdamW([one], lr=1e-2, update="backward") for one in ours.parameters()]
    with infinity.gathered(ours):
        value(ours).backward()
    for one in both:
        one.step()
        one.zero_grad()
    assert engine_of_model(ours).outgoing_share.ledger.held_nbytes == 0
    assert differences(state(plain), state(ours)) == []


def test_an_optimizer_made_anew_applies_what_the_old_one_left_and_starts_with_zero_moments():
    torch.manual_seed(0)
    plain = prepare(nn.Linear(64, 64, bias=False))
    ours = offloaded(lambda: nn.Linear(64, 64, bias=False))
    for model, kind in ((plain, ReferenceAdamW), (ours, infinity.AdamW)):
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.0)
            model.weight.grad = torch.randn(64, 64, generator=generator).bfloat16()
            optimizer.step()
            del optimizer
            gc.collect()
    assert differences(state(plain), state(ours)) == []


def test_a_view_kept_from_before_gathered_keeps_its_values(folder):
    model = offloaded(lambda: nn.Sequential(Kept(), Kept(), Kept()), folder)
    optimizer, engine = infinity.AdamW(model.parameters(), lr=1e-2), engine_of_model(model)
    keep(model, keeping=False)
    for step in range(6):
        if step == 3:
            for unit in engine.units:
                demote(engine, unit, "lo")
        one_step(model, optimizer, seed=step)
    keep(model, keeping=True)
    loss = value(model, 6)
    keep(model, keeping=False)
    assert any(unit.in_place for unit in engine.units)
    with infinity.gathered(model):
        pass
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value(model, 7).backward()
    assert changed(model) == []


LATER = {
    "the next step": one_step,
    "an evaluation": lambda model, optimizer: torch.no_grad()(value)(model),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "gathered": lambda model, optimizer: gather(model),
}


def gather(model):
    with infinity.gathered(model):
        pass


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_a_view_that_was_kept_and_is_changed_later_is_an_error_that_names_the_parameter(nvme, later):
    model = offloaded(lambda: nn.Sequential(Kept(), Kept()), nvme)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        one_step(model, optimizer)
    later(model, optimizer)
    with torch.no_grad():
        model[1].view[3].mul_(2)
    with pytest.raises(infinity.UnsupportedError, match=r"1\.weight was changed in place by a view of it"):
        later(model, optimizer)


class Halves(nn.Module):
    """Two parameters that are parts of one tensor, whose version torch has for both."""

    def __init__(self):
        super().__init__()
        self.up, self.down = map(nn.Parameter, torch.randn(128, 64).split(64))

    def forward(self, x):
        return x @ self.up @ self.down * 0.1


def test_parameters_that_have_one_version_train(nvme):
    losses = []
    for build, kind in ((offloaded, infinity.AdamW), (in_memory, ReferenceAdamW)):
        model = build(Halves) if build is in_memory else build(Halves, nvme)
        optimizer = kind(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            losses[-1].append(value(model).item())
            one_step(model, optimizer)
    assert losses[0] == losses[1]


def in_memory(build):
    torch.manual_seed(0)
    return prepare(build())


def test_a_pinned_record_is_worked_on_inline_again_after_a_gradient_was_spilled(folder):
    model = models.build("llama", nvme=str(folder), host_memory="64MiB").train()
    optimizer, engine = infinity.AdamW(model.parameters(), lr=1e-2), engine_of_model(model)
    limit, engine.kept.limit_nbytes = engine.kept.limit_nbytes, 0
    models.train(model, optimizer, 1)
    engine.kept.limit_nbytes = limit
    assert any("grad16" in dict(unit.record.tiers()) for unit in engine.units)
    models.train(model, optimizer, 20, first=1)
    assert all(unit.record.in_host(field) for unit in engine.units for field in unit.record.schema.fields)
    before = engine.lane.times.inline_s
    models.train(model, optimizer, 1, first=21)
    assert engine.lane.times.inline_s > before
    assert all(unit.record.all_in_host for unit in engine.units)


def test_memory_that_an_update_is_giving_back_is_not_taken_for_the_next_use(folder, monkeypatch):
    giving_back, met, slow_s = threading.Event(), [], [0.02]
    deallocate, fetch_owed = Unit.deallocate, UnitResidency.fetch_owed

    def slowly(unit):
        if threading.current_thread() is not threading.main_thread():
            giving_back.set()
            time.sleep(slow_s[0])  # the thread that computes goes on meanwhile
        deallocate(unit)

    def just_then(residency):
        if residency._owed and residency.units[residency._owed[0]].residence.lent is not None:
            giving_back.clear()
            met.append(giving_back.wait(10 * slow_s[0]))
        fetch_owed(residency)

    monkeypatch.setattr(Unit, "deallocate", slowly)
    monkeypatch.setattr(UnitResidency, "fetch_owed", just_then)
    fields = {"nvme": str(folder), "host_memory": "1MiB"}
    ours, plain = models.both("gpt2", {"lr": 1e-2}, fields, update="backward")
    for first in range(0, 40, 4):
        steps = {"steps": 4, "first": first}
        assert models.train(*ours[:2], **steps) == models.train(*plain[:2], **steps)
        if any(met):
            break
        slow_s[0] = 0.1  # than which this machine is slower
    models.assert_same_state(ours[0], ours[1], plain[0], plain[1])
    assert any(met), "else the two never met"


def test_a_round_that_an_interrupt_keeps_from_beginning_leaves_steps_the_room_of_gradients(nvme, monkeypatch):
    model = offloaded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nvme)
    engine = engine_of_model(model)
    x = torch.ones(4, 64, dtype=torch.bfloat16)

    def room():
        return engine.outgoing_share.ledger.limit_nbytes, engine.residency.window_nbytes

    def interrupted():
        raise KeyboardInterrupt

    before = room()
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(engine.residency.blocks, "period_ended", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert room() == (0, sum(before)), "what a round has, which would have begun"
    model(x).sum().backward()
    assert room() == before
