"""`infinity bench adam`. Trusted: the clock, findings.py. Nothing here asks how fast anything is."""

import argparse
import io
import json
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from infinity import kernels
from infinity.bench.kernels import adam, recipes
from infinity.bench.kernels.recipes import BESIDE, READ, SPLIT, UPDATE, WRITE, FieldStream, Memory, Operation
from infinity.errors import ConfigError

NUMEL = 1024


@pytest.fixture(scope="module")
def memory():
    return Memory.of(NUMEL)


def options(*given):
    parser = argparse.ArgumentParser()
    adam.add_arguments(parser)
    return parser.parse_args([*given])


def timing(name, gradient, seconds, limit_seconds, isa="avx512", threads=2):
    streams = (FieldStream(512, UPDATE, 0), FieldStream(512, READ, 0))
    is_step = name.startswith("adamw")
    operation = Operation(name, streams, lambda: None, gradient, (isa,), is_step=is_step)
    return adam.Timing(operation, isa, threads, NUMEL, seconds, limit_seconds)


def test_a_row_stands_for_the_bytes_that_the_design_counts(memory):
    found = {(one.name, one.gradient): one.bytes_per_parameter for one in recipes.steps(memory, ("scalar",))}
    scales = 2 * 8 / 256
    assert found == {
        ("adamw, fp32 moments", "bf16"): 26,
        ("adamw, fp32 moments", "fp32"): 28,
        ("adamw, bf16 moments", "bf16"): 18,
        ("adamw, bf16 moments", "fp32"): 20,
        ("adamw, int8 moments", "bf16"): 14 + scales,
        ("adamw, int8 moments", "fp32"): 16 + scales,
    }
    found = {one.name: one.bytes_per_parameter for one in recipes.other_steps(memory, "scalar")}
    weights = {"adamw, fp16 weights": 28, "adamw, fp32 weights": 28, "adam": 26}
    assert found == weights | {"sgd with momentum": 18, "adagrad": 18, "lion": 18}
    assert [one.bytes_per_parameter for one in recipes.torchs(NUMEL)] == [28, 40]


def test_every_call_works_on_its_memory(memory):
    before = memory.hi.clone()
    every = (recipes.steps(memory, ("scalar",)), recipes.other_steps(memory, "scalar"))
    for one in (*every[0], *every[1], *recipes.others(memory, "scalar"), *recipes.torchs(512)):
        one.call()
    assert not torch.equal(before, memory.hi)
    assert all(moment.float().abs().sum() > 0 for fields in memory.moments.values() for moment in fields)


def test_torchs_contestant_copies_its_weights_back():
    _, beside = recipes.torchs(NUMEL)
    cells = dict(zip(beside.call.__code__.co_freevars, beside.call.__closure__, strict=True))
    weight, master = cells["weight"].cell_contents, cells["master"].cell_contents
    before = weight.clone()
    for _ in range(200):
        beside.call()
    assert not torch.equal(before, weight)
    assert torch.equal(master.detach().bfloat16(), weight)


@pytest.mark.parametrize("kind", [READ, UPDATE, WRITE])
def test_the_limit_goes_over_each_stream_and_leaves_what_is_not_only_written(kind):
    blocks, rest = NUMEL // recipes.BLOCK, 64
    widths = {1024: kind, 8: kind, 512: READ}
    fields = [torch.randint(1, 256, (blocks * width + rest,), dtype=torch.uint8) for width in widths]
    before = [field.clone() for field in fields]
    places = zip(widths.items(), fields, strict=True)
    adam.limit(tuple(FieldStream(width, one, field.data_ptr()) for (width, one), field in places), NUMEL)()
    for width, field, was in zip(widths, fields, before, strict=True):
        is_written = kind == WRITE and width != 512
        assert bool((field[: blocks * width] == 0).all()) == is_written
        assert torch.equal(field[blocks * width :], was[blocks * width :])
        assert is_written or torch.equal(field, was)


def test_the_limit_of_a_row_goes_over_its_own_fields(memory):
    for one in recipes.steps(memory, ("scalar",)):
        state = one.name.removeprefix("adamw, ").removesuffix(" moments")
        grad = memory.grad16 if one.gradient == "bf16" else memory.grad32
        fields = (memory.hi, memory.lo, *memory.moments[state], grad)
        assert [stream.address for stream in one.streams] == [field.data_ptr() for field in fields]


def test_verdicts_take_the_median_of_paired_ratios_on_the_most_threads():
    timings = [
        timing("adamw, fp32 moments", "bf16", [1.0], [0.1], threads=1),
        timing(SPLIT, "bf16", [1.0, 2.0, 1.0], [0.95, 1.9, 0.5]),
        timing(SPLIT, "bf16", [9.0, 9.0, 9.0], [0.95, 1.9, 0.5], isa="scalar"),
        timing("adamw, int8 moments", "fp32", [1.0, 1.0, 1.0], [0.8, 0.7, 0.9]),
        timing(BESIDE, "bf16", [1.7, 3.4, 2.0], [1.0, 1.0, 1.0], isa=""),
        timing("copy", "", [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
    ]
    assert adam.verdicts(timings) == [
        "≥ 0.9 of the memory limit: adamw, fp32 moments, bf16 gradient, avx512: 0.95 ✓ (best 0.50)",
        "≥ 0.9 of the memory limit: adamw, int8 moments, fp32 gradient, avx512: 0.80 ✗ (best 0.70)",
        f"≥ 1.8 times the parameters/s of {BESIDE}: 1.70 ✗ (best 1.70)",
    ]


def test_a_row_of_the_record_is_in_si_units():
    row = timing(SPLIT, "bf16", [4.0, 2.0], [1.0, 1.0]).record()
    assert row["parameters_per_s"] == NUMEL / 2
    assert row["bytes_per_s"] == 6 * NUMEL / 2
    assert row["limit_bytes_per_s"] == 6 * NUMEL
    assert (row["of_limit"], row["of_limit_best"]) == (0.375, 0.5)


def test_the_first_call_behind_a_pause_is_not_timed(monkeypatch):
    said = []
    clock = SimpleNamespace(sleep=time.sleep, perf_counter=lambda: float(said.append("clock") or len(said)))
    monkeypatch.setattr(adam, "time", clock)  # the module's name alone: other threads read the real clock
    adam.timed(lambda: said.append("call"), 2)
    assert said == ["call", "clock", "call", "call", "clock"]


def test_rows_of_the_same_limit_are_timed_right_behind_it(monkeypatch):
    said = []
    operations = [
        Operation(name, streams, lambda name=name: said.append(name), isas=("scalar",))
        for name, streams in (
            ("a", (FieldStream(512, READ, 0),)),
            ("b", (FieldStream(8, READ, 0),)),
            ("c", (FieldStream(512, READ, 0),)),
        )
    ]
    monkeypatch.setattr(adam, "limit", lambda streams, _: lambda: said.append(streams[0].nbytes))
    monkeypatch.setattr(adam, "LEAST_NBYTES", 1)
    with adam.settings_kept():
        found = adam.measured(operations, NUMEL, 1, 2, lambda: None)
    each_twice = [512, 512, "a", "a", "c", "c", 8, 8, "b", "b"]  # the first does not count
    assert said == each_twice * 3
    assert [len(one.seconds) for one in found] == [2, 2, 2]


def test_the_command_writes_a_row_per_kernel_instruction_set_and_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(adam, "LEAST_NBYTES", 1)
    files = ("--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "found.png"))
    chosen = options("--numel", "1024", "--rounds", "1", "--threads", "1", "2", "--isa", "scalar", *files)
    before = (kernels.isa(), kernels.threads(), torch.get_num_threads())
    said = io.StringIO()
    assert adam.run(chosen, Console(file=said, width=200)) == 0
    assert before == (kernels.isa(), kernels.threads(), torch.get_num_threads())
    record = json.loads((tmp_path / "found.json").read_text())
    assert {row["threads"] for row in record["rows"]} == {1, 2}
    steps = [row for row in record["rows"] if row["operation"].startswith("adamw")]
    assert len(steps) == 2 * 8
    assert {row["isa"] for row in steps} == {"scalar"}
    assert all(row["parameters_per_s"] > 0 for row in record["rows"])
    assert record["verdicts"] == ["No verdicts: a median takes at least 3 rounds."]
    assert (tmp_path / "found.png").stat().st_size > 1000
    assert "2 threads: measured" in said.getvalue()


def test_ctrl_c_puts_the_settings_back(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(adam, "one_round", interrupted)
    before = (kernels.isa(), kernels.threads(), torch.get_num_threads())
    with pytest.raises(KeyboardInterrupt):
        adam.run(options("--numel", "256", "--threads", "3"), Console(file=io.StringIO()))
    assert before == (kernels.isa(), kernels.threads(), torch.get_num_threads())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--numel", "1000"], "multiple of 256"),
        (["--numel", "0"], "multiple of 256"),
        (["--rounds", "0"], "at least 1"),
        (["--threads", "0"], "1 to 1024"),
        (["--json", "/nowhere/at/all.json"], "nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(given, said, monkeypatch):
    monkeypatch.setattr(adam, "measured", lambda *_: pytest.fail("it began"))
    with pytest.raises(ConfigError, match=said):
        adam.run(options(*given), Console(file=io.StringIO()))


def test_an_instruction_set_that_is_missing_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(adam, "available", lambda: ("scalar",))
    with pytest.raises(ConfigError, match="avx2"):
        adam.check(options("--isa", "avx2"))


@pytest.mark.parametrize(("rounds", "judged"), [(2, False), (3, True)])
def test_there_is_no_verdict_from_less_than_three_rounds(rounds, judged):
    timings = [timing(name, "bf16", [1.0] * rounds, [1.0] * rounds) for name in (SPLIT, BESIDE)]
    said = adam.findings(timings, options("--rounds", str(rounds))).verdicts
    assert any("✓" in line or "✗" in line for line in said) is judged
    assert any("at least 3 rounds" in line for line in said) is not judged


def test_more_than_there_is_memory_for_is_refused_with_the_numbers(monkeypatch):
    class Machine:
        available = 56 * 1024 - 1

    monkeypatch.setattr(adam.psutil, "virtual_memory", lambda: Machine)
    with pytest.raises(ConfigError, match=r"--numel 1024: takes 56\.0 KiB .* and 56\.0 KiB are available"):
        adam.check(options("--numel", "1024"))
    Machine.available += 1
    adam.check(options("--numel", "1024"))


def test_the_memory_that_is_asked_for_holds_everything(memory):
    moments = (one for fields in memory.moments.values() for one in fields)
    held = (memory.hi, memory.lo, memory.grad16, memory.grad32, memory.out, memory.other, *moments)
    ours = sum(one.nbytes for one in held) / NUMEL
    torchs = 4 + 4 + 4 + 4 + 2 + 2  # fp32: weight, gradient and two moments; bf16: weight and gradient
    assert adam.NBYTES - 8 < ours + torchs <= adam.NBYTES
