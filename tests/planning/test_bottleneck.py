"""What a run is up against. Pure: loads and speeds are made up."""

from dataclasses import dataclass

import pytest

from infinity.planning.bottleneck import Load, bound, disk_limits_s


@dataclass(frozen=True)
class FakeSpeed:
    read: float = 2e9
    write: float = 3e9
    mixed: float = 1.6e9


def load(seconds=1.0, stall_s=0.5, read=0.8e9, written=0.6e9) -> Load:
    return Load(seconds, stall_s, read, written)


def test_a_step_that_waits_for_a_busy_disk_is_io_bound():
    found = bound(load(), FakeSpeed())
    assert (found.kind, found.limit) == ("disk", "mixed")
    assert found.disk_share == pytest.approx(1.4 / 1.6)
    assert str(found) == "I/O-bound: 88% of the disk's mixed limit"


@pytest.mark.parametrize(
    ("speed", "read", "written", "limit", "share"),
    [
        (FakeSpeed(), 1.6e9, 0, "read", 0.8),
        (FakeSpeed(), 0, 2.4e9, "write", 0.8),
        (FakeSpeed(mixed=100e9), 1.6e9, 0.3e9, "read", 0.8),
        (FakeSpeed(mixed=100e9), 0.1e9, 2.4e9, "write", 0.8),
    ],
)
def test_the_limit_named_is_the_one_that_asks_for_most_time(speed, read, written, limit, share):
    found = bound(load(read=read, written=written), speed)
    assert (found.limit, found.disk_share) == (limit, pytest.approx(share))


def test_the_mixed_limit_is_none_of_a_disk_that_only_reads():
    assert disk_limits_s(load(read=2e9, written=0), FakeSpeed()) == {"read": 1.0, "write": 0.0}


def test_a_step_that_hardly_waits_is_compute_bound_however_busy_the_disk():
    found = bound(load(stall_s=0.1, read=0.8e9, written=0.72e9), FakeSpeed())
    assert found.kind == "compute"
    assert str(found) == "compute-bound: 90% of the step computes, 95% of the disk's mixed limit"


def test_a_step_that_waits_though_the_disk_is_less_busy_than_computing_lacks_overlap():
    found = bound(load(stall_s=0.3), FakeSpeed(mixed=2.1e9))
    assert str(found) == "overlap-bound: 30% of the step waits, 67% of the disk's mixed limit"
    assert bound(load(stall_s=0.3), FakeSpeed(mixed=1.9e9)).kind == "disk"


def test_the_floor_is_the_larger_of_computing_and_the_disk():
    assert bound(load(stall_s=0.05), FakeSpeed()).floor_share == pytest.approx(0.95)
    assert bound(load(stall_s=0.5), FakeSpeed()).floor_share == pytest.approx(0.875)


def test_without_a_measurement_the_wait_alone_decides():
    assert str(bound(load(stall_s=0.4), None)) == "I/O-bound: 40% of the step waits"
    assert str(bound(load(stall_s=0.04), None)) == "compute-bound: 96% of the step computes"


def test_waiting_without_any_io_is_a_lack_of_overlap():
    found = bound(load(read=0, written=0), FakeSpeed())
    assert str(found) == "overlap-bound: 50% of the step waits, without any I/O"
    assert bound(load(stall_s=0, read=0, written=0), FakeSpeed()).kind == "compute"
