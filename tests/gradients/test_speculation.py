"""Updates that are made before step() decides them: bits, and what is dropped. Trusted: the recipe in memory.
Nothing is faked but a full disk.
"""

import contextlib
import itertools
import time

import pytest
import torch
from torch import nn

import deep
import infinity
import models
from deep import LAYERS, SETTINGS, WIDTH, Deep
from infinity import SGD, AdamW, Init, Lion, UnsupportedError, stats
from infinity.aio import StorageFullError
from infinity.gradients import early
from infinity.gradients.speculation import why_never
from infinity.lane.lane import StreamLane
from infinity.planning.split import HalfStep, UpdateSplit
from infinity.reference import ReferenceAdamW, clip_grad_norm_, prepare
from parity import differences, engine_in

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

UNITS = LAYERS
NEVER = 1e9  # a norm that is never reached
HI_PINNED = "2MiB"  # a budget with room for some of hi; that of the others has none


class Both(deep.Both):
    """Both, whose updates are made ahead where the model is offloaded."""

    def __init__(self, folder, *, speculate=True, **settings):
        super().__init__(folder, ours={"speculate": speculate}, **settings)
        self.speculation = self.engine.speculation

    def step(self, number, factor=1.0):
        self.backward(number, factor)
        self.decide()

    def decide(self):
        for _, optimizer in self:
            optimizer.step()
            optimizer.zero_grad()

    @property
    def counts(self):
        return self.speculation.confirmed, self.speculation.dropped


@pytest.fixture
def undecided(monkeypatch):
    """Have no step timed: all updates are made ahead that can be."""
    monkeypatch.setattr(early, "_FIRST", 1 << 30)


SOMETIMES = [1.0, 1.0, 1.0, 100.0, 1.0]


@pytest.mark.parametrize(
    ("memory", "factors", "confirmed", "dropped"),
    [
        (HI_PINNED, SOMETIMES, 8, 2),
        *(
            pytest.param("1MiB", *case, marks=pytest.mark.slow)
            for case in (([1.0], 10, 0), (SOMETIMES, 8, 2))
        ),
        *(pytest.param(one, [100.0], 0, 10, marks=pytest.mark.slow) for one in ("1MiB", HI_PINNED)),
        pytest.param(HI_PINNED, [1.0], 10, 0, marks=pytest.mark.slow),
    ],
)
def test_bits_are_the_recipes_whether_norms_exceed_their_bound_or_not(
    folder, memory, factors, confirmed, dropped
):
    both = Both(folder, memory=memory, max_norm=0.1)
    for number, factor in zip(range(10), itertools.cycle(factors), strict=False):
        both.step(number, factor)
    both.check()
    assert both.counts == (confirmed * UNITS, dropped * UNITS)
    assert not both.speculation.refused


def test_confirmed_steps_move_26_bytes_a_parameter_also_where_gradients_find_no_room(folder):
    both = Both(folder, memory="1MiB", max_norm=NEVER)
    for number in range(3):
        both.step(number)
    engine_in(both.model).lane.drain()
    before = stats(both.model)
    for number in range(3, 6):
        both.step(number)
    engine_in(both.model).lane.drain()
    done = stats(both.model).since(before)
    numel = 3 * sum(unit.record.shard.numel for unit in engine_in(both.model).units)
    moved = (done.nvme_read_nbytes + done.nvme_written_nbytes) / numel
    assert ("nvme", "grad16") not in {**done.read_nbytes, **done.written_nbytes}
    assert moved <= 26.5
    assert done.passes["AheadPass"] == 3 * UNITS
    assert done.speculated == {"confirmed": 3 * UNITS, "dropped": 0}
    assert 10 * numel <= 3 * done.second_nbytes <= 12 * numel, (
        "of hi that is coming back there is no second one"
    )
    assert ("made ahead", "12 confirmed, 0 dropped") in done.rows()
    assert not done.passes.get("FetchAndUpdatePass")


def test_however_slow_the_lane_is_no_more_memory_is_lent_than_the_outgoing_share_has(folder, monkeypatch):
    work = StreamLane._work
    monkeypatch.setattr(StreamLane, "_work", lambda lane, tile: (time.sleep(0.01), work(lane, tile)))
    both = Both(folder, max_norm=NEVER)
    engine, lent = engine_in(both.model), [0]
    settle = engine.gradients.settle

    def watched(unit):
        settle(unit)
        lent.append(sum(one.resident_nbytes for one in engine.units if one.residence.lent is not None))

    engine.gradients.settle = watched
    both.step(0)
    both.step(1)
    of_unit = engine.units[0].resident_nbytes
    assert 0 < max(lent) <= max(of_unit, engine.outgoing_share.ledger.limit_nbytes)
    assert both.counts[0] > 0
    engine.lane.drain()
    both.model.zero_grad()
    assert engine.outgoing_share.ledger.held_nbytes == 0


def test_hi_stays_in_its_place_in_host_memory_and_is_moved_there(folder):
    both = Both(folder, memory=HI_PINNED, max_norm=NEVER)
    for number in range(4):
        both.step(number)
    engine = engine_in(both.model)
    pinned = [one for one in engine.units if engine.pins._placement.get((one.index, "hi")) == "host"]
    assert pinned
    held = engine.host_store.held_nbytes
    both.step(4)
    assert engine.lane.passes["MoveHiPass"]
    assert all(one.record.in_host("hi") for one in pinned)
    both.backward(5)
    assert all(one.record.in_host("hi") for one in pinned)
    both.decide()
    assert engine.host_store.held_nbytes == held
    both.check()


def test_units_that_are_used_where_they_lie_need_no_room_where_no_update_is_left_to_their_fetches(folder):
    both = Both(folder, memory=HI_PINNED, max_norm=0.1)
    engine = engine_in(both.model)

    def fetched_in_place():
        plan = engine.residency.cursor.plan
        fetched = {*plan.opening, *(unit for step in plan.steps for unit in step.fetch)}
        return [one.index for one in engine.units if one.in_place and one.index in fetched]

    for number in range(4):
        both.step(number)
    assert any(one.in_place for one in engine.units)
    assert fetched_in_place() == []
    both.step(4, 100.0)
    assert fetched_in_place(), "what was decided comes with the fetch"
    for number in range(5, 7):
        both.step(number)
    assert fetched_in_place() == []
    both.check()


@pytest.mark.slow
def test_records_of_which_more_is_placed_in_host_memory_are_updated_as_ever(folder):
    both = Both(folder, memory="8MiB", max_norm=NEVER)
    for number in range(5):
        both.step(number)
    both.check()
    assert both.counts[0] < 5 * UNITS
    assert set(both.speculation.refused) <= {
        "more of its record than hi lies in host memory",
        "its record is not on NVMe",
    }
    before = stats(both.model)
    both.step(5)
    engine_in(both.model).lane.drain()
    assert not stats(both.model).since(before).nvme_written_nbytes, "it all fits"


def test_torchs_own_clipping_counts_as_the_norms_bound_does(folder):
    both = Both(folder)
    for number in range(6):
        both.backward(number, 100.0 if number == 3 else 1.0)
        torch.nn.utils.clip_grad_norm_(both.model.parameters(), 0.1)
        clip_grad_norm_(both.reference, 0.1)
        both.decide()
    both.check()
    assert both.counts == (5 * UNITS, UNITS)


@pytest.mark.slow
def test_a_learning_rate_may_change_at_any_time(folder):
    both = Both(folder)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for _, one in both]
    for number in range(6):
        both.backward(number)
        if number == 4:
            for _, optimizer in both:
                optimizer.param_groups[0]["lr"] *= 0.75
        both.decide()
        for one in schedules:
            one.step()
    both.check()
    assert both.counts == (5 * UNITS, UNITS)


@pytest.mark.slow
def test_gradients_that_are_added_up_make_what_was_written_worthless(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(4):
        for micro in range(3):
            both.backward(10 * number + micro)
        both.decide()
    both.check()
    assert both.counts == (0, UNITS), "of the first step: then it is known that there are several backwards"
    for number in range(2):
        both.step(100 + number)
    both.check()
    assert both.counts == (UNITS, UNITS)


def test_what_is_read_between_backward_and_step_is_what_was_there_before(folder):
    both = Both(folder, memory=HI_PINNED, max_norm=NEVER)
    for number in range(3):
        both.step(number)
    before = {name: one.clone() for name, one in both.plain.state_dict().items()}
    both.backward(3)
    weight = both.model.layers[1].weight
    with infinity.gathered(weight):
        assert torch.equal(weight, before["layers.1.weight"])
    assert differences(before, dict(both.model.state_dict())) == []
    state = both.optimizer.state_dict()["state"][2]
    expected = both.reference.state[both.plain.layers[1].weight]
    assert state["step"] == 3
    assert torch.equal(state["exp_avg"], expected["exp_avg"])
    with torch.no_grad():
        x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
        assert torch.equal(both.model(x), both.plain(x))
    confirmed = both.counts[0]
    both.decide()
    both.check()
    assert both.counts == (confirmed + UNITS, 0), "reading changes nothing"


def test_weights_and_state_that_are_changed_by_hand_in_between_are_what_the_update_starts_from(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(2):
        both.step(number)
    both.backward(2)
    for model, _ in both:
        weight = model.layers[1].weight
        ours = infinity.gathered(weight, write=True) if model is both.model else contextlib.nullcontext()
        with ours, torch.no_grad():
            weight.mul_(0.5)
    both.decide()
    assert both.counts == (3 * UNITS - 1, 1)
    both.backward(3)
    loaded = both.optimizer.state_dict()
    for one in loaded["state"].values():
        one["exp_avg"] = one["exp_avg"] * 2
    both.optimizer.load_state_dict(loaded)
    for one in both.reference.state.values():
        one["exp_avg"].mul_(2)
    both.decide()
    both.check()
    assert both.counts == (3 * UNITS - 1, UNITS + 1)


@pytest.mark.slow
def test_a_gradient_that_is_changed_or_replaced_counts(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(4):
        both.backward(number)
        for model, _ in both:
            weight = model.layers[2].weight
            if number == 1:
                weight.grad.add_(1.0)
            elif number == 2:
                weight.grad = (
                    torch.full_like(weight.detach(), 0.25)
                    if model is both.plain
                    else torch.full((WIDTH, WIDTH), 0.25, dtype=torch.bfloat16)
                )
            elif number == 3:
                model.layers[0].bias.grad = None
        both.decide()
    both.check()
    assert both.counts == (4 * UNITS - 3, 3)


def test_a_step_that_is_skipped_leaves_everything_as_it_was(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(5):
        both.backward(number)
        if number in (1, 2):
            for _, optimizer in both:
                optimizer.zero_grad()
        else:
            both.decide()
    both.check()
    assert both.counts == (2 * UNITS, UNITS), "a use more since the last step might bring more gradients"


@pytest.mark.slow
def test_gradients_that_are_set_to_zeros_are_not_added_to(folder):
    both = Both(folder, max_norm=NEVER)
    for number in range(4):
        both.backward(number)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    both.check()
    assert both.counts == (4 * UNITS, 0)


@pytest.mark.slow
def test_a_norm_that_is_not_finite_is_refused_what_was_written(folder):
    both = Both(folder, max_norm=NEVER)
    both.step(0)
    both.backward(1, float("inf"))
    for _, optimizer in both:
        optimizer.step()
    assert both.counts == (UNITS, UNITS)
    for ours, theirs in zip(both.model.parameters(), both.plain.parameters(), strict=True):
        with infinity.gathered(ours):
            assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize(
    ("kind", "init"),
    [
        (AdamW, {"state_dtype": "int8"}),
        (Lion, {"state_dtype": "int4"}),
        pytest.param(AdamW, {"state_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param(AdamW, {"dtype": "fp32"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_form_of_a_record_has_two_generations(folder, kind, init):
    found = []
    for speculate in (False, True):
        torch.manual_seed(0)
        with Init(nvme=folder, host_memory="1.5MiB", **init):
            model = Deep()
        optimizer = kind(model.parameters(), max_norm=NEVER, speculate=speculate, **SETTINGS)
        for number in range(4):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
            model(x.to(next(model.parameters()).dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((model.state_dict(), optimizer.state_dict()["state"]))
        assert bool(engine_in(model).speculation.confirmed) == speculate
    assert differences(*found) == []


@pytest.mark.slow
def test_steps_that_a_grad_scaler_skips_are_refused_what_was_written(folder):
    found = []
    for speculate in (False, True):
        torch.manual_seed(0)
        with Init(nvme=folder, host_memory="1.5MiB", dtype="fp16"):
            model = Deep()
        optimizer = AdamW(model.parameters(), speculate=speculate, **SETTINGS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        for number in range(9):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).half()
            loss = model(x).square().mean() * (1e5 if number == 5 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**9
        found.append((model.state_dict(), optimizer.state_dict()["state"]))
        assert bool(engine_in(model).speculation.confirmed) == speculate
    assert differences(*found) == []


@pytest.mark.slow
def test_other_optimizers_speculate_too(folder):
    found = []
    for speculate in (False, True):
        torch.manual_seed(0)
        with Init(nvme=folder, host_memory="1MiB"):
            model = Deep()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, max_norm=NEVER, speculate=speculate)
        for number in range(3):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.state_dict())
        assert bool(engine_in(model).speculation.confirmed) == speculate
    assert differences(*found) == []


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [None, "reentrant", "non-reentrant"])
def test_tied_weights_and_checkpoints_keep_their_bits(folder, checkpoint):
    init = {"nvme": folder, "host_memory": "1MiB"}
    settings = {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 1.0}
    model, _, schedule = models.offloaded("gpt2", settings, init, checkpoint)
    del schedule
    with pytest.warns(UserWarning, match="supersedes"):
        optimizer = AdamW(model.parameters(), **settings, speculate=True)
    plain, reference, _ = models.in_memory("gpt2", settings, init, checkpoint)
    reference.param_groups[0]["lr"] = settings["lr"]
    assert models.train(model, optimizer, 4) == models.train(plain, reference, 4)
    models.assert_same_state(model, optimizer, plain, reference)
    assert engine_in(model).speculation.dropped or engine_in(model).speculation.confirmed


def test_without_being_told_updates_are_made_ahead_of_so_many_units_that_both_halves_are_as_busy(
    folder, monkeypatch
):
    half = UpdateSplit((2, 0), LAYERS, HalfStep(1.0, 0.5), HalfStep(2.0, 1.0))
    monkeypatch.setattr(early, "split_updates", lambda *_, ahead: half if ahead else pytest.fail("not asked"))
    both = Both(folder, speculate="auto", max_norm=NEVER)
    for number in range(6):
        both.step(number)
    both.check()
    assert both.counts == (4 * 2, 0)
    assert both.speculation.refused["the next forward has time for them"] == 4 * 2
    assert stats(both.model).updates == str(half)


def test_what_was_timed_decides_which_updates_are_made_ahead_and_bits_stay(folder):
    both = Both(folder, speculate="auto", memory=HI_PINNED, max_norm=0.1)
    assert stats(both.model).updates == ""
    for number, factor in enumerate([1.0] * 6 + [100.0, 1.0]):
        both.step(number, factor)
    both.check()
    split = engine_in(both.model).arrivals.ahead.split
    assert split.candidates == UNITS
    assert split.forward.compute_s > 0
    assert split.forward.disk_s + split.backward.disk_s > 0


@pytest.mark.slow
@pytest.mark.usefixtures("undecided")
def test_without_being_told_it_begins_where_norms_have_stayed_within_their_bound(folder):
    both = Both(folder, speculate="auto", max_norm=0.1)
    for number in range(4):
        both.step(number)
    assert both.counts[0], "two steps show what to expect"
    confirmed = both.counts[0]
    for number in range(4, 12):
        both.step(number, 100.0)
    both.check()
    assert both.counts[0] == confirmed
    assert both.counts[1] <= 3 * UNITS
    assert both.speculation.counts["the last steps were not as expected"] >= 4 * UNITS, "told in stats"


@pytest.mark.slow
@pytest.mark.usefixtures("undecided")
def test_a_full_disk_ends_it_with_a_word_in_the_log_or_an_error_where_it_was_asked_for(
    folder, monkeypatch, caplog
):
    both = Both(folder, speculate="auto", max_norm=NEVER)
    store = engine_in(both.model).nvme_store
    allocate = store.allocate

    def full(nbytes, what):
        if "second generation" not in what:
            return allocate(nbytes, what)
        raise StorageFullError(28, f"{what}: no room", folder).with_sizes(needed=nbytes, free=0)

    monkeypatch.setattr(store, "allocate", full)
    for number in range(5):
        both.step(number)
    assert both.counts == (0, 0)
    assert len([one for one in caplog.messages if "before step() any more" in one]) == 1
    with pytest.warns(UserWarning, match="supersedes"), pytest.raises(StorageFullError, match="second gen"):
        AdamW(both.model.parameters(), speculate=True)


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("speculate", [True, pytest.param("auto", marks=pytest.mark.slow)])
def test_what_was_taken_before_the_disk_was_full_is_freed(folder, monkeypatch, speculate):
    both = Both(folder, speculate=False, max_norm=NEVER)
    store, left = engine_in(both.model).nvme_store, [6]
    allocate = store.allocate

    def full(nbytes, what):
        left[0] -= "second generation" in what
        if left[0] < 0:
            raise StorageFullError(28, f"{what}: no room", folder).with_sizes(needed=nbytes, free=0)
        return allocate(nbytes, what)

    monkeypatch.setattr(store, "allocate", full)
    expected = pytest.raises(StorageFullError) if speculate is True else contextlib.nullcontext()
    with pytest.warns(UserWarning, match="supersedes"), expected:
        both.optimizer = AdamW(both.model.parameters(), speculate=speculate, max_norm=NEVER, **SETTINGS)
    if speculate == "auto":
        for number in range(6):
            both.step(number)
        both.check()
        assert sum(both.counts) > 0
    assert left[0] < 0
    assert both.speculation.nbytes == 0


def test_a_later_optimizer_takes_over_what_an_earlier_one_has_allocated(folder, monkeypatch):
    both = Both(folder, max_norm=NEVER)
    both.step(0)
    both.backward(1)
    store, asked = engine_in(both.model).nvme_store, []
    allocate = store.allocate
    monkeypatch.setattr(
        store, "allocate", lambda nbytes, what: (asked.append(what), allocate(nbytes, what))[1]
    )
    with pytest.warns(UserWarning, match="supersedes"):
        AdamW(both.model.parameters(), speculate=True)
    assert [one for one in asked if "second generation" in one] == []


def test_a_durable_run_commits_what_was_confirmed_and_nothing_else(folder):
    def begin():
        torch.manual_seed(0)
        with Init(nvme=folder, host_memory="1MiB", durable=True):
            model = Deep()
        optimizer = AdamW(model.parameters(), max_norm=0.1, speculate=True, **SETTINGS)
        return model, optimizer, infinity.resume(model, optimizer)

    def backward(model, number, factor=1.0):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        (model(x).square().mean() * factor).backward()

    torch.manual_seed(0)
    plain = prepare(Deep())
    reference = ReferenceAdamW(plain.parameters(), max_norm=0.1, **SETTINGS)
    model, optimizer, _ = begin()
    for number in range(5):
        for one, its in ((model, optimizer), (plain, reference)):
            backward(one, number, 100.0 if number == 2 else 1.0)
            its.step()
            its.zero_grad()
        infinity.commit(model)
    speculation = engine_in(model).speculation
    assert speculation.confirmed > UNITS
    backward(model, 5)
    engine_in(model).lane.drain()  # the other sides are written; no step confirms them
    engine_in(model).close()
    del model, optimizer, speculation
    model, _, step = begin()
    assert step == 5
    assert differences(plain.state_dict(), model.state_dict()) == []


def test_what_cannot_speculate_says_why(folder):
    assert why_never(2, 3) == "several ranks train"
    assert why_never(1, 2)
    with Init(host_memory="16MiB"):
        model = nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match="there is no NVMe"):
        AdamW(model.parameters(), speculate=True)
    with Init(nvme=folder, host_memory="1MiB"):
        model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="nothing is foreseen"):
        AdamW(model.parameters(), update="backward", speculate=True)
    for value in (1, "yes"):
        with pytest.raises(ValueError, match='expected True, False or "auto"'):
            AdamW(model.parameters(), speculate=value)
