"""The simulated device finds what it is for: each order that device/device.py's note names is dropped once,
and found. Nothing else is faked.
"""

import pytest

import simulated
import simulated_faults

pytestmark = [pytest.mark.disk, pytest.mark.multi]

DEFAULT = ["arrived", "host kernel"]


def assert_caught(names):
    said = simulated.results(*(f"fault: {name}" for name in names))
    for name in names:
        fault, one = simulated_faults.FAULTS[name], said[f"fault: {name}"]
        if fault.caught == "SIGSEGV":
            assert one["killed"] == "SIGSEGV", name
        elif fault.caught:
            assert fault.caught in one["failure"], name
        else:  # nobody sees what the host reads: the bits show it
            assert one.get("losses") is False or one["raised"], (name, one)


def test_a_dropped_wait_and_a_host_kernel_on_device_memory_are_found():
    assert_caught(DEFAULT)


@pytest.mark.slow
def test_every_other_dropped_order_is_found_in_a_training():
    assert_caught([name for name in simulated_faults.FAULTS if name not in DEFAULT])


def test_single_orders_hold_and_are_missed_when_dropped():
    orders = simulated_faults.ORDERS
    said = simulated.results(*(f"order: {one}{more}" for one in orders for more in ("", " without it")))
    for name, fault in orders.items():
        held, dropped = said[f"order: {name}"], said[f"order: {name} without it"]
        assert (held["killed"], held["raised"], held["failure"]) == ("", "", ""), name
        assert (dropped["killed"], fault.caught in dropped["failure"]) == ("", True), (name, dropped)
