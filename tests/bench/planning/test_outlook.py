"""How `infinity plan` draws its figures. Trusted: planning. Faked: how much memory this machine has."""

import pytest

from infinity.bench.planning import outlook, sketch
from infinity.bench.planning import plan as planning
from infinity.bench.planning.outlook import decimal_size, duration, figure, short_count
from infinity.planning.outline import Outline, Stage, UnitOutline
from infinity.planning.setting import Setting
from infinity.planning.simulator import Disk, Rates
from infinity.planning.zero_memory import STAGES, model_states
from plan_calls import parsed

RATES = Rates(Disk(2e9, 1e9, 1.5e9), update=1e9, checked=1e10, copied=1e10)


def planned(host_nbytes=1 << 20, model="1m", **setting):
    outline = sketch.outline_of(model)
    return planning.plan(outline, Setting(host_nbytes, **setting), tokens=64, seconds=1.0, rates=RATES)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figure(0), "0"),
        (figure(0.04123), "0.0412"),
        (figure(0.9997), "1.00"),
        (figure(31.44), "31.4"),
        (figure(12345.6), "12,300"),
        (short_count(852_480), "852 k"),
        (short_count(999_900_000), "1.00 G"),
        (short_count(7.046e9), "7.05 G"),
        (short_count(1e12), "1.00 T"),
        (decimal_size(0), "0 kB"),
        (decimal_size(12_000), "12.0 kB"),
        (decimal_size(3.4e6), "3.40 MB"),
        (decimal_size(12.5e9), "12.5 GB"),
        (decimal_size(1.25e15), "1,250 TB"),
        (duration(0.00321), "3.21 ms"),
        (duration(0.0000321), "0.0321 ms"),
        (duration(1.254), "1.25 s"),
        (duration(4321.0), "4,320 s"),
    ],
)
def test_a_figure_has_three_digits_in_a_unit_that_fits_it(shown, expected):
    assert shown == expected


def test_a_plan_of_a_small_model_shows_no_zeros():
    findings = outlook.single([({}, planned())], parsed("check", "--model", "1m", "--tbw", "100"))
    said = "\n".join([findings.title, *(row["shown"] for row in findings.rows), *findings.verdicts])
    for nothing in ("0.00 ", "0.000 ", " 0.0 "):
        assert nothing not in said
    assert " k parameters" in findings.title


def test_what_is_pinned_is_a_share_of_the_units_that_a_run_has():
    pinned = outlook.facts(planned(1 << 30, units="block"), None)["pinned"]
    assert set(pinned.values()) == {1.0}


def test_a_plan_repeats_the_rates_that_it_takes_for_granted_and_whose_they_are():
    (given, measured) = (
        {row["what"]: row["shown"] for row in outlook.single([({}, one)], told).rows}
        for one in [planned()]
        for told in (parsed("check", "--compute", "1", "--update-rate", "1"), parsed("check"))
    )
    assert given["computing of each rank"].endswith("FLOPS reached (given)")
    assert given["the CPU's updates"] == "1.00 G parameters a second (given)"
    assert measured["computing of each rank"].endswith("FLOPS reached (measured here)")
    assert measured["the CPU's updates"].endswith("(measured here)")
    assert "half of what is available now on this machine" in measured["host_memory"]


def test_the_table_of_zero_is_that_of_the_paper():
    per_stage = [outlook._gb(model_states(7.5e9, 64, stage)) for stage in STAGES]
    assert per_stage == ["120.0 GB", "31.4 GB", "16.6 GB", "1.9 GB"]
    assert outlook._gb(16e12) == "16,000.0 GB"


def test_a_small_model_s_table_of_zero_says_something_too():
    findings = outlook.zero(sketch.outline_of("1m"), 64)
    shown = [column.show(findings.rows[-1][column.key]) for column in findings.columns[1:]]
    assert shown[0].endswith(" MB")
    assert all(not text.startswith("0.0 ") for text in shown)


def test_no_more_units_wait_than_there_are():
    outline = Outline(
        "one", (UnitOutline("a", ((256, 256),)), UnitOutline("b", ((256, 256),))), (Stage((0, 1)),)
    )
    everywhere = planning.plan(outline, Setting(1 << 60, ranks=2))
    assert outlook.facts(everywhere, None)["window_nbytes"] == 2 * 2 * 256 * 256
