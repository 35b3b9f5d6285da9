"""What stays above NVMe, and when that changes. Pure."""

import itertools
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.planning.placement import (
    HORIZON_STEPS,
    Candidate,
    PlacementBudget,
    choose,
    opening,
    place,
    revise,
    revise_in_turn,
    spread,
)
from plan_texts import parse_plan

DENSITY = {"hi": 3, "lo": 2, "m": 2, "v": 2}
UNIT = {"hi": 20, "lo": 20, "m": 40, "v": 40}


def dense(units, fields=UNIT):
    return [
        Candidate(unit, field, nbytes, DENSITY[field] - 1, 1)
        for unit in range(units)
        for field, nbytes in fields.items()
    ]


def widest_gap(units, count):
    """The longest way from one of the chosen units to the next, or to the end of the model."""
    return max(b - a for a, b in itertools.pairwise([-1, *sorted(units), count]))


# Host memory, in dense training


def test_the_densest_field_is_kept_first_and_evenly():
    chosen = choose(dense(10), 100, 1000)
    assert [field for _, field in chosen] == ["hi"] * 5
    assert widest_gap([unit for unit, _ in chosen], 10) <= 3, "spread over the model"


def test_equally_dense_fields_are_kept_one_after_the_other_each_evenly():
    chosen = choose(dense(10), 10 * 40 + 5 * 40, 0)
    assert [field for _, field in chosen] == ["hi"] * 10 + ["lo"] * 10 + ["m"] * 5
    assert widest_gap([unit for unit, _ in chosen[20:]], 10) <= 3


def test_moments_are_kept_only_with_what_gradients_leave():
    assert {field for _, field in choose(dense(10), 400, 150)} == {"hi", "lo"}
    assert {field for _, field in choose(dense(10), 400, 400)} == {"hi"}
    assert len(choose(dense(10), 1400, 200)) == 40


# Host memory, by expected uses


def test_experts_in_use_are_kept_before_those_that_are_not():
    experts = [
        Candidate(unit, "m", 10, uses, uses) for unit, uses in enumerate([0.1, 0.9, 0.0, 0.5, 1.0, 0.2])
    ]
    assert choose(experts, 30, 0) == [(4, "m"), (1, "m"), (3, "m")]
    assert (2, "m") not in choose(experts, 60, 0), "what is never used saves nothing"


def test_an_experts_weights_may_be_thinner_than_a_gradient_and_a_dense_layers_moments_not():
    candidates = [
        Candidate(0, "hi", 10, 0.6, 0.3),
        Candidate(1, "m", 10, 1.0, 1.0),
        Candidate(2, "hi", 10, 4, 1),
    ]
    assert choose(candidates, 20, 10) == [(2, "hi")]
    assert choose(candidates, 30, 10) == [(2, "hi"), (1, "m")]


def test_noise_far_below_a_use_does_not_upset_the_even_spread():
    wavering = [Candidate(unit, "m", 10, 1 + unit * 1e-6, 1) for unit in range(100)]
    assert widest_gap([unit for unit, _ in choose(wavering, 200, 0)], 100) <= 9


some = st.builds(
    Candidate,
    unit=st.integers(0, 9),
    field=st.sampled_from(sorted(UNIT)),
    nbytes=st.integers(1, 50),
    reads=st.floats(0, 4),
    writes=st.floats(0, 1),
)
lists = st.lists(some, unique_by=lambda candidate: candidate.key, max_size=30)
room = st.integers(0, 500)
budgets = st.builds(PlacementBudget, st.integers(0, 100), st.integers(0, 500), st.integers(0, 300))


@given(lists, room, room)
def test_what_is_kept_never_exceeds_the_room(candidates, room, gradients):
    sizes = {candidate.key: candidate.nbytes for candidate in candidates}
    chosen = choose(candidates, room, gradients)
    assert sum(sizes[key] for key in chosen) <= room
    assert len(set(chosen)) == len(chosen)


@given(st.integers(0, 300))
def test_spreading_leaves_nobody_out(count):
    assert sorted(spread(count)) == list(range(count))


# Two tiers


def test_the_device_takes_weights_alone_and_the_host_what_is_left():
    placement = place(dense(4), PlacementBudget(40, 60, 0))
    assert list(placement.values()) == ["device"] * 2 + ["host"] * 3
    assert [field for (_, field), tier in placement.items() if tier == "device"] == ["hi"] * 2
    assert [field for (_, field), tier in placement.items() if tier == "host"] == ["hi", "hi", "lo"]
    assert {field for _, field in place(dense(4), PlacementBudget(1000, 0, 0))} == {"hi"}


def test_the_most_used_experts_live_on_the_device_the_next_in_host_memory_the_rest_on_nvme():
    experts = [Candidate(unit, "hi", 10, uses, uses) for unit, uses in enumerate([0.2, 0.8, 0.4, 1.0, 0.1])]
    assert place(experts, PlacementBudget(20, 20, 0)) == {
        (3, "hi"): "device",
        (1, "hi"): "device",
        (2, "hi"): "host",
        (0, "hi"): "host",
    }


def test_a_placement_cannot_be_changed():
    with pytest.raises(TypeError):
        place(dense(1), PlacementBudget(100, 100, 0))[0, "hi"] = "host"


# Changing it


def experts(*uses):
    return [Candidate(unit, "m", 10, often, often) for unit, often in enumerate(uses)]


HOST_OF_ONE = PlacementBudget(0, 10, 0)
FIRST_IS_KEPT = MappingProxyType({(0, "m"): "host"})


def test_a_small_difference_moves_nothing():
    worth = 1 / HORIZON_STEPS  # reads and writes both: a byte of the other saves twice that more
    stays = revise(FIRST_IS_KEPT, experts(0.5, 0.5 + 0.9 * worth), HOST_OF_ONE)
    assert (stays.placement, stays.moves) == (FIRST_IS_KEPT, ())
    moves = revise(FIRST_IS_KEPT, experts(0.5, 0.5 + 1.2 * worth), HOST_OF_ONE)
    assert [str(move) for move in moves.moves] == ["0.m host -> nvme", "1.m nvme -> host"]
    assert moves.placement == {(1, "m"): "host"}


def test_what_pays_does_not_carry_along_what_does_not():
    both_kept = MappingProxyType({(0, "m"): "host", (1, "m"): "host"})
    revised = revise(both_kept, experts(0.0, 0.5, 1.0, 0.52), PlacementBudget(0, 20, 0))
    assert [str(move) for move in revised.moves] == ["0.m host -> nvme", "2.m nvme -> host"]


def test_units_that_change_places_between_full_tiers_go_by_way_of_nvme():
    weights = [Candidate(0, "hi", 10, 1, 0), Candidate(1, "hi", 10, 9, 0)]
    swapped = MappingProxyType({(0, "hi"): "device", (1, "hi"): "host"})
    tight, roomy = (
        revise(swapped, weights, PlacementBudget(10, 10, 0)),
        revise(swapped, weights, PlacementBudget(10, 20, 0)),
    )
    assert [str(move) for move in tight.moves] == [
        "0.hi device -> nvme",
        "1.hi host -> device",
        "0.hi nvme -> host",
    ]
    assert [str(move) for move in roomy.moves] == ["0.hi device -> host", "1.hi host -> device"]


def test_the_reason_can_be_read_in_a_log():
    assert revise(FIRST_IS_KEPT, experts(0.5, 1.0), HOST_OF_ONE).reason == (
        "2 moves of 20 B, saving 10 B a step: pays in 2 steps"
    )
    assert revise(FIRST_IS_KEPT, experts(1, 1), HOST_OF_ONE).reason == "as before: 1 fields placed"
    rare = revise(MappingProxyType({}), experts(0.01), HOST_OF_ONE)
    assert rare.reason == ("as before: 1 moves of 10 B, saving 0 B a step, would not pay within 20 steps")


def test_dense_training_moves_once_and_never_again():
    candidates, memory = dense(10), PlacementBudget(60, 400, 100)
    first = revise(MappingProxyType({}), candidates, memory)
    assert first.placement == place(candidates, memory)
    assert {move.source for move in first.moves} == {"nvme"}
    again = revise(first.placement, candidates, memory)
    assert (again.placement, again.moves) == (first.placement, ())


def test_with_less_room_than_before_something_goes_whether_it_pays_or_not():
    placed = place(dense(10), PlacementBudget(0, 200, 0))
    fewer = revise(placed, dense(10), PlacementBudget(0, 120, 0))
    assert len(fewer.moves) == 4
    assert {move.target for move in fewer.moves} == {"nvme"}
    assert fewer.placement.items() <= placed.items(), "nothing else moves"
    assert "less room" in fewer.reason


def test_gradients_that_grow_push_out_what_is_used_less_and_nothing_else():
    candidates = [*experts(0.3, 0.3, 0.3), *dense(3, {"hi": 10})]
    placed = place(candidates, PlacementBudget(0, 60, 0))
    revised = revise(placed, candidates, PlacementBudget(0, 60, 20))
    assert [(move.field, move.target) for move in revised.moves] == [("m", "nvme")] * 2


def test_gradients_that_grow_do_not_push_out_moments_as_dense_as_they_are():
    placed = place(dense(10), PlacementBudget(0, 400, 0))
    assert revise(placed, dense(10), PlacementBudget(0, 400, 200)).moves == ()


def test_nothing_is_moved_out_while_nobody_needs_the_room():
    revised = revise(FIRST_IS_KEPT, experts(0.0, 1.0), PlacementBudget(0, 20, 0))
    assert [str(move) for move in revised.moves] == ["1.m nvme -> host"]


def test_what_is_placed_has_to_be_a_candidate():
    with pytest.raises(ValueError, match=r"\[\(0, 'm'\)\]"):
        revise(FIRST_IS_KEPT, [], HOST_OF_ONE)


@given(lists, budgets, st.data())
def test_moves_lead_from_one_placement_to_the_other_and_never_need_more_than_the_rooms(
    candidates, memory, data
):
    wavered = [
        Candidate(one.unit, one.field, one.nbytes, data.draw(st.floats(0, 4)), one.writes)
        for one in candidates
    ]
    sizes = {candidate.key: candidate.nbytes for candidate in candidates}
    now = dict(place(candidates, memory))
    revision = revise(MappingProxyType(dict(now)), wavered, memory)
    for move in revision.moves:
        key = (move.unit, move.field)
        assert (now.pop(key, "nvme"), sizes[key]) == (move.source, move.nbytes)
        if move.target != "nvme":
            now[key] = move.target
        for tier, limit in (("device", memory.device_nbytes), ("host", memory.host_nbytes)):
            assert sum(sizes[one] for one, where in now.items() if where == tier) <= limit
    assert now == revision.placement


# Whole records on the device


def trained(units, beside=0):
    """Units whose records may live on the device, with gradients of so many bytes beside each."""
    return [
        replace(one, lasts=False, whole=True, beside_nbytes=beside * (one.field == "v"))
        for one in dense(units)
    ]


def units_of(placement, tier="device"):
    return {unit for (unit, _), where in placement.items() if where == tier}


RECORD = sum(UNIT.values())


def test_records_live_on_the_device_whole_or_not_at_all_with_their_gradients_and_evenly():
    placement = place(trained(10, beside=20), PlacementBudget(5 * (RECORD + 20) - 1, 0, 0))
    assert len(units_of(placement)) == 4
    assert set(placement) == {(unit, field) for unit in units_of(placement) for field in UNIT}
    assert widest_gap(units_of(placement), 10) <= 4


def test_weights_that_last_come_first_and_records_have_what_they_leave_but_for_the_scratch():
    frozen = [Candidate(unit, "hi", 20, 2, 0) for unit in range(10, 12)]
    candidates = [*trained(4), *frozen]
    placement = place(candidates, PlacementBudget(40 + RECORD + 5, 0, 0, scratch_nbytes=6))
    assert units_of(placement) == {10, 11}
    placement = place(candidates, PlacementBudget(40 + RECORD + 6, 0, 0, scratch_nbytes=6))
    assert len(units_of(placement)) == 3


def test_the_densest_records_live_on_the_device_and_the_host_keeps_of_the_others_what_is_densest():
    candidates = [
        replace(one, reads=one.reads * (1 + unit % 2), writes=one.writes * (1 + unit % 2))
        for unit in range(4)
        for one in trained(4)[4 * unit : 4 * unit + 4]
    ]
    placement = place(candidates, PlacementBudget(2 * RECORD, 2 * 20, 0))
    assert units_of(placement) == {1, 3}
    assert {key for key, tier in placement.items() if tier == "host"} == {(0, "hi"), (2, "hi")}


def test_records_of_what_opens_a_step_live_on_the_device_before_denser_ones():
    candidates = [
        replace(one, opens=one.unit == 0, reads=one.reads / 2 if one.unit == 0 else one.reads)
        for one in trained(4)
    ]
    assert units_of(place(candidates, PlacementBudget(RECORD, 0, 0))) == {0}
    assert len(units_of(place(candidates, PlacementBudget(3 * RECORD, 0, 0)))) == 3
    larger = [replace(one, nbytes=2 * one.nbytes) if one.opens else one for one in candidates]
    assert len(units_of(place(larger, PlacementBudget(RECORD, 0, 0))) - {0}) == 1, "what finds no room"


def test_what_comes_before_all_that_a_backward_uses_opens_a_step():
    plan = parse_plan("open\nF0\nF1\nF2\nF3\nB3\nB2")
    assert opening(step.use for step in plan.steps) == 2
    assert opening(step.use for step in parse_plan("open\nF0\nF1").steps) == 0


def test_a_record_without_one_of_its_fields_stays_below():
    candidates = [replace(one, whole=one.field != "m") for one in trained(2)]
    assert units_of(place(candidates, PlacementBudget(10 * RECORD, 0, 0))) == set()


def test_with_less_room_than_before_records_leave_the_device():
    budget = PlacementBudget(3 * RECORD + 10, 0, 0, scratch_nbytes=10)
    before = revise({}, trained(4), budget).placement
    assert len(units_of(before)) == 3
    after = revise(before, trained(4), replace(budget, device_nbytes=3 * RECORD))
    assert len(units_of(after.placement)) == 2
    assert {(move.source, move.target) for move in after.moves} == {("device", "nvme")}
    assert "less room" in after.reason


# Of several ranks


def test_what_lives_on_the_devices_of_ranks_does_not_depend_on_the_room_of_their_hosts():
    found = [
        revise_in_turn({}, trained(6), PlacementBudget(2 * RECORD, host, 40), agreed=lambda _: True)
        for host in (0, 50, 10 * RECORD)
    ]
    there = [[key for key, tier in one.placement.items() if tier == "device"] for one in found]
    assert len(there[0]) == 2 * len(UNIT)
    assert there[0] == there[1] == there[2]
    hosts = [{key for key, tier in one.placement.items() if tier == "host"} for one in found]
    assert (len(hosts[0]), len(hosts[2])) == (0, 4 * len(UNIT))
    assert not hosts[2] & set(there[2])
    for one in found:
        assert {(move.unit, move.field) for move in one.moves} == set(one.placement)


def test_what_ranks_have_not_agreed_on_stays_where_it_was():
    before = revise_in_turn(
        {}, trained(6), PlacementBudget(2 * RECORD, 0, 0), agreed=lambda _: True
    ).placement
    asked = []
    after = revise_in_turn(before, trained(6), PlacementBudget(4 * RECORD, RECORD, 0), agreed=asked.append)
    assert len(units_of(asked[0])) == 4
    assert units_of(after.placement) == units_of(before)
    assert units_of(after.placement, "host")
    assert not units_of(after.placement, "host") & units_of(before)


def test_a_copy_on_the_device_takes_the_shares_of_all_ranks_and_a_record_its_own():
    frozen = [Candidate(unit, "hi", 20, 2, 0, copies=4) for unit in range(10, 14)]
    budget = PlacementBudget(2 * 80 + RECORD, 0, 0)
    placement = place([*trained(2), *frozen], budget)
    assert len(units_of(placement) - {0, 1}) == 3
    placement = revise({}, [*trained(2), *frozen[:2]], budget).placement
    assert len(units_of(placement)) == 3
    kept = revise(placement, [*trained(2), *frozen[:2]], replace(budget, device_nbytes=2 * 80 + RECORD - 1))
    assert "less room" in kept.reason
