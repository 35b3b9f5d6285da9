"""What durable runs and checksums cost, as it is told. The runs are made up."""

from argparse import Namespace
from dataclasses import replace

from infinity.bench import durability
from infinity.bench.fio import Bandwidth
from measurements import RUN


def a_race(*turns, host_nbytes=0, written=12.0, busy=None):
    """Turns of these seconds for a step that is durable and one without checksums, where 1 s is as it is; the
    disk needs the part `busy` of that without checksums.
    """
    engine = {**RUN.engine, "host_nbytes": host_nbytes}
    durable = replace(RUN, engine=engine, written_per_parameter=written)
    runs = {"as it is": RUN, "durable": durable, "unchecked": RUN}
    moved = RUN.read_nbytes + RUN.written_nbytes

    def disk(unchecked):
        mixed = moved / (busy * unchecked)
        return Bandwidth(read=2 * mixed, write=2 * mixed, mixed=mixed)

    return durability.Race(
        runs,
        [
            durability.Turn(
                {"as it is": 1.0, "durable": durable, "unchecked": unchecked},
                None if busy is None else disk(unchecked),
            )
            for durable, unchecked in turns or [(1.0, 1.0)]
        ],
    )


def test_each_cost_is_held_against_its_limit_by_the_median_of_the_turns():
    race = a_race((1.04, 0.98), (1.2, 0.5), (1.03, 0.97))
    time, nbytes, checks = durability.verdicts(16, race)
    assert ("1.04 ✓" in time, "1.00 ✓" in nbytes, "≤ 1.1" in checks) == (True, True, True)
    assert "(3 turns, half of them 1.04 to 1.12)" in time
    assert "1.06 ✗" in durability.verdicts(16, a_race((1.06, 1.0)))[0]


def test_checksums_may_cost_less_where_the_disk_is_the_limit():
    full, other, unknown = (a_race((1.0, 1 / 1.05), busy=busy) for busy in (0.86, 0.84, None))
    assert "≤ 1.03" in durability.verdicts(16, full)[2]
    assert "1.05 ✗" in durability.verdicts(16, full)[2]
    assert "1.05 ✓" in durability.verdicts(16, other)[2]
    assert "1.05 ✓" in durability.verdicts(16, unknown)[2]


def test_what_lies_in_host_memory_is_not_held_against_the_bytes_of_a_durable_step():
    assert durability.bytes_over(a_race(written=12.5, host_nbytes=500)) == 1.0
    assert durability.bytes_over(a_race(written=12.5)) > 1.01


def test_every_turn_has_its_rows():
    two = a_race((1.0, 1.0), (1.0, 1.0))
    found = durability.findings_of({16: two}, Namespace(nvme=None, turns=2))
    ways = [(row["turn"], row["way"]) for row in found.rows]
    assert ways == [(number, way) for number in (1, 2) for way in durability.WAYS]
    assert len(found.verdicts) == 3
    assert [round(row["busy"], 2) for row in found.rows] == [0.0] * 6
    known = durability.findings_of({16: a_race(busy=0.5)}, Namespace(nvme=None, turns=1))
    assert [round(row["busy"], 2) for row in known.rows] == [0.5] * 3


def test_what_was_not_run_has_no_verdict():
    race = a_race()
    alone = {way: run for way, run in race.runs.items() if way != "durable"}
    (line,) = durability.verdicts(16, replace(race, runs=alone))
    assert "checksums" in line
