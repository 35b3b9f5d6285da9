"""Training on the simulated device: late copies, late kernels, every access checked, and the recipe's bits;
and each order that device/device.py's note names, dropped once, and found.

Trusted: the reference recipe in memory, and the simulator, which the planted faults test. This proves order
and bits, and nothing of CUDA's own interface or of speed.
"""

import pytest

import simulated
import simulated_cases
import simulated_faults
import simulated_ranks

pytestmark = [pytest.mark.disk, pytest.mark.multi]

TRAININGS = ["llama, jitter", "clipped, 0.2 ms", "offloaded, 0.2 ms", "clipped on the device, jitter"]
FAULTS = ["arrived", "download", "host kernel"]
ORDERS = [f"order: {name}{more}" for name in simulated_faults.ORDERS for more in ("", " without it")]


@pytest.fixture(scope="module")
def default():
    """What the quick cases said, of one process that imports and compiles for all of them."""
    return simulated.results(*TRAININGS, *(f"fault: {name}" for name in FAULTS), *ORDERS)


def assert_exact(names, said):
    """Losses and weights are the recipe's, without a race; and copies and kernels were late."""
    for name in names:
        for one in said[name]:
            assert (one["killed"], one["raised"], one["failure"]) == ("", "", ""), one
            assert one["warned"] == [], one
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
    assert held["peak"] > held["allocated"] == 0
    assert dropped["killed"] == ""
    assert simulated_faults.ORDERS[name].caught in dropped["failure"]


def test_without_a_compiler_the_cases_are_skipped_and_say_why(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=r"needs a C\+\+ compiler, and there is no g\+\+"):
        simulated.results("llama, jitter")


@pytest.mark.slow
@pytest.mark.parametrize("delay", simulated_cases.DELAYS)
@pytest.mark.parametrize("half", [0, 1])
def test_every_case_has_the_bits_of_the_recipe_at_every_delay(delay, half):
    named = [f"{base}, {delay}" for base in simulated_cases.BASES]
    names = [name for name in named if name not in TRAININGS][half::2]
    assert_exact(names, simulated.results(*names))


@pytest.mark.slow
def test_every_other_dropped_order_is_found_in_a_training():
    names = [name for name in simulated_faults.FAULTS if name not in FAULTS]
    assert_caught(names, simulated.results(*(f"fault: {name}" for name in names)))


@pytest.mark.slow
@pytest.mark.parametrize("delay", simulated_ranks.DELAYS)
def test_two_ranks_have_the_bits_of_plain_data_parallelism_at_every_delay(delay):
    names = [name for name in simulated_ranks.CASES if name.endswith(f", {delay}")]
    assert_exact(names, simulated.results(*names))
