"""What durable runs and checksums cost, as it is told. The runs are made up."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

from infinity.bench.aio.fio import Bandwidth
from infinity.bench.durable import durability
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
    time, nbytes, checks = durability.verdicts(16, [race])
    assert ("1.04 ✓" in time, "1.00 ✓" in nbytes, "≤ 1.1" in checks) == (True, True, True)
    assert "(3 turns, half of them 1.04 to 1.12)" in time
    assert "1.06 ✗" in durability.verdicts(16, [a_race((1.06, 1.0))])[0]


def test_the_turns_of_all_races_count_alike_and_each_race_is_told():
    races = [a_race((1.0, 1.0), (1.02, 1.0)), a_race((1.04, 1.0), (1.1, 1.0), (1.2, 1.0))]
    time, _, checks = durability.verdicts(16, races)
    assert "1.04 ✓ (5 turns, half of them 1.02 to 1.10; race by race 1.01, 1.10)" in time
    assert "race by race 1.00, 1.00" in checks


def test_checksums_may_cost_less_where_the_disk_is_the_limit():
    full, other, unknown = (a_race((1.0, 1 / 1.05), busy=busy) for busy in (0.86, 0.84, None))
    assert "≤ 1.03" in durability.verdicts(16, [full])[2]
    assert "1.05 ✗" in durability.verdicts(16, [full])[2]
    assert "1.05 ✓" in durability.verdicts(16, [other])[2]
    assert "1.05 ✓" in durability.verdicts(16, [unknown])[2]


def test_what_lies_in_host_memory_is_not_held_against_the_bytes_of_a_durable_step():
    assert durability.bytes_over(a_race(written=12.5, host_nbytes=500)) == 1.0
    assert durability.bytes_over(a_race(written=12.5)) > 1.01


def test_every_turn_has_its_rows():
    two = a_race((1.0, 1.0), (1.0, 1.0))
    found = durability.findings_of({16: [two, two]}, Namespace(nvme=None, turns=2))
    ways = [(row["race"], row["turn"], row["way"]) for row in found.rows]
    assert ways == [(race, turn, way) for race in (1, 2) for turn in (1, 2) for way in durability.WAYS]
    assert len(found.verdicts) == 3
    assert [round(row["busy"], 2) for row in found.rows] == [0.0] * 12
    known = durability.findings_of({16: [a_race(busy=0.5)]}, Namespace(nvme=None, turns=1))
    assert [round(row["busy"], 2) for row in known.rows] == [0.5] * 3


def test_every_race_is_between_new_processes_and_orders_change_from_turn_to_turn(monkeypatch, tmp_path):
    seen = []

    def taken(runs, orders, before):
        seen.append([list(order) for order in orders])
        for _ in orders:
            before()
        return {way: replace(RUN, all_seconds=[1.0] * 4 * len(orders)) for way in runs}

    gauge = SimpleNamespace(measure=lambda _percent: SimpleNamespace(own=None))
    monkeypatch.setattr(durability, "take_turns", taken)
    options = Namespace(races=2, turns=3, beside=["durable"], model="125m", host_memory="128MiB")
    options = Namespace(**vars(options), update="backward", dtype="bf16")
    races = durability.compare(16, options, tmp_path, gauge)
    one, other = ["as it is", "durable"], ["durable", "as it is"]
    assert seen == [[one, one, other, one], [other, other, one, other]]  # the first of each settles
    assert [len(race.turns) for race in races] == [3, 3]


def test_what_was_not_run_has_no_verdict():
    race = a_race()
    alone = {way: run for way, run in race.runs.items() if way != "durable"}
    (line,) = durability.verdicts(16, [replace(race, runs=alone)])
    assert "checksums" in line
