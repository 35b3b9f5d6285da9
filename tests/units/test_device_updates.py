"""Records that live on the device and are updated there, on a device whose copies are as late as their events
allow, and whose memory is the host's. Trusted: the reference recipe, and training where the CPU computes. On
the simulated device such records are trained in tests/device/test_simulated_device.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fragile
import infinity
import models
from covers import matrix
from infinity import SGD, Adagrad, Adam, AdamW, Init, Lion, gathered, stats
from infinity.engine.engine import engine_of_model
from infinity.gradients.on_device import GradientsOnDevice
from infinity.optim.base import OffloadedOptimizer
from infinity.records.update_rules import ADAMW
from infinity.units import device_updates
from streams import compute_late

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("impatient", "repeatable")]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
WIDTH = 64
RECORD = 12 * WIDTH * WIDTH


@pytest.fixture
def late(monkeypatch):
    return compute_late(monkeypatch, 64 << 20)


def tower(layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def built(folder, layers=4, **config):
    with Init(nvme=folder, **{"host_memory": "1MiB", **config}):
        return tower(layers)


def backward(model, number):
    torch.manual_seed(number)
    dtype = engine_of_model(model).weights.dtype
    model(torch.randn(3, WIDTH).to(dtype)).float().square().mean().backward()


def train(model, optimizer, steps, first=0, micro=1):
    for step in range(first, first + steps):
        for one in range(micro):
            backward(model, 10 * step + one)
        optimizer.step()
        optimizer.zero_grad()


def there(model):
    return [unit.record.on_device for unit in engine_of_model(model).units]


def state(model, optimizer):
    """Every weight, master and moment."""
    engine, fields = engine_of_model(model), ["hi", "master", *optimizer.recipe.state]
    return [engine.parameters.read(one, fields) for one in model.parameters()]


def same(ours, theirs):
    return all(
        torch.equal(a, b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )


# Bits


@pytest.mark.parametrize(
    *matrix(
        together=1,
        way={
            "backward": ("backward", 1, {}),
            "clipped": ("forward", 1, {"max_norm": 0.5}),
            "accumulated": ("forward", 2, {}),
        },
        dtype=["bf16", "fp32"],
    )
)
def test_losses_weights_masters_and_moments_are_the_recipes(folder, late, way, dtype):
    update, accumulate, settings = way
    init = {"nvme": folder, "host_memory": "64MiB", "dtype": dtype}
    ways = {"update": update, "accumulate": accumulate, "scheduled": True}
    model, _ = models.compare("llama", {**SETTINGS, **settings}, init, steps=5, **ways)
    assert all(there(model))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda one: Adam(one, **SETTINGS), marks=pytest.mark.slow),
        pytest.param(lambda one: SGD(one, lr=0.1, weight_decay=0.1), marks=pytest.mark.slow),
        lambda one: SGD(one, lr=0.1, momentum=0.9, nesterov=True),
        pytest.param(lambda one: Adagrad(one, lr=0.1), marks=pytest.mark.slow),
        pytest.param(lambda one: Lion(one, lr=1e-3, weight_decay=0.1), marks=pytest.mark.slow),
    ],
    ids=["Adam", "SGD", "momentum", "Adagrad", "Lion"],
)
def test_every_optimizer_makes_the_same_steps_there(tmp_path, folder, monkeypatch, make):
    plain = built(tmp_path)
    expected = make(plain.parameters())
    train(plain, expected, 4)
    compute_late(monkeypatch)
    model = built(folder)
    optimizer = make(model.parameters())
    train(model, optimizer, 4)
    assert all(there(model))
    assert same(state(model, optimizer), state(plain, expected))


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize("settings", [{"state_dtype": "int8"}, {"state_dtype": "bf16"}, {"dtype": "fp16"}])
def test_records_in_other_formats_stay_where_the_kernels_are(folder, late, settings):
    model = built(folder, **settings)
    train(model, AdamW(model.parameters()), 3)
    assert not any(there(model))


# What users do between steps


def test_state_is_read_and_set_where_it_lies(folder, late):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 3)
    assert all(there(model))
    weight, saved = model[1].weight, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = state(model, optimizer)
    optimizer.state[weight]["exp_avg"] = torch.ones(WIDTH, WIDTH)
    assert optimizer.state[weight]["exp_avg"].eq(1).all()
    with gathered(model, write=True), torch.no_grad():
        weight.fill_(2)
    assert model.state_dict()["1.weight"].eq(2).all()
    train(model, optimizer, 1, first=3)
    assert all(there(model))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    found = state(model, optimizer)
    assert same([one[2:] for one in found], [one[2:] for one in expected])
    assert same([one[:1] for one in found], [one[:1] for one in expected])


def test_a_checkpoint_of_the_device_goes_on_where_the_cpu_computes_and_back(folder, tmp_path, monkeypatch):
    places = [tmp_path / name for name in ("plain", "again")]
    for place in places:
        place.mkdir()
    plain = built(places[0])
    expected = AdamW(plain.parameters(), **SETTINGS)
    train(plain, expected, 6)
    with monkeypatch.context() as context:
        compute_late(context)
        model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 3)
    assert all(there(model))
    infinity.save(model, optimizer, tmp_path / "checkpoint")
    again = built(places[1])
    after = AdamW(again.parameters(), **SETTINGS)
    infinity.load(again, after, tmp_path / "checkpoint")
    train(again, after, 3, first=3)
    assert same(state(again, after), state(plain, expected))
    infinity.load(model, optimizer, tmp_path / "checkpoint")
    train(model, optimizer, 3, first=3)
    assert same(state(model, optimizer), state(plain, expected))


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_durable_run_goes_on_from_its_last_commit(folder, tmp_path, monkeypatch, update):
    plain = fragile.Run(tmp_path, update=update, durable=False)
    losses, expected = plain.train(), plain.state()
    compute_late(monkeypatch)
    first = fragile.Run(folder, update=update)
    before = first.train(4)
    assert sum(there(first.model)) > 3
    first.kill()
    compute_late(monkeypatch)
    again = fragile.Run(folder, seed=99, update=update)
    assert again.first == 3
    assert {**before, **again.train()} == losses
    assert fragile.same(again.state(), expected)


def test_a_view_that_outlives_an_update_keeps_its_values(folder, late):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 2)
    with gathered(model[0]):
        values = model[0].weight.detach().clone()
    seen = []
    model[0].register_forward_hook(lambda module, *_: seen.append(module.weight.detach().t()))
    backward(model, 20)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1, first=3)
    assert torch.equal(seen[0], values.t())
    assert not torch.equal(seen[1], values.t())


def test_another_optimizer_with_more_state_takes_the_records_over(folder, late):
    model = built(folder)
    earlier = SGD(model.parameters(), lr=0.1)
    train(model, earlier, 3)
    assert all(there(model))
    with pytest.warns(UserWarning, match="supersedes"):
        optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 3, first=3)
    assert len(state(model, optimizer)[0]) == 4


# Where the room ends


def plainly(folder, steps):
    """Return what a training in which no record moves ends with."""
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, steps, micro=2)
    return state(model, optimizer)


@pytest.fixture
def expected(tmp_path):
    return plainly(tmp_path, 5)


def test_records_leave_in_the_middle_of_a_step_for_what_is_in_use(folder, expected, late):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 3, micro=2)
    assert all(there(model))
    backward(model, 30)
    room = engine_of_model(model).device.room
    taken = room.take(room.ledger.free_nbytes - 4096, "of others")
    room.give_back(taken + room.take(3 * RECORD, "of others"))
    assert 0 < sum(there(model)) < 4
    backward(model, 31)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1, first=4, micro=2)
    assert same(state(model, optimizer), expected)


@pytest.mark.parametrize("nvme", [True, False])
def test_after_the_device_ran_out_of_memory_nothing_lives_there_and_the_warning_has_the_numbers(
    folder, expected, late, caplog, nvme
):
    model = built(folder if nvme else None)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 3, micro=2)
    assert all(there(model))
    backward(model, 30)
    late.failed += 1  # in the user's code, which caught the error
    backward(model, 31)
    assert not any(there(model))
    assert "192.0 KiB of device_memory=32.0 MiB" in caplog.text
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1, first=4, micro=2)
    assert not any(there(model))
    assert stats(model).device_nbytes == 0
    assert same(state(model, optimizer), expected)


def test_an_allocation_of_ours_that_fails_is_tried_again_when_what_lives_there_has_left(
    folder, expected, late, monkeypatch
):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 5, micro=2)
    assert all(there(model))
    empty, fails = torch.empty, [True]

    def once(*args, **more):
        if fails and "device" in more:
            fails.clear()
            raise torch.OutOfMemoryError("no memory")
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", once)
    with gathered(model[0]):
        assert sum(there(model)) == 1
        assert torch.equal(model[0].weight, expected[0][0])


def test_more_is_gathered_than_records_leave_room_for_since_they_leave(folder, late):
    late.free = 2 * (4 * RECORD + 9 * 8192 + 4 * 512 + (16 << 10))
    model = built(folder)
    optimizer = AdamW(model.parameters(), update="backward", **SETTINGS)
    train(model, optimizer, 3)
    assert all(there(model))
    values = model.state_dict()
    room = engine_of_model(model).device.room
    taken = room.take(room.ledger.free_nbytes, "of others")
    with gathered(model[:2]):
        assert torch.equal(model[1].weight, values["1.weight"])
    assert 0 < sum(there(model)) < 4
    room.give_back(taken)


# Gradients


def test_gradients_are_read_scaled_and_summed_up_where_they_are(folder, late):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 2)
    backward(model, 5)
    before = stats(model).downloaded_nbytes
    gradients = [one.grad.float() for one in model.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm.item() == pytest.approx(torch.cat([one.flatten() for one in gradients]).norm().item(), 1e-5)
    assert stats(model).downloaded_nbytes - before <= 8 * 4, "a sum of squares for each"
    assert model[0].weight.grad.float().norm() < 1e-3


def test_a_scaler_skips_the_step_whose_gradients_overflow(folder, tmp_path, monkeypatch):
    def scaled(model):
        optimizer = AdamW(model.parameters(), **SETTINGS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(5):
            torch.manual_seed(step)
            loss = model(torch.randn(3, WIDTH)).square().mean()
            scaler.scale(loss * (torch.inf if step == 3 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return state(model, optimizer), scaler.get_scale()

    plain, scale = scaled(built(tmp_path, dtype="fp32"))
    compute_late(monkeypatch)
    model = built(folder, dtype="fp32")
    found, after = scaled(model)
    assert all(there(model))
    assert after == scale == 2.0**9
    assert same(found, plain)


# Faults that were found


def in_part(model, number, layers):
    torch.manual_seed(number)
    model[:layers](torch.randn(3, WIDTH).bfloat16()).float().square().mean().backward()


def with_missed_steps(folder, host_memory):
    """Train such that a spilled gradient is followed by steps in which its layer is not used."""
    model = built(folder, layers=2, host_memory=host_memory)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    for step in range(8):
        in_part(model, step, 2 if step < 5 else 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model, state(model, optimizer)


def test_steps_of_zeros_that_follow_a_spilled_gradient_are_made(tmp_path, folder, monkeypatch):
    _, expected = with_missed_steps(tmp_path, "128KiB")
    compute_late(monkeypatch)
    monkeypatch.setattr(GradientsOnDevice, "take", lambda *_, **__: False)  # without room there
    _, found = with_missed_steps(folder, "128KiB")
    assert same(found, expected)


def test_updates_are_pending_until_the_record_is_marked_as_changed_and_the_lane_is_told(
    folder, late, monkeypatch
):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 3)
    assert all(there(model))
    engine, make = engine_of_model(model), device_updates.make_step
    notify_all, seen, told = engine.lane.changed.notify_all, [], []

    def left():
        return sum(bool(unit.pending) for unit in engine.units)

    monkeypatch.setattr(device_updates, "make_step", lambda *args: (seen.append(left()), make(*args)))
    monkeypatch.setattr(engine.lane.changed, "notify_all", lambda: (told.append(left()), notify_all()))
    backward(model, 30)
    for unit in engine.units:
        unit.record.changed_in_host.clear()
    optimizer.step()
    for unit in engine.units:
        engine.residency.flush(unit)
        assert unit.record.changed_in_host == set(unit.record.fields)
    assert seen == 2 * [4, 3, 2, 1]  # of the step before, in the forward, and of this one
    assert set(told) >= {3, 2, 1, 0}


@pytest.mark.usefixtures("late")
def test_a_record_that_left_and_came_back_is_committed_as_it_is(folder, monkeypatch):
    first = fragile.Run(folder)
    first.train(8)
    first.engine.durable.commit_now()
    assert sum(there(first.model)) > 3
    room = first.engine.device.room
    first.done += 1
    first.model(first.loader.next(), seldom=False).backward()
    taken = room.take(room.ledger.free_nbytes, "of others")
    with gathered(first.model):
        pass
    assert sum(there(first.model)) < 3
    room.give_back(taken)
    first.optimizer.step()
    first.schedule.step()
    first.optimizer.zero_grad()
    first.engine.durable.commit_now()
    expected = first.state()
    first.kill()
    compute_late(monkeypatch)
    again = fragile.Run(folder, seed=99)
    assert again.first == 9
    found = again.state()
    again.kill()
    del expected["buffers"], found["buffers"]
    assert fragile.same(found, expected)


def failing_zeros(monkeypatch, from_call):
    """Let torch have no memory for records from this extent on."""
    zeros, calls = torch.zeros, []

    def refuse(*args, **more):
        if more.get("dtype") is torch.uint8 and "device" in more and more["device"] != "cpu":
            calls.append(more)
            if len(calls) >= from_call:
                raise torch.OutOfMemoryError("no memory")
        return zeros(*args, **more)

    monkeypatch.setattr(torch, "zeros", refuse)


def test_records_for_which_torch_has_no_memory_stay_below_and_the_warning_has_the_numbers(
    folder, expected, late, monkeypatch, caplog
):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    failing_zeros(monkeypatch, 8)  # in the second record: the first is the memory for intermediate values
    train(model, optimizer, 5, micro=2)
    assert sum(there(model)) == 1
    assert "the device has no memory for 48.0 KiB" in caplog.text
    assert same(state(model, optimizer), expected)
    room, held = engine_of_model(model).device.room, stats(model).device_nbytes
    assert held == RECORD, "what was allocated of the second record is free again"
    assert room.ledger.held_nbytes > held


def test_records_leave_before_an_optimizer_without_a_step_for_devices_has_updates(folder, late):
    model = built(folder)
    earlier = AdamW(model.parameters(), **SETTINGS)
    train(model, earlier, 3)
    assert all(there(model))

    class Mine(OffloadedOptimizer):
        def __init__(self, parameters):
            defaults = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
            super().__init__(parameters, defaults, replace(ADAMW, tensors=None, name="Mine"))

    with pytest.warns(UserWarning, match="supersedes"):
        optimizer = Mine(model.parameters())
    assert not any(there(model))
    train(model, optimizer, 3, first=3)
    assert not any(there(model))


def test_an_allocation_of_ours_that_was_made_again_does_not_empty_the_device(folder, late, monkeypatch):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 3)
    empty, fails = torch.empty, [True]

    def once(*args, **more):
        if fails and more.get("device", "cpu") != "cpu":
            fails.clear()
            late.failed += 1
            raise torch.OutOfMemoryError("no memory")
        return empty(*args, **more)

    with monkeypatch.context() as context:
        context.setattr(torch, "empty", once)
        with gathered(model[0]):
            assert sum(there(model)) == 1
    train(model, optimizer, 9, first=3)
    assert all(there(model))


def test_gradients_that_start_at_zero_stay_on_the_device(folder, late):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    seen = []
    for step in range(6):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seen.append(stats(model))
    assert all(there(model))
    last = seen[-1].since(seen[2])
    assert (last.uploaded_nbytes, last.downloaded_nbytes) == (0, 0)


def test_intermediate_values_leave_with_the_last_record(folder, late):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 3)
    assert all(there(model))
    engine = engine_of_model(model)
    store = engine.units[0].record.home("hi")[0].store
    assert store.held_nbytes > 4 * RECORD
    while engine.pins.one_record_leaves():
        pass
    assert store.held_nbytes == 0


def test_the_default_device_of_torch_is_not_where_memory_of_the_host_comes_from(folder, late):
    model = built(folder)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    x = torch.ones(3, WIDTH, dtype=torch.bfloat16)
    with torch.device("meta"):  # where nothing has an address
        for step in range(4):
            model(x).float().square().mean().backward()
            if step == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        tensors = [*model.state_dict().values(), optimizer.state[model[0].weight]["exp_avg"]]
        tensors += [one for values in state(model, optimizer) for one in values]
    assert all(there(model))
    assert all(one.device.type == "cpu" and one.abs().sum() > 0 for one in tensors)
