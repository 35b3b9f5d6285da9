"""How long a model computes: what is timed of two blocks, and what the drive takes. Trusted: what counts
operations. Faked: clocks and steps; a step takes what a formula says, of a model on the meta device.
"""

import pytest
from rich.console import Console

from infinity.bench.planning import cores, pace, plan
from infinity.bench.planning.planned import flops
from infinity.bench.planning.sketch import outline_of
from infinity.storage.disk_speed import DiskSpeed, today


def test_all_tokens_are_timed_where_two_blocks_compute_them_in_some_seconds(monkeypatch):
    def seconds(tokens):
        return 0.3 + 0.001 * tokens**1.3  # more than in proportion

    outline, batches = outline_of("7b"), []
    few = pace.outline_of_model(*pace._shallow("7b", 256))
    monkeypatch.setattr(pace, "_real", lambda model: model)
    monkeypatch.setattr(pace, "_step", lambda _, batch: batches.append(batch))
    monkeypatch.setattr(pace, "best", lambda call, repeats: call() or seconds(batches[-1][0]))
    found = pace.compute_seconds("7b", outline, 256, 256)
    assert batches[-1] == (256, 256)
    assert found == pytest.approx(seconds(256) * flops(outline, 256, 256) / flops(few, 256, 256))


@pytest.mark.usefixtures("unhurried")
def test_a_plan_counts_what_the_drive_takes_of_the_cores_that_compute(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "shares_cores", lambda: True)

    def planned(taken):
        speed = DiskSpeed(2e9, 1e9, 1.5e9, 8, 1 << 20, "threads", today(), 1.5e9, taken)
        monkeypatch.setattr(plan, "speed_today", lambda _: speed)
        options = ["--model", "25m", "--tokens", "1x64", "--host-memory", "8MiB", "--update", "backward"]
        return plan.planned_of([*options, "--nvme", str(tmp_path)], Console())

    without, taking = planned(0.0), planned(2e-10)
    moved = taking.demand.read_nbytes + taking.demand.written_nbytes
    assert 0 < taking.step_s - without.step_s < 2e-10 * moved  # some of it while nothing computes
