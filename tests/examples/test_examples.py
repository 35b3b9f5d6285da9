"""The programs of examples/, with small sizes. Nothing is faked.

Those that import nothing but what tests import are forked from this process, where torch and transformers are
imported already, one of them with --all by an interpreter of its own as well; so are all others. What
torchrun starts, other tests have.
"""

import functools
import importlib
import json
import re
import subprocess
import sys
import tempfile

import pytest

from launches import environment, python, python_of_ranks
from places import ROOT, disk

pytestmark = pytest.mark.disk

EXAMPLES = ROOT / "examples"
RUN_BELOW = {path.name for path in EXAMPLES.iterdir()} - {"__pycache__", "deepspeed.json"}


def run(name, *arguments, code=0, way="started"):
    """Run an example; what it printed."""
    command = [EXAMPLES / name, *arguments]
    if way == "forked":
        with tempfile.TemporaryDirectory() as place:
            done = python(*command, folder=place)
    else:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.mark.parametrize("way", ["forked", pytest.param("started", marks=pytest.mark.slow)])
def test_the_plain_loop_learns_and_saves(folder, way):
    text = run("plain_loop.py", "--nvme", folder, "--out", folder / "out", way=way)
    assert losses(text)[20] < losses(text)[10]
    assert re.search(r"^steps +20, \d+ rounds without gradients$", text, re.MULTILINE)
    assert (folder / "out/checkpoint/manifest.json").is_file()
    assert (folder / "out/model/model.safetensors").is_file()


def test_the_deepspeed_script_trains_and_loads_its_checkpoint(folder):
    text = run("deepspeed_script.py", "--nvme", folder, "--out", folder / "out", way="forked")
    assert "not supported" not in text
    assert losses(text)[10] < losses(text)[2]
    assert "loaded: {'epoch': 1}" in text


@pytest.mark.multi
def test_the_durable_run_goes_on_with_the_same_bits_where_it_was_killed(folder):
    before = losses(run("durable.py", "--nvme", folder, "--kill-at", 8, code=-9, way="forked"))
    text = run("durable.py", "--nvme", folder, way="forked")
    after = losses(text)
    done = int(re.search(r"steps already done: (\d+)", text)[1])
    assert (min(before), max(before), done in {6, 7}) == (1, 7, True)
    assert (min(after), max(after)) == (done + 1, 12)
    assert {step: before[step] for step in before.keys() & after} == {
        step: after[step] for step in before.keys() & after
    }


@pytest.mark.multi
def test_two_ranks_train_each_on_its_part_and_save_together(folder, tmp_path):
    command = [EXAMPLES / "two_ranks.py", "--nvme", folder, "--out", folder / "out"]
    done = python_of_ranks(2, *command, folder=tmp_path)
    assert {one.returncode for one in done} == {0}, [one.stderr for one in done]
    shown = re.findall(r"rank (\d), step (\d+): loss ([\d.]+)", "".join(one.stdout for one in done))
    of_ranks = [sorted((step, loss) for one, step, loss in shown if one == rank) for rank in "01"]
    assert [len(one) for one in of_ranks] == [10, 10]
    assert of_ranks[0] != of_ranks[1]
    assert (folder / "out/manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_share_a_sequence_and_see_one_loss(folder, tmp_path):
    example = EXAMPLES / "two_ranks_one_sequence.py"
    done = python_of_ranks(2, example, "--nvme", folder, "--tokens", 256, folder=tmp_path)
    assert {one.returncode for one in done} == {0}, [one.stderr for one in done]
    said = "".join(one.stdout for one in done)
    shown = re.findall(r"rank (\d), step (\d): loss ([\d.]+), (\d+) of (\d+) tokens", said)
    losses = {rank: [loss for one, _, loss, _, _ in shown if one == rank] for rank in "01"}
    assert losses["0"] == losses["1"]
    assert float(losses["0"][-1]) < float(losses["0"][0])
    assert {(int(part), int(whole)) for *_, part, whole in shown} >= {(48, 96), (128, 256)}


@pytest.fixture(scope="module")
def of_one():
    """Return a function that says the losses of one process, trained once for each of its options."""
    for name in ("torch.distributed.pipelining", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)  # once, and not in each rank

    @functools.cache
    def losses_of_one(*options):
        with tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as nvme:
            command = [EXAMPLES / "mesh.py", "--nvme", nvme, *options]
            (done,) = python_of_ranks(1, *command, folder=nvme)
        assert done.returncode == 0, done.stderr
        return losses(done.stdout)

    return losses_of_one


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    ("alone", "mesh"),
    [
        ((), ("--dp", 2, "--tp", 2, "--pp", 2)),
        (("--ep", 1), ("--dp", 2, "--tp", 2, "--pp", 2, "--ep", 2)),
    ],
)
def test_a_mesh_has_the_losses_of_one_process(folder, of_one, alone, mesh, tmp_path):
    expected = of_one(*alone)
    done = python_of_ranks(8, EXAMPLES / "mesh.py", "--nvme", folder, *mesh, folder=tmp_path)
    assert {one.returncode for one in done} == {0}, [one.stderr for one in done]
    of_mesh = losses("".join(one.stdout for one in done))
    assert (len(expected), len(of_mesh)) == (8, 8)
    assert expected[8] < 0.8 * expected[1]
    assert of_mesh == pytest.approx(expected, rel=1e-3)  # bf16, in another order of sums


@pytest.mark.slow
def test_the_trainer_resumes(folder):
    text = run("trainer.py", "--nvme", folder, "--out", folder / "out")
    assert "steps: 10" in text
    assert (folder / "out/checkpoint-5/infinity/manifest.json").is_file()
    assert (folder / "out/model/config.json").is_file()


@pytest.mark.slow
def test_adapters_are_trained_and_saved(folder):
    pytest.importorskip("peft")
    text = run("lora.py", "--nvme", folder, "--out", folder / "adapter")
    assert losses(text)[15] < losses(text)[5]
    assert (folder / "adapter/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_tiles_take_less_memory_and_give_the_same_losses(folder):
    tiled, plain = (
        run("long_sequence.py", "--nvme", folder, "--tokens", 2048, *how) for how in ([], ["--plain"])
    )
    peaks = [int(re.search(r"first step: (\d+) MiB", text)[1]) for text in (tiled, plain)]
    assert peaks[0] < peaks[1] / 2
    assert losses(tiled) == pytest.approx(losses(plain), abs=0.02)


@pytest.mark.slow
def test_the_notebook_runs_and_is_kept_without_outputs():
    path = EXAMPLES / "notebook.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(cells)
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert any("text/html" in output["data"] for output in outputs)  # the table of stats


def test_every_example_is_run_here_and_named_in_the_docs():
    here = (ROOT / "tests/examples/test_examples.py").read_text()
    page = (ROOT / "docs/examples.md").read_text()
    assert {name for name in RUN_BELOW if name not in here} == set()
    assert {name for name in RUN_BELOW if f"(../examples/{name})" not in page} == set()
