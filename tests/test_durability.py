"""What durable runs and checksums cost, as it is told. The runs are made up."""

from argparse import Namespace
from dataclasses import replace

from infinity.bench import durability
from infinity.bench.fio import Bandwidth
from measurements import RUN


def a_run(seconds, *, host_nbytes=0, written=12.0):
    engine = {**RUN.engine, "host_nbytes": host_nbytes}
    return replace(RUN, engine=engine, written_per_parameter=written, seconds=seconds)


def a_round(durable=1.0, unchecked=1.0, *, host_nbytes=0, written=12.0, busy=None):
    """Runs of these seconds; the disk needs the part `busy` of the one without checksums."""
    runs = {
        "as it is": a_run(1.0),
        "durable": a_run(durable, host_nbytes=host_nbytes, written=written),
        "unchecked": a_run(unchecked),
    }
    if busy is None:
        return durability.Round(runs)
    moved = runs["unchecked"].read_nbytes + runs["unchecked"].written_nbytes
    mixed = moved / (busy * unchecked)
    return durability.Round(runs, Bandwidth(read=2 * mixed, write=2 * mixed, mixed=mixed))


def test_each_cost_is_held_against_its_limit_by_the_median_of_the_rounds():
    rounds = [a_round(1.04, 0.98), a_round(1.2, 0.5), a_round(1.03, 0.97)]
    time, nbytes, checks = durability.verdicts(16, rounds)
    assert ("1.04 ✓" in time, "1.00 ✓" in nbytes, "≤ 1.1" in checks) == (True, True, True)
    assert "1.06 ✗" in durability.verdicts(16, [a_round(1.06)])[0]


def test_checksums_may_cost_less_where_the_disk_is_the_limit():
    full, other, unknown = (a_round(unchecked=1 / 1.05, busy=busy) for busy in (0.86, 0.84, None))
    assert "≤ 1.03" in durability.verdicts(16, [full])[2]
    assert "1.05 ✗" in durability.verdicts(16, [full])[2]
    assert "1.05 ✓" in durability.verdicts(16, [other])[2]
    assert "1.05 ✓" in durability.verdicts(16, [unknown])[2]


def test_what_lies_in_host_memory_is_not_held_against_the_bytes_of_a_durable_step():
    assert durability.bytes_over(a_round(written=12.5, host_nbytes=500)) == 1.0
    assert durability.bytes_over(a_round(written=12.5)) > 1.01


def test_every_run_has_its_row():
    found = durability.findings_of({16: [a_round(), a_round()]}, Namespace(nvme=None, rounds=2))
    ways = [(row["round"], row["way"]) for row in found.rows]
    assert ways == [(number, way) for number in (1, 2) for way in durability.WAYS]
    assert len(found.verdicts) == 3
    assert [round(row["busy"], 2) for row in found.rows] == [0.0] * 6
    known = durability.findings_of({16: [a_round(busy=0.5)]}, Namespace(nvme=None, rounds=1))
    assert [round(row["busy"], 2) for row in known.rows] == [0.5] * 3


def test_what_was_not_run_has_no_verdict():
    alone = {way: run for way, run in a_round().runs.items() if way != "durable"}
    (line,) = durability.verdicts(16, [durability.Round(alone)])
    assert "checksums" in line
