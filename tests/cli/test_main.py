"""The command line: its arguments, errors and exit codes. Real training, of a model of 0.9 M parameters."""

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from infinity import __main__ as cli
from infinity.aio import EngineUnavailableError
from infinity.bench import aio as bench_of_aio
from infinity.cli.main import describe
from infinity.cli.text import TextError
from infinity.errors import ConfigError, EngineFailedError, InfinityError
from launches import Program

pytestmark = pytest.mark.disk

GIVEN = ["--nvme-read", "2", "--nvme-write", "1", "--nvme-mixed", "1.5", "--compute", "1"]
GIVEN += ["--update-rate", "1", "--host-memory", "1GiB"]
"""All that `infinity plan` would measure."""
SMALL = ["--model", "25m", "--host-memory", "64MiB"]
TINY = ["--preset", "1m", "--sequence", "32", "--host-memory", "4MiB", "--steps", "2"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_text("It was the best of times, it was the worst of times. " * 20)
    return str(path)


def refused(capsys, *arguments: object) -> tuple[int, str]:
    """Run a command that must fail; its exit code and its message."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = int(str(exit_.code))
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return code, message


def test_without_a_command_it_prints_what_there_is(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    for command in ("train", "doctor", "bench", "plan"):
        assert command in printed
    assert "what limits it: without training it" in " ".join(printed.split())


def test_it_knows_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("infinity ")


def test_python_m_infinity_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "infinity", "--help"], capture_output=True, text=True, check=True
    )
    assert "usage: infinity" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--preset", "9t"], "9t"),
        (["--steps", "0"], "at least 1"),
        (["--steps", "x"], "'x'"),
        (["--sequence", "1"], "at least 2"),
        (["--lr", "-1"], "at least 0"),
        (["--lr", "nan"], "'nan'"),
        (["--host-memory", "much"], "'much' is not a size"),
        (["--aio", "magic"], "magic"),
        (["--state-dtype", "fp8"], "fp8"),
        (["--dtype", "fp8"], "fp8"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_arguments_are_refused_by_name(capsys, arguments, named):
    code, message = refused(capsys, "train", *arguments)
    assert code == 2
    assert named in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--update", "backward", "--max-norm", "1"], "--max-norm"),
        (["--update", "backward", "--accumulate", "2", "--no-checkpointing"], "--accumulate"),
        (["--offload-activations", "host", "--no-checkpointing"], "--no-checkpointing"),
        (["--offload-activations", "nvme", "--no-nvme"], "--no-nvme"),
        (["--activation-memory", "1GiB", "--offload-activations", "host"], "--offload-activations"),
        (["--activation-memory", "1GiB", "--accumulate", "2"], "--accumulate"),
        (["--activation-memory", "1GiB", "--plain"], "--plain"),
        (["--no-nvme", "--nvme", "/"], "--nvme"),
        (["--dtype", "fp16", "--update", "backward"], "--update backward"),
        (["--speculate", "--update", "backward"], "--update backward"),
        (["--speculate", "--plain"], "--plain"),
        (["--dtype", "fp16", "--plain"], "--plain"),
        (["--plain", "--timeline", "t.json"], "--timeline"),
        (["--plain", "--report", "r.html"], "--report"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused_as_in_every_command(capsys, arguments, named):
    code, message = refused(capsys, "train", *arguments)
    assert (code, message.count("\n")) == (1, 1)
    assert f"excludes {named}" in message


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (["train"], ["--plain", "--offload-activations", "--no-nvme", "--log-every", "--update"]),
        (["plan", "check"], ["--no-nvme", "--micro-batches", "--update", "--tile-above"]),
        (["bench", "io"], ["--piece", "--depth", "--small-pages", "--rounds"]),
        (["bench", "step"], ["--micro-batches", "--disk-size", "--only"]),
    ],
)
def test_flags_that_nobody_needs_daily_stand_in_a_group_of_their_own(capsys, command, flags):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    printed = capsys.readouterr().out
    options, advanced = printed[printed.index("\noptions:") :].split("\nadvanced:\n")
    assert [flag for flag in flags if f"\n  {flag}" not in f"\n{advanced}"] == []
    assert [flag for flag in flags if f"\n  {flag}" in options] == []
    assert "\n  --nvme " in options


def test_a_text_that_is_not_there_is_named_with_its_option_and_what_to_do(capsys, folder):
    code, message = refused(capsys, "train", *TINY, "--text", folder / "nothing", "--out", folder / "run")
    assert code == 1
    assert message == (
        f"infinity train: --text {folder}/nothing: there is no such file or folder. "
        "Name a text file, or a folder of them.\n"
    )
    assert not (folder / "run").exists()


def test_an_empty_text_is_named(capsys, folder):
    (folder / "empty").touch()
    code, message = refused(capsys, "train", *TINY, "--text", folder / "empty", "--out", folder / "run")
    assert code == 1
    assert f"{folder}/empty is empty" in message


def test_a_budget_of_zero_is_refused_and_nothing_is_left(capsys, folder, text):
    arguments = [*TINY, "--host-memory", "0", "--text", text, "--out", folder / "run"]
    code, message = refused(capsys, "train", *arguments)
    assert code == 1
    assert "host_memory=0" in message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "missing", "unwritable"])
def test_an_nvme_folder_that_cannot_be_used_is_named(capsys, folder, text, kind):
    nvme = folder / kind
    if kind == "file":
        nvme.touch()
    elif kind == "unwritable" and os.geteuid() == 0:
        nvme = Path("/proc/sys")  # not even root makes files there
    elif kind == "unwritable":
        nvme.mkdir(mode=0o555)
    arguments = [*TINY, "--nvme", nvme, "--text", text, "--out", folder / "run"]
    code, message = refused(capsys, "train", *arguments)
    assert code == 1
    assert str(nvme) in message
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("--timeline", "t.png", ".json"),
        ("--report", "r.pdf", ".html"),
        ("--timeline", "text", ".json"),
        ("--report", "nowhere/r.html", "no folder"),
        ("--report", "there.png", "never overwritten"),
    ],
)
def test_a_timeline_or_report_that_cannot_be_written_is_refused_at_once(
    capsys, folder, text, flag, name, said
):
    (folder / "there.png").write_text("precious")
    arguments = [*TINY, "--text", text, flag, folder / name, "--out", folder / "run"]
    code, message = refused(capsys, "train", *arguments)
    assert code == 1
    assert flag[2:] in message
    assert said in message
    assert [path.name for path in folder.iterdir()] == ["there.png"]
    assert (folder / "there.png").read_text() == "precious"


def test_train_takes_several_folders(monkeypatch):
    seen = []
    monkeypatch.setattr("infinity.cli.train.train", lambda settings, _: seen.append(settings))
    assert cli.main(["train", "--nvme", "/a", "--nvme", "/b", "--state-dtype", "int8"]) == 0
    assert cli.main(["train"]) == 0
    assert [(one.nvme, one.state_dtype) for one in seen] == [(["/a", "/b"], "int8"), (None, "fp32")]


@pytest.mark.parametrize(
    ("arguments", "folders", "measures"),
    [
        ([], ["."], False),
        (["--nvme", "/a"], ["/a"], False),
        (["--measure", "--nvme", "/a", "--nvme", "/b"], ["/a", "/b"], True),
    ],
)
def test_doctor_looks_at_every_folder_and_measures_if_asked(
    monkeypatch, capsys, arguments, folders, measures
):
    class FakeExamination:
        healthy, complete = True, True

        def table(self) -> str:
            return "fine"

    seen = []

    def examine(names: list[str], *, measure: bool = False, model: object = None) -> FakeExamination:
        seen.append((list(names), measure))
        return FakeExamination()

    monkeypatch.setattr("infinity.cli.doctor.examine", examine)
    assert cli.main(["doctor", *arguments]) == 0
    assert seen == [(folders, measures)]
    assert "fine" in capsys.readouterr().out


# bench and plan

MODULES = {
    "bench io": "aio.io",
    "bench adam": "kernels.adam",
    "bench step": "engine.step",
    "bench tiles": "tiling.tiles",
    "bench experts": "planning.experts",
    "bench copy": "device.copy",
    "plan": "planning.plan",
}


@pytest.fixture
def fake(monkeypatch):
    """Put a module in the place of `infinity bench io`; its run does what a test sets."""
    module = types.ModuleType("infinity.bench.aio.io")
    module.HELP = "measures nothing"
    module.add_arguments = lambda parser: parser.add_argument("--depth", type=int)
    module.run = lambda options, console: options.depth
    monkeypatch.setattr(bench_of_aio, "io", module, raising=False)
    return module


def test_bench_alone_prints_what_there_is(capsys):
    assert cli.main(["bench"]) == 0
    printed = capsys.readouterr().out
    assert "usage: infinity bench" in printed
    for name in ("io", "adam", "step", "copy"):
        assert name in printed


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (["--help"], {"torch", "transformers", "numpy", "cffi", "psutil"}),
        (["train", "--help"], {"torch", "transformers", "numpy", "cffi", "psutil"}),
        (["bench"], {"torch", "transformers", "numpy"}),
        (["doctor"], {"torch", "transformers", "numpy"}),
        (["plan", "check", *GIVEN, *SMALL], {"torch", "transformers"}),
        (["plan", "check", *GIVEN, *SMALL, "--nvme-space", "1MB"], {"torch", "transformers"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_only_what_it_needs(arguments, without):
    code = f"""if True:
        import sys
        from infinity import __main__ as cli
        try:
            cli.main({arguments})
        except SystemExit:
            pass
        print("loaded:", *({without} & sys.modules.keys()))"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--modle", "x"], "Did you mean --model?"),
        (
            ["plan", "check", "--mdel", "7b"],
            "infinity plan check: error: unrecognized arguments: --mdel 7b. Did",
        ),
        (["train", "--dtype", "bf61"], "Did you mean bf16?"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_word_that_is_nearly_one_of_the_commands_is_told_with_it_alone(capsys, arguments, says):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1


def test_a_full_drive_to_save_to_is_told_before_training(capsys, text, tmp_path, monkeypatch):
    few = types.SimpleNamespace(disk_usage=lambda _: types.SimpleNamespace(free=1 << 20))
    monkeypatch.setattr("infinity.cli.run_folder.shutil", few)
    save = tmp_path / "new" / "saved"
    typed = ["--text", text, "--nvme", tmp_path, "--out", tmp_path / "run", "--save", save]
    code, message = refused(capsys, "train", *TINY, *typed)
    assert code == 1
    assert f"--save {save}: the weights take " in message
    assert f"and {tmp_path} has 1.0 MiB free, " in message
    assert "step 1/" not in message


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_is_told_every_command_and_option(capsys, shell):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--completion", shell])
    script = capsys.readouterr().out
    for word in ("train", "doctor", "--durable", "--measure", "check", "--peer", "--traceback"):
        assert word in script
    if shell == "bash":
        subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True)


def test_completion_without_shtab_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, message = refused(capsys, "--completion", "zsh")
    assert code == 2
    assert "pip install 'zero-infinity[completion]'" in message


def test_no_measurement_is_imported_before_it_is_asked_for():
    code = """if True:
        import sys
        from infinity import __main__ as cli
        cli.main(["bench"])
        sys.exit(any(name.startswith("infinity.bench.") for name in sys.modules))"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", MODULES)
def test_each_measurement_explains_itself(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command.split(), "--help"])
    module = importlib.import_module(f"infinity.bench.{MODULES[command]}")
    printed = capsys.readouterr().out
    assert f"usage: infinity {command}" in printed
    assert module.HELP.split()[0] in printed


def test_a_measurement_gets_its_own_arguments_and_gives_the_exit_code(fake, capsys):
    assert cli.main(["bench", "io", "--depth", "7"]) == 7
    code, message = refused(capsys, "bench", "io", "--depth", "x")
    assert code == 2
    assert "infinity bench io: error" in message


def test_an_error_of_a_measurement_is_one_paragraph_with_its_name(fake, capsys):
    def run(options, console):
        raise InfinityError("the disk is gone")

    fake.run = run
    assert refused(capsys, "bench", "io") == (1, "infinity bench io: the disk is gone\n")
    with pytest.raises(InfinityError):
        cli.main(["bench", "io", "--traceback"])


@pytest.mark.parametrize("arguments", [["plan", "check"], ["plan"]], ids=" ".join)
def test_an_error_of_a_plan_names_its_subcommand_told_or_not(capsys, arguments):
    code, message = refused(capsys, *arguments, "--model", "8q")
    assert (code, message.startswith("infinity plan check: ")) == (1, True)
    with pytest.raises(ConfigError, match="8q"):
        cli.main([*arguments, "--model", "8q", "--traceback"])


def test_ctrl_c_while_a_command_is_imported_is_no_error(fake):
    def interrupted(parser):
        raise KeyboardInterrupt

    fake.add_arguments = interrupted
    assert cli.main(["bench", "io"]) == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_measurement_and_what_it_holds_is_given_back(fake, number, code):
    closed = []

    def run(options, console):
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            closed.append(number)

    fake.run = run
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["bench", "io"]) == code
    assert closed == [number]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("how", [[], ["--plain"]])
@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named(capsys, folder, text, device, how):
    arguments = [*TINY, *how, "--device", device, "--text", text, "--out", folder / "run"]
    code, message = refused(capsys, "train", *arguments)
    assert code == 1
    assert device in message
    assert not (folder / "run").exists()


def test_a_run_is_never_overwritten(capsys, folder, text):
    (folder / "log.jsonl").write_text("precious")
    code, message = refused(capsys, "train", *TINY, "--text", text, "--out", folder)
    assert code == 1
    assert f"{folder} is not empty" in message
    assert (folder / "log.jsonl").read_text() == "precious"


def test_an_out_that_is_a_file_is_named(capsys, folder, text):
    (folder / "file").touch()
    code, message = refused(capsys, "train", *TINY, "--text", text, "--out", folder / "file")
    file = folder / "file"
    assert (code, message) == (
        1,
        f"infinity train: --out {file}: that is a file. Name a new folder for the run.\n",
    )


def test_runs_of_the_same_second_get_folders_of_their_own(capsys, folder, text, monkeypatch):
    monkeypatch.chdir(folder)
    for _ in range(2):
        assert cli.main(["train", *TINY, "--text", text]) == 0
    assert len(list((folder / "runs").iterdir())) == 2


def test_traceback_shows_where_an_error_came_from(folder):
    with pytest.raises(ConfigError, match="nothing"):
        cli.main(["train", *TINY, "--text", str(folder / "nothing"), "--traceback"])


def test_an_error_is_told_with_its_notes_and_its_cause():
    error = TextError("no text")
    error.__notes__ = ["while looking for some"]
    assert describe(error) == "no text\n  while looking for some"
    failed = EngineFailedError("the engine has failed")
    failed.__cause__ = OSError(5, "Input/output error", "/nvme")
    assert describe(failed) == "the engine has failed\n  cause: /nvme: Input/output error"
    assert describe(InfinityError()) == "InfinityError"


def test_a_cause_whose_beginning_the_message_tells_is_not_told_again():
    error = ConfigError("config.json: is no JSON (Expecting value: line 1). Give another one.")
    error.__cause__ = ValueError("Expecting value: line 1\nand a long list of what would have done")
    assert describe(error) == str(error)


@pytest.mark.parametrize(("arguments", "told"), [(["--aio", "io_uring"], True), ([], False)])
def test_an_engine_that_was_asked_for_and_is_refused_need_not_be_asked_for(
    capsys, monkeypatch, arguments, told
):
    def train(settings, console):
        raise EngineUnavailableError.of_kind("io_uring", errno.EPERM, "starting it", "/nvme")

    monkeypatch.setattr("infinity.cli.train.train", train)
    code, message = refused(capsys, "train", *arguments)
    assert (code, message.endswith("; or leave --aio out\n")) == (1, told)


def wait_for_three_steps(log, over):
    """Wait until a training has logged three steps."""
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert not over()
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_training_cleanly(folder, tmp_path, number, code):
    arguments = [*TINY, "--steps", "1000000", "--nvme", folder, "--out", tmp_path / "run"]
    training = Program("-m", "infinity", "train", *arguments, folder=tmp_path)
    try:
        wait_for_three_steps(tmp_path / "run" / "log.jsonl", training.over)
        os.kill(training.pid, number)
        ended = training.end()
    finally:
        training.kill()
    assert_ended_cleanly(ended.returncode, code, ended.stdout, ended.stderr, tmp_path / "run", folder)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_an_interpreter_that_trains_cleanly(folder, number, code):
    nvme, out = folder / "nvme", folder / "run"
    nvme.mkdir()
    arguments = [*TINY, "--steps", "1000000", "--nvme", nvme, "--out", out]
    command = [sys.executable, "-m", "infinity", "train", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_three_steps(out / "log.jsonl", lambda: process.poll() is not None)
            process.send_signal(number)
            printed, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert_ended_cleanly(process.returncode, code, printed, told, out, nvme)


def assert_ended_cleanly(found, code, printed, told, out, nvme):
    assert found == code, told
    assert "Traceback" not in told
    steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert f"{len(steps)} in " in printed
    assert sorted(path.name for path in out.iterdir()) == ["log.jsonl", "loss.png"]
    assert list(nvme.iterdir()) == []
