"""What is concluded from the cells of `infinity bench io`. Faked: the measurements."""

from infinity.aio.measure import READ
from infinity.bench.aio import cells, io, peers
from infinity.bench.aio.peers import FioPeer, Measurement, Ours, Workload


def samples(*rates, cpu=1.0):
    return [Measurement(rate, cpu, dict.fromkeys(peers.PERCENTILES, 0.1)) for rate in rates]


def test_what_is_not_waited_for_keeps_the_depth():
    works = [
        *((16 << 20, 1 << 20, 32, 6), (4096, 4096, 32, 96)),
        *((64 << 20, 1 << 20, 8, 2), (1 << 20, 1 << 20, 8, 1)),
    ]
    assert [Workload(READ, *work).together for work in works] == [4, 64, 1, 1]


def test_rounds_too_short_for_a_peer_s_cpu_time_to_be_counted_are_left_out():
    ours = samples(1.0, 1.0, cpu=3.0)
    assert cells.cpu_ratios(ours, [*samples(1.0, cpu=0.0), *samples(1.0, cpu=2.0)]) == [1.5]
    work = Workload(READ, 1 << 20, 1 << 20, 32, 32)
    found = {
        cells.Cell(Ours("io_uring"), work, (0,)): ours,
        cells.Cell(FioPeer("io_uring"), work, (0,)): samples(1.0, 1.0, cpu=0.0),
    }
    assert any("counted none in so short a time" in line for line in io.verdicts_of(found))
