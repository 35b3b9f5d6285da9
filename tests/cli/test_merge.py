"""`infinity merge`. Trusted: PEFT's merge_and_unload and save_pretrained in memory."""

import argparse
import json

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file

import quantised
from infinity import ConfigError, UnsupportedError
from infinity.__main__ import main
from infinity.cli import merge
from parity import differences

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.disk,
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    ),
]


def adapters(base, folder):
    """Save adapters of a base that are no longer zero, and the base with them merged."""
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "expected")


def run(*arguments):
    parser = argparse.ArgumentParser()
    merge.add_arguments(parser)
    return merge.run(parser.parse_args([str(one) for one in arguments]), Console(quiet=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_base_and_adapters_in_folders_become_a_merged_model(folder, dtype):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**quantised.SIZES)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder / "base")
    adapters(folder / "base", folder)
    names = [str(folder / one) for one in ("base", "adapter", "merged")]
    assert main(["merge", *names, "--host-memory", "16MiB"]) == 0
    expected, found = (load_file(folder / one / "model.safetensors") for one in ("expected", "merged"))
    assert differences(expected, dict(sorted(found.items()))) == []


def test_a_packed_base_asks_for_a_choice_and_missing_folders_are_named(folder):
    quantised.bitsandbytes_llama(folder / "base", "nf4", folder / "plain")
    adapters(folder / "plain", folder)
    names = folder / "base", folder / "adapter", folder / "merged"
    if hasattr(transformers, "core_model_loading"):
        with pytest.raises(UnsupportedError, match="packed in fewer bits"):
            run(*names, "--host-memory", "16MiB")
        run(*names, "--host-memory", "16MiB", "--widen")
        expected, found = (load_file(folder / one / "model.safetensors") for one in ("expected", "merged"))
        assert differences(expected, dict(sorted(found.items()))) == []
    for base, adapter, lacks in (("nowhere", "adapter", "config.json"), ("plain", "plain", "adapter_config")):
        with pytest.raises(ConfigError, match=f"there is no {lacks}"):
            run(folder / base, folder / adapter, folder / "merged")


def test_the_type_of_weights_is_that_of_the_files_where_the_configuration_names_none(folder):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**quantised.SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")
    path = folder / "base" / "config.json"
    said = {key: one for key, one in json.loads(path.read_text()).items() if "dtype" not in key}
    path.write_text(json.dumps(said))
    adapters(folder / "base", folder)
    assert run(folder / "base", folder / "adapter", folder / "merged", "--host-memory", "16MiB") == 0
    expected, found = (load_file(folder / one / "model.safetensors") for one in ("expected", "merged"))
    assert differences(expected, dict(sorted(found.items()))) == []
    path.write_text(json.dumps({**said, "dtype": "float64"}))
    with pytest.raises(ConfigError, match="of the types float64"):
        run(folder / "base", folder / "adapter", folder / "other")


def test_adapters_of_tokens_are_refused_before_anything_is_read(folder):
    for name in ("base", "adapter"):
        (folder / name).mkdir()
    (folder / "base" / "config.json").write_text("{}")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"trainable_token_indices": [1]}))
    with pytest.raises(ConfigError, match=r"trainable_token_indices=.*single tokens are not merged here"):
        run(folder / "base", folder / "adapter", folder / "merged")


def llama(folder, **options):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**quantised.SIZES, **options})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")


def trained_whole(folder, modules):
    """Save adapters and modules that were trained whole, and the base with both."""
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    settings = {"target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings, modules_to_save=modules))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(2)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "expected")


@pytest.mark.parametrize("modules", [["lm_head", "embed_tokens"], ["0.mlp", "norm"]])
def test_modules_that_were_trained_whole_take_the_place_of_the_bases(folder, modules):
    llama(folder)
    trained_whole(folder, modules)
    assert run(folder / "base", folder / "adapter", folder / "merged", "--host-memory", "16MiB") == 0
    expected, found = (load_file(folder / one / "model.safetensors") for one in ("expected", "merged"))
    assert differences(expected, dict(sorted(found.items()))) == []
    base = load_file(folder / "base" / "model.safetensors")
    assert torch.equal(found["model.norm.weight"], base["model.norm.weight"]) != ("norm" in modules)


def test_what_an_adapters_file_lacks_or_has_in_another_shape_is_named_and_nothing_is_written(folder):
    llama(folder)
    trained_whole(folder, ["lm_head"])
    file, said = (folder / "adapter" / one for one in ("adapter_model.safetensors", "adapter_config.json"))
    tensors, key = load_file(file), "base_model.model.lm_head.weight"
    names = folder / "base", folder / "adapter", folder / "merged"
    lora = next(one for one in tensors if "lora_A" in one)
    without = [{name: one for name, one in tensors.items() if name != gone} for gone in (key, lora)]
    for others, why in (
        (without[0], r"nothing for lm_head\.weight.*the base has \[64, 256\]"),
        ({**tensors, key: tensors[key][:60].clone()}, r"\[60, 256\] for lm_head\.weight"),
        ({**tensors, "base_model.model.lm_head.other": tensors[key]}, r"lm_head\.other: neither"),
        (without[1], "lacks .*lora_A.* and 0 others"),
        (
            {**tensors, "base_model.model.model.other": tensors[key]},
            "other of its file belongs to no",
        ),
    ):
        save_file({name: one.clone() for name, one in others.items()}, file)
        with pytest.raises(ConfigError, match=why):
            run(*names, "--host-memory", "16MiB")
    said.write_text(json.dumps({**json.loads(said.read_text()), "modules_to_save": ["score"]}))
    with pytest.raises(ConfigError, match="modules_to_save='score', which no module of the base is called"):
        run(*names, "--host-memory", "16MiB")
    file.rename(folder / "adapter" / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"there is no adapter_model\.safetensors"):
        run(*names, "--host-memory", "16MiB")
    assert not (folder / "merged").exists()


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
    "ignore:Input and output embeddings are no longer tied:UserWarning",
)
def test_a_module_that_is_tied_to_one_that_was_not_trained_is_refused(folder):
    llama(folder, tie_word_embeddings=True)
    trained_whole(folder, ["embed_tokens"])
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight was trained .* ties it to lm_head\.weight"):
        run(folder / "base", folder / "adapter", folder / "merged", "--host-memory", "16MiB")
