"""from_pretrained inside Init. Trusted: transformers' from_pretrained outside of it. Nothing is faked."""

import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import models
from covers import matrix
from infinity import AdamW, Init, TensorFileError, UnsupportedError, reference
from infinity.engine import pretrained
from infinity.engine.engine import engine_of, engine_of_model
from infinity.engine.pretrained import Mapped, loading_in_order
from parity import differences

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]


def saved(name, folder, dtype):
    torch.manual_seed(1)
    model = models.MODELS[name]().to(dtype)
    model.save_pretrained(folder / "model", max_shard_size="60kB")
    return folder / "model"


def masters(model):
    return {
        name: engine_of(one).parameters.read(one, ["master"])[0] for name, one in model.named_parameters()
    }


@pytest.mark.parametrize(
    *matrix(
        name=["llama", "gpt2", "mixtral"],
        of_files=[torch.bfloat16, torch.float32],
        asked=[{}, {"dtype": torch.bfloat16}, {"dtype": torch.float32}],
        nvme=[False, True],
    )
)
def test_weights_are_those_that_plain_from_pretrained_gives(folder, name, of_files, asked, nvme):
    path = saved(name, folder, of_files)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, **asked)
    with Init(nvme=folder if nvme else None, host_memory="128KiB" if nvme else "16MiB"):
        ours = transformers.AutoModelForCausalLM.from_pretrained(path, **asked)
    expected = {name: one.detach().float() for name, one in plain.named_parameters()}
    assert differences(expected, masters(ours)) == []
    assert {one.dtype for one in ours.parameters()} == {torch.bfloat16}
    ids = models.batch(0)
    assert torch.equal(ours(input_ids=ids).logits, reference.prepare(plain)(input_ids=ids).logits)
    losses = []
    for model, kind in ((plain, reference.ReferenceAdamW), (ours, AdamW)):
        model.train()
        torch.manual_seed(4)
        losses.append(models.train(model, kind(model.parameters(), lr=1e-2), 2))
    assert losses[0] == losses[1]


def test_weights_that_the_files_lack_are_initialised(folder):
    path = saved("llama", folder, torch.float32)
    config = transformers.LlamaConfig(**models.SIZES, num_labels=3)
    torch.manual_seed(8)
    plain = transformers.LlamaForSequenceClassification.from_pretrained(path, config=config)
    torch.manual_seed(8)
    with Init(nvme=folder, host_memory="128KiB"):
        ours = transformers.LlamaForSequenceClassification.from_pretrained(path, config=config)
    assert differences(dict(plain.named_parameters()), masters(ours)) == []
    assert float(plain.score.weight.detach().std()) > 0


def test_several_parameters_of_a_module_lie_in_one_unit(folder):
    path = saved("gpt2", folder, torch.float32)
    with Init(nvme=folder, host_memory="128KiB"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    with Init(nvme=folder, host_memory="128KiB"):
        built = models.MODELS["gpt2"]()
    assert [unit.name for unit in engine_of_model(loaded).units] == [
        unit.name for unit in engine_of_model(built).units
    ]


def test_parameters_that_never_get_values_are_named(folder):
    with (
        pytest.raises(UnsupportedError, match=r"3 parameters.*meta.*: 0.weight, 0.bias, 1.weight"),
        Init(nvme=folder),
    ):
        model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, bias=False, device="meta"))
    assert model[0].weight.is_meta
    with pytest.raises(UnsupportedError, match=r"12 parameters.*9.weight and 2 more"), Init(nvme=folder):
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False, device="meta") for _ in range(12)))


@pytest.mark.parametrize("how", ["cut", "another format"])
def test_a_file_that_is_cut_or_of_another_format_is_named(folder, how):
    path = saved("llama", folder, torch.bfloat16)
    shard = max(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100] if how == "cut" else b"hello" * 100)
    with (
        pytest.raises(TensorFileError, match=rf"{shard}: .* or was cut: {shard.stat().st_size} B"),
        Init(nvme=folder, host_memory="128KiB", frozen=True),
    ):
        transformers.AutoModelForCausalLM.from_pretrained(path)


def test_a_shard_that_the_index_names_and_is_not_there_is_named(folder):
    path = saved("llama", folder, torch.bfloat16)
    shard = max(path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(OSError, match=shard.name), Init(nvme=folder, host_memory="128KiB", frozen=True):
        transformers.AutoModelForCausalLM.from_pretrained(path)


def test_a_setting_of_transformers_is_put_back(monkeypatch):
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    monkeypatch.delenv(name, raising=False)
    with loading_in_order():
        assert os.environ[name] == "1"
    assert name not in os.environ
    monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="x"), loading_in_order():
        raise ValueError("x")
    assert os.environ[name] == "0"
    with pytest.raises(RuntimeError, match="x"), Init(host_memory="16MiB"):
        raise RuntimeError("x")
    assert os.environ[name] == "0"


def resident_nbytes_of(path):
    """Return the bytes in memory of the mappings of a file."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].endswith(":"):
            found += 1024 * int(line.split()[1]) if here and line.startswith("Rss:") else 0
        else:
            here = line.endswith(str(path))
    return found


def test_a_part_of_a_mapped_file_that_was_taken_in_leaves_memory(folder):
    mapped, path = Mapped(), (folder / "w.safetensors").resolve()
    save_file({"w": torch.arange(8 << 20, dtype=torch.float32)}, path)
    with safe_open(path, framework="pt") as file:
        values = file.get_slice("w")[...]
        copy = values.clone()
        before = resident_nbytes_of(path)
        mapped.taken(1000)
        assert before - resident_nbytes_of(path) < 1 << 20
        mapped.taken(32 << 20)
        assert before - resident_nbytes_of(path) > 30 << 20
        assert torch.equal(values, copy)


def test_what_was_mapped_before_and_ordinary_memory_stay(monkeypatch):
    mapped = Mapped()
    kept = torch.zeros(64 << 20)
    monkeypatch.setattr(pretrained.ctypes, "c_void_p", None)  # any request would fail
    mapped.page_out()
    assert not kept.any()


def test_what_was_changed_in_a_mapped_file_stays(folder):
    save_file({"w": torch.zeros(8 << 20)}, folder / "w.safetensors")
    mapped = Mapped()
    with safe_open(folder / "w.safetensors", framework="pt") as file:
        values = file.get_slice("w")[...]
        values[5] = 3.0
        mapped.page_out()
        assert values[5] == 3.0
        assert not values[6:].any()
