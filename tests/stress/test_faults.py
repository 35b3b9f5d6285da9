"""A sample of `python3 dev.py faults`: faults at some requests, a few kills and power cuts, in children.

The whole of it takes minutes; this says that it works, and that nothing has come loose.
"""

import gc
import random

import pytest

import faults
import fragile
import infinity.aio.faults
import soak
import trials
from children import ended
from covers import examples
from infinity import CorruptionError
from places import SEED, disk

pytestmark = [pytest.mark.disk, pytest.mark.multi, pytest.mark.timeout(900)]


def swept(capsys, options):
    """Run the sweep with these options; return what it printed."""
    try:
        ended = faults.main([word for name, value in options.items() for word in (f"--{name}", str(value))])
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    said = capsys.readouterr().out
    assert ended == 0, said
    return said


@pytest.mark.usefixtures("repeatable")
def test_a_sample_of_every_kind_of_fault_kill_and_power_cut(folder, capsys):
    every = examples(400, 100)
    few = {"kills": 2, "ranks": 1, "cuts": 2, "each": 0, "every": every, "seed": SEED, "place": folder}
    said = swept(capsys, few)
    for kind in (*faults.KINDS, "kill -9, up to three times", "kill -9 of one rank or two", "power cut"):
        assert kind in said


@pytest.mark.slow
@pytest.mark.usefixtures("repeatable")
def test_a_kill_and_a_power_cut_of_every_other_kind_of_training(folder, capsys):
    few = {"kills": 0, "ranks": 0, "cuts": 0, "each": 1, "every": 10**6, "seed": SEED, "place": folder}
    said = swept(capsys, few)
    kinds = "slices", "speculation", "speculation by turns", "generation", "three tiers"
    for kind in (*kinds, "ranks that share memory"):
        assert f"kill -9: {kind}" in said
        assert f"power cut: {kind}" in said


@pytest.mark.slow
def test_the_sweep_notices_a_drive_of_ranks_that_keeps_nothing_of_what_it_has_flushed(folder, monkeypatch):
    bench = faults.Bench(folder, jobs=1, seed=7)
    monkeypatch.setattr(trials.PowerCut, "flushed", lambda *_: None)
    bench.run("power cut", (bench.cut_ranks(number, shared_memory=True) for number in (2, 3, 4)))
    assert bench.counts["power cut"]["WRONG"]


def test_the_sweep_notices_a_wrong_number_a_lost_step_and_a_hang():
    expected = {"losses": [1.0, 2.0], "digest": "d"}
    good = [{"first": 1}, {"step": 2, "loss": 2.0}, {"committed": 2}, {"digest": "d"}]

    class Ended:
        status = 0

        def __init__(self, said):
            self.said = said

    def complaint(said, at_least=0):
        return faults._complaint(expected, said, Ended(said), at_least, 2)

    assert complaint(good) is None
    assert "expected 2.0" in complaint([*good, {"step": 2, "loss": 2.5}])
    assert "but step 2 was committed" in complaint(good, 2)
    assert "other bits" in complaint([*good, {"digest": "e"}])
    assert "not committed" in complaint([*good, {"committed": 1}])
    assert "hang" in complaint([*good, {"hang": True}])
    assert "Error: x" in complaint([*good, {"crash": "Error: x"}])


def test_what_a_power_cut_takes_back_is_what_was_not_flushed(folder):
    path, journal = folder / "file", folder / "journal"
    path.write_bytes(b"n" * 8192)
    power = trials.PowerCut(str(journal), nth=10**9)
    power.note(str(path), 0, b"o" * 4096)
    power.note(str(path), 4096, b"o" * 4096)
    power.flushed(0, 1)
    for seed in range(50):
        path.write_bytes(b"n" * 8192)
        assert trials.lose_power(journal, random.Random(seed)) == 1
        assert path.read_bytes()[:4096] == b"n" * 4096
    assert set(path.read_bytes()) <= set(b"no")


def test_a_disk_that_hangs_is_reported_in_time_with_what_it_was_asked_for(folder):
    said = ended(trials.with_fault(60, infinity.aio.faults.HANG, str(folder), {}))
    assert said["end"] == "IoTimeoutError"
    for part in (
        "the disk does not answer",
        "in flight: ",
        " B at ",
        "try: look at `dmesg`",
        "INFINITY_IO_TIMEOUT",
    ):
        assert part in said["message"]


def test_every_bit_of_a_records_fields_is_watched(folder):
    run = fragile.Run(folder)
    run.train(2)
    infinity.commit(run.model)
    run.engine.lane.drain()
    durable, rng = run.engine.durable, random.Random(SEED)
    unit = next(unit for unit in run.engine.units if unit.name == "embed")
    record, numel = unit.record, unit.layout.numel
    path = next((folder / "infinity-run" / "rank0").glob("state-*"))
    for field in ("hi", "lo", "m", "v"):
        assert not record.in_host(field)
        extent, _ = durable.homes.home(record, field)
        sides, runs = durable.store.describe(extent)
        ((_, side),) = runs
        offset, nbytes = sides[side]
        arena = infinity.storage.memory.Arena(nbytes)
        for bit in rng.sample(range(8 * nbytes), 32):
            _flip(path, offset + bit // 8, 1 << bit % 8)
            record.read(field, 0, numel, arena.address, arena).wait()
            with pytest.raises(CorruptionError, match=rf"embed\.{field}"):
                record.checksums(0, numel, {field: arena.address}, (field,), ()).compare()
            _flip(path, offset + bit // 8, 1 << bit % 8)
        record.read(field, 0, numel, arena.address, arena).wait()
        record.checksums(0, numel, {field: arena.address}, (field,), ()).compare()
    run.kill()


def _flip(path, offset, mask):
    import os

    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("steps", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_nothing_grows_over_many_steps(steps):
    first, last = soak.soak(steps, str(disk()))
    assert soak.grown({**first, "memory": 0}, {**last, "memory": 0}) == []


@pytest.mark.slow
def test_nothing_grows_over_steps_of_experts_or_made_ahead_and_over_tokens():
    for (first, last), noted in (
        (soak.soak(60, str(disk()), "slices"), 60),
        (soak.soak(60, str(disk()), "speculation by turns"), 0),
        (soak.soak_generation(600, str(disk())), 0),
    ):
        assert soak.grown({**first, "memory": 0}, {**last, "memory": 0}, noted) == []


def test_the_soak_notices_what_grows():
    first = {"memory": 0, "descriptors": 10, "objects": 100}
    assert soak.grown(first, {"memory": 5 << 20, "descriptors": 11, "objects": 301}) == list(first)
