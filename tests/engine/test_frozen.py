"""Frozen weights quantised when they are loaded. Trusted: the weights, within the stated bounds."""

import logging
import re

import pytest
import torch
import transformers

import infinity
import models
import quantised
from infinity import AdamW, Config, ConfigError, Init, reference
from infinity.engine.engine import engine_of_model

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]


def saved(path, kind=transformers.LlamaForCausalLM, config=None):
    torch.manual_seed(1)
    model = kind(config or transformers.LlamaConfig(**quantised.SIZES)).to(torch.bfloat16)
    model.save_pretrained(path)
    return model


def loaded(path, nvme, kind, host_memory="2MiB", **config):
    with Init(nvme=str(nvme), host_memory=host_memory, frozen_dtype=kind, frozen=True, **config):
        return transformers.AutoModelForCausalLM.from_pretrained(path)


def errors(plain, ours):
    """Yield (name, weight, its error) of every parameter."""
    found = ours.state_dict()
    for name, weight in plain.state_dict().items():
        yield name, weight.float(), found[name].float() - weight.float()


def test_int8_is_within_a_254th_of_the_largest_of_each_row(folder):
    plain = saved(folder / "model")
    ours = loaded(folder / "model", folder, "int8")
    for name, weight, error in errors(plain, ours):
        rounding = 2**-8 * weight.abs()
        bound = weight.abs().amax(-1, keepdim=True) / 254 * 1.001 + rounding
        assert (error.abs() <= (bound if name.endswith("proj.weight") else 0)).all(), name


def test_nf4_is_within_its_bound_of_the_largest_of_each_64(folder):
    plain = saved(folder / "model")
    ours = loaded(folder / "model", folder, "nf4")
    for name, weight, error in errors(plain, ours):
        if not name.endswith("proj.weight"):
            assert not error.any(), name
            continue
        blocks, errors_ = weight.view(-1, 64), error.view(-1, 64)
        largest = blocks.abs().amax(1)
        of_scales = (largest - largest.mean()).abs().max() / 254 * 1.001
        bound = 0.153 * largest + of_scales + 2**-8 * largest
        assert (errors_.abs() <= bound[:, None]).all(), name
        assert error.square().mean().sqrt() < 0.1 * weight.square().mean().sqrt()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_values_are_made_once_and_are_the_same_in_every_use_and_process(folder, kind, caplog):
    saved(folder / "model")
    before = {one.name: (one.stat().st_mtime_ns, one.read_bytes()) for one in (folder / "model").iterdir()}
    with caplog.at_level(logging.INFO, "infinity"):
        ours = loaded(folder / "model", folder, kind)
    assert "were quantised once" in caplog.text
    assert {
        one.name: (one.stat().st_mtime_ns, one.read_bytes()) for one in (folder / "model").iterdir()
    } == before
    assert not list(folder.glob("infinity-frozen-*"))
    written = infinity.stats(ours).written_nbytes
    assert set(written) == {("nvme", "packed")}
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    plain.load_state_dict(ours.state_dict())
    again = loaded(folder / "model", folder, kind, host_memory="64MiB")
    for number in range(3):
        expected = plain(input_ids=models.batch(number)).logits
        for one in (ours, again):
            with torch.no_grad():
                assert torch.equal(one(input_ids=models.batch(number)).logits, expected)
    assert infinity.stats(ours).written_nbytes == written
    packed = [unit.record for unit in engine_of_model(ours).units if unit.record.packed_nbytes]
    assert len(packed) == 2 * 7
    per_parameter = sum(one.packed_nbytes for one in packed) / sum(one.shard.end for one in packed)
    assert per_parameter < {"int8": 1.03, "nf4": 0.53}[kind]


def test_experts_are_quantised_and_biases_stay(folder):
    config = transformers.GptOssConfig(**quantised.GPT_OSS)
    plain = saved(folder / "model", transformers.GptOssForCausalLM, config)
    ours = loaded(folder / "model", folder, "nf4", host_memory="4MiB")
    for name, weight, error in errors(plain, ours):
        packed = "proj" in name and not name.endswith("bias") and weight.numel() >= 4096
        assert bool(error.any()) == packed, name
        assert error.square().mean().sqrt() < 0.1 * weight.square().mean().sqrt() or not packed


def test_zeros_and_what_does_not_fill_a_block_are_kept(folder):
    config = transformers.LlamaConfig(**{**quantised.SIZES, "hidden_size": 72, "intermediate_size": 90})
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    model.save_pretrained(folder / "model")
    for kind in ("int8", "nf4"):
        ours = loaded(folder / "model", folder, kind).state_dict()
        up = ours["model.layers.0.mlp.up_proj.weight"].float()
        assert up.abs().max() < 0.01 if kind == "nf4" else not up.any()
        down = model.model.layers[0].mlp.down_proj.weight.float()
        error = ours["model.layers.0.mlp.down_proj.weight"].float() - down
        assert error.square().mean().sqrt() < 0.1 * down.square().mean().sqrt()


def test_quantised_layers_that_are_trained_after_all_get_records_of_their_own_and_the_log_says_so(
    folder, caplog
):
    saved(folder / "model")
    ours = loaded(folder / "model", folder, "nf4")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    plain.load_state_dict(ours.state_dict())
    losses = []
    for model, kind in ((reference.prepare(plain), reference.ReferenceAdamW), (ours, AdamW)):
        model.requires_grad_(False)
        model.model.layers[1].requires_grad_(True)
        with caplog.at_level(logging.INFO, "infinity"):
            optimizer = kind([one for one in model.parameters() if one.requires_grad], lr=1e-3)
        losses.append(models.train(model, optimizer, 2))
    assert losses[0] == losses[1]
    said = (
        r"layers.1.self_attn.q_proj and 8 more were copied .* to records of their own, .* since AdamW trains"
    )
    assert re.search(said, caplog.text)
    assert {name for _, name in infinity.stats(ours).written_nbytes} >= {"packed", "hi", "lo"}


def test_what_cannot_be_quantised_is_refused_by_name(folder):
    with pytest.raises(ConfigError, match=r"frozen_dtype='nf4' needs a folder on NVMe"):
        Config(frozen_dtype="nf4")
    with pytest.raises(ConfigError, match=r"frozen_dtype='nf3': expected one of None, 'int8', 'nf4'"):
        Config(frozen_dtype="nf3", nvme=str(folder))
    with (
        pytest.raises(ConfigError, match=r"frozen_dtype='nf4': no weight of a linear layer .* is frozen"),
        Init(frozen_dtype="nf4", nvme=str(folder), host_memory="2MiB"),
    ):
        torch.nn.Linear(64, 64)


def test_what_is_frozen_while_the_model_is_built_is_quantised_as_what_is_loaded_frozen(folder):
    saved(folder / "model")
    expected = loaded(folder / "model", folder, "nf4").state_dict()
    with Init(nvme=str(folder), host_memory="2MiB", frozen_dtype="nf4"):
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        ours.model.layers[0].requires_grad_(False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    for name, found in ours.state_dict().items():
        frozen = name.startswith("model.layers.0.")
        assert torch.equal(found, expected[name] if frozen else plain[name]), name


def test_saving_approximations_is_said_once(folder, caplog):
    saved(folder / "model")
    ways = {
        "infinity": infinity.save_pretrained,
        "checkpoint": lambda ours, path: infinity.save(ours, None, path),
        "transformers": lambda ours, path: ours.save_pretrained(path),
    }
    for name, save in ways.items():
        caplog.clear()
        ours = loaded(folder / "model", folder, "nf4")
        for number in range(2):
            save(ours, folder / f"{name}{number}")
        said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert len([one for one in said if "layers are approximations in nf4" in one]) == 1, name
        assert "infinity merge BASE ADAPTER FOLDER" in said[0]
