"""Runs of contestants, each in a process of its own, and figures beside limits. Faked: most measurements.

Real: processes of this Python, three of them contestants of 0.9 M parameters, forked by default.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contestants import BOTH, FORKED
from infinity.bench.checkpoint import checkpoints
from infinity.bench.engine import contestant, memory, rival, runs
from infinity.bench.engine.runs import OWN, Environment, Model, RunError, measure, settings_of
from infinity.bench.targets import Target
from infinity.cli.presets import PRESETS, llama
from infinity.errors import ConfigError
from infinity.storage import disk_speed as disk
from mounts import mounted, root

ROW = memory.MemoryRow(
    model="350m",
    update="backward",
    parameters=1000,
    peak_nbytes=5000,
    build_peak_nbytes=0,
    host_nbytes=100,
    blocks_nbytes=200,
    plain_nbytes=300,
    bytes_per_parameter=26.0,
)


def test_a_verdict_takes_the_median_of_the_rounds_and_its_own_limit_for_met():
    assert Target("≥", 1.4, "as fast").verdict([9.0, 1.0, 1.4]) == "≥ 1.4 as fast: 1.40 ✓"
    assert Target("≥", 1.4, "as fast").verdict([9.0, 1.0, 1.3]) == "≥ 1.4 as fast: 1.30 ✗"
    assert Target("≤", 1.05, "as long").verdict([1.05]) == "≤ 1.05 as long: 1.05 ✓"
    assert Target("≤", 1.05, "as long").verdict([1.06]) == "≤ 1.05 as long: 1.06 ✗"
    assert Target("≥", 4, "as fast").verdict([]) == "≥ 4 as fast: not measured"


@pytest.mark.parametrize("shape", ["1m", "25m", "269m", "1.1b"])
def test_parameters_are_counted_without_building_the_model(shape):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.LlamaConfig(**runs.SHAPES[shape])
        config.num_key_value_heads = config.num_attention_heads
        model = transformers.LlamaForCausalLM(config)
    assert runs.parameter_count(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_only_moments_that_are_not_exact_are_named_to_the_contestant():
    assert "state_dtype" not in settings_of("1GiB")
    assert settings_of("1GiB", state_dtype="int8")["state_dtype"] == "int8"


def test_a_clipped_update_comes_in_the_forward_and_none_before_its_norm_is_known():
    settings = {"host_memory": 1, "update": "forward", "max_norm": runs.MAX_NORM, "speculate": False}
    assert settings_of(1, "clipped") == settings


def test_growth_counts_only_what_the_bound_does_not_explain():
    large = replace(ROW, parameters=3000, peak_nbytes=7000, blocks_nbytes=1200, plain_nbytes=400)
    assert memory.growth(ROW, large) == pytest.approx({"in_all": 1.0, "beyond_terms": 0.45})


def test_a_bound_is_the_sum_of_its_terms():
    assert ROW.bound_nbytes == 100 + 200 + 300 + memory.ALLOWANCE


def test_buffers_of_deepspeed_hold_the_largest_parameter_and_leave_its_settings_alone():
    settings = rival.settings("269m")
    assert settings["zero_optimization"]["offload_param"]["buffer_size"] >= 8192 * 1024
    assert "buffer_size" not in rival.SETTINGS["zero_optimization"]["offload_param"]


def test_an_environment_without_deepspeed_is_named_with_what_to_install(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot import deepspeed.*pip install"):
        rival.check(Environment.of_venv(tmp_path))


class Counted(torch.nn.Module):
    """A model whose loss is the mean of the tokens' ids, times a weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.rows, self.steps = torch.nn.Parameter(torch.ones(())), [], 0

    def forward(self, input_ids, labels):
        self.rows.append(len(input_ids))
        return SimpleNamespace(loss=self.weight * labels.float().mean())

    def step(self):
        self.steps += 1


@pytest.mark.parametrize(
    ("options", "rows", "steps", "parts"),
    [({}, 1, 1, 1), ({"rows": 4}, 4, 1, 1), ({"counting": True}, 1, 4, 4)],
)
def test_every_contestant_trains_on_the_mean_over_the_same_micro_batches(
    tmp_path, options, rows, steps, parts
):
    model = Counted()
    kind = contestant.Contestant(model, 1, torch.Tensor.backward, model.step, **options)
    spec = contestant.Spec("a fake", {"vocab_size": 50}, 1, 8, str(tmp_path), "", micro_batches=4)
    found = contestant.one_step(kind, spec, 3)
    ids = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(3))
    assert model.rows == [rows] * (4 // rows)
    assert model.steps == steps
    assert model.weight.grad / parts == pytest.approx(ids.float().mean())
    assert found.loss == pytest.approx(ids.float().mean())
    assert found.seconds == pytest.approx(found.forward_s + found.backward_s + found.step_s)


# Processes


def test_what_a_process_wrote_and_its_exit_code_are_returned():
    code, said = OWN.run(["-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"])
    assert code == 3
    assert sorted(said.split()) == ["err", "out"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_process_is_being_started_ends_it_too(monkeypatch, number):
    begun, start = [], subprocess.Popen

    def interrupted(*args, **kwargs):
        begun.append(start(*args, **kwargs))
        signal.raise_signal(number)
        return begun[0]

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(number, stop)
    try:
        monkeypatch.setattr(subprocess, "Popen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            OWN.run(["-c", "import time; time.sleep(600)"])
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    assert begun[0].returncode == -signal.SIGKILL


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(600)
"""
INTERRUPTED = """
import sys
from infinity.bench.engine.runs import OWN
OWN.run(["-c", sys.argv[1], sys.argv[2]])
"""


@pytest.mark.multi
def test_ctrl_c_ends_a_contestant_and_whatever_it_has_started(tmp_path):
    path = tmp_path / "pid"
    command = [sys.executable, "-P", "-c", INTERRUPTED, FAMILY, path]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not (path.exists() and path.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.05)
        grandchild = int(path.read_text())
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert process.returncode != 0
    deadline = time.monotonic() + 30
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(grandchild)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.multi
@pytest.mark.skipif(disk.filesystem(Path("/dev/shm")) != "tmpfs", reason="no tmpfs at /dev/shm")  # noqa: S108
@pytest.mark.parametrize("environment", BOTH)
def test_on_a_tmpfs_the_engine_counts_the_bytes_that_the_kernel_does_not(environment):
    with runs.folder_on(Path("/dev/shm")) as folder:  # noqa: S108
        run = measure(environment, "infinity", Model("1m", 16, 3), folder, settings_of("2MiB"))
        assert list(folder.iterdir()) == []
    assert 5 < run.read_per_parameter < 20
    assert 5 < run.written_per_parameter < 20
    assert run.engine["budget_nbytes"] == 2 << 20


@pytest.mark.multi
@pytest.mark.parametrize("environment", FORKED)
def test_an_error_of_a_contestant_is_told_in_its_own_words(folder, environment):
    with pytest.raises(RunError) as caught:
        measure(environment, "infinity", Model("1m", 16, 3), folder, settings_of(0))
    assert str(caught.value).startswith("infinity on 1m: ")
    assert "host_memory=0" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert list(folder.iterdir()) == []


def test_a_contestant_that_dies_is_told_with_its_last_lines(folder):
    environment = Environment("/bin/sh", ("-c", "echo a last word; kill -9 $$"))
    with pytest.raises(RunError, match=r"(?s)exit code -9.*a last word"):
        measure(environment, "plain", Model("1m", 16, 3), folder, {})
    assert list(folder.iterdir()) == []


@pytest.mark.multi
@root
@pytest.mark.parametrize("environment", FORKED)
def test_a_disk_that_fills_while_training_is_told_and_left_empty(folder, environment):
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        with pytest.raises(RunError, match="No space left") as caught:
            measure(environment, "infinity", Model("1m", 16, 3), folder, settings_of("2MiB"))
        assert "StorageFullError" in str(caught.value)
        assert list(folder.iterdir()) == []


def test_a_contestant_recomputes_its_blocks_without_a_word(recwarn):
    with torch.device("meta"):
        model = llama(PRESETS["1m"], sequence=16)
    recwarn.clear()
    parts = contestant.checkpointed(model).modules()
    assert any(getattr(one, "gradient_checkpointing", False) for one in parts)
    assert [str(one.message) for one in recwarn] == []


@pytest.mark.parametrize("peak", [900, 901])
def test_the_peaks_of_checkpoints_stand_beside_their_limits_and_one_above_fails(
    tmp_path, monkeypatch, capsys, peak
):
    def measured(folder, sizes, ranks, host_nbytes):
        assert (sizes["vocab_size"], ranks, host_nbytes) == (32_000, 2, 1 << 20)
        for rank, taken in enumerate((100, peak)):
            part = 1.02 if rank else None
            yield checkpoints.CheckpointRow(
                "load", "", rank, taken, 900, 5, part, seconds=1.0, parameters=2_000_000
            )

    monkeypatch.setattr(checkpoints, "measured", measured)
    arguments = ["--nvme", str(tmp_path), "--ranks", "2", "--host-memory", "1MiB"]
    arguments += ["--json", str(tmp_path / "found.json")]
    with pytest.raises(SystemExit) if peak > 900 else contextlib.nullcontext():
        checkpoints.main(arguments)
    printed = capsys.readouterr().out
    assert printed.count("✓") == (1 if peak > 900 else 2)
    assert "1.02 times" in printed
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["met"] for row in rows] == [True, peak <= 900]
