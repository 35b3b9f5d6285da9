"""Published models, read without transformers. Trusted: transformers' own on the meta device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.bench.planning.meta import from_config, outline_of_model
from infinity.planning.architectures import outline_of_config

CONFIGS = Path(__file__).parent / "configs"
PUBLISHED = {
    "llama-3-70b": (70_553_706_496, 70.6e9),
    "llama-3.1-405b": (405_853_388_800, 405.9e9),
    "qwen3-235b-a22b": (235_093_634_560, 22.2e9),
    "qwen3-30b-a3b": (30_532_122_624, 3.3e9),
    "deepseek-v3": (671_026_404_352, 37.5e9),
    "gpt-oss-120b": (116_829_156_672, 5.7e9),
    "mixtral-8x7b": (46_702_792_704, 12.9e9),
}
"""Parameters in all, and of those that are active for a token, with both embeddings."""


def content(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters_and_those_that_are_active(name):
    outline = outline_of_config(name, content(name))
    total, active = PUBLISHED[name]
    assert outline.parameters == total
    assert outline.active_parameters == pytest.approx(active, rel=0.02)


SHALLOW = {name: {"num_hidden_layers": 2} for name in PUBLISHED} | {
    "deepseek-v3": {"num_hidden_layers": 4},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_is_read_as_transformers_builds_it(name, tmp_path):
    """The same units with the same shapes, used in the same order; few layers, of full size."""
    few = {**content(name), **SHALLOW[name]}
    (tmp_path / "config.json").write_text(json.dumps(few))
    built = outline_of_model(*from_config(tmp_path / "config.json"), name=name)
    read = outline_of_config(name, few)
    assert [(one.name, one.shapes) for one in read.parts] == [(one.name, one.shapes) for one in built.parts]
    assert read.stages == built.stages


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_whole_model_has_the_parameters_that_transformers_counts(name):
    model, _ = from_config(CONFIGS / f"{name}.json")
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name][0]


@pytest.mark.parametrize("name", ["gpt-oss-120b", "mixtral-8x7b"])
def test_experts_that_a_token_is_not_routed_to_do_not_compute(name):
    outline = outline_of_config(name, content(name))
    operations = sum(part.flops(1, 1) for part in outline.parts)
    active = outline.active_parameters - outline.parts[0].numel
    assert operations == pytest.approx(2 * active, rel=0.01)


def test_what_is_unusual_is_left_to_transformers():
    usual = content("llama-3-70b")
    assert outline_of_config("x", usual) is not None
    for changes in (
        {"model_type": "gpt2"},
        {"hidden_size": "wide"},
        {"num_attention_heads": 5},
        {"vocab_size": None},
        {"architectures": ["LlamaForSequenceClassification"]},
    ):
        assert outline_of_config("x", {**usual, **changes}) is None


def test_presets_and_known_configs_are_read_without_torch():
    program = (
        "import sys; from infinity.bench.planning import plan, sketch;"
        f"sketch.outline_of('70b'); sketch.outline_of({str(CONFIGS / 'deepseek-v3.json')!r});"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
