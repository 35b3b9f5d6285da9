"""Adapters merged into a base, streamed to files. Trusted: PEFT's merge_and_unload and save_pretrained in
memory, on the same weights.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import infinity
import models
import quantised
from infinity.engine.engine import engine_of_model
from launches import forked
from parity import differences
from places import SUPPORT

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # transformers 4's import
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
        "ignore:Model has `tie_word_embeddings=True`:UserWarning",
        "ignore:Already following adapters were merged:UserWarning",
    ),
]

KINDS = {
    "lora": {},
    "lora of all, with a bias": {"target_modules": "all-linear", "bias": "none", "use_rslora": True},
    "dora": {"use_dora": True},
    "with a trained head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
}


def adapted(model, *, autocast=True, **options):
    """Return a model with adapters that are no longer zero."""
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "r": 4, **options}
    torch.manual_seed(3)
    options["init_lora_weights"] = False
    return peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=autocast)


def saved(folder, **options):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**quantised.SIZES, **options})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="300kB")
    return folder


def loaded(path, nvme=None, **init):
    if nvme is None:
        return transformers.AutoModelForCausalLM.from_pretrained(path)
    with infinity.Init(nvme=str(nvme), host_memory="2MiB", frozen=True, **init):
        return transformers.AutoModelForCausalLM.from_pretrained(path)


def tensors(folder):
    """Return all tensors of a folder of Hugging Face's."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return dict(sorted(found.items()))


def merged_in_memory(model, folder):
    model.merge_and_unload().save_pretrained(folder, max_shard_size="300kB")
    return tensors(folder)


HELD_IDS = models.batch(7)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_files_have_the_bits_of_peft_in_memory(folder, kind):
    path, options = saved(folder / "base"), KINDS[kind]
    within = "modules_to_save" in options  # Init, where modules can be copied, and all is in 16 bits
    plain = adapted(loaded(path), autocast=not within, **options)
    if within:
        with infinity.Init(nvme=str(folder), host_memory="2MiB", frozen=True):
            ours = adapted(loaded(path), **options)
        for one in (plain, ours):
            head = one.base_model.model.lm_head.modules_to_save["default"].weight
            with infinity.gathered(head, write=True) if one is ours else torch.no_grad(), torch.no_grad():
                head.mul_(2)
    else:
        ours = adapted(loaded(path, folder), **options)
    infinity.save_merged(ours, folder / "ours", max_shard_size="300kB")
    assert differences(merged_in_memory(plain, folder / "theirs"), tensors(folder / "ours")) == []
    configs = [json.loads((folder / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0] == configs[1]
    with torch.no_grad():
        again = loaded(folder / "ours")
        assert torch.equal(
            again(input_ids=HELD_IDS).logits, plain.base_model.model(input_ids=HELD_IDS).logits
        )


def test_a_model_goes_on_as_it_was_with_its_base_in_its_files(folder):
    path = saved(folder / "base")
    plain, ours = adapted(loaded(path)), adapted(loaded(path, folder))
    before = ours.state_dict()
    infinity.save_merged(ours, folder / "merged")
    counted = infinity.stats(ours)
    assert counted.written_nbytes == {}
    assert all(unit.record.in_files is not None for unit in engine_of_model(ours).units)
    assert not any(unit.attached for unit in engine_of_model(ours).units)
    assert differences(before, ours.state_dict()) == []
    losses = [
        models.train(one, torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2), 2)
        for one in (plain, ours)
    ]
    assert losses[0] == losses[1]
    infinity.save_merged(ours, folder / "merged", overwrite=True)
    assert differences(merged_in_memory(plain, folder / "theirs"), tensors(folder / "merged")) == []


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_a_packed_base_is_merged_in_16_bits_where_that_was_chosen(folder, kind):
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone is seen to")
    quantised.bitsandbytes_llama(folder / "base", kind, folder / "values")
    plain, ours = adapted(loaded(folder / "values"), use_dora=True), None
    ours = adapted(loaded(folder / "base", folder), use_dora=True)
    with pytest.raises(
        infinity.UnsupportedError, match=r"self_attn.* are packed .* Choose: dtype=torch.bfloat16"
    ):
        infinity.save_merged(ours, folder / "merged")
    assert not (folder / "merged").exists()
    infinity.save_merged(ours, folder / "merged", dtype=torch.bfloat16)
    assert differences(merged_in_memory(plain, folder / "theirs"), tensors(folder / "merged")) == []
    assert "quantization_config" not in json.loads((folder / "merged" / "config.json").read_text())


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss in MXFP4"])
def test_the_attention_of_experts_is_merged_and_the_experts_are_written_as_they_are(folder, kind):
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone stacks experts")
    if kind == "mixtral":
        torch.manual_seed(1)
        sizes = {**quantised.SIZES, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
        model.to(torch.bfloat16).save_pretrained(folder / "base")
    else:
        quantised.mxfp4_gpt_oss(folder / "base")
    plain, ours = adapted(loaded(folder / "base")), adapted(loaded(folder / "base", folder))
    infinity.save_merged(ours, folder / "ours", dtype=torch.bfloat16)
    assert differences(merged_in_memory(plain, folder / "theirs"), tensors(folder / "ours")) == []
    assert "quantization_config" not in json.loads((folder / "ours" / "config.json").read_text())


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_write_the_files_of_one(folder):
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone is seen to")
    quantised.bitsandbytes_llama(folder / "base", "nf4 nested", folder / "values")
    forked(2, SUPPORT / "merged_ranks_run.py", folder)
    plain = adapted(loaded(folder / "values"), use_dora=True)
    assert differences(merged_in_memory(plain, folder / "theirs"), tensors(folder / "merged")) == []


def test_two_active_adapters_are_merged_one_after_the_other(folder):
    path = saved(folder / "base")
    pair = []
    for place in (None, folder):
        one = adapted(loaded(path, place))
        torch.manual_seed(4)
        one.add_adapter(
            "other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, use_dora=True)
        )
        one.base_model.set_adapter(["default", "other"])
        pair.append(one)
    infinity.save_merged(pair[1], folder / "ours")
    assert differences(merged_in_memory(pair[0], folder / "theirs"), tensors(folder / "ours")) == []


def test_what_cannot_be_merged_is_refused_by_name_and_nothing_changes(folder):
    path = saved(folder / "base", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no adapters of PEFT"):
        infinity.save_merged(loaded(path, folder), folder / "merged")
    ours = adapted(loaded(path, folder))
    with pytest.raises(ValueError, match=r"dtype=torch.float32: adapters are merged in torch.bfloat16"):
        infinity.save_merged(ours, folder / "merged", dtype=torch.float32)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(infinity.UnsupportedError, match=r"PROMPT_TUNING.* have no weights to merge"):
        infinity.save_merged(peft.get_peft_model(loaded(path, folder), prompts), folder / "merged")
    assert not (folder / "merged").exists()
    wrapper = ours.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(wrapper, peft.tuners.lora.Linear)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # PEFT's, of LlamaRMSNorm
@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
        lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5]),
    ],
)
def test_adapters_whose_merge_was_not_compared_are_refused_and_stay(folder, config):
    path = saved(folder / "base")
    with infinity.Init(nvme=str(folder), host_memory="4MiB", frozen=True):
        base = transformers.AutoModelForCausalLM.from_pretrained(path)
        model = peft.get_peft_model(base, config())
    before = {key: one.clone() for key, one in model.state_dict().items()}
    with pytest.raises(infinity.UnsupportedError, match=r"modules_to_save are merged here, others are not"):
        infinity.save_merged(model, folder / "merged")
    assert not (folder / "merged").exists()
    after = model.state_dict()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
