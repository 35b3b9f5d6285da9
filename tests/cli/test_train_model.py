"""`infinity train --model`: folders of transformers, data of three kinds, LoRA, evaluation, resuming, saving.

Real files and tiny models. Trusted: transformers and PEFT reading what was saved; the run in memory.
"""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import models
import quantised
from infinity import __main__ as cli
from infinity.cli import report
from infinity.cli.data import IGNORED, packed
from launches import Program, python, python_of_ranks
from places import ROOT
from words import SPECIAL, TEMPLATE, tokenizer

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.disk,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} "
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
)
LINES = "the cat sat on a mat and a dog ran to the cat\n" * 12
CHAT = {"messages": [{"role": "user", "content": "who sat"}, {"role": "assistant", "content": "the cat"}]}
RECIPE = ["--sequence", "16", "--steps", "3", "--warmup", "0", "--lr", "1e-2", "--host-memory", "2MiB"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What datasets keeps goes away with the test."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def base(tmp_path) -> Path:
    """A folder with the weights of a Llama, and a tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**models.SIZES, max_position_embeddings=64, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def lines(tmp_path) -> Path:
    (tmp_path / "lines.txt").write_text(LINES)
    return tmp_path / "lines.txt"


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(out: Path, *arguments: object) -> list[dict]:
    """Train by the command line, in a folder of its own; return the log."""
    with pytest.MonkeyPatch.context() as patch:
        if "--save" not in arguments:
            patch.setattr("infinity.cli.train.plot_run", lambda *_: None)
        return logged_by(out, *arguments)


def logged_by(out: Path, *arguments: object) -> list[dict]:
    nvme = [] if {"--plain", "--nvme"} & set(arguments) else ["--nvme", out.parent]
    typed = [*RECIPE, *nvme, "--out", out, *arguments]
    assert cli.main(["train", *map(str, typed)]) == 0
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(log: list[dict]) -> list[float]:
    return [step["loss"] for step in log]


def refused(capsys, *arguments: object) -> str:
    try:
        code = cli.main(["train", *map(str, [*RECIPE, *arguments])])
    except SystemExit as exit_:
        code = exit_.code
    assert code in (1, 2)
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return " ".join(message.split())


def test_a_models_text_trains_with_the_losses_in_memory_and_is_saved_for_plain_transformers(
    folder, base, lines, one_thread, capsys
):
    ours = train(folder / "run", "--model", base, "--data", lines, "--save", folder / "saved")
    printed = capsys.readouterr().out
    plain = train(folder / "plain", "--model", base, "--data", lines, "--plain")
    assert losses(ours) == losses(plain)
    assert losses(ours)[-1] < losses(ours)[0]
    assert f"weights of {base}; data: {lines}: 11 sequences of 16 tokens, 9" in printed
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved")
    again = transformers.AutoTokenizer.from_pretrained(folder / "saved")
    before = transformers.AutoModelForCausalLM.from_pretrained(base)
    ids = again(LINES[:40], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert saved(input_ids=ids, labels=ids).loss < before(input_ids=ids, labels=ids).loss
    assert again.chat_template == TEMPLATE


def test_a_configuration_without_weights_starts_fresh_and_gpt2_is_a_model_as_well(folder, tmp_path, lines):
    transformers.GPT2Config(**models.GPT2).save_pretrained(tmp_path / "gpt2")
    tokenizer().save_pretrained(tmp_path / "words")
    options = ["--model", tmp_path / "gpt2" / "config.json", "--tokenizer", tmp_path / "words"]
    log = train(folder / "run", *options, "--data", lines, "--lr", "1e-3", "--batch", "11")
    assert losses(log)[0] == pytest.approx(4.16, abs=0.4), "log(64): nothing was learned before"
    assert losses(log)[-1] < losses(log)[0]


def test_lora_trains_adapters_alone_on_chats_and_saves_them_for_plain_peft(folder, base, capsys):
    peft = pytest.importorskip("peft")
    tokenizer(MARKED).save_pretrained(base)
    chats = written(folder / "chats.jsonl", *[CHAT] * 30)
    kept = {path.name: path.read_bytes() for path in base.glob("*.safetensors")}
    options = ["--model", base, "--data", chats, "--lora", "4", "--save", folder / "adapter"]
    log = train(folder / "run", *options, "--lr", "3e-2", "--eval-data", chats, "--eval-every", "2")
    printed = capsys.readouterr().out
    assert [step["eval_loss"] is not None for step in log] == [False, True, True]
    assert log[2]["eval_loss"] < log[1]["eval_loss"]
    assert "% learned" in printed
    assert "M trained" in printed
    assert "at best" in printed
    assert {path.name: path.read_bytes() for path in base.glob("*.safetensors")} == kept
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(plain, folder / "adapter")
    assert model.peft_config["default"].r == 4
    assert model.peft_config["default"].base_model_name_or_path == str(base)
    assert any(one.abs().sum() > 0 for name, one in model.named_parameters() if "lora_B" in name)
    assert transformers.AutoTokenizer.from_pretrained(folder / "adapter").eos_token == SPECIAL[1]


def test_lora_learns_beside_fp8_weights_which_cannot_be_trained_themselves(folder, lines, capsys):
    pytest.importorskip("peft")
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone converts fp8")
    path = quantised.fp8_llama(folder / "fp8")
    tokenizer().save_pretrained(path)
    kept = {one.name: one.read_bytes() for one in path.glob("*.safetensors")}
    options = ["--model", path, "--data", lines]
    assert "quantized weights (fp8) cannot be trained. Give --lora" in refused(
        capsys, *options, "--nvme", folder
    )
    log = losses(train(folder / "run", *options, "--lora", "2", "--host-memory", "8MiB"))
    assert log[-1] < log[0]
    assert {one.name: one.read_bytes() for one in path.glob("*.safetensors")} == kept


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_adapters_learn_beside_weights_that_are_quantised_for_them(folder, lines, dtype):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {**models.SIZES, "hidden_size": 64, "intermediate_size": 128}
    base = folder / "base"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(base)
    tokenizer().save_pretrained(base)
    asked = ["--model", base, "--data", lines, "--lora", "4", "--lr", "3e-2"]
    exact = losses(train(folder / "exact", *asked))
    coded = losses(train(folder / "coded", *asked, "--frozen-dtype", dtype))
    assert coded[-1] < coded[0]
    assert coded != exact
    assert coded == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize(
    ("template", "row", "learned"),
    [
        (MARKED, CHAT, ["the", "cat"]),
        (TEMPLATE, CHAT, ["<user>", "who", "sat", "<assistant>", "the", "cat"]),
        (None, {"prompt": "who sat", "completion": "the cat"}, ["the", "cat", "<end>"]),
        (None, {"text": "a dog ran", "id": 7}, ["a", "dog", "ran", "<end>"]),
    ],
)
def test_of_each_kind_of_row_the_expected_tokens_are_learned(tmp_path, template, row, learned):
    words = tokenizer(template)
    rows, _ = packed([str(written(tmp_path / "rows.jsonl", row))], words, 16, "--data")
    (labels,) = rows["labels"]
    assert words.convert_ids_to_tokens([one for one in labels if one != IGNORED]) == learned


def test_packing_keeps_every_token_in_its_order_and_parquet_is_read_like_json_lines(tmp_path):
    words, texts = tokenizer(), [{"text": "the cat sat " * count} for count in range(1, 9)]
    as_json, _ = packed([str(written(tmp_path / "rows.jsonl", *texts))], words, 10, "--data")
    datasets.Dataset.from_list(texts).to_parquet(tmp_path / "rows.parquet")
    as_parquet, _ = packed([str(tmp_path / "rows.parquet")], words, 10, "--data")
    assert as_json["labels"][:] == as_parquet["labels"][:]
    learned = [one for row in as_json["labels"] for one in row if one != IGNORED]
    expected = "".join(one["text"] + "<end> " for one in texts).split()
    assert words.convert_ids_to_tokens(learned) == expected
    assert {len(row) for row in as_json["input_ids"]} == {10}


def test_a_run_that_was_stopped_goes_on_in_the_same_order_of_the_data(folder, base, lines, monkeypatch):
    """Eleven sequences, four a step: it is stopped in the second epoch, and ends in the third."""
    options = [
        "--model",
        base,
        "--data",
        lines,
        "--durable",
        "--accumulate",
        "2",
        "--batch",
        "2",
        "--steps",
        "7",
    ]
    for name in ("whole", "stopped"):
        (folder / name).mkdir()
    whole = train(folder / "whole" / "run", *options, "--nvme", folder / "whole")

    def stop(log, step):
        write(log, step)
        if step.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    write = report.StepLog.write
    options += ["--nvme", folder / "stopped"]
    with monkeypatch.context() as patch:
        patch.setattr(report.StepLog, "write", stop)
        typed = [*RECIPE, *options, "--out", folder / "stopped" / "first"]
        assert cli.main(["train", *map(str, typed)]) == 128 + signal.SIGTERM
    again = train(folder / "stopped" / "second", *options, "--resume")
    assert again[0]["step"] in (4, 5)
    assert losses(again) == losses(whole)[again[0]["step"] - 1 :]
    assert len(set(losses(whole))) == 7


def test_an_evaluation_is_the_mean_over_the_tokens_that_are_learned(folder, base, lines):
    chat = CHAT["messages"]
    rows = [
        {"messages": [*chat, *[{"role": "user", "content": "a dog ran " * n}], chat[1]]} for n in range(9)
    ]
    tokenizer(MARKED).save_pretrained(base)
    held = written(folder / "held.jsonl", *rows)
    options = ["--model", base, "--data", lines, "--eval-data", held, "--batch", "4", "--dtype", "fp32"]
    log = train(folder / "run", *options, "--steps", "1", "--lr", "0")
    packed_rows, _ = packed([str(held)], tokenizer(MARKED), 16, "--eval-data")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    total = 0.0
    for ids, labels, learned in zip(*(packed_rows[name] for name in packed_rows.column_names), strict=True):
        with torch.no_grad():
            total += float(plain(torch.tensor([ids]), labels=torch.tensor([labels])).loss) * learned
    assert len(set(packed_rows["learned"])) > 2
    assert len(packed_rows) % 4 > 0
    assert log[0]["eval_loss"] == pytest.approx(total / sum(packed_rows["learned"]), rel=1e-5)


def test_options_come_from_a_file_and_the_command_line_wins(folder, base, lines):
    config = folder / "run.yaml"
    said = f"model: {base}\ndata: [{lines}]\nsteps: 5\nlr: 1e-3\ncheckpointing: false\nnvme: [/nowhere]\n"
    config.write_text(said + "max_norm: 1\nlora: true\neval-data: [/nowhere]\n")
    pytest.importorskip("peft")
    more = ["--config", config, "--eval-data", lines, "--nvme", folder]
    log = train(folder / "run", *more)
    assert len(log) == 3, "RECIPE says so on the command line"
    assert log[0]["lr"] == 1e-2
    assert log[0]["grad_norm"] > 0
    assert log[-1]["eval_loss"] > 0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("step: 3", "unknown option 'step'. The nearest is 'steps'"),
        ("sequnce: 3", "The nearest is 'sequence'"),
        ("steps: [1, 2]", "Expected one value"),
        ("nvme: {a: b}", "a text, true, false or a list"),
        ("steps: many", "run.yaml: error: argument --steps: 'many'"),
        ("- steps", "found list"),
        ("steps: [", "not readable as YAML"),
    ],
)
def test_a_wrong_file_of_options_is_refused_by_name(tmp_path, capsys, content, named):
    (tmp_path / "run.yaml").write_text(content)
    assert named in refused(capsys, "--config", tmp_path / "run.yaml")


def test_a_file_of_options_that_is_not_there_is_named_first(tmp_path, capsys):
    said = refused(capsys, "--config", tmp_path / "nope.yaml")
    assert said.startswith(f"infinity train: --config {tmp_path}/nope.yaml: there is no such file")
    assert "usage" not in said
    assert "Name a YAML file." in refused(capsys, "--config", tmp_path)


def test_wrong_models_are_refused_before_anything_is_built(tmp_path, base, lines, capsys, monkeypatch):
    monkeypatch.setattr("infinity.cli.train.build", None)
    data = ["--data", lines]
    assert "there is no such folder" in refused(capsys, "--model", tmp_path / "no", *data)
    (tmp_path / "none").mkdir()
    assert "holds no config.json" in refused(capsys, "--model", tmp_path / "none", *data)
    transformers.LlamaConfig(**models.SIZES).save_pretrained(tmp_path / "bare")
    assert "no tokenizer there" in refused(capsys, "--model", tmp_path / "bare", *data)
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    assert "t5 is no causal language model" in refused(capsys, "--model", tmp_path / "t5", *data)
    long = refused(capsys, "--model", base, *data, "--sequence", "65")
    assert "the model has positions for 64 tokens. Give --sequence 64" in long
    transformers.LlamaConfig(**models.SIZES | {"vocab_size": 8}).save_pretrained(tmp_path / "small")
    tokens = refused(capsys, "--model", tmp_path / "small", "--tokenizer", base, *data)
    assert "the tokenizer has 18 tokens, the model 8" in tokens


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("empty.jsonl", "", "the file is empty"),
        ("rows.jsonl", '{"question": "a", "answer": "b"}\n', "the columns are question, answer. Expected"),
        ("rows.jsonl", '{"prompt": "a"}\n', "the columns are prompt. Expected"),
        ("rows.jsonl", '{"text": 7}\n', "column text is Value('int64'). Expected strings"),
        ("rows.jsonl", '{"text": \n', "not readable as json"),
        ("rows.jsonl", '{"text": null}\n', "rows.jsonl"),
        ("rows.parquet", "no parquet", "not readable as parquet"),
        ("binary.txt", "a\0b", "that is no text"),
        ("rows.jsonl", '{"messages": [{"role": "user", "content": "hi"}]}\n', "has none"),
    ],
)
def test_wrong_data_is_refused_by_its_name(tmp_path, base, capsys, monkeypatch, name, content, named):
    monkeypatch.setattr("infinity.cli.train.build", None)
    tokenizer(None).save_pretrained(base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / name).write_text(content)
    message = refused(capsys, "--model", base, "--data", tmp_path / name)
    assert f"--data {tmp_path / name}" in message
    assert named in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data", "x"], "--data needs --model"),
        (["--lora"], "--lora needs --model"),
        (["--model", "x"], "--model needs --data"),
        (["--model", "x", "--data", "x", "--text", "x"], "--model excludes --text"),
        (["--model", "x", "--data", "x", "--eval-every", "2"], "--eval-every needs --eval-data"),
        (["--model", "x", "--data", "x", "--lora-alpha", "2"], "need --lora"),
        (["--model", "x", "--data", "x", "--frozen-dtype", "nf4"], "--frozen-dtype needs --lora"),
        (["--model", "x", "--data", "x", "--lora", "--plain"], "--plain excludes --lora"),
        (["--save", "/"], "--save / exists"),
    ],
)
def test_options_that_do_not_go_together_are_named(capsys, arguments, named):
    assert named in refused(capsys, *arguments)


def test_missing_packages_are_named_with_what_installs_them(folder, base, lines, capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec

    def without(*missing: str):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else real(name))

    options = ["--model", base, "--data", lines, "--no-nvme"]
    without("datasets")
    assert "pip install 'zero-infinity[finetune]'" in refused(capsys, *options)
    without("peft")
    assert "--lora needs peft: pip install 'zero-infinity[finetune]'" in refused(capsys, *options, "--lora")
    without("tensorboard")
    assert "pip install tensorboard" in refused(capsys, *options, "--tensorboard", folder / "board")


def test_a_budget_that_cannot_hold_the_model_is_refused_by_its_size(folder, base, lines, capsys):
    message = refused(capsys, "--model", base, "--data", lines, "--nvme", folder, "--host-memory", "4KiB")
    assert "host_memory" in message
    assert "4.0 KiB" in message


def test_lora_resumes_after_the_last_committed_step(folder, base, lines):
    pytest.importorskip("peft")
    options = ["--model", base, "--data", lines, "--lora", "2", "--eval-data", lines, "--eval-every", "2"]
    options += ["--durable", "--resume", "--max-norm", "1"]
    whole = train(folder / "whole", *options, "--nvme", folder, "--steps", "4")
    assert [step["step"] for step in whole] == [1, 2, 3, 4]
    again = train(folder / "again", *options, "--nvme", folder, "--steps", "5", "--eval-every", "5")
    assert [step["step"] for step in again] == [5]
    assert again[0]["eval_loss"] < whole[-1]["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["--lora", "2"]], ids=["all weights", "adapters"])
def test_a_killed_run_goes_on_with_the_losses_of_one_that_never_stopped(folder, tmp_path, base, lines, lora):
    def command(nvme: Path, out: str) -> list[object]:
        options = ["--model", base, "--data", lines, *RECIPE, "--steps", "12", "--max-norm", "1", *lora]
        options += ["--durable", "--resume", "--nvme", nvme, "--out", nvme / out, "--eval-data", lines]
        return ["-m", "infinity", "train", *options, "--eval-every", "3"]

    def logged(path: Path) -> dict[int, tuple[float, float | None]]:
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return {step["step"]: (step["loss"], step["eval_loss"]) for step in map(json.loads, whole)}

    places = folder / "whole", folder / "killed"
    for place in places:
        place.mkdir()
    assert python(*command(places[0], "run"), folder=tmp_path).returncode == 0
    expected = logged(places[0] / "run" / "log.jsonl")
    log = places[1] / "first" / "log.jsonl"
    killed = Program(*command(places[1], "first"), folder=tmp_path)
    while not killed.over() and (not log.exists() or len(logged(log)) < 5):
        time.sleep(0.005)
    killed.kill()
    assert killed.end().returncode == -signal.SIGKILL
    assert python(*command(places[1], "second"), folder=tmp_path).returncode == 0
    before, after = logged(log), logged(places[1] / "second" / "log.jsonl")
    assert 1 < min(after) <= max(before) + 1
    assert {**before, **after} == {**after, **before} == expected


@pytest.mark.parametrize("page", ["start.md", "cli.md"])
def test_the_documented_commands_run(folder, base, lines, monkeypatch, page):
    """On the small model, for a step each; /local_nvme and what a command names are made first."""
    pytest.importorskip("peft")
    said = (ROOT / "docs" / page).read_text()
    commands = re.findall(r"^(?:# )?infinity (train --(?:model|config) .*)$", said, re.MULTILINE)
    assert len(commands) == {"start.md": 2, "cli.md": 3}[page]
    monkeypatch.chdir(folder)
    monkeypatch.setattr("infinity.cli.train.plot_run", lambda *_: None)
    base.rename(folder / "base")
    for name in ("corpus.txt", "held-out.txt"):
        (folder / name).write_text(LINES)
    written(folder / "chats.jsonl", *[CHAT] * 30)
    (folder / "run.yaml").write_text("".join(re.findall(r"```yaml\n(.*?)```", said, re.DOTALL)))
    for number, command in enumerate(commands):
        typed = command.replace("/local_nvme", str(folder)).replace("4GiB", "16MiB").split()
        assert cli.main([*typed, "--steps", "1", "--sequence", "16", "--out", f"run{number}"]) == 0
        if "--save" in typed:
            assert any((folder / typed[-1]).glob("*.safetensors"))


def test_the_quick_starts_own_model_is_trained_adapted_and_asked(folder, monkeypatch):
    """The page alone: its program makes what its commands take, in their order; for a step each."""
    pytest.importorskip("peft")
    said = (ROOT / "docs" / "start.md").read_text()
    (recipe,) = (one for one in re.findall(r"```python\n(.*?)```", said, re.DOTALL) if "corpus.txt" in one)
    commands = re.findall(r"^infinity ((?:train --model|generate) .*)$", said, re.MULTILINE)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("infinity.cli.train.plot_run", lambda *_: None)
    exec(compile(recipe, "start.md", "exec"), {})  # noqa: S102 - it is ours
    assert [command.split()[0] for command in commands] == ["train", "train", "generate", "generate"]
    for number, command in enumerate(commands):
        typed = command.replace("/local_nvme", str(folder)).replace("4GiB", "16MiB").split()
        if typed[0] == "train":
            typed += ["--steps", "1", "--sequence", "16", "--out", f"run{number}"]
        assert cli.main(typed) == 0
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    (answer,) = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
    assert answer["completion"]


def test_a_board_that_does_not_open_is_told_with_its_cure(folder, base, lines, capsys):
    pytest.importorskip("tensorboard")
    said = refused(
        capsys,
        "--model",
        base,
        "--data",
        lines,
        "--nvme",
        folder,
        "--out",
        folder / "x",
        "--tensorboard",
        lines,
    )
    assert "--tensorboard does not open" in said
    assert "Name a folder" in said


def test_tensorboard_gets_every_step(folder, base, lines, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = train(folder / "x", "--model", base, "--data", lines, "--tensorboard", tmp_path / "board")
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [one.step for one in events.Scalars("train/loss")] == [1, 2, 3]
    assert [one.value for one in events.Scalars("train/loss")] == pytest.approx(losses(log))


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_two_ranks_train_adapters_on_chats_in_parquet_and_resume(folder, base, tmp_path, dtype):
    pytest.importorskip("peft")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.table({"messages": [CHAT["messages"]] * 40}), chats)

    def steps(nvme: Path, out: str, count: int) -> dict[int, float]:
        nvme.mkdir(exist_ok=True)
        options = [*RECIPE, "--model", base, "--data", chats, "--lora", "2", "--dtype", dtype, "--durable"]
        options += [
            "--resume",
            "--nvme",
            nvme,
            "--out",
            nvme / out,
            "--steps",
            count,
            "--host-memory",
            "4MiB",
        ]
        ended = python_of_ranks(2, "-m", "infinity", "train", *options, folder=tmp_path)
        assert {one.returncode for one in ended} == {0}, [one.stderr for one in ended]
        log = (nvme / out / "log.jsonl").read_text().splitlines()
        return {step["step"]: step["loss"] for step in map(json.loads, log)}

    first = steps(folder / "one", "first", 3)
    again = steps(folder / "one", "second", 3 + 2)
    assert (list(first), list(again)) == ([1, 2, 3], [4, 5])
