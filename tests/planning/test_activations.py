"""Planned activations beside those of real steps, counted tensor by tensor. Real: transformers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from covers import matrix
from infinity.activations.cut_by_budget import position_wise
from infinity.bench.planning.live_tensors import LiveTensors
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError
from infinity.planning.activations import Method, kept_by_budget, usage
from infinity.planning.architectures import outline_of_config
from infinity.planning.recomputation import KEEP, InputTiers
from infinity.tiling import tile_loss_, tile_sequence

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


def config_of(content):
    sizes = {key: value for key, value in content.items() if key != "model_type"}
    return AutoConfig.for_model(content["model_type"], **sizes, use_cache=False)


def built(content, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(content)).to(dtype).train()
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


@pytest.mark.parametrize(*matrix(together=1, name=list(FAMILIES), checkpointing=[True, False]))
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpointing"), [("llama", False), ("llama", True), ("mixtral", True)])
def test_a_step_with_mlps_in_slices_takes_what_was_planned(name, checkpointing):
    content = {**LLAMA, **FAMILIES[name], "intermediate_size": 1024}
    model = built(content)
    if checkpointing:
        checkpointed(model)
    for one in list(position_wise(model)):
        tile_sequence(one.module, 4, one.dim)
    tile_loss_(model)
    got = counted(model, 2, 192)
    told = planned(content, 2, 192, checkpointing=checkpointing, sequence_tiles=4, loss_tiles=True)
    whole = planned(content, 2, 192, checkpointing=checkpointing, loss_tiles=True)
    assert told.peak_nbytes == pytest.approx(got, rel=0.2)
    assert told.peak_nbytes < 0.8 * whole.peak_nbytes


def test_ranks_that_hold_copies_of_inputs_keep_a_part_each_and_gather_one():
    model = outline_of_config("x", LLAMA).activations
    whole, part = (usage(model, Method(64, 64, copies=ranks), 2) for ranks in (1, 4))
    one = whole.inputs_nbytes // LLAMA["num_hidden_layers"]
    assert part.inputs_nbytes == part.kept_nbytes == whole.inputs_nbytes // 4
    assert part.block_nbytes == whole.block_nbytes + one - one // 4


def test_a_budget_is_planned_for_as_the_engine_decides_within_it():
    content, room = {**LLAMA, "intermediate_size": 704}, InputTiers(64 << 20)
    for budget, tiles in ((8 << 20, None), (7 << 20, "auto"), (16 << 20, None)):
        with infinity.Init(
            host_memory="96MiB", activation_memory=budget, sequence_tiles=tiles, loss_tiles=tiles or False
        ):
            model = AutoModelForCausalLM.from_config(config_of(content)).train()
        ids = torch.randint(0, 256, (1, 512))
        model(input_ids=ids, labels=ids).loss.backward()
        measured = engine_of_model(model).activations.decisions[-1].plan
        method = Method(512, 512, activation_nbytes=budget, sequence_tiles=tiles, loss_tiles=tiles or False)
        told = usage(outline_of_config("x", content).activations, method, 2, tiers=room)
        kept = int(told.decided.split(" ")[0])
        assert abs(kept - measured.places.count(KEEP)) <= 1
        assert told.peak_nbytes <= budget


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_that_works():
    model = outline_of_config("x", LLAMA).activations
    with pytest.raises(ConfigError, match="The smallest that works is") as error:
        usage(model, Method(4096, 4096, activation_nbytes=1 << 10), 2)
    least = int(str(error.value).split("activation_memory=")[2].split(" ")[0])
    used = usage(model, Method(4096, 4096, activation_nbytes=least), 2)
    assert used.peak_nbytes == least
    assert kept_by_budget(model, Method(4096, 4096, activation_nbytes=least), 2, gpu=False) == (False,) * 4
    assert kept_by_budget(model, Method(4096, 4096, activation_nbytes=1 << 40), 2, gpu=False) == (True,) * 4


def test_inputs_that_a_budget_sends_away_wait_in_host_memory_as_far_as_that_has_room_and_on_nvme():
    model = outline_of_config("x", {**LLAMA, "num_hidden_layers": 40}).activations
    method = Method(4096, 4096, activation_nbytes=24 << 20, loss_tiles=True, sequence_tiles="auto")
    one = 2 * 128 * 4096
    used = usage(model, method, 2, tiers=InputTiers(5 * one, nvme=True))
    assert used.leaving_nbytes - used.on_nvme_nbytes == 5 * one
    assert used.on_nvme_nbytes > 0
    assert used.peak_nbytes <= 24 << 20
