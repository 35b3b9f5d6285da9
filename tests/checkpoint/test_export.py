"""Files for everybody else. Trusted: from_pretrained and save_pretrained of transformers, torch's readers."""

import json
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import models
from children import ended
from covers import matrix
from infinity import AdamW, CorruptionError, Init, UnsupportedError, gathered
from infinity.checkpoint import hub
from infinity.checkpoint.export import add_arguments, export_checkpoint, run, save_pretrained
from infinity.checkpoint.save_load import save
from infinity.engine.engine import engine_of
from infinity.storage.manifest import CheckpointError
from killed_save_run import Doom
from parity import differences

pytestmark = [
    pytest.mark.disk,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
FIELDS = {torch.bfloat16: "hi", torch.float32: "master"}


@pytest.fixture(params=["llama", "gpt2", "mixtral"])
def trained(request, folder):
    """A model with an update that is still pending."""
    model = models.build(request.param, nvme=folder, host_memory="1MiB")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    models.train(model, optimizer, 1)
    return model


def values(model, dtype):
    return {
        name: engine_of(one).parameters.read(one, [FIELDS[dtype]])[0].clone()
        for name, one in model.named_parameters()
    }


def export(source, model, folder, dtype, size):
    if source == "model":
        save_pretrained(model, folder / "out", dtype, size)
    else:
        save(model, None, folder / "saved")
        export_checkpoint(folder / "saved", folder / "out", dtype, size)
    return folder / "out"


@pytest.mark.parametrize(*matrix(source=["model", "checkpoint"], size=["5GB", "60kB"], dtype=list(FIELDS)))
@pytest.mark.usefixtures("three_layers")
def test_plain_from_pretrained_loads_every_value(trained, folder, source, size, dtype):
    out = export(source, trained, folder, dtype, size)
    loaded, found = type(trained).from_pretrained(out, output_loading_info=True)
    assert not any(found.values()), found
    assert differences(values(trained, dtype), dict(loaded.named_parameters())) == []
    assert loaded.dtype == loaded.config.dtype == dtype
    shards = list(out.glob("*.safetensors"))
    assert (len(shards) > 1) is (size == "60kB") is (out / "model.safetensors.index.json").exists()
    largest = max(tensor.nbytes for shard in shards for tensor in load_file(shard).values())
    assert all(shard.stat().st_size < max(60_000, largest) + 20_000 for shard in shards) or size == "5GB"


def test_files_are_those_that_save_pretrained_of_transformers_writes(trained, folder):
    trained.save_pretrained(folder / "theirs")
    save_pretrained(trained, folder / "ours")
    theirs, ours = ({path.name: path for path in (folder / one).iterdir()} for one in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    for name in theirs:
        if name.endswith(".json"):
            assert json.loads(ours[name].read_text()) == json.loads(theirs[name].read_text())
    expected, found = (load_file(one["model.safetensors"]) for one in (theirs, ours))
    assert differences(expected, {name: found[name] for name in expected}) == []
    assert expected.keys() == found.keys()


def test_plain_torch_save_of_a_state_dict_works(trained, folder):
    torch.save(trained.state_dict(), folder / "state.pt")
    loaded = torch.load(folder / "state.pt", weights_only=True)
    assert differences(dict(trained.state_dict()), dict(loaded)) == []


@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_torchs_distributed_checkpoint_reads_both(trained, folder, kind):
    dtype = torch.float32
    if kind == "export":
        save_pretrained(trained, folder / "out", dtype, "60kB")
        expected = {}
        for shard in (folder / "out").glob("*.safetensors"):
            expected |= load_file(shard)
    else:
        save(trained, None, folder / "out")
        expected = values(trained, dtype)
    found = {name: torch.zeros_like(one) for name, one in expected.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "out")), no_dist=True)
    assert differences(expected, found) == []


def test_a_model_that_is_not_of_transformers_is_written_without_configuration(folder):
    with Init(host_memory="16MiB"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    model.register_buffer("scale", torch.arange(3))
    model.register_buffer("fleeting", torch.arange(3), persistent=False)
    save_pretrained(model, folder / "out")
    assert [path.name for path in (folder / "out").iterdir()] == ["model.safetensors"]
    assert differences(dict(model.state_dict()), load_file(folder / "out" / "model.safetensors")) == []
    save(model, None, folder / "saved")
    with pytest.raises(CheckpointError, match="without a configuration of transformers"):
        export_checkpoint(folder / "saved", folder / "other")


def test_where_files_need_several_weights_for_one_the_models_names_are_written(folder, monkeypatch, caplog):
    def joined(_model, tensors):
        """Files that have all weights of a layer in one."""
        together = [name for name in tensors if "layers.0.self_attn" in name]
        left = {name: one for name, one in tensors.items() if name not in together}
        return {**left, **({"qkv": torch.zeros(len(together))} if together else {})}

    monkeypatch.setattr(hub, "_reverted", joined)
    model = models.build("llama", host_memory="16MiB")
    save_pretrained(model, folder / "out")
    assert "the model's own names" in caplog.text
    loaded = type(model).from_pretrained(folder / "out")
    assert differences(values(model, torch.bfloat16), dict(loaded.named_parameters())) == []


def test_a_folder_with_something_else_in_it_is_left_alone(folder):
    """A model that was downloaded, too: the weights in it are not ours. What is trained goes beside it."""
    model = models.build("llama", host_memory="16MiB")
    type(model).save_pretrained(model, folder / "theirs")
    before = {path.name: path.read_bytes() for path in (folder / "theirs").iterdir()}
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text("mine")
    for name in ("mine", "theirs"):
        with pytest.raises(FileExistsError, match=r"not an export of infinity\.save_pretrained") as caught:
            save_pretrained(model, folder / name, overwrite=True)
        assert caught.value.filename2 == str(folder / f"{name}-2")
        loaded = type(model).from_pretrained(folder / f"{name}-2")
        assert differences(values(model, torch.bfloat16), dict(loaded.named_parameters())) == []
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "mine-2", "theirs", "theirs-2"]
    assert (folder / "mine" / "config.json").read_text() == "mine"
    assert {path.name: path.read_bytes() for path in (folder / "theirs").iterdir()} == before


def test_an_export_is_replaced_when_asked_and_a_tokenizer_beside_it_stays(folder):
    model = models.build("llama", host_memory="16MiB")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    out = folder / "out"
    save_pretrained(model, out, max_shard_size="60kB")
    (out / "tokenizer.json").write_text("mine")
    models.train(model, optimizer, 1)
    with pytest.raises(FileExistsError, match="overwrite=True replaces it"):
        save_pretrained(model, out)
    save_pretrained(model, out, overwrite=True)
    assert not list(out.glob("*-of-*"))
    loaded = type(model).from_pretrained(out)
    assert differences(values(model, torch.bfloat16), dict(loaded.named_parameters())) == []
    assert (out / "tokenizer.json").read_text() == "mine"


def test_killed_at_any_moment_of_replacing_an_export_leaves_the_old_or_the_new(folder):
    """Forked children that are killed before or behind a call; what else is in the folder stays."""

    def work(value, doom, say):
        torch.set_num_threads(1)
        with Init(host_memory="4MiB"):
            model = nn.Sequential(nn.Linear(8, 8, bias=False))
        with torch.no_grad(), gathered(model, write=True):
            model[0].weight.fill_(value)
        doom.watch()
        save_pretrained(model, folder / "out", overwrite=True)
        say(counts=doom.counts)

    def found():
        return float(load_file(folder / "out" / "model.safetensors")["0.weight"].unique())

    ended(lambda say: work(0, Doom(), say))
    (folder / "out" / "notes.txt").write_text("mine")
    counts = ended(lambda say: work(1, Doom(), say))["counts"]
    assert {"pwrite", "fsync", "exchange", "remove", "link"} <= counts.keys()
    last = 1.0
    for value, (name, count) in enumerate(counts.items(), 2):
        for nth, when in ((0, "before"), (count - 1, "behind")):
            said = ended(partial(work, value, Doom(name, nth, when)))
            assert "counts" not in said, (name, nth, when)
            assert found() in (last, value), (name, nth, when)
            assert (folder / "out" / "notes.txt").read_text() == "mine"
            last = found()
    ended(lambda say: work(100, Doom(), say))
    assert found() == 100
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_what_cannot_be_written_is_refused(folder):
    model = models.build("llama", host_memory="16MiB")
    with pytest.raises(
        ValueError,
        match=r"torch.float64: weights can be written as torch.bfloat16, torch.float16, torch.float32",
    ):
        save_pretrained(model, folder / "out", torch.float64)
    with pytest.raises(ValueError, match="max_shard_size"):
        save_pretrained(model, folder / "out", max_shard_size="many")
    with pytest.raises(ValueError, match="no parameter built inside"):
        save_pretrained(nn.Linear(2, 2), folder / "out")
    assert list(folder.iterdir()) == []


def test_a_model_whose_state_dict_has_names_of_its_own_is_refused(folder):
    with Init(host_memory="16MiB"):
        model = nn.Sequential(nn.Linear(3, 4))
    model[0].register_state_dict_post_hook(lambda *_rest: None)
    with pytest.raises(UnsupportedError, match=r"0 \(Linear\) gives its state_dict other names"):
        save_pretrained(model, folder / "out")


def test_a_damaged_checkpoint_is_not_exported(folder):
    save(models.build("llama", host_memory="16MiB"), None, folder / "saved")
    path = folder / "saved" / "weights-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    with pytest.raises(CorruptionError, match="weights-00001"):
        export_checkpoint(folder / "saved", folder / "out")
    assert [path.name for path in folder.iterdir()] == ["saved"]


def test_the_command_does_what_the_function_does(folder, capsys):
    import argparse

    model = models.build("gpt2", host_memory="16MiB")
    save(model, None, folder / "saved")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = [str(folder / "saved"), str(folder / "out"), "--dtype", "float32", "--max-shard-size", "60kB"]
    assert run(parser.parse_args(arguments), Console()) == 0
    assert "float32 weights for from_pretrained" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="--overwrite replaces it"):
        run(parser.parse_args(arguments), Console())
    assert run(parser.parse_args([*arguments, "--overwrite"]), Console()) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    assert differences(values(model, torch.float32), dict(loaded.named_parameters())) == []


def test_of_tied_names_the_one_that_files_have_is_written():
    model = nn.ModuleDict({"head": nn.Linear(3, 4, bias=False), "embed": nn.Embedding(4, 3)})
    model["head"].weight = model["embed"].weight
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    assert hub.file_name(model, model["embed"].weight, "head.weight") == "embed.weight"
    assert hub.file_name(model, model["embed"].weight, "embed.weight") == "embed.weight"
