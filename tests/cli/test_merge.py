"""`infinity merge`. Trusted: PEFT's merge_and_unload and save_pretrained in memory."""

import argparse
import json

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file

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


@pytest.mark.parametrize("key", ["modules_to_save", "trainable_token_indices"])
def test_adapters_with_trained_copies_are_refused_before_anything_is_read(folder, key):
    for name in ("base", "adapter"):
        (folder / name).mkdir()
    (folder / "base" / "config.json").write_text("{}")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({key: [1]}))
    with pytest.raises(ConfigError, match=f"{key}.*the command merges adapters alone"):
        run(folder / "base", folder / "adapter", folder / "merged")
