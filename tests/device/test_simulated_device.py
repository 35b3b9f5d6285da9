"""Training on the simulated device: late copies, late kernels, every access checked, and the recipe's bits;
and each order that device/device.py's note names, dropped once, and found. And the device as a tier: what
lives there, its budget to the byte, and what goes over the link.

Trusted: the reference recipe in memory, and the simulator, which the planted faults test. This proves order
and bits, and nothing of CUDA's own interface or of speed.
"""

import re

import pytest

import simulated
import simulated_cases
import simulated_faults
import simulated_ranks
import simulated_tiers

pytestmark = [pytest.mark.disk, pytest.mark.multi]

TRAININGS = ["llama, jitter", "clipped, 0.2 ms", "offloaded, 0.2 ms", "clipped on the device, jitter"]
LORA = ["lora on the device, 0.2 ms"]
FAULTS = ["arrived", "download", "host kernel"]
ORDERS = [f"order: {name}{more}" for name in simulated_faults.ORDERS for more in ("", " without it")]

FROZEN = ["frozen, no room", "frozen, room for half", "frozen, room for all"]
RECORDS = ["records, no room", "records, room for half", "records, room for all", "records, later"]
EMBEDDED = "records and an embedding, room for half"
PLANTED = [f"fault: {name}" for name in simulated_faults.BUDGETS]
BY_NAME = "by name, 0.2 ms"
TOGETHER = ["2 ranks, on the device, room for all, 0.2 ms"]
TOWERS = [*FROZEN, *RECORDS, EMBEDDED, "trained, no room", "trained, room for all", "clipped"]
LAYER = simulated_tiers.LAYER_NBYTES
SETTLED = 2
"""Steps after which nothing moves to another place."""
AT_ONCE = 4
"""Cases that run beside each other, where most of what they take is waiting for late copies."""
PARTS = 4
"""Of the cases: those that differ in delays alone are in one part, and run in one process."""


@pytest.fixture(scope="module")
def default():
    """What the quick cases said, of one process that imports and compiles for all of them."""
    faults = [f"fault: {name}" for name in FAULTS]
    return simulated.results(*TRAININGS, *LORA, *faults, *ORDERS, *TOWERS, *PLANTED, BY_NAME)


@pytest.fixture(scope="module")
def together():
    """What two ranks said that have all of their parts of records on their devices."""
    return simulated.results(*TOGETHER)


def of(said, name):
    (one,) = said[name]
    return one


def assert_exact(names, said):
    """Losses and weights are the recipe's, without a race; and copies and kernels were late."""
    for name in names:
        for one in said[name]:
            assert (one["killed"], one["raised"], one["failure"]) == ("", "", ""), one
            assert [text for text in one["warned"] if "activations quantised" not in text] == [], one
            assert (one["losses"], one["different"]) == (True, []), one
            assert_counted(one)
            assert min(one["late_copies"], one["late_kernels"]) > 0, one


def assert_counted(one):
    """Beside what the ledger counts, the device holds what a plain backward holds at the same use: less of
    what is offloaded, or counted before another thread allocates it. And at most so much beside the limit.
    """
    case = simulated_cases.CASES.get(one["case"])
    if case is None or case.offload is not None:
        assert one["uncounted"][-1] <= 0, one
    else:
        assert one["uncounted"] == [0], one
    assert one["most"] <= one["device_memory"] + one["activations"], one


def assert_caught(names, said):
    for name in names:
        fault, (one,) = simulated_faults.FAULTS[name], said[f"fault: {name}"]
        if fault.caught == "SIGSEGV":
            assert one["killed"] == "SIGSEGV", one
        elif fault.caught:
            assert fault.caught in one["failure"], one
        else:  # the host's own reads are in no check: the target of a download is NaN until it is over
            assert one["losses"] is False, one


def test_training_with_late_copies_and_kernels_has_the_bits_of_the_recipe(default):
    assert_exact(TRAININGS, default)


def test_a_dropped_wait_and_a_host_kernel_on_device_memory_are_found(default):
    assert_caught(FAULTS, default)


@pytest.mark.parametrize("name", simulated_faults.ORDERS)
def test_a_single_order_holds_and_is_missed_when_it_is_dropped(default, name):
    ((held,), (dropped,)) = default[f"order: {name}"], default[f"order: {name} without it"]
    assert (held["killed"], held["raised"], held["failure"]) == ("", "", "")
    assert held["peak"] > held["allocated"]
    assert held["allocated"] == 0 or name == "kept_aside", "that has a model"
    assert dropped["killed"] == ""
    assert simulated_faults.ORDERS[name].caught in dropped["failure"]


def test_an_accelerator_that_is_known_by_its_name_alone_trains_with_the_bits_of_the_recipe(default):
    one = of(default, BY_NAME)
    assert (one["killed"], one["raised"], one["failure"]) == ("", "", ""), one
    assert (one["losses"], one["different"], one["late_copies"]) == (True, [], 0)
    (warned,) = one["warned"]
    assert "cannot be page-locked: torch locks no memory" in warned
    assert "ulimit" not in warned


def test_without_a_compiler_the_cases_are_skipped_and_say_why(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=r"needs a C\+\+ compiler, and there is no g\+\+"):
        simulated.results("llama, jitter")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_has_the_bits_of_the_recipe_at_every_delay(part):
    bases = [base for base in simulated_cases.BASES if base != "by name"][part::PARTS]
    named = [f"{base}, {delay}" for base in bases for delay in simulated_cases.DELAYS]
    names = [name for name in named if name not in TRAININGS + LORA]
    assert_exact(names, simulated.results(*names, at_once=AT_ONCE))


@pytest.mark.slow
def test_every_other_dropped_order_is_found_in_a_training():
    names = [name for name in simulated_faults.FAULTS if name not in FAULTS]
    assert_caught(names, simulated.results(*(f"fault: {name}" for name in names), at_once=AT_ONCE))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_two_ranks_have_the_bits_of_plain_data_parallelism_at_every_delay(part):
    each = len(simulated_ranks.DELAYS)
    names = list(simulated_ranks.CASES)
    some = [name for number, name in enumerate(names) if number // each % PARTS == part]
    assert_exact(some, simulated.results(*some, at_once=AT_ONCE // 2))


@pytest.mark.slow
def test_several_ranks_update_their_parts_of_records_on_their_devices_and_nothing_goes_over_the_link(
    together,
):
    assert_exact(TOGETHER, together)
    for one in together[TOGETHER[0]]:
        assert one["records"] == one["on_device"] == one["whole"]
        assert (
            one["uploaded"][SETTLED:] == one["downloaded"][SETTLED:] == [0] * len(one["uploaded"][SETTLED:])
        )


@pytest.mark.slow
def test_ranks_queue_the_same_collectives_in_one_order_each_kind_on_a_stream_of_its_own(together):
    first, second = together[TOGETHER[0]]
    assert first["collectives"] == second["collectives"]
    assert {"infinity-gather", "infinity-reduce"} == set(first["collectives"])
    for one in (first, second):
        streams = [number for numbers in one["streams"].values() for number in numbers]
        assert len(streams) == len({*streams, one["computes_on"]} - {one["computes_on"]}) == 2


@pytest.mark.slow
def test_of_several_ranks_what_has_room_on_their_devices_lives_there():
    cases = {name: f"2 ranks, on the device, {name}, 0.2 ms" for name in simulated_ranks.TIER}
    said = simulated.results(*cases.values(), at_once=AT_ONCE // 2)
    assert_exact(cases.values(), said)
    for one in said[cases["room for half"]]:
        assert 0.3 < one["records"] / one["whole"] < 0.8
    for one in said[cases["frozen"]]:  # of the blocks all of each unit, of the rest this rank's part
        assert one["records"] < one["on_device"]
        assert one["uploaded"][SETTLED:] == [0] * len(one["uploaded"][SETTLED:])
    for one in said[cases["summed and clipped"]]:
        assert one["uploaded"][SETTLED:] == [0] * len(one["uploaded"][SETTLED:])


@pytest.mark.slow
def test_of_several_ranks_what_a_plan_lets_live_on_their_devices_does():
    with_room = ["room for all", "summed and clipped", "frozen"]
    cases = {f"2 ranks, on the device, {name}, at once": name for name in [*with_room, "room for half"]}
    for case, ranks in simulated.results(*cases).items():
        for one in ranks:
            planned = one["planned"]
            if cases[case] in with_room:
                assert one["there"] == planned["units"] != [], case
                assert one["on_device"] == pytest.approx(planned["nbytes"], rel=0.1), case
            else:  # reductions take another part of device_memory than a plan keeps for what is in use
                assert one["on_device"] == pytest.approx(planned["nbytes"], rel=0.3), case


# The device as a tier


def assert_within_its_budget(one):
    assert (one.get("crash"), one["killed"], one["raised"], one["failure"]) == (None, "", "", ""), one
    assert (one["losses"], one["different"], one["warned"]) == (True, [], []), one
    assert one["ledger_peak"] <= one["device_memory"], one
    assert one["most"] <= one["device_memory"] + one["activations"], one
    assert one["uncounted"] == [0], one
    assert min(one["late_copies"], one["late_kernels"]) > 0, one
    assert 0 < one["locked"] <= one["host_memory"], one


def per_step(one, way="uploaded"):
    settled = one[way][SETTLED:]
    return sum(settled) / len(settled)


@pytest.mark.parametrize("name", TOWERS)
def test_bits_are_the_recipes_and_budgets_are_kept(default, name):
    assert_within_its_budget(of(default, name))


@pytest.mark.parametrize("name", PLANTED)
def test_memory_that_is_held_beyond_what_is_counted_is_seen(default, name):
    one = of(default, name)
    assert (one["raised"], one["failure"], one["losses"]) == ("", "", True)
    assert max(one["uncounted"]) >= LAYER


def test_a_frozen_base_that_fits_the_device_is_uploaded_once(default):
    one, layers = of(default, "frozen, room for all"), simulated_tiers.TOWERS["frozen, room for all"].layers
    assert one["on_device"] == (layers - 2) * LAYER
    assert per_step(one) <= 2 * 2 * LAYER  # of the two layers that are trained


def test_with_room_for_half_of_a_frozen_base_half_of_the_bytes_go_over_the_link(default):
    none, half = (per_step(of(default, f"frozen, {room}")) for room in ("no room", "room for half"))
    assert of(default, "frozen, no room")["on_device"] == 0
    assert half / none == pytest.approx(0.5, abs=0.03)


def test_lora_on_a_frozen_base_that_fits_the_device_uploads_nothing_after_the_first_step(default):
    assert_exact(LORA, default)
    one = of(default, *LORA)
    assert one["uploaded"][0] > 0
    assert one["uploaded"][1:] == [0] * (len(one["uploaded"]) - 1)


@pytest.mark.parametrize("name", ["frozen, room for all", "records, room for all", "records, later"])
def test_in_a_steady_step_with_room_the_thread_of_the_backward_does_not_wait_for_the_device(default, name):
    one = of(default, name)
    assert one["waits_of_backward"][-1] == 0
    assert one["waits_of_caller"] > 0, "it reads each loss"


@pytest.mark.parametrize("name", ["frozen, no room", "records, no room", "records, room for half", "clipped"])
def test_else_it_waits_only_where_it_would_run_further_ahead_than_the_budget_allows(default, name):
    one = of(default, name)
    assert one["waits_of_backward"][-1] <= one["waits_for_room"][-1]


@pytest.mark.slow
def test_of_several_ranks_the_thread_of_the_backward_does_not_wait_for_the_device_either(together):
    assert [one["waits_of_backward"][-1] for one in together[TOGETHER[0]]] == [0, 0]


def test_records_that_fit_the_device_are_updated_there_and_nothing_goes_over_the_link(default):
    one, layers = of(default, "records, room for all"), simulated_tiers.TOWERS["records, room for all"].layers
    assert one["on_device"] == layers * simulated_tiers.RECORD_NBYTES
    assert (per_step(one), per_step(one, "downloaded")) == (0, 0)
    assert one["tiers"] == ["device"]
    assert "update" in one["timeline"]


PLANNED = ["frozen, room for half", EMBEDDED, "records, later", "records, no room"]


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_with_the_same_room_lets_the_same_units_live_on_the_device(default, name):
    one = of(default, name)
    assert one["there"] == one["planned"]
    assert bool(one["there"]) == (name != "records, no room")


def test_with_room_for_half_of_the_records_half_of_the_bytes_go_over_the_link(default):
    none, half = (of(default, f"records, {room}") for room in ("no room", "room for half"))
    layers = simulated_tiers.TOWERS["records, no room"].layers
    assert (none["on_device"], half["on_device"]) == (0, layers // 2 * simulated_tiers.RECORD_NBYTES)
    gradients = [per_step(one, "downloaded") for one in (none, half)]
    assert gradients == [layers * LAYER, layers // 2 * LAYER]
    assert per_step(half) / per_step(none) == pytest.approx(0.5, abs=0.15)  # some wait on the device


def test_clipping_brings_a_sum_for_each_gradient_from_the_device_and_no_gradient(default):
    one, layers = of(default, "records, later"), simulated_tiers.TOWERS["records, later"].layers
    assert (per_step(one), per_step(one, "downloaded")) == (0, 8 * layers)
    assert 1 <= one["waits_of_clipping"] <= 2


def test_an_update_in_the_backward_reads_no_weights_from_nvme_again(default):
    """Each layer is used twice in the first step, and read once for a use at most: updates read none."""
    one, layers = of(default, "trained, no room"), simulated_tiers.TOWERS["trained, no room"].layers
    assert 0 < one["hi_read"] <= 2 * layers * LAYER


def test_clipping_makes_the_host_wait_for_the_device_once_and_not_for_each_parameter(default):
    assert 1 <= of(default, "clipped")["waits_of_clipping"] <= 2


def test_stats_timeline_and_plan_show_three_tiers(default):
    one = of(default, "frozen, room for half")
    assert one["tiers"] == ["device", "host", "nvme"]
    assert {"upload", "download", "read", "write"} <= set(one["timeline"])
    assert re.search(r"^open( fetch [\d ]+)? device( \d+){32}$", one["plan"])
    assert "256.0 KiB of units that live there" in one["printed"]


@pytest.mark.slow
def test_other_towers_stay_within_their_budgets():
    names = [name for name in simulated_tiers.TOWERS if name not in (*TOWERS, *PLANTED)]
    for (one,) in simulated.results(*names, at_once=AT_ONCE).values():
        assert_within_its_budget(one)


@pytest.mark.slow
def test_with_room_for_half_of_many_records_half_of_the_bytes_go_over_the_link():
    names = [f"many records, {room}" for room in ("no room", "room for half")]
    none, half = (one for (one,) in simulated.results(*names, at_once=AT_ONCE).values())
    for way in ("uploaded", "downloaded"):
        assert per_step(half, way) / per_step(none, way) == pytest.approx(0.5, abs=0.03)
