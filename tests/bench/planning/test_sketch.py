"""Models that are described by a config.json. Real: transformers, on the meta device; nothing has values."""

import json

import pytest
from rich.console import Console

from infinity.bench.planning import hindsight, meta, sketch
from infinity.cli import main as cli
from infinity.errors import ConfigError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
MIXTRAL = {"model_type": "mixtral", "vocab_size": 128, "num_local_experts": 4, **SIZES}
MIXTRAL |= {"num_key_value_heads": 2}
LLAMA = {"model_type": "llama", "vocab_size": 128, **SIZES}


def described(folder, config, name="config.json"):
    """Write a config; its path."""
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "config.json: not valid JSON (Expecting property name"),
        ("[]", 'has no "model_type"'),
        ("{}", 'has no "model_type"'),
        ({"model_type": ["llama"]}, 'has no "model_type"'),
        ({"model_type": "nonsense"}, "\"model_type\" is 'nonsense', which transformers"),
        ({**LLAMA, "hidden_size": "wide"}, "(Validation error for field 'hidden_size': "),
        (
            {**LLAMA, "num_attention_heads": 5},
            "describes no causal language model that transformers builds (",
        ),
        ({**LLAMA, "architectures": [7]}, "describes no causal language model"),
        ({"model_type": "t5"}, "describes no causal language model"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "takes no input_ids"),
        ({**LLAMA, "architectures": ["LlamaConfig"]}, "describes no causal language model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_describes_nothing_is_refused_in_one_short_line(config, says, tmp_path):
    path = described(tmp_path, config)
    with pytest.raises(ConfigError) as caught:
        sketch.outline_of(str(path))
    told = cli.describe(caught.value)
    assert told.startswith(f"{path}: ")
    assert says in told
    assert "\n" not in told
    assert len(told) < len(str(path)) + 400


def test_a_check_of_a_broken_file_tells_its_cause_once(tmp_path):
    path = described(tmp_path, "{", "broken.json")
    with pytest.raises(ConfigError) as caught:
        hindsight.check([path], Console(quiet=True))
    told = cli.describe(caught.value)
    assert told.count("Expecting property name") == 1
    assert "cause:" not in told


def test_a_model_with_experts_is_planned_in_the_order_of_its_forward(tmp_path, caplog):
    outline = sketch.outline_of(str(described(tmp_path, MIXTRAL)))
    assert caplog.text == ""
    blocks = [stage for stage in outline.stages if stage.recomputed]
    assert len(blocks) == 2
    first, *_ = (outline.parts[unit].name for unit in blocks[0].units)
    assert first == "model.layers.0.input_layernorm", "registered last, and used first"


def test_a_model_is_outlined_in_the_type_that_a_run_computes_in(tmp_path):
    for named in ({}, {"architectures": ["LlamaForCausalLM"]}, {"dtype": "float16"}):
        model, width = meta.from_config(described(tmp_path, {**LLAMA, **named}))
        assert {str(one.dtype) for one in model.parameters()} == {"torch.bfloat16"}
        assert width == 64


def test_a_plan_is_named_after_the_file_or_the_folder_of_a_config_json(tmp_path, monkeypatch):
    folder = tmp_path / "small-llama"
    folder.mkdir()
    described(folder, LLAMA)
    assert sketch.outline_of(str(folder)).name == "small-llama"
    assert sketch.outline_of(str(folder / "config.json")).name == "small-llama"
    assert sketch.outline_of(str(described(folder, LLAMA, "wider.json"))).name == "wider"
    monkeypatch.chdir(folder)
    assert sketch.outline_of("config.json").name == "small-llama"
