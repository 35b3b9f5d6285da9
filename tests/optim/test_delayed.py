"""update="delayed": gradients that are applied a step late. Trusted: the recipe in memory, told to do so.
Nothing is faked.
"""

import pytest
import torch

import infinity
from deep import WIDTH, Deep
from infinity import AdamW, HostMemoryError, UnsupportedError
from infinity.reference import ReferenceAdamW
from infinity.reference.recipe import _store, _stored
from parity import build_both, differences, engine_in

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
AFTER = 2
ROOMY = "8MiB"


def batch(number):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()


class Late:
    """What update="delayed" is to do: a reference whose steps apply the gradients of the step before."""

    def __init__(self, model, after, max_norm=None):
        self.optimizer = ReferenceAdamW(model.parameters(), max_norm=max_norm, **SETTINGS)
        self.parameters = list(model.parameters())
        self.after, self.done, self.held = after, 0, None

    def step(self):
        if self.done < self.after:
            self.optimizer.step()
            self.done += 1
            return
        fresh = [_stored(one) for one in self.parameters]
        self.catch_up()
        self.held = fresh

    def catch_up(self):
        if self.held is not None:
            for parameter, (value, factor) in zip(self.parameters, self.held, strict=True):
                _store(parameter, value, factor)
            self.optimizer.step()
        self.held = None

    def zero_grad(self):
        for one in self.parameters:
            one.grad = None

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def train(both, steps, *, micro=1):
    for number in steps:
        for model, optimizer in both:
            for part in range(micro):
                model(batch(10 * number + part)).square().mean().backward()
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + number)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("memory", "max_norm", "micro"),
    [pytest.param(ROOMY, None, 1, marks=pytest.mark.slow), (ROOMY, 0.05, 2)],
)
def test_each_step_applies_the_gradients_of_the_step_before_as_the_reference_does(
    folder, memory, max_norm, micro
):
    plain, model = build_both(Deep, nvme=folder, memory=memory, waits=True)
    late = Late(plain, AFTER, max_norm)
    ours = AdamW(model.parameters(), update="delayed", delayed_after=AFTER, max_norm=max_norm, **SETTINGS)
    both = [(plain, late), (model, ours)]
    for number in range(7):
        train(both, [number], micro=micro)
        assert differences(plain.state_dict(), model.state_dict()) == [], number
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.state[one]["exp_avg"], late.optimizer.state[other]["exp_avg"])
        assert ours.state[one]["step"] == 6


def test_what_is_kept_can_be_applied_before_a_checkpoint_which_has_none_of_it(folder):
    plain, model = build_both(Deep, nvme=folder, memory=ROOMY, waits=True)
    late = Late(plain, 0)
    ours = AdamW(model.parameters(), update="delayed", delayed_after=0, **SETTINGS)
    train([(plain, late), (model, ours)], range(2))
    for refused in (ours.state_dict, lambda: infinity.save(model, ours, folder / "saved")):
        with pytest.raises(UnsupportedError, match="apply_delayed"):
            refused()
    ours.apply_delayed()
    late.catch_up()
    assert differences(plain.state_dict(), model.state_dict()) == []
    infinity.save(model, ours, folder / "saved")
    assert ours.state_dict()["state"]


def test_gradients_of_two_steps_without_room_in_host_memory_are_an_error_with_the_number(folder):
    with infinity.Init(nvme=folder, host_memory="1MiB"):
        model = Deep()
    ours = AdamW(model.parameters(), update="delayed", delayed_after=0, **SETTINGS)
    with pytest.raises(HostMemoryError, match=r"gradients of two steps in host memory, 1\.0 MiB in all"):
        train([(model, ours)], range(3))


def test_a_backward_that_adds_to_what_is_kept_is_an_error(folder):
    with infinity.Init(nvme=folder, host_memory=ROOMY):
        model = Deep()
    ours = AdamW(model.parameters(), update="delayed", delayed_after=0, **SETTINGS)
    for number in range(2):
        model(batch(number)).square().mean().backward()
        if number:
            with pytest.raises(UnsupportedError, match="zero_grad"):
                ours.step()
        else:
            ours.step()


def test_a_step_that_raises_before_it_decides_anything_keeps_what_was_kept(folder):
    plain, model = build_both(Deep, nvme=folder, memory=ROOMY, waits=True)
    late = Late(plain, 0)
    ours = AdamW(model.parameters(), update="delayed", delayed_after=0, **SETTINGS)
    both = [(plain, late), (model, ours)]
    train(both, range(2))
    for one, _ in both:
        one(batch(20)).square().mean().backward()
    with pytest.raises(UnsupportedError, match="gathered"), infinity.gathered(model):
        ours.step()
    for _, optimizer in both:
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()
        optimizer.zero_grad()
    assert differences(plain.state_dict(), model.state_dict()) == []


def test_what_is_kept_is_of_no_training_that_is_loaded(folder):
    with infinity.Init(nvme=folder, host_memory=ROOMY):
        model = Deep()
    ours = AdamW(model.parameters(), update="delayed", delayed_after=0, **SETTINGS)
    infinity.save(model, ours, folder / "saved")
    before = ours.state_dict()
    for load in (lambda: infinity.load(model, ours, folder / "saved"), lambda: ours.load_state_dict(before)):
        train([(model, ours)], range(1))
        assert len(ours.delayed) > 0
        load()
        assert len(ours.delayed) == 0


def test_what_it_does_not_go_with_is_refused_by_name(folder):
    with infinity.Init(nvme=folder, host_memory=ROOMY, dtype="fp16"):
        model = torch.nn.Linear(8, 8)
    with pytest.raises(UnsupportedError, match="fp16 leaves out steps"):
        AdamW(model.parameters(), update="delayed")
    with infinity.Init(nvme=folder, host_memory=ROOMY):
        model = torch.nn.Linear(8, 8)
    with pytest.raises(ValueError, match="delayed_after=-1"):
        AdamW(model.parameters(), update="delayed", delayed_after=-1)
    with pytest.raises(ValueError, match="nothing is foreseen"):
        AdamW(model.parameters(), update="delayed", speculate=True)


def test_a_durable_run_commits_what_is_kept_and_goes_on_with_the_same_bits(folder):
    def run(place, stop):
        torch.manual_seed(0)
        with infinity.Init(nvme=str(place), host_memory=ROOMY, durable=True):
            model = Deep()
        ours = AdamW(model.parameters(), update="delayed", delayed_after=1, **SETTINGS)
        first = infinity.resume(model, ours)
        train([(model, ours)], range(first, stop))
        infinity.commit(model)
        values = {name: one.clone() for name, one in model.state_dict().items()}
        engine_in(model).close()
        return first, values

    whole, cut = folder / "whole", folder / "cut"
    for one in (whole, cut):
        one.mkdir()
    _, expected = run(whole, 6)
    run(cut, 3)
    first, values = run(cut, 6)
    assert first == 3
    assert differences(expected, values) == []
