"""What a run shows and leaves behind: log, table, curve, progress. The steps are made up."""

import builtins
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from infinity.cli.report import Progress, Run, StepLog, StepReport, _seconds, plot_run, typical
from infinity.engine.stats import Stats


def test_the_first_steps_and_every_nth_are_logged(tmp_path):
    log = StepLog(tmp_path / "log", every=3)
    for number in range(1, 8):
        log.write(step(number))
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3, 6]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = StepLog(tmp_path / "log")
    log.write(step(1))
    assert json.loads((tmp_path / "log").read_text())["loss"] == 2.5
    log.close()
    with pytest.raises(FileExistsError):
        StepLog(tmp_path / "log")


def step(number: int, **values: object) -> StepReport:
    fields = {"loss": 2.5, "lr": 0.1, "grad_norm": None, "seconds": 0.5, "tokens_per_second": 10.0}
    nbytes = dict.fromkeys(
        ("nvme_read_nbytes", "nvme_written_nbytes", "rss_nbytes", "budget_held_nbytes"), 1000
    )
    return StepReport(step=number, **{**fields, **nbytes, **values})


def test_the_table_of_a_run_leaves_the_first_step_out_of_what_is_typical():
    run = Run("1m", parameters=1000, peak_nbytes=6000)
    run.steps = [step(1, seconds=100.0), *(step(number) for number in (2, 3, 4))]
    console = Console(width=160, record=True, quiet=True)
    with console.capture():
        pass
    wide = Console(width=160, file=None, record=True)
    with wide.capture() as captured:
        wide.print(run.table())
    assert "median 0.50 s" in captured.get()
    assert "50% of the state" in captured.get()


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    for module in [module for module in sys.modules if module.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install matplotlib" in str(
        plot_run(tmp_path / "loss.png", Run("1m", 1, steps=[step(1)]), "title", "byte")
    )
    assert not (tmp_path / "loss.png").exists()


def test_the_meter_sees_memory_that_is_taken_and_given_back():
    """In a process of its own: what earlier tests left would go in the middle of this one."""
    code = """
from infinity.cli.report import Meter
meter = Meter()
taken = bytearray(256 << 20)
taken[::4096] = b"x" * len(taken[::4096])
del taken
print(meter.peak_nbytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 150 << 20 < int(done.stdout) < 300 << 20


def snapshot(scale: int) -> Stats:
    now = {"parameters": 1000, "nvme_nbytes": 1 << 20, "host_nbytes": 0, "budget_nbytes": 1 << 20}
    counts = dict.fromkeys(("steps", "plans", "uses", "hits", "misses", "divergences"), 3 * scale)
    seconds = {
        "stalls_s": {"read": 1.5 * scale, "slot": 0.5 * scale, "update": 0.0},
        "lane_s": {"read_wait": 0.25 * scale, "idle": 7.0 * scale},
    }
    nothing = {"read_nbytes": {}, "written_nbytes": {}, "passes": {}, "units": (), "plan": ""}
    return Stats(**now, budget_held_nbytes=0, io_engine="threads", **counts, **seconds, **nothing)


class FakeSpeed:
    read = write = 8000.0
    mixed = 5000.0


def offloaded(**values: object) -> Run:
    """A run of four steps of 0.5 s, of which 0.3 s are waited for."""
    run = Run("1m", parameters=1000, before=snapshot(1), after=snapshot(2), **values)
    run.steps = [step(number, stall_s=0.3) for number in range(1, 5)]
    return run


def test_the_typical_step_is_made_of_medians():
    load = typical([step(1, seconds=9.0, stall_s=8.0), *(step(at, stall_s=0.1) for at in (2, 3))])
    assert (load.seconds, load.stall_s, load.read_nbytes, load.written_nbytes) == (0.5, 0.1, 1000, 1000)


def test_the_table_names_the_bound_and_the_floor_of_a_step():
    rows = dict(offloaded(speed=FakeSpeed()).rows())
    assert rows["bound"] == "I/O-bound: 80% of the disk's mixed limit"
    floor = "0.40 s (computing 0.20 s, the disk 0.40 s at its mixed limit); the median step takes 0.50 s"
    assert rows["floor of a step"] == floor


def test_without_a_measured_disk_the_table_says_how_to_measure():
    rows = dict(offloaded().rows())
    assert rows["bound"].startswith("I/O-bound: 60% of the step waits; `infinity doctor --measure`")
    assert "floor of a step" not in rows


def test_a_run_in_memory_has_no_bound():
    run = Run("1m", parameters=1000, steps=[step(1)])
    assert run.bound() is None
    assert "bound" not in dict(run.rows())


def test_what_the_plan_promised_stands_beside_what_the_median_step_took():
    run = offloaded(speed=FakeSpeed())
    assert "predicted step" not in dict(run.rows())
    run.after = replace(run.after, predicted_step_s=0.4)
    assert dict(run.rows())["predicted step"] == "0.40 s by its plan; the median step takes 0.50 s (+25%)"


def test_nothing_is_predicted_of_a_disk_that_was_not_measured():
    run = offloaded()
    run.predict(None, snapshot(3))
    assert (run.after, run.after.predicted_step_s) == (snapshot(3), None)


def test_seconds_that_round_to_none_are_not_listed():
    assert _seconds({"a": 0.04, "b": 2.0, "c": 0.0}, {"b": "waiting"}) == "waiting 2.0 s"
    assert _seconds({"a": 0.04}, {}) == "less than 0.05 s"


def test_the_bound_of_the_last_steps_forgets_the_others():
    run = offloaded()
    run.steps[3:] = [step(4, stall_s=0.0), step(5, stall_s=0.0)]
    assert (run.bound(2).kind, run.bound().kind) == ("compute", "disk")


def test_time_that_computing_waited_is_told_by_cause_and_only_of_this_run():
    rows = dict(offloaded().rows())
    told = "waiting for reads 1.5 s, waiting for slots to read through 0.5 s"
    assert rows["main thread"] == told, "0.0 s of computing is left out"
    assert rows["record lane"] == "reads awaited 0.2 s, idle 7.0 s"
    assert rows["uses of units"] == "3 hits, 3 misses, 3 out of the plan's order; 6 plans"


def test_the_state_is_that_of_the_moments_type():
    assert "8 B per parameter" in dict(Run("1m", parameters=1000, state_nbytes=8).rows())["state"]


def test_progress_says_what_the_run_is_up_against(capsys):
    run = offloaded()
    progress = Progress(4, None, 0)
    progress.show(run.steps[0], run.bound())
    progress.show(run.steps[-1], None)
    progress.close()
    first, last = capsys.readouterr().err.splitlines()
    assert "I/O-bound: 60% of the step waits" in first
    assert "bound" not in last
    assert "host_memory" not in last


def test_progress_tells_the_process_from_the_share_of_host_memory_that_is_in_use(capsys):
    step = replace(offloaded().steps[0], rss_nbytes=90 << 20, budget_held_nbytes=3 << 20)
    progress = Progress(4, 4 << 20, 50 << 20)
    progress.show(step, None)
    progress.close()
    assert capsys.readouterr().err.rstrip().endswith("process 40.0 MiB, host_memory 3.0 MiB of 4.0 MiB")


def test_the_bar_of_a_resumed_run_begins_where_the_run_is(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(4, None, 0, 2)
    progress.show(offloaded().steps[0], None)
    progress.close()
    shown = capsys.readouterr().err
    assert "| 2/4 [" in shown
    assert "| 3/4 [" in shown
