"""update="auto": some updates in the backward, as steps were timed. Trusted: the recipe in memory.
Faked: what is decided from times, where a test says so.
"""

import pytest
import torch

import deep
import infinity
from deep import LAYERS, SETTINGS, WIDTH, Deep
from infinity import AdamW, UnsupportedError, stats
from infinity.engine.engine import engine_of_model
from infinity.gradients import early
from infinity.planning.split import HalfStep, UpdateSplit
from infinity.planning.step_lengths import UNLIMITED
from infinity.reference import ReferenceAdamW
from parity import differences, engine_in

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

HALF = UpdateSplit((2, 0), LAYERS, HalfStep(1.0, 0.5), HalfStep(2.0, 1.0))
TOLD = "2 of 4 units in the backward; the disk is busy for 50% of the forward, 50% of the backward"


class Both(deep.Both):
    """Both, some of whose updates are early where the model is offloaded."""

    def __init__(self, folder, **settings):
        super().__init__(folder, ours={"update": "auto"}, **settings)
        self.early = self.engine.arrivals.early

    def step(self, number, between=lambda model, optimizer: None):
        self.backward(number)
        for model, optimizer in self:
            between(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def half(monkeypatch):
    """Decide for two of four layers, whatever was timed."""
    monkeypatch.setattr(early, "split_updates", lambda *_, **__: HALF)


@pytest.mark.usefixtures("half")
def test_two_of_four_updates_are_made_in_the_backward_with_the_recipes_bits(folder):
    both = Both(folder)
    passes = []
    for number in range(6):
        before = stats(both.model)
        both.step(number)
        passes.append(stats(both.model).since(before).passes)
    both.check()
    assert [one.get("UpdatePass", 0) for one in passes] == [0, 0, 2, 2, 2, 2]
    with_fetches = sum(one.get("FetchAndUpdatePass", 0) for one in passes)
    assert 4 + 4 + 3 * 2 <= with_fetches <= 4 + 4 + 4 * 2, "the last step's may have come, or not"
    assert ("updates", TOLD) in stats(both.model).rows()
    assert stats(both.model).updates == TOLD


def test_what_was_timed_decides_and_bits_stay(folder):
    both = Both(folder)
    assert stats(both.model).updates == "all in the next forward: no step was timed yet"
    for number in range(4):
        both.step(number)
    both.check()
    assert both.early.split.candidates == LAYERS
    assert both.early.split.forward.compute_s > 0
    assert both.early.split.backward.disk_s > 0


@pytest.mark.parametrize(("memory", "may_spill"), [("1MiB", True), ("16MiB", False)])
def test_it_is_decided_by_how_many_bytes_of_gradients_have_found_room(folder, monkeypatch, memory, may_spill):
    rooms = []
    monkeypatch.setattr(
        early, "split_updates", lambda *_, room_nbytes, **__: rooms.append(room_nbytes) or HALF
    )
    both = Both(folder, memory=memory)
    for number in range(4):
        both.step(number)
    both.check()
    grads = sum(2 * parameter.numel() for parameter in both.plain.parameters())
    spilled = {(tier, name) for tier, name in both.engine.traffic.written if name.startswith("grad")}
    assert spilled <= early._SPILLED
    assert bool(spilled) is may_spill
    assert rooms
    assert all(0 <= one < grads if may_spill else one == UNLIMITED for one in rooms)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda model, _: next(model.parameters()).grad.norm(), "read, set, clipped or added up"),
        pytest.param(
            lambda model, _: torch.nn.utils.clip_grad_value_(model.parameters(), 1e9),
            "read, set, clipped",
            marks=pytest.mark.slow,
        ),
        (lambda _, optimizer: optimizer.param_groups[0].update(lr=2e-3), "options of param groups change"),
    ],
)
def test_steps_that_need_gradients_or_other_options_at_their_end_have_no_early_updates(folder, between, why):
    both = Both(folder)
    for number in range(5):
        both.step(number, between if number == 1 else lambda *_: None)
    both.check()
    assert both.early.split is None
    assert why in stats(both.model).updates


@pytest.mark.slow
@pytest.mark.usefixtures("half")
def test_a_bound_on_the_norm_leaves_all_updates_to_the_forward(folder):
    both = Both(folder)
    both.optimizer.max_norm = 1e9
    for number in range(4):
        both.step(number)
    both.check()
    assert "max_norm" in stats(both.model).updates


@pytest.mark.usefixtures("half")
def test_options_changed_too_late_for_an_update_that_is_made_are_an_error(folder):
    both = Both(folder)
    for number in range(3):
        both.step(number)
    both.backward(3)
    both.optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(UnsupportedError, match="changed between the backward and step"):
        both.optimizer.step()


def dropped(model, _):
    for one in model.layers[2].parameters():
        one.grad = None


@pytest.mark.usefixtures("half")
def test_steps_that_drop_gradients_have_no_early_updates(folder):
    both = Both(folder)
    for number in range(5):
        both.step(number, dropped)
    assert differences(both.plain.state_dict(), both.model.state_dict()) == []
    assert "gradients are dropped before step()" in stats(both.model).updates


@pytest.mark.usefixtures("half")
def test_a_gradient_dropped_too_late_for_an_update_that_is_made_is_an_error(folder):
    both = Both(folder)
    for number in range(3):
        both.step(number)
    both.backward(3)
    with pytest.raises(UnsupportedError, match="its gradient was dropped between the backward and step"):
        both.optimizer.zero_grad()
    dropped(both.model, None)
    with pytest.raises(UnsupportedError, match=r"layers\.2.*its gradient was dropped"):
        both.optimizer.step()


@pytest.mark.usefixtures("half")
def test_other_ranks_are_told_why_this_one_stops(folder, monkeypatch):
    both, told = Both(folder), []
    for number in range(3):
        both.step(number)
    both.backward(3)
    ranks = engine_of_model(both.model).ranks
    monkeypatch.setattr(ranks, "post_failure", lambda why, *, ends: told.append((why, ends)))
    for call in (both.optimizer.zero_grad, lambda: (dropped(both.model, None), both.optimizer.step())):
        with pytest.raises(UnsupportedError, match="its gradient was dropped"):
            call()
        why, ends = told.pop()
        assert why.startswith("UnsupportedError: ")
        assert "its gradient was dropped between the backward and step()" in why
        assert not ends, "a program that catches it may go on"


@pytest.mark.usefixtures("half")
def test_a_later_optimizer_that_clips_has_no_early_updates_of_the_one_before(folder):
    both = Both(folder)
    for number in range(3):
        both.step(number)
    both.reference = ReferenceAdamW(both.plain.parameters(), max_norm=1e-3, **SETTINGS)
    with pytest.warns(UserWarning, match="later optimizer|supersede"):
        both.optimizer = AdamW(both.model.parameters(), update="auto", max_norm=1e-3, **SETTINGS)
    for number in range(3, 6):
        both.step(number)
    assert differences(both.plain.state_dict(), both.model.state_dict()) == []


@pytest.mark.usefixtures("half")
def test_a_gradient_assigned_where_an_update_was_made_is_an_error(folder):
    both = Both(folder)
    for number in range(3):
        both.step(number)
    both.backward(3)
    weight = both.model.layers[2].weight
    weight.grad = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="a gradient that was assigned needs the gradient"):
        both.optimizer.step()


@pytest.mark.usefixtures("half")
def test_a_second_backward_behind_early_updates_is_an_error_that_names_the_cure_and_told_to_other_ranks(
    folder, monkeypatch
):
    both, told = Both(folder), []
    for number in range(3):
        both.step(number)
    both.backward(3)
    ranks = engine_of_model(both.model).ranks
    monkeypatch.setattr(ranks, "post_failure", lambda why, *, ends: told.append((why, ends)))
    with pytest.raises(UnsupportedError, match='update="forward"'):
        both.backward(4)
    ((why, ends),) = told
    assert "a second backward before step() needs the gradient" in why
    assert not ends, "a program that catches it may go on"


def test_it_is_told_apart_from_what_it_is_not(folder):
    with infinity.Init(nvme=folder, host_memory="1MiB"):
        model = Deep()
    with pytest.raises(ValueError, match="expected one of forward, backward, auto, delayed"):
        AdamW(model.parameters(), update="sometimes")
    with pytest.raises(ValueError, match='update="auto" nothing is foreseen'):
        AdamW(model.parameters(), update="auto", speculate=True)


@pytest.mark.slow
@pytest.mark.usefixtures("half")
def test_a_durable_run_resumes_with_the_bits_of_one_that_went_on(folder):
    def run(place, stop=None):
        torch.manual_seed(0)
        with infinity.Init(nvme=str(place), host_memory="1MiB", durable=True):
            model = Deep()
        optimizer = AdamW(model.parameters(), update="auto", **SETTINGS)
        for number in range(infinity.resume(model, optimizer), stop or 8):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        infinity.commit(model)
        values = {name: one.clone() for name, one in model.state_dict().items()}
        engine_in(model).close()
        return values

    whole, cut = folder / "whole", folder / "cut"
    for one in (whole, cut):
        one.mkdir()
    expected = run(whole)
    run(cut, stop=5)
    assert differences(expected, run(cut)) == []
