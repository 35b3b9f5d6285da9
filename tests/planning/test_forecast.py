"""Steps on a simulated machine. Rates are whole numbers, so that times can be told in one's head."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning import forecast as forecasts
from infinity.planning.architectures import llama
from infinity.planning.bottleneck import Load, disk_limits_s
from infinity.planning.demand import demand
from infinity.planning.forecast import EngineLimits, Forecast, Moves, forecast, predict_step
from infinity.planning.gpus import GPUS, LAUNCH_S, USE_S
from infinity.planning.outline import Outline, Stage, UnitOutline, timed, trace_of
from infinity.planning.plan import make_plan
from infinity.planning.setting import Setting
from infinity.planning.simulator import Disk, Rates
from plan_texts import parse_plan

DISK = Disk(read=10.0, write=10.0, mixed=10.0)
LIMITS = EngineLimits(tile_numel=1, slots=100, window_nbytes=0, outgoing_nbytes=1000, update="backward")
AHEAD = "open fetch 0\nF0 fetch 1\nF1 keep\nB1 fetch 0\nB0"
SMALL = llama("small", 4, 64, 192, 256)


def pair(moves, limits=LIMITS, rates=None, seconds=(1.0,) * 4, plan="open\nF0\nF1\nB1\nB0"):
    """A step of two equal units, forward and back."""
    return predict_step(parse_plan(plan), seconds, [moves, moves], limits, rates or Rates(DISK))


def frozen(**changes):
    return Moves(
        **{
            "numel": 1,
            "hi_nbytes": 10,
            "state_nbytes": 0,
            "waiting_nbytes": 10,
            "trainable": False,
            **changes,
        }
    )


def test_without_a_window_every_use_waits_for_its_read():
    told = pair(frozen())
    assert (told.seconds, told.stall_s, told.misses, told.read_nbytes) == (8.0, 4.0, 4, 40)


def test_a_window_lets_reads_go_while_computing_and_only_the_first_is_waited_for():
    told = pair(frozen(), limits=EngineLimits(1, 100, 10, 1000), plan=AHEAD)
    assert (told.seconds, told.stall_s, told.misses, told.read_nbytes) == (5.0, 1.0, 0, 30)


def test_what_is_in_place_is_neither_read_nor_waited_for():
    told = pair(frozen(hi_nbytes=0, waiting_nbytes=0, in_place=True))
    assert (told.seconds, told.stall_s, told.misses, told.read_nbytes) == (4.0, 0.0, 0, 0)


def test_updates_in_the_backward_are_written_behind_and_the_next_step_begins_while_they_are():
    # Each unit: 10 to read twice, 20 of state to read and 30 to write. The disk is never idle: 200 a step.
    told = pair(Moves(numel=1, hi_nbytes=10, state_nbytes=20, waiting_nbytes=10), seconds=(0.0,) * 4)
    assert (told.read_nbytes, told.written_nbytes) == (40 + 40, 60)
    assert told.seconds == pytest.approx(14.0, rel=0.2)


def test_updates_in_the_forward_come_with_the_first_fetch_and_with_what_was_spilled():
    moves = Moves(1, 10, 20, waiting_nbytes=10, spills=((0, 5),), spilled_nbytes=5)
    told = pair(moves, limits=EngineLimits(1, 100, 0, 1000, update="forward"))
    assert (told.read_nbytes, told.written_nbytes) == (2 * (10 + 20 + 5 + 10), 2 * (30 + 5))


def test_what_needs_no_transfer_is_updated_by_the_thread_that_computes():
    pinned = Moves(numel=8, hi_nbytes=0, state_nbytes=0, in_place=True)
    told = pair(pinned, rates=Rates(DISK, update=4.0))
    assert (told.seconds, told.stall_s) == (4.0 + 2 * 2.0, 0.0)


def test_updating_on_the_cores_that_compute_makes_computing_slower():
    moves, limits = Moves(8, 1, 1, waiting_nbytes=1), EngineLimits(8, 100, 1, 1000, update="backward")
    fast = Disk(1e9, 1e9, 1e9)
    slow, apart = (
        pair(moves, limits, Rates(fast, update=4.0, shared=shared), (8.0,) * 4, AHEAD).seconds
        for shared in (True, False)
    )
    assert apart == pytest.approx(32.0 + 2.0, rel=0.01), "the first use waits for the last update"
    assert slow == pytest.approx(apart + 2.0, rel=0.01), "the other takes as long from computing"


def test_each_use_takes_time_of_the_thread_that_computes():
    assert pair(frozen(), rates=Rates(DISK, use_s=0.5)).seconds == 8.0 + 4 * 0.5
    assert pair(frozen(hi_nbytes=0, in_place=True), rates=Rates(DISK, use_s=0.5)).seconds == 4.0


def test_each_field_of_a_tile_takes_time_of_the_lane():
    def seconds(request_s, **moved):
        units = Moves(numel=4, waiting_nbytes=10, **moved)
        rates = Rates(Disk(1e9, 1e9, 1e9), request_s=request_s, shared=False)
        limits = EngineLimits(1, 100, 0, 1000, update="backward")
        return pair(units, limits, rates, (0.0,) * 4).seconds

    def asked(**moved):
        return seconds(1.0, **moved) - seconds(0.0, **moved)

    # Two units of four tiles. `hi` alone is read 8 times as wide, in one tile, before each of the four uses.
    assert asked(hi_nbytes=0, state_nbytes=20, state_fields=2) == pytest.approx(2 * 4 * 4)
    assert asked(hi_nbytes=10, state_nbytes=20, state_fields=2) == pytest.approx(2 * 4 * 5 + 4)
    assert asked(hi_nbytes=10, state_nbytes=0, trainable=False) == pytest.approx(4)


def test_few_bytes_of_outgoing_gradients_make_computing_wait_for_updates():
    # 2's gradient takes all of the tight share, until the disk has read for 10 s what its update needs.
    def seconds(outgoing_nbytes):
        here = {"hi_nbytes": 0, "in_place": True}
        units = [Moves(4, state_nbytes=0, trainable=False, **here), *[Moves(4, state_nbytes=100, **here)] * 2]
        plan = parse_plan("open\nF0\nF1\nF2\nB2\nB1\nB0")
        limits = EngineLimits(4, 100, 0, outgoing_nbytes, update="backward")
        return predict_step(plan, [40.0, 1, 1, 1, 1, 40], units, limits, Rates(DISK)).seconds

    assert (seconds(1000), seconds(8)) == (84.0, 84.0 + 9.0)


def test_ranks_wait_for_the_link_too():
    gathered = frozen(gathered_nbytes=30)
    assert pair(gathered, rates=Rates(DISK, link=10.0)).seconds == 8.0 + 4 * 3.0


def test_what_ranks_sum_takes_the_link_for_its_own_bytes():
    def link_s(**moved):
        moves = Moves(4, hi_nbytes=0, state_nbytes=0, **moved)
        plan = parse_plan("open\nF0\nF1\nB1\nB0")
        limits = EngineLimits(4, 100, 0, 1000)
        return predict_step(plan, [1.0] * 4, [moves] * 2, limits, Rates(DISK, link=10.0)).busy_s["link"]

    gathers = link_s(gathered_nbytes=40)
    assert link_s(gathered_nbytes=40, reduced_nbytes=10) == pytest.approx(gathers + 2 * 1.0)


# On an accelerator


def on_device(moves, rates=None, plan="open\nF0\nF1\nB1\nB0", seconds=(1.0,) * 4, **limits):
    """A step of two equal units on an accelerator."""
    kept = {"tile_numel": 5, "slots": 100, "window_nbytes": 0, "outgoing_nbytes": 1000, **limits}
    return pair(moves, EngineLimits(on_host=False, **kept), rates, seconds, plan)


def test_without_a_window_an_upload_waits_for_the_computing_before_it():
    told = on_device(frozen(numel=5, hi_nbytes=0), Rates(DISK, up=10.0))
    assert (told.seconds, told.compute_s, told.stall_s) == (4 * (1.0 + 1.0), 4.0, 4.0)
    assert told.busy_s["up"] == 4.0


def test_with_a_window_uploads_run_beside_computing():
    told = on_device(frozen(numel=5, hi_nbytes=0), Rates(DISK, up=10.0), AHEAD, window_nbytes=10)
    assert told.seconds == 4.0 + 1.0, "the first upload of a step waits for the last computing before it"


def test_what_lives_there_is_not_uploaded_again():
    told = on_device(frozen(numel=5, hi_nbytes=0, lodged=True), Rates(DISK, up=10.0))
    assert (told.seconds, told.busy_s["up"]) == (4.0, 0.0)


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_record_that_lives_there_is_updated_there_and_its_gradient_stays(update):
    told, updated = (
        on_h200(4096, trainable=True, update=update, room=room, device_update=rate)
        for room, rate in ((1 << 40, 1e15), (1 << 40, 1e9))
    )
    assert told.busy_s["up"] == told.busy_s["down"] == told.busy_s["work"] == 0
    numel = sum(part.numel for part in DENSE.parts)
    assert updated.seconds - told.seconds == pytest.approx(numel / 1e9, rel=0.02)


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_parts_that_live_on_the_devices_of_ranks_go_over_the_link_between_them_alone(update):
    numel, link = sum(part.numel for part in DENSE.parts), 1e12
    told, updated = (
        on_h200(4096, ranks=4, trainable=True, update=update, room=1 << 40, link=link, device_update=rate)
        for rate in (1e15, 1e9)
    )
    assert told.busy_s["up"] == told.busy_s["down"] == told.busy_s["work"] == 0
    once = 2 * numel * 3 / 4  # what others have; at least one use gathers that, and one sum brings as much
    assert 2 * once <= told.busy_s["link"] * link <= 4.01 * once
    assert updated.seconds - told.seconds == pytest.approx(numel / 4 / 1e9, rel=0.02)


def test_launching_counts_only_where_it_takes_longer_than_computing():
    lodged = frozen(hi_nbytes=0, lodged=True)
    assert on_device(lodged, Rates(DISK, launch_s=0.25, use_s=0.25)).seconds == pytest.approx(4.0, abs=0.6)
    assert on_device(lodged, Rates(DISK, launch_s=1.0, use_s=2.0)).seconds >= 4 * 3.0


def test_a_gradient_goes_down_beside_computing_and_its_update_waits_for_it():
    moves = Moves(numel=5, hi_nbytes=0, state_nbytes=0, waiting_nbytes=10)
    slow, fast = (on_device(moves, Rates(DISK, down=down), update="backward") for down in (1.0, 1e9))
    assert (slow.busy_s["down"], fast.busy_s["down"]) == (pytest.approx(20.0), pytest.approx(0.0, abs=1e-6))
    assert (slow.seconds, fast.seconds) == (pytest.approx(20.0, rel=0.2), pytest.approx(4.0))


def test_a_device_without_room_for_what_leaves_makes_the_host_wait():
    moves = Moves(numel=5, hi_nbytes=0, state_nbytes=0, waiting_nbytes=10)
    tight, wide = (
        on_device(moves, Rates(DISK, down=5.0), device_nbytes=nbytes).seconds for nbytes in (15, 1000)
    )
    assert tight > wide


def test_updates_lose_what_copies_take_of_the_hosts_memory():
    """Each takes 10 s alone, in both of which a gradient of 1 s comes down, at half of what memory moves."""
    moves = Moves(numel=10, hi_nbytes=0, state_nbytes=0)

    def busy(memory):
        rates = Rates(DISK, update=1.0, down=20.0, shared=False, memory=memory)
        return on_device(moves, rates, update="backward").busy_s["work"]

    assert busy(math.inf) == pytest.approx(20.0)
    assert busy(40.0) == pytest.approx(20.0 + 0.5)


H200 = GPUS["h200"]
UPDATE, MEMORY = 6.8e9, 178e9
"""Elements that the 16 cores beside one update in a second, alone, and the bytes that moves:
bench/results/gpu-h200.json.
"""
DENSE = llama("dense", 6, 8192, 28672, 32000)
"""Six blocks of a model of 70 G parameters."""


def on_h200(tokens, *, trainable, update="forward", room=4 << 30, ranks=1, **more):
    """A step on an H200's figures, with all state in host memory but for `room` on the GPU."""
    parts = tuple(replace(part, trainable=trainable) for part in DENSE.parts)
    outline = replace(DENSE, parts=parts)
    need = demand(outline, Setting(1 << 40, device_nbytes=room, update=update, ranks=ranks))
    script = outline.script(tokens, min(tokens, 4096))
    seconds = sum(act.amount for act in script) / H200.compute
    link = {"up": H200.reached_link, "down": H200.reached_link, "launch_s": LAUNCH_S, "use_s": USE_S}
    rates = Rates(
        Disk(25e9, 20e9, 22e9), update=UPDATE, checked=50e9, shared=False, memory=MEMORY, **link, **more
    )
    return forecast(timed(script, seconds), need.plan, need.units, need.limits, rates)


@pytest.mark.parametrize(
    ("tokens", "how"),
    [
        (16384, {"trainable": False}),
        (16384, {"trainable": True, "update": "backward"}),
        (32768, {"trainable": True, "update": "forward"}),  # all updates are made while a forward computes
    ],
)
def test_an_h200_is_idle_for_little_where_computing_exceeds_its_link_and_hides_updates(tokens, how):
    told = on_h200(tokens, **how)
    assert told.busy_s["up"] < told.busy_s["compute"]
    assert told.stall_s <= 0.05 * told.seconds


def test_the_cpus_updates_go_on_without_a_break_where_they_take_longer_than_an_h200():
    told = on_h200(4096, trainable=True, update="backward")
    assert told.busy_s["compute"] < told.busy_s["work"]
    assert told.busy_s["work"] >= 0.9 * told.seconds


def test_an_h200s_link_is_busy_where_computing_does_not_exceed_it():
    told = on_h200(1024, trainable=False)
    assert told.busy_s["compute"] < told.busy_s["up"]
    assert told.busy_s["up"] >= 0.9 * told.seconds


def test_a_step_that_an_h200_took_is_forecast_within_a_tenth():
    """Eight layers of an 8B model, all state in host memory but for 4.2 GiB, by rates that were measured."""
    outline = llama("8b", 8, 4096, 14336, 32000)
    need = demand(outline, Setting(64 << 30, nvme=False, device_nbytes=int(3.7 * 2**30), update="backward"))
    link = {"up": 53.2e9, "down": 43.6e9, "launch_s": LAUNCH_S, "use_s": USE_S}
    rates = Rates(Disk(1, 1, 1), update=UPDATE, memory=MEMORY, shared=False, **link)
    script = timed(outline.script(8192, 8192), 0.267)
    told = forecast(script, need.plan, need.units, need.limits, rates)
    assert told.seconds == pytest.approx(0.387, rel=0.1)
    assert told.busy_s["work"] == pytest.approx(0.354, rel=0.05)


def test_a_step_is_bound_by_what_takes_longest():
    def kind(seconds, rate):
        disk = Disk(rate, rate, rate)
        return pair(Moves(1, 10, 20, waiting_nbytes=10), rates=Rates(disk), seconds=(seconds,) * 4).bound.kind

    assert (kind(100.0, 100.0), kind(0.01, 1.0)) == ("compute", "disk")


def test_a_script_and_a_plan_of_different_steps_are_refused():
    plan = parse_plan("open\nF0")
    with pytest.raises(ValueError, match="uses and a plan of 1"):
        forecast(SMALL.script(), plan, [], LIMITS, Rates(DISK))
    with pytest.raises(ValueError, match="3 times for the 1 uses"):
        predict_step(plan, [1.0] * 3, [frozen()], LIMITS, Rates(DISK))


# What holds for any setting

settings = st.builds(
    Setting,
    host_nbytes=st.sampled_from([128 << 10, 1 << 20, 3 << 20, 8 << 20]),
    update=st.sampled_from(["forward", "backward"]),
    ranks=st.sampled_from([1, 4]),
    device_nbytes=st.sampled_from([None, 64 << 10]),
)


def walked(setting, compute_s=1.0, **rates) -> Forecast:
    need = demand(SMALL, setting)
    disk = Disk(2e7, 1e7, 1.5e7)
    script = timed(SMALL.script(), compute_s)
    return forecast(script, need.plan, need.units, need.limits, Rates(disk, **{"link": 1e9, **rates}))


@given(settings)
def test_a_step_takes_no_less_than_its_floor_and_no_more_than_all_its_parts(setting):
    told = walked(setting, update=1e7, checked=1e9)
    load = Load(told.seconds, told.stall_s, told.read_nbytes, told.written_nbytes)
    assert told.seconds >= told.compute_s
    assert told.seconds >= 0.7 * max(
        disk_limits_s(load, Disk(2e7, 1e7, 1.5e7)).values()
    )  # writes go on later
    assert told.seconds <= sum(told.busy_s.values()) * 1.001, "at any time, something is busy"
    assert told.stall_s <= told.seconds


@given(settings)
def test_a_walk_moves_the_bytes_that_were_demanded(setting):
    told, need = walked(setting), demand(SMALL, setting)
    assert told.read_nbytes == pytest.approx(need.read_nbytes, rel=0.02)
    assert told.written_nbytes == need.written_nbytes


@given(settings)
def test_a_faster_machine_takes_no_longer(setting):
    slow, fast = walked(setting, 1.0, update=1e6), walked(setting, 0.5, update=1e7)
    assert fast.seconds <= slow.seconds * 1.001


def test_coarse_tiles_change_a_forecast_little(monkeypatch):
    need = demand(SMALL, Setting(128 << 10))
    args = (timed(SMALL.script(), 0.1), need.plan, need.units, need.limits, Rates(Disk(2e7, 1e7, 1.5e7)))
    fine = forecast(*args)
    monkeypatch.setattr(forecasts, "TILES_MOST", 60)
    assert forecast(*args).seconds == pytest.approx(fine.seconds, rel=0.1)


def test_a_gradient_that_nobody_uses_its_unit_for_still_updates_it():
    outline = Outline(
        "e", (UnitOutline("e", ((4, 2),), looked_up=True), UnitOutline("w", ((2, 2),))), (Stage((0, 1)),)
    )
    script = timed(outline.script(), 1.0)
    plan = make_plan(trace_of(script), [8, 8], 0, hides=[8, 8])
    told = forecast(script, plan, [Moves(8, 8, 8, 8)] * 2, LIMITS, Rates(DISK))
    assert (told.read_nbytes, told.written_nbytes) == ((8 + 16) + (8 + 8 + 8), 2 * 16)
