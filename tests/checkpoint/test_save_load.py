"""A training that is saved and loaded goes on as if nothing had happened. Faked: a full disk."""

import json
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import models
from infinity import AdamW, CheckpointReader, CorruptionError, Init, UnsupportedError, gathered, stats
from infinity.aio import StorageFullError
from infinity.checkpoint import writer as checkpoint_writer
from infinity.checkpoint.save_load import checkpoint_files, load, save
from infinity.engine.engine import engine_of
from infinity.storage.manifest import CheckpointError
from parity import differences

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]


def start(name="llama", seed=0, host_memory="64MiB", update="forward", **init):
    """Return a model, its optimizer with two param groups, and a scheduler."""
    model = models.build(name, seed=seed, host_memory=host_memory, **init)
    model.train()
    parameters = list(model.parameters())
    groups = [{"params": parameters[1:]}, {"params": parameters[:1], "weight_decay": 0.5}]
    optimizer = AdamW(groups, lr=1e-2, update=update)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def go_on(training, first, last):
    """Train steps first to last; return their losses."""
    model, optimizer, scheduler = training
    steps = {"first": first, "ids_of": models.by_number}
    return models.train(model, optimizer, last - first, schedule=scheduler, **steps)


def state(training):
    """Return everything that a training consists of, as plain tensors and values."""
    model, optimizer, scheduler = training
    fields = ["master", "m", "v"]
    stored = {
        name: engine_of(one).parameters.read(one, fields if optimizer.state.get(one) else fields[:1])
        for name, one in model.named_parameters()
    }
    return [
        stored,
        dict(model.named_buffers()),
        optimizer.state_dict()["param_groups"],
        scheduler.state_dict(),
    ]


CASES = [
    ("llama", "fp32"),
    ("llama", "bf16"),
    ("llama", "int8"),
    ("gpt2-dropout", "fp32"),
    ("mixtral", "bf16"),
]


@pytest.mark.parametrize(
    ("name", "state_dtype", "there"),
    [
        pytest.param(*case, there, marks=[] if number % 3 == way else [pytest.mark.slow])
        for number, case in enumerate(CASES)
        for way, there in enumerate(["memory", "disk", "backward"])
    ],
)
def test_losses_go_on_bit_for_bit_wherever_it_is_loaded(folder, name, state_dtype, there):
    whole = start(name, state_dtype=state_dtype)
    torch.manual_seed(3)
    expected = go_on(whole, 0, 4)
    first = start(name, state_dtype=state_dtype, nvme=folder, host_memory="2MiB")
    torch.manual_seed(3)
    losses = go_on(first, 0, 2)
    save(*first[:2], folder / "saved", scheduler=first[2])
    places = {
        "memory": {},
        "disk": {"nvme": folder, "host_memory": "1MiB"},
        "backward": {"update": "backward", "nvme": folder},
    }
    second = start(name, seed=9, state_dtype=state_dtype, **places[there])
    torch.manual_seed(4)
    load(*second[:2], folder / "saved", scheduler=second[2])
    assert differences(state(first), state(second)) == []
    assert losses + go_on(second, 2, 4) == expected
    assert differences(state(whole), state(second)) == []


def test_loading_into_a_training_under_way_forgets_what_it_was(folder):
    first = start()
    go_on(first, 0, 2)
    save(*first[:2], folder / "saved", scheduler=first[2])
    expected = go_on(first, 2, 4)
    go_on(first, 4, 7)  # the last step's updates are pending
    load(*first[:2], folder / "saved", scheduler=first[2])
    assert go_on(first, 2, 4) == expected


def test_a_save_before_the_first_step_takes_moments_away_again(folder):
    training = start(nvme=folder)
    save(*training[:2], folder / "saved", scheduler=training[2])
    expected = go_on(training, 0, 3)
    load(*training[:2], folder / "saved", scheduler=training[2])
    assert not training[1].state
    assert go_on(training, 0, 3) == expected


def test_saving_changes_nothing(folder):
    expected = go_on(start(), 0, 4)
    training = start(nvme=folder, host_memory="1MiB")
    losses = go_on(training, 0, 2)
    before = torch.get_rng_state()
    save(*training[:2], folder / "saved")
    assert torch.equal(torch.get_rng_state(), before)
    assert losses + go_on(training, 2, 4) == expected


def test_what_you_give_comes_back(folder):
    model, optimizer, _ = start()
    extra = {
        "position": (3, 2**70),
        "weights": [torch.eye(3), torch.tensor(2.5)],
        "best": float("inf"),
        7: None,
    }
    save(model, optimizer, folder / "saved", extra=extra)
    assert differences(extra, load(model, optimizer, folder / "saved")) == []


def test_generators_go_on(folder):
    model, optimizer, _ = start()
    save(model, optimizer, folder / "saved")
    drawn = [torch.rand(3), random.random(), np.random.rand()]  # noqa: NPY002
    load(model, optimizer, folder / "saved")
    assert differences(drawn, [torch.rand(3), random.random(), np.random.rand()]) == []  # noqa: NPY002


def test_weights_alone_are_loaded_without_an_optimizer(folder):
    first = start()
    go_on(first, 0, 2)
    save(*first[:2], folder / "saved")
    model = models.build("llama", seed=5, host_memory="64MiB")
    before = torch.get_rng_state()
    load(model, None, folder / "saved")
    assert differences(dict(first[0].state_dict()), dict(model.state_dict())) == []
    assert torch.equal(torch.get_rng_state(), before)


def mixed():
    """A model with frozen, trained, replaced and ordinary parameters, and buffers of both kinds."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 300, bias=False))
    model[0].requires_grad_(False)
    model[2].bias = nn.Parameter(torch.zeros(300))
    model.register_buffer("fleeting", torch.ones(2), persistent=False)
    model.register_buffer("count", torch.tensor(4, dtype=torch.int64))
    model.index = nn.Parameter(torch.arange(3), requires_grad=False)
    return model


@pytest.mark.parametrize("nvme", [False, True])
def test_frozen_parameters_buffers_and_integers_are_saved_as_they_are(folder, nvme):
    def build(seed):
        torch.manual_seed(seed)
        with Init(host_memory="16MiB", nvme=folder if nvme else None):
            model = mixed()
        return model, AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)

    model, optimizer = build(1)
    model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()
    model.fleeting.zero_()
    with torch.no_grad():
        model.index.add_(5)
        model.count.add_(5)
    save(model, optimizer, folder / "saved")
    other, its_optimizer = build(2)
    load(other, its_optimizer, folder / "saved")
    assert differences(dict(model.state_dict()), dict(other.state_dict())) == []
    assert torch.equal(other.fleeting, torch.ones(2))
    expected, found = (
        [engine_of(one).parameters.read(one, ["master"])[0] for one in m.parameters() if engine_of(one)]
        for m in (model, other)
    )
    assert differences(expected, found) == []
    assert len(its_optimizer.state) == len(optimizer.state) == 4


def test_missing_unexpected_and_other_shapes_are_all_named_before_anything_changes(folder):
    def build(width, *more):
        with Init(host_memory="16MiB"):
            model = nn.Sequential(nn.Linear(4, width), *more)
            model.register_buffer("only" + str(width), torch.zeros(1))
        return model, AdamW(model.parameters())

    save(*build(5, nn.Linear(5, 2)), folder / "saved")
    model, optimizer = build(6, nn.ReLU(), nn.Linear(6, 2))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="does not fit; nothing was loaded") as caught:
        load(model, optimizer, folder / "saved")
    said = str(caught.value)
    assert "2 parameters missing in the checkpoint: 2.weight, 2.bias" in said
    assert "2 parameters in the checkpoint that the model does not have: 1.weight, 1.bias" in said
    assert "0.weight: F32 [5, 4], expected F32 [6, 4]" in said
    assert "0.bias: F32 [5], expected F32 [6]" in said
    assert "missing in the checkpoint: only6" in said
    assert "does not have: only5" in said
    assert "only there 1.weight, 1.bias; only here 2.weight, 2.bias" in said
    assert differences(before, dict(model.state_dict())) == []


def test_another_kind_of_optimizer_state_is_refused(folder):
    training = start(state_dtype="int8")
    save(*training[:2], folder / "saved")
    model, optimizer, scheduler = start()
    with pytest.raises(
        CheckpointError, match=r"moments are int8, those of this model fp32.*state_dtype='int8'"
    ):
        load(model, optimizer, folder / "saved")
    save(model, None, folder / "weights")
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        load(model, optimizer, folder / "weights")
    save(model, optimizer, folder / "unscheduled")
    with pytest.raises(CheckpointError, match="no scheduler was saved"):
        load(model, optimizer, folder / "unscheduled", scheduler=scheduler)
    with pytest.raises(TypeError, match=r"an optimizer of infinity.*got SGD"):
        save(model, torch.optim.SGD(nn.Linear(1, 1).parameters()), folder / "sgd")


def test_what_cannot_be_saved_by_name_is_refused(folder):
    model, optimizer, _ = start()
    with pytest.raises(UnsupportedError, match="not in this model: save and load the whole"):
        save(_linear_and_part_of(model), None, folder / "part")
    with pytest.raises(
        ValueError, match=r"no parameter built inside .*: weight and 1 more are ordinary ones"
    ):
        save(nn.Linear(2, 2), None, folder / "plain")
    with pytest.raises(ValueError, match="ReLU has no parameters: there is nothing"):
        stats(nn.ReLU())
    with pytest.raises(ValueError, match=r"shape \(32,\) that is not in the model"):
        save(model.model.layers, optimizer, folder / "layers")
    with pytest.raises(CheckpointError, match=r"extra\['f'\] is a "):
        save(model, optimizer, folder / "lambda", extra={"f": print})
    assert not any(path.is_dir() for path in folder.iterdir())


def _linear_and_part_of(_model):
    with Init(host_memory="16MiB"):
        linear = nn.Linear(3, 3)
    part = nn.Module()
    part.weight = linear.weight
    part.keeps = [linear]
    return part


def test_loading_where_values_are_in_use_is_refused(folder):
    model, optimizer, _ = start()
    save(model, optimizer, folder / "saved")
    with gathered(model), pytest.raises(UnsupportedError, match="load inside a forward"):
        load(model, optimizer, folder / "saved")
    load(model, optimizer, folder / "saved")


def test_a_load_between_forward_and_backward_is_refused(folder):
    model, optimizer, _ = start(nvme=folder)
    save(model, optimizer, folder / "saved")
    ids = models.batch(0)
    loss = model(input_ids=ids, labels=ids).loss
    load(model, optimizer, folder / "saved")
    with pytest.raises(RuntimeError, match="were changed"):
        loss.backward()


def test_the_seed_of_rounding_is_loaded(folder):
    model = models.build("llama", host_memory="64MiB", state_dtype="int8")
    save(model, AdamW(model.parameters(), seed=11), folder / "saved")
    other = models.build("llama", host_memory="64MiB", state_dtype="int8")
    optimizer = AdamW(other.parameters())
    load(other, optimizer, folder / "saved")
    assert optimizer.seed == 11


def test_a_checkpoint_is_replaced_only_when_asked_and_nothing_else_ever(folder):
    model, optimizer, _ = start()
    save(model, optimizer, folder / "saved", extra=1)
    (folder / "saved" / "notes.txt").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"a checkpoint of infinity\.save is there: overwrite=True repl"
    ):
        save(model, optimizer, folder / "saved", extra=2)
    assert load(model, optimizer, folder / "saved") == 1
    save(model, optimizer, folder / "saved", extra=3, overwrite=True)
    assert load(model, optimizer, folder / "saved") == 3
    assert (folder / "saved" / "notes.txt").read_text() == "mine"
    (folder / "other").mkdir()
    (folder / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"thesis\.txt.*not a checkpoint of infinity\.save"):
        save(model, optimizer, folder / "other", extra=4, overwrite=True)
    assert checkpoint_files(folder / "other") is None
    assert (folder / "other" / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_training_is_not_lost_with_the_process_where_its_folder_is_taken(folder):
    """A script that ends with the error finds what it trained where the error says."""
    for name in ("saved", "above"):
        (folder / name).mkdir()
        (folder / name / "results.csv").write_text("mine")
    script = (
        "import torch, infinity\n"
        "torch.manual_seed(0)\n"
        "with infinity.Init(host_memory='4MiB'): model = torch.nn.Sequential(torch.nn.Linear(8, 8))\n"
        "optimizer = infinity.AdamW(model.parameters(), lr=0.1)\n"
        "model(torch.ones(2, 8).bfloat16()).sum().backward(); optimizer.step()\n"
        "torch.save(model.state_dict(), 'weights.pt')\n"
    )
    ends = ["infinity.save(model, optimizer, 'saved')", "infinity.save_pretrained(model, 'above')"]
    for end in ends:
        run = subprocess.run(
            [sys.executable, "-c", script + end], cwd=folder, capture_output=True, text=True, check=False
        )
        assert run.returncode == 1
        assert "everything was saved in" in run.stderr
    expected = dict(torch.load(folder / "weights.pt"))
    assert differences(expected, load_file(folder / "above-2" / "model.safetensors")) == []
    with Init(host_memory="4MiB"):
        model = nn.Sequential(nn.Linear(8, 8))
    optimizer = AdamW(model.parameters())
    load(model, optimizer, folder / "saved-2")
    assert differences(expected, dict(model.state_dict())) == []
    assert [(folder / name / "results.csv").read_text() for name in ("saved", "above")] == ["mine"] * 2


def test_a_full_disk_leaves_nothing_but_the_last_checkpoint(folder, monkeypatch):
    model, optimizer, _ = start()
    save(model, optimizer, folder / "saved", extra=1)

    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(checkpoint_writer.os, "statvfs", lambda _path: Full)
    with pytest.raises(StorageFullError, match=r"are needed, 12.0 KiB free"):
        save(model, optimizer, folder / "saved", extra=2, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["saved"]
    assert load(model, optimizer, folder / "saved") == 1
    assert go_on((model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)), 0, 1)


@pytest.mark.parametrize("kind", ["weights", "moments", "extra"])
def test_a_flipped_bit_is_found_and_named(folder, kind):
    training = start()
    go_on(training, 0, 1)
    save(*training[:2], folder / "saved", extra=torch.ones(100))
    path = folder / "saved" / f"{kind}-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptionError, match=rf"{kind}-00001.safetensors: bytes 0 to \d+ of .*xxh3"):
        load(*training[:2], folder / "saved")


def test_a_folder_without_a_checkpoint_is_told_with_what_is_there(folder):
    model, optimizer, _ = start()
    (folder / "files").mkdir()
    for given, match in (
        ("none", "there is no such folder .looked in "),
        ("files", "it holds no manifest.json"),
    ):
        with pytest.raises(FileNotFoundError, match=match) as caught:
            load(model, optimizer, folder / given)
        assert caught.value.filename == str(folder / given)
    (folder / "files" / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"weights of Hugging Face's: load them by from_pretrained"):
        load(model, optimizer, folder / "files")
    with pytest.raises(NotADirectoryError, match=r"that is a file. Name the folder"):
        load(model, optimizer, folder / "files" / "model.safetensors")
    save(model, None, folder / "run" / "step-10")
    with pytest.raises(FileNotFoundError, match=r"it holds no manifest.json; .*/step-10 does: name that"):
        load(model, optimizer, folder / "run")


def test_files_that_are_gone_short_or_others_are_refused_before_anything_changes(folder):
    training = start()
    go_on(training, 0, 1)
    saved = folder / "saved"
    save(*training[:2], saved)
    before = state(training)
    moments = saved / "moments-00001.safetensors"
    content = moments.read_bytes()
    moments.unlink()
    with pytest.raises(FileNotFoundError, match="moments-00001"):
        load(*training[:2], saved)
    moments.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="moments-00001"):
        load(*training[:2], saved)
    shutil.copy(saved / "weights-00001.safetensors", moments)
    with pytest.raises(CheckpointError, match=r"moments-00001.*bytes"):
        load(*training[:2], saved)
    moments.write_bytes(content)
    text = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CheckpointError, match=r"manifest.json: .*changed or damaged"):
        load(*training[:2], saved)
    assert differences(before, state(training)) == []


def test_nothing_is_pickled(folder):
    training = start()
    go_on(training, 0, 1)
    save(*training[:2], folder / "saved", scheduler=training[2], extra=[torch.ones(1)])
    assert json.loads((folder / "saved" / "manifest.json").read_text())["manifest"]["version"] == 1
    assert sorted(path.name for path in (folder / "saved").iterdir()) == [
        "extra-00001.safetensors",
        "manifest.json",
        "moments-00001.safetensors",
        "weights-00001.safetensors",
    ]


def test_any_reader_of_safetensors_finds_the_fp32_values_by_their_names(folder):
    torch.manual_seed(0)
    plain = models.MODELS["llama"]()
    ours = models.build("llama", nvme=folder, host_memory="1MiB")
    save(ours, None, folder / "saved")
    found = load_file(folder / "saved" / "weights-00001.safetensors")
    assert differences(dict(plain.state_dict()), found) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoints_read_weights_of_8_bit_moments_and_no_codes_as_if_they_were_numbers(folder):
    training = start(state_dtype="int8")
    go_on(training, 0, 1)
    save(*training[:2], folder / "saved")
    name, weight = next(iter(training[0].named_parameters()))
    reader = CheckpointReader(folder / "saved")
    found = {name: torch.zeros(weight.shape)}
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found[name], engine_of(weight).parameters.read(weight, ["master"])[0])
    with pytest.raises(dcp.api.CheckpointException, match=f"exp_avg.{name}: .*state_dtype='int8', which are"):
        dcp.load({f"exp_avg.{name}": found[name]}, storage_reader=reader, no_dist=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_4_bit_moments_are_saved_and_loaded_as_codes_and_torchs_checkpoints_refuse_them(folder):
    training, again = start(state_dtype="int4"), start(state_dtype="int4")
    go_on(training, 0, 2)
    save(*training[:2], folder / "saved")
    load(*again[:2], folder / "saved")
    again[2].load_state_dict(training[2].state_dict())
    assert go_on(again, 2, 4) == go_on(training, 2, 4)
    name, weight = next(iter(training[0].named_parameters()))
    values = {f"exp_avg_both.{name}": torch.zeros(weight.shape, dtype=torch.uint8)}
    with pytest.raises(dcp.api.CheckpointException, match=f"{name}: .*state_dtype='int4', which are codes"):
        dcp.load(values, storage_reader=CheckpointReader(folder / "saved"), no_dist=True)


def test_moments_of_a_parameter_that_is_frozen_while_it_is_loaded_are_there_when_it_is_thawed(folder):
    def thaw(training):
        training[0].model.layers[1].requires_grad_(True)
        return training

    interrupted = start(nvme=str(folder))
    go_on(interrupted, 0, 3)
    interrupted[0].model.layers[1].requires_grad_(False)
    save(*interrupted[:2], folder / "saved", scheduler=interrupted[2])
    model = models.build("llama", seed=1, host_memory="64MiB", nvme=str(folder)).train()
    model.model.layers[1].requires_grad_(False)
    parameters = list(model.parameters())
    groups = [{"params": parameters[1:]}, {"params": parameters[:1], "weight_decay": 0.5}]
    optimizer = AdamW(groups, lr=1e-2)
    other = model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    load(model, optimizer, folder / "saved", scheduler=other[2])
    assert go_on(thaw(other), 3, 6) == go_on(thaw(interrupted), 3, 6)
    assert differences(state(interrupted), state(other)) == []
