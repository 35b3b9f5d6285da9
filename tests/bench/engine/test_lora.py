"""What LoRA reads and writes, beside its limits. Faked: measurements. Real: one run of 0.9 M parameters."""

import argparse
import importlib.util
import json
from dataclasses import replace

import pytest
from rich.console import Console

from contestants import BOTH, FORKED
from infinity import __main__ as cli
from infinity.bench.engine import lora
from infinity.errors import ConfigError
from measurements import RUN

ALLOWED = (2 << 20) + 3 * 4 * lora.largest_block("1m") + lora.ALLOWANCE


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def a_row(**changes):
    return lora.row_of("1m", "2MiB", replace(RUN, **changes))


def test_a_step_may_write_a_hundredth_of_what_it_reads():
    assert a_row(read_per_parameter=2.0, written_per_parameter=0.02).met
    assert not a_row(read_per_parameter=2.0, written_per_parameter=0.021).met


def test_the_peak_may_be_the_bound_and_not_a_byte_more():
    assert a_row(written_per_parameter=0.0, peak_nbytes=ALLOWED).met
    assert not a_row(written_per_parameter=0.0, peak_nbytes=ALLOWED + 1).met


def test_a_base_that_lies_in_memory_measures_nothing():
    with pytest.raises(ConfigError, match=r"2MiB holds the whole base of 1,000 parameters.*Choose less"):
        a_row(read_per_parameter=0.0)


@needs_peft
@pytest.mark.parametrize("written", [0.0, 1.0])
def test_a_run_above_a_limit_ends_with_1(written, tmp_path, monkeypatch, capsys):
    run = replace(RUN, read_per_parameter=2.0, written_per_parameter=written)
    monkeypatch.setattr(lora, "measure", lambda *_: run)
    arguments = ["--nvme", str(tmp_path), "--model", "1m"]
    assert cli.main(["bench", "lora", *arguments]) == (1 if written else 0)
    mark = "50.00 ✗" if written else "0.00 ✓"
    assert f"≤ 1 % of the bytes read are written: {mark}" in capsys.readouterr().out


@needs_peft
@pytest.mark.disk
@pytest.mark.parametrize("environment", FORKED)
@pytest.mark.parametrize("base", ["bf16", "fp8"])
def test_a_base_in_files_is_read_as_packed_as_it_is_and_nothing_is_written(
    folder, monkeypatch, base, environment
):
    monkeypatch.setattr(lora, "OWN", environment)
    out = folder / "lora.json"
    arguments = ["--nvme", str(folder), "--model", "1m", "--host-memory", "1MiB", "--steps", "1"]
    assert cli.main(["bench", "lora", *arguments, "--json", str(out), "--base", base]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["written_nbytes"] == 0
    assert 0 < row["read_per_parameter"] < (9.0 if base == "bf16" else 6.0)
    assert not list(folder.glob("infinity-*"))


@needs_peft
@pytest.mark.disk
@pytest.mark.parametrize("environment", FORKED)
def test_a_small_base_is_read_in_each_step_and_never_written(folder, monkeypatch, environment):
    monkeypatch.setattr(lora, "OWN", environment)
    out = folder / "lora.json"
    arguments = ["--nvme", str(folder), "--model", "1m", "--host-memory", "1MiB", "--steps", "1"]
    assert cli.main(["bench", "lora", *arguments, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["read_nbytes"] > row["parameters"]
    assert row["written_nbytes"] == 0
    assert row["parameters"] > lora.SHAPES["1m"]["hidden_size"] ** 2


@needs_peft
@pytest.mark.disk
@pytest.mark.parametrize("environment", BOTH)
def test_a_peer_trains_the_same_adapters_and_its_losses_are_ours(folder, monkeypatch, environment, capsys):
    monkeypatch.setattr(lora, "OWN", environment)
    out = folder / "lora.json"
    arguments = ["--nvme", str(folder), "--model", "1m", "--host-memory", "1MiB", "--steps", "1"]
    arguments += ["--base", "bf16", "--peer", "torch", "--json", str(out)]
    assert cli.main(["bench", "lora", *arguments]) == 0
    assert "losses of 4 steps are those of PEFT in memory, to the bit: ✓" in capsys.readouterr().out
    ours, torch = json.loads(out.read_text())["rows"]
    assert [one["contestant"] for one in (ours, torch)] == ["infinity", "torch"]
    assert ours["parameters"] == torch["parameters"]
    assert torch["peak_nbytes"] > 0
    assert torch["read_nbytes"] == 0 < ours["read_nbytes"]


def test_a_peer_that_cannot_run_is_refused_before_anything_is_written(folder):
    arguments = ["--nvme", str(folder), "--model", "1m", "--peer", "deepspeed"]
    for more, why in (([], "needs --venv"), (["--base", "fp8", "--venv", str(folder)], "does not read fp8")):
        options = command().parse_args([*arguments, *more])
        with pytest.raises(ConfigError, match=why):
            lora.train(options, folder, Console(quiet=True))
    assert not list(folder.iterdir())


def command():
    parser = argparse.ArgumentParser()
    lora.add_arguments(parser)
    return parser
