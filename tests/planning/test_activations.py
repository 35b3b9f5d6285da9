"""Planned activations beside those of real steps, counted tensor by tensor. Real: transformers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infinity.bench.planning.live_tensors import LiveTensors
from infinity.planning.activations import Method, usage
from infinity.planning.architectures import outline_of_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
QWEN = {"model_type": "qwen3", "head_dim": 48}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FAMILIES = {
    "llama": {},
    "qwen3": QWEN,
    "mixtral": {"model_type": "mixtral", **MOE},
    "qwen3_moe": {"model_type": "qwen3_moe", "moe_intermediate_size": 64, **MOE, "num_experts": 4},
    "gpt_oss": {"model_type": "gpt_oss", "intermediate_size": 128, "head_dim": 32, **MOE},
    "deepseek_v3": DEEPSEEK,
}


def built(content, dtype=torch.bfloat16):
    torch.manual_seed(0)
    sizes = {key: value for key, value in content.items() if key != "model_type"}
    config = AutoConfig.for_model(content["model_type"], **sizes, use_cache=False)
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    return model


def counted(model, batch, sequence):
    """Peak bytes of the second of two steps, weights and their gradients apart."""
    ids = torch.randint(0, model.config.vocab_size, (batch, sequence))
    for _ in range(2):
        live = LiveTensors([*model.parameters(), *model.buffers(), ids])
        with live:
            model(input_ids=ids, labels=ids).loss.backward()
    return live.peak_nbytes


def planned(content, batch, sequence, width=2, **method):
    outline = outline_of_config("x", content)
    return usage(outline.activations, Method(batch * sequence, sequence, **method), width)


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_takes_the_activations_that_were_planned(name, checkpointing):
    content = {**LLAMA, **FAMILIES[name]}
    model = built(content)
    if checkpointing:
        checkpointed(model)
    got = counted(model, 2, 192)
    assert planned(content, 2, 192, checkpointing=checkpointing).peak_nbytes == pytest.approx(got, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_in_fp32_does_so_too(checkpointing):
    model = built(LLAMA, torch.float32)
    if checkpointing:
        checkpointed(model)
    got = counted(model, 2, 192)
    told = planned(LLAMA, 2, 192, width=4, checkpointing=checkpointing)
    assert told.peak_nbytes == pytest.approx(got, rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_with_many_logits_takes_those_that_were_planned(checkpointing):
    content = {**LLAMA, "vocab_size": 8192}
    model = built(content)
    if checkpointing:
        checkpointed(model)
    told = planned(content, 2, 128, checkpointing=checkpointing)
    assert told.logits_nbytes > told.block_nbytes
    assert told.peak_nbytes == pytest.approx(counted(model, 2, 128), rel=0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ranks_that_share_a_sequence_keep_their_part_of_what_one_rank_keeps(checkpointing):
    model = outline_of_config("x", LLAMA).activations
    whole = usage(model, Method(4096, 2048, checkpointing=checkpointing), 2)
    part = usage(model, Method(1024, 2048, checkpointing=checkpointing, sequence_parallel=4), 2)
    assert part.peak_nbytes == pytest.approx(whole.peak_nbytes / 4, rel=1e-6)
    assert part.inputs_nbytes == whole.inputs_nbytes // 4
