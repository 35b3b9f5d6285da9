"""What docs/ says: its programs raise what they are said to raise, its commands run, on a smaller model."""

import json
import re
import shlex

import pytest
import torch

import infinity
import infinity.storage.safetensors_file
import models
from infinity import aio
from infinity.__main__ import main
from places import ROOT

DOCS = ROOT / "docs"
SECTIONS = re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", (DOCS / "errors.md").read_text(), re.MULTILINE)
ERRORS = {
    name: getattr(module, name)
    for module in (infinity, aio)
    for name in module.__all__
    if name.endswith("Error") and name != "InfinityError"
} | {"FileExistsError": FileExistsError}
PROGRAMS = [
    (name, one) for name, text in SECTIONS for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", (DOCS / "how-large.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]


def test_every_error_has_a_section_by_its_name():
    told = {word for title, _ in SECTIONS for word in title.split()} - {"and"}
    assert told == set(ERRORS)


@pytest.fixture(scope="module")
def model():
    with infinity.Init(host_memory="4MiB"):
        return models.MODELS["llama"]()


@pytest.mark.disk
@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_programs_raise_what_they_are_said_to(folder, model, name, program):
    (folder / "not-a-tensor-file").write_bytes(b"nothing of the kind")
    program = program.replace('"/local_nvme', f'"{folder}')
    with pytest.raises(ERRORS[name]):
        exec(program, {"infinity": infinity, "torch": torch, "model": model})  # noqa: S102 - it is ours
    assert len(PROGRAMS) >= 6


@pytest.mark.disk
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_that_plan_run(folder, monkeypatch, capsys, command):
    """Of what each says of the machine, the first is measured there, and given here."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **models.SIZES}))
    measured = "--compute 10 --update-rate 1 --nvme-read 3 --nvme-write 2 --nvme-mixed 2.5"
    given = "--compute" in command or "--gpu " in command
    words = shlex.split(command if given else f"{command} {measured}")
    replaced = {
        "/local_nvme": str(folder),
        "7b": "1m",
        "70b": "1m",
        "1t": "25m",  # has heads and layers for a mesh of 8 by 4
        "config.json": str(folder / "config.json"),
    }
    assert words[:2] == ["infinity", "plan"]
    assert main([replaced.get(word, word) for word in words[1:]]) == 0
    assert "limited by" in capsys.readouterr().out
