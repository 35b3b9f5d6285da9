"""`infinity plan`: small models, or shapes of large ones, at given rates. Faked: what would be measured."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import plan_calls
from infinity.bench.engine.runs import SHAPES
from infinity.bench.planning import cores, hindsight, machine, meta, pace, sketch
from infinity.bench.planning import plan as planning
from infinity.bench.planning.planned import flops
from infinity.cli.presets import PRESETS, llama
from infinity.engine.init import Init
from infinity.errors import ConfigError
from infinity.planning import tile_size
from infinity.planning.capacity import Process
from infinity.planning.outline import trace_of
from infinity.planning.setting import Setting
from infinity.planning.simulator import Disk, Rates
from plan_calls import RATES, parsed, rows_of

pytestmark = pytest.mark.usefixtures("unhurried")

EXPERTS = ["check", "--model", str(Path(__file__).parents[2] / "planning/configs/mixtral-8x7b.json")]
ask = partial(plan_calls.ask, width=200)
KERNELS = Rates(Disk(1.0, 1.0, 1.0), update=1e9, checked=1e10, copied=1e10)

# One plan


def test_a_plan_says_whether_it_fits_how_fast_it_is_and_what_limits_it():
    code, said = ask(
        "check", "--model", "1m", "--host-memory", "1MiB", "--tokens", "1x64", "--tbw", "100", *RATES
    )
    assert code == 0
    for part in (
        "It fits where there is",
        "tokens per second",
        "limited by",
        "steps until",
        "1 x 64 tokens",
        "memory of each machine",
        "one block's backward",
    ):
        assert part in said


def test_what_does_not_fit_says_what_would(tmp_path):
    code, said = ask("check", "--model", "1m", "--host-memory", "1MiB", "--no-nvme", *RATES)
    assert (code, "It does not fit." in said, "The smallest that works is" in said) == (1, True, True)


def test_a_training_that_lacks_room_is_told_how_long_a_step_would_take(tmp_path):
    arguments = ("check", "--model", "1m", "--host-memory", "8MiB", "--machine-memory", "1MiB", *RATES)
    code, said = ask(*arguments)
    assert (code, "a step, if it had room" in said, "limited by" in said) == (1, True, True)
    (short, *_) = rows_of(tmp_path, *arguments)
    (tmp_path / "plan.json").unlink()
    (enough, *_) = rows_of(tmp_path, *arguments, "--machine-memory", "8GiB")
    assert (short["facts"]["fits"], enough["facts"]["fits"]) == (False, True)
    assert short["facts"]["seconds"] == enough["facts"]["seconds"]


def test_a_smaller_host_memory_is_advised_where_the_machine_lacks_the_rest():
    arguments = (
        "check",
        "--model",
        "70b",
        "--tokens",
        "1x2048",
        "--gpu-memory",
        "24GB",
        "--machine-memory",
        "62GiB",
    )
    code, said = ask(*arguments, "--host-memory", "64GiB")
    assert (code, "Advice: would fit: --host-memory 62GiB" in said) == (1, True)
    assert ask(*arguments, "--host-memory", "62.0 GiB")[0] == 0


def test_what_cannot_be_counted_is_named_and_has_an_exit_code_of_its_own(tmp_path, monkeypatch):
    def uncounted(_name):
        return replace(sketch.outline_of("1m"), activations=None, uncounted="shapes depend on values")

    monkeypatch.setattr(planning, "outline_of", uncounted)
    code, said = ask("check", "--host-memory", "1MiB", *RATES)
    assert code == planning.UNCOUNTED == 3
    assert "Whether it fits cannot be said." in said
    assert "shapes depend on values" in said
    code, said = ask("check", "--host-memory", "1MiB", "--machine-memory", "1MiB", *RATES)
    assert (code, "It does not fit." in said) == (1, True)
    code, said = ask("sweep", "host-memory=1MiB,2MiB", *RATES)
    assert (code, said.count("not known")) == (3, 2)


def test_python_and_torch_are_counted_where_they_were_measured(tmp_path, monkeypatch):
    arguments = ("--model", "1m", "--host-memory", "1MiB", "--ranks", "2", "--local-ranks", "2", *RATES)
    _, said = ask("check", *arguments)
    assert "Python and torch are not counted" in said
    monkeypatch.setattr(machine, "process_memory", lambda: Process(own_nbytes=300, shared_nbytes=100))
    (row, *_) = rows_of(tmp_path, "check", *arguments)
    assert row["facts"]["needs"][0]["parts"]["Python and torch"] == 2 * 300 + 100


def test_without_rates_everything_but_the_time_is_told(tmp_path):
    code, said = ask("check", "--model", "1t", "--ranks", "16", "--host-memory", "64GiB")
    assert code == 0
    assert "read in a step" in said
    assert "tokens per second" not in said
    assert "--nvme DIR" in said
    assert "--link" in said
    assert "--compute TFLOPS" in said


def test_numbers_of_the_json_are_in_si_units(tmp_path):
    (row, *_) = rows_of(
        tmp_path, "check", "--model", "1m", "--host-memory", "1MiB", "--tokens", "2x32", "--tbw", "1", *RATES
    )
    found = row["facts"]
    assert found["tokens"] == 64
    assert found["parameters"] == PRESETS["1m"].parameters
    assert found["host_memory"] == 1 << 20
    assert found["tokens_per_s"] == pytest.approx(64 / found["seconds"])
    assert found["written_per_day"] == pytest.approx(found["written_nbytes"] * 86400 / found["seconds"])
    assert found["steps_until_tbw"] == pytest.approx(1e12 / found["written_nbytes"])
    assert sum(found["moved"].values()) == found["read_nbytes"] + found["written_nbytes"]


def test_ranks_of_one_machine_share_its_disk_and_wear_it_together(tmp_path):
    args = ("check", "--model", "25m", "--link", "100", "--ranks", "2", *RATES, "--nvme-mixed", "0.5")
    apart, together = (
        rows_of(folder, *args, "--local-ranks", local, "--host-memory", f"{8 * local}MiB")[0]["facts"]
        for local in (1, 2)
        for folder in [tmp_path / str(local)]
        if not folder.mkdir()
    )
    assert together["seconds"] > 1.2 * apart["seconds"]
    assert together["machine_written_nbytes"] == 2 * apart["machine_written_nbytes"]


def test_time_is_calibrated_where_it_is_not_given(tmp_path):
    (row, *_) = rows_of(tmp_path, "check", "--model", "1m", "--host-memory", "1MiB", *RATES[:-2])
    assert row["facts"]["compute_s"] == pytest.approx(2.0)


def test_micro_batches_compute_as_often(tmp_path):
    (row, *_) = rows_of(
        tmp_path, "check", "--model", "1m", "--host-memory", "1MiB", "--micro-batches", "3", *RATES[:-2]
    )
    assert row["facts"]["compute_s"] == pytest.approx(6.0)


def test_zero_shows_the_memory_of_each_stage():
    code, said = ask("zero", "--model", "7b", "--ranks", "64")
    assert (code, "113.4 GB" in said, "1.8 GB" in said) == (0, True, True)


def test_a_folder_whose_disk_was_not_measured_asks_for_its_rates(tmp_path, monkeypatch):
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("INFINITY_MEASURE", "0")
    with pytest.raises(ConfigError, match="could not be measured"):
        ask("check", "--model", "1m", "--nvme", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "--model", "8q"], "neither a preset"),
        (["check", "--model", "1m", "--ranks", "6", "--local-ranks", "4"], "whole number of machines"),
        (["check", "--model", "1m", "--ranks", "3", "--local-ranks", "8"], "whole number of machines"),
        (["zero", "--model", "1m", "--ranks", "3", "--local-ranks", "8"], "whole number of machines"),
        (["check", "--model", "1m", "--update", "backward", "--micro-batches", "2"], "2 micro-batches"),
        (["check", "--model", "1m", "--nvme-read", "2"], "give all three"),
        (["sweep", "ranks=1,2", "ranks=4"], "each key once"),
        (["check", "--model", "1m", "--ranks", "2", "--expert-parallel", "2"], "1m has no experts in stacks"),
        ([*EXPERTS, "--ranks", "6", "--expert-parallel", "4"], "Of 6 ranks, 1, 2, 3, 6 may divide"),
        ([*EXPERTS, "--ranks", "16", "--expert-parallel", "16"], "Of 8 experts, 1, 2, 4, 8 ranks may"),
        ([*EXPERTS, "--ranks", "2", "--expert-parallel", "2", "--gpu", "h200"], "compute on CPUs"),
        (["compare", "/dev/null"], "not what `infinity bench step --json` writes"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(arguments, says):
    with pytest.raises(ConfigError, match=says):
        ask(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--ranks", "0"], ["--tokens", "4x"], ["--link", "x"], ["--micro-batches", "1.5"]),
        *(["--compute", "-1"], ["--compute", "nan"]),
    ],
)
@pytest.mark.parametrize("question", [["check"], ["sweep", "ranks=1"]], ids="-".join)
def test_arguments_out_of_range_are_refused_by_the_parser(question, arguments, capsys):
    with pytest.raises(SystemExit):
        ask(*question, *arguments)
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["colour=red", "ranks=", "ranks"])
def test_a_sweep_over_nothing_is_refused_by_the_parser(given, capsys):
    with pytest.raises(SystemExit):
        ask("sweep", given)
    assert "expected KEY=A,B,... with a KEY of host-memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "--sweep", "ranks=1,2"], "unrecognized arguments: --sweep"),
        (["check", "--plot", "new.png"], "unrecognized arguments: --plot"),
        (["sweep"], "KEY=A,B,..."),
        (["compare"], "FILE"),
        (["zero", "--tokens", "1x8"], "unrecognized arguments: --tokens"),
    ],
)
def test_a_question_takes_its_own_arguments_alone(arguments, says, capsys):
    with pytest.raises(SystemExit):
        ask(*arguments)
    assert says in capsys.readouterr().err


# The questions, and how they were asked before


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([], ["check"]),
        (["--model", "1m"], ["check", "--model", "1m"]),
        (["--model", "1m", "--sweep", "ranks=1,2"], ["sweep", "ranks=1,2", "--model", "1m"]),
        (
            ["--sweep=ranks=1,2", "--nvme", "check", "--sweep", "tokens=1x8"],
            ["sweep", "ranks=1,2", "tokens=1x8", "--nvme", "check"],
        ),
        (
            ["--check", "a.json", "b.json", "--json", "c.json"],
            ["compare", "a.json", "b.json", "--json", "c.json"],
        ),
        (["--plot", "c.png", "--check=a.json"], ["compare", "--plot", "c.png", "a.json"]),
        (["--model", "7b", "--zero", "--ranks", "64"], ["zero", "--model", "7b", "--ranks", "64"]),
    ],
)
def test_what_was_asked_before_there_were_subcommands_means_the_same(before, now):
    assert planning.spelled_out(before) == planning.spelled_out(now) == now
    assert parsed(*before) == parsed(*now)


def test_help_is_of_the_command_and_tells_its_questions(capsys):
    assert planning.spelled_out(["--help"]) == ["--help"]
    with pytest.raises(SystemExit, match="0"):
        ask("--help")
    printed = capsys.readouterr().out
    assert all(one in printed for one in ("check", "sweep", "compare", "zero"))


@pytest.mark.parametrize("question", ["check", "sweep"])
def test_flags_that_nobody_needs_daily_stand_apart(question, capsys):
    with pytest.raises(SystemExit, match="0"):
        ask(question, "--help")
    daily, advanced = capsys.readouterr().out.split("\nadvanced:\n")
    daily = daily[daily.index("\noptions:") :]
    for flag in ("--update", "--micro-batches", "--tile-above", "--no-nvme", "--update-rate", "--tbw"):
        assert f"  {flag} " in advanced
        assert f"  {flag} " not in daily
    for flag in ("--model", "--tokens", "--host-memory", "--nvme", "--ranks", "--compute"):
        assert f"  {flag} " in daily


# Sweeps


def test_a_sweep_plans_every_combination_and_draws_it(tmp_path):
    sweeps = ("host-memory=1MiB,4MiB", "tokens=1x64,1x128", "--plot", tmp_path / "s.png")
    rows = rows_of(tmp_path, "sweep", *sweeps, "--model", "1m", *RATES)
    assert [tuple(row["swept"].values()) for row in rows] == [
        *(("1.0 MiB", "1x64"), ("1.0 MiB", "1x128"), ("4.0 MiB", "1x64"), ("4.0 MiB", "1x128")),
    ]
    assert rows[0]["read_nbytes"] > rows[2]["read_nbytes"]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_a_row_of_a_sweep():
    code, said = ask("sweep", "host-memory=1MiB,1GiB", "--model", "1m", "--no-nvme", *RATES)
    assert (code, "1 of 2 fit" in said) == (0, True)


# Models


def test_a_module_on_meta_is_planned_in_the_order_of_its_forward():
    with torch.device("meta"):
        model = llama(PRESETS["1m"], sequence=16)
    got, expected = planning.plan(model, Setting(1 << 20)), sketch.outline_of("1m")
    assert [part.name for part in got.outline.parts] == [part.name for part in expected.parts]
    assert trace_of(got.outline.script()) == trace_of(expected.script())
    assert got.forecast is None
    used = planning.plan(expected, Setting(1 << 20)).demand.activations
    assert got.demand.activations.peak_nbytes == pytest.approx(used.peak_nbytes, rel=0.1)
    assert replace(got.demand, activations=used) == planning.plan(expected, Setting(1 << 20)).demand


def test_a_module_of_ones_own_is_planned_too():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    inputs = {"input": torch.zeros(1, 8, device="meta")}
    planned = planning.plan(model, Setting(1 << 20), inputs=inputs, seconds=1.0, rates=KERNELS)
    assert planned.outline.parameters == 8 * 8 + 8 + 8 * 4 + 4
    assert planned.forecast is not None
    assert planned.tokens_per_s == 2048 / planned.forecast.seconds


def test_where_a_forward_fails_on_meta_the_order_is_that_of_registration_and_that_is_said(caplog):
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.first(self.second(x)) if x.sum().item() else x

    with torch.device("meta"):
        outline = meta.outline_of_model(Backwards(), inputs={"x": torch.zeros(1, 2, device="meta")})
    assert [stage.units for stage in outline.stages] == [(0, 1)]
    assert "a forward on meta failed" in caplog.text


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="no parameters"):
        planning.plan(nn.ReLU(), Setting(1 << 20))


def test_a_model_with_values_is_planned_by_its_shapes_and_stays_as_it_is():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    inputs = {"input": torch.zeros(2, 8, device="meta")}
    got = planning.plan(model, Setting(1 << 20), inputs=inputs)
    assert got.outline.parameters == 8 * 8 + 3 * 8
    assert {one.device.type for one in (*model.parameters(), *model.buffers())} == {"cpu"}
    with Init(host_memory="4MiB", device="cpu"):
        offloaded = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match=r"Linear was built in Init: .*`with torch.device\('meta'\)"):
        planning.plan(offloaded, Setting(1 << 20))


def test_a_config_of_hugging_face_is_a_model(tmp_path):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    config |= {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    outline = sketch.outline_of(str(tmp_path))
    assert sum(stage.recomputed for stage in outline.stages) == 3
    block = 12 * 32**2 + 13 * 32
    assert outline.parameters == 3 * block + (64 + 16) * 32 + 2 * 32, "the head is tied to the embedding"


# Calibration


def test_blocks_are_timed_and_scaled_to_the_whole_model(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(pace, "best", lambda call, repeats=1: call() or 1.0)
    outline = sketch.outline_of("1m")
    seconds = pace.compute_seconds("1m", outline, 64, 32)
    few = meta.outline_of_model(*pace._shallow("1m", 32))
    assert seconds == pytest.approx(flops(outline, 64, 32) / flops(few, 64, 32))


def test_of_many_tokens_two_smaller_numbers_are_timed_and_tell_the_rest(monkeypatch):
    """The cores take a second for any number of tokens, and one more for each 1e9 operations."""
    monkeypatch.undo()
    outline, timed = sketch.outline_of("1m"), []
    few = meta.outline_of_model(*pace._shallow("1m", 512))
    monkeypatch.setattr(pace, "_FLOPS_MOST", flops(few, 64, 64))
    monkeypatch.setattr(pace, "_FLOPS_MORE", flops(few, 256, 256))
    monkeypatch.setattr(pace, "_FLOPS_ALL", flops(few, 256, 256))
    monkeypatch.setattr(pace, "_step", lambda _, batch: timed.append(batch))
    monkeypatch.setattr(pace, "best", lambda call, repeats: call() or 1 + flops(few, *timed[-1]) / 1e9)
    seconds = pace.compute_seconds("1m", outline, 1024, 512)
    assert timed[0] == timed[1]
    assert 32 <= timed[1][0] < timed[2][0] < 512
    whole = flops(few, 1024, 512)
    assert seconds == pytest.approx((1 + whole / 1e9) * flops(outline, 1024, 512) / whole)


@pytest.mark.parametrize(
    ("more", "seconds"),
    [((3.0, 2.0), 3.5), ((3.0, 3.0), 6.0), ((3.0, 4.0), 8.0), ((3.0, 1.0), 2.0), ((3.0, 0.5), 1.0)],
)
def test_seconds_grow_along_the_line_at_most_in_proportion_and_so_where_more_took_no_longer(more, seconds):
    assert pace.extrapolated((1.0, 1.0), more, 6.0) == pytest.approx(seconds)


def test_a_model_too_large_to_time_asks_for_its_speed(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="--compute TFLOPS"):
        pace.compute_seconds("1t", sketch.outline_of("1t"), 2048, 2048)


def test_blocks_that_are_timed_are_recomputed_without_a_word(recwarn, tmp_path, capfd):
    """transformers warns of a cache of keys and values that a config asks for, by a logger of its own."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "use_cache": True, **sizes}))
    model, _ = pace._shallow(str(tmp_path), 32)
    recwarn.clear()
    real = pace._real(model)
    assert any(getattr(one, "gradient_checkpointing", False) for one in real.modules())
    real(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert [str(one.message) for one in recwarn] == []
    assert "use_cache" not in capfd.readouterr().err


def test_blocks_that_do_not_train_here_are_told_and_ask_for_their_speed(monkeypatch):
    def broken(model):
        raise RuntimeError("no such kernel\nand a long story")

    monkeypatch.undo()
    monkeypatch.setattr(pace, "_real", broken)
    with pytest.raises(ConfigError, match=r"\(no such kernel\)\. Give --compute TFLOPS"):
        pace.compute_seconds("1m", sketch.outline_of("1m"), 64, 32)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8", "int4"])
def test_kernels_are_timed_for_every_state(state_dtype, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cores, "_ELEMENTS", 1 << 14)
    assert cores.update_rate(state_dtype) > 0
    assert min(cores.hash_rate(), cores.copy_rate()) > 0


def test_torchs_threads_are_known_without_it(monkeypatch):
    """Trusted: torch, in this environment."""
    told = cores.torch_threads()
    assert told == torch.get_num_threads()
    monkeypatch.delitem(sys.modules, "torch")
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert 1 <= cores.torch_threads() <= len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert cores.torch_threads() == 7


# Forecasts beside measurements


def measured(**changes):
    row = {"kind": "infinity", "model": "25m", "tokens": 64, "host_memory": 64 << 20, "state_dtype": "fp32"}
    row |= {"update": "backward", "compute_s": 1.0, "own_disk": {"read": 2e9, "write": 1e9, "mixed": 1.5e9}}
    row |= {
        "cores": {
            "update": 1e9,
            "checked": 1e10,
            "copied": 1e10,
            "shared": True,
            "computing": 0.5,
            "working": 0.5,
            "request_s": 1e-5,
            "asking": 0.5,
            "computing_asked": 0.5,
            "use_s": 1e-4,
        }
    }
    row["seconds"] = hindsight.foretell(row).seconds
    return {**row, **changes}


def checked(tmp_path, *rows):
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"rows": rows}))
    return hindsight.check([path], Console(quiet=True))


def test_steps_that_were_measured_with_embeddings_in_rows_are_foretold_with_them(monkeypatch):
    monkeypatch.setattr(tile_size, "LEAST_FEW_ROWS_NBYTES", 1 << 18)  # 64 blocks of 8,192 x 1,024
    few = {"tokens": 4, "model": "269m"}
    whole, rows = (hindsight.foretell(measured(**few, **more)) for more in ({}, {"embeddings": "rows"}))
    assert rows.read_nbytes + rows.written_nbytes < 0.98 * (whole.read_nbytes + whole.written_nbytes)


def test_a_forecast_that_is_right_passes(tmp_path):
    findings, good = checked(tmp_path, measured(), {"kind": "plain", "seconds": 1.0})
    assert (good, [round(row["error"], 6) for row in findings.rows]) == (True, [0.0])
    assert findings.verdicts[0].endswith("✓")


def test_a_forecast_that_is_off_by_more_than_the_limit_fails(tmp_path):
    wrong = measured()
    findings, good = checked(tmp_path, measured(), {**wrong, "seconds": wrong["seconds"] / 1.2})
    assert (good, round(findings.rows[1]["error"], 6)) == (False, 0.2)
    assert findings.verdicts[0].endswith("✗")


def test_the_command_checks_files_and_fails_where_a_forecast_does(tmp_path):
    row = measured()
    (tmp_path / "step.json").write_text(json.dumps({"rows": [{**row, "seconds": 9 * row["seconds"]}]}))
    code, said = ask("compare", tmp_path / "step.json", "--plot", tmp_path / "c.png")
    assert (code, "✗" in said, (tmp_path / "c.png").exists()) == (1, True, True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "13q"}, "expected one of"),
        ({"own_disk": None}, "with .*own_disk, cores"),
        ({"cores": {"update": 1e9, "working": 0.5}}, r"cores \(.*request_s.*older `infinity bench step`"),
    ],
)
def test_rows_that_cannot_be_forecast_are_named(change, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        checked(tmp_path, measured(**change))


@pytest.mark.parametrize("part", ["own_disk", "cores"])
def test_a_forecast_is_made_with_what_was_measured_beside_the_run(part, tmp_path):
    row = measured(tokens=16, compute_s=0.001)
    slower = {name: rate if rate is True else rate / 9 for name, rate in row[part].items()}
    slower |= {name: row[part][name] for name in ("request_s", "use_s") if part == "cores"}
    assert hindsight.foretell({**row, part: slower}).seconds > 2 * hindsight.foretell(row).seconds


@pytest.mark.parametrize("name", ["request_s", "use_s"])
def test_a_forecast_counts_the_python_that_was_measured_beside_the_run(name):
    row = measured(compute_s=0.001)
    slower = {**row["cores"], name: 100 * row["cores"][name]}
    assert hindsight.foretell({**row, "cores": slower}).seconds > 1.2 * hindsight.foretell(row).seconds


@pytest.mark.parametrize("name", SHAPES)
def test_what_was_measured_has_an_outline(name):
    assert sketch.outline_of_shape(name).parameters > 9e5


# A model of 10^12 parameters

ONE_T = ["check", "--model", "1t", "--ranks", "16", "--host-memory", "64GiB", "--link", "50", *RATES]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_plan_of_10_to_the_12_parameters_on_16_ranks_takes_less_than_a_gb():
    program = (
        "import argparse, re, sys; from rich.console import Console;"
        "from infinity.bench.planning import plan as planning;"
        "p = argparse.ArgumentParser(); planning.add_arguments(p);"
        f"code = planning.run(p.parse_args({ONE_T!r}), Console());"
        # Not ru_maxrss: that begins with what the process that started this one took.
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1];"
        "sys.stderr.write(peak); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert "It fits where there is: memory of each machine" in done.stdout
    assert int(done.stderr.split()[-1]) * 1024 < 1e9


# On a GPU by name

ON_H200 = ["check", "--model", "1m", "--host-memory", "64MiB", "--gpu", "h200", *RATES[:6]]


def test_a_gpu_by_name_brings_its_memory_its_computing_and_its_link():
    code, said = ask(*ON_H200)
    assert code == 0
    for part in ("H200 SXM: 396 TFLOPS reached, 50.7 GiB/s to it", "each GPU in a step", "it computes"):
        assert part in said


def test_what_is_said_beside_a_gpus_name_counts(tmp_path):
    said = ask(*ON_H200, "--compute", "100", "--gpu-link", "20", "--gpu-memory", "2GiB")[1]
    assert "100 TFLOPS reached, 18.6 GiB/s to it" in said
    (needs,) = (
        need
        for need in rows_of(tmp_path, *ON_H200, "--gpu-memory", "2GiB")[0]["facts"]["needs"]
        if need["what"] == "memory of each GPU"
    )
    assert needs["has_nbytes"] == 2 << 30


def test_a_slower_link_makes_a_step_that_waits_for_it_longer(tmp_path):
    few = ["--tokens", "1x16", "--device-memory", "64KiB"]
    told = []
    for rate in ("50", "0.001"):
        (tmp_path / rate).mkdir()
        told.append(rows_of(tmp_path / rate, *ON_H200, *few, "--gpu-link", rate)[0]["facts"])
    fast, slow = told
    assert slow["seconds"] > 2 * fast["seconds"]
    assert slow["limit"].startswith("bound by the link")


def test_without_a_name_the_link_is_told_to_be_a_guess():
    said = ask("check", "--model", "1m", "--host-memory", "64MiB", "--gpu-memory", "2GiB", *RATES)[1]
    assert "9.3 GiB/s to it, and as much from it (as copies in memory here: give --gpu-link)" in said
