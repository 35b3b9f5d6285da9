"""Small models of transformers, built from their configs, and the loop that trains them."""

from __future__ import annotations

import functools

import torch
import transformers

from covers import examples
from infinity import AdamW, Init, tiling
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference import clip_grad_norm_ as reference_clip
from infinity.reference.moments import widened

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": examples(2, 3),  # the fixture three_layers: always three
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": examples(2, 3),
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    "gpt2-dropout": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **{**SIZES, "num_hidden_layers": 2}, num_local_experts=4, num_experts_per_tok=2
        )
    ),
}


ROUTED = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "num_experts_per_tok": 2,
}
"""Large enough that each expert is a slice of its own."""
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 192,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
OF_EXPERTS = {
    "mixtral": (transformers.MixtralConfig, {**ROUTED, "num_local_experts": 12}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**ROUTED, "num_experts": 12, "moe_intermediate_size": 192, "head_dim": 16, "mlp_only_layers": []},
    ),
    "deepseek_v3": (transformers.DeepseekV3Config, {**LATENT, "n_routed_experts": 12}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {**ROUTED, "num_local_experts": 12, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    ),
    "granitemoe": (transformers.GraniteMoeConfig, {**ROUTED, "num_local_experts": 12}),
}
"""Configurations with stacked experts, by architecture."""


def of_experts(name, implementation=None, **changes):
    """Build a small model of an architecture with experts, from seed 0."""
    kind, fields = OF_EXPERTS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**fields, **changes}))
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model


def prepared_of_experts(name, implementation=None, **changes):
    """Build one in memory, for the reference; a router that is made in fp32 computes in it."""
    model = of_experts(name, implementation, **changes)
    for module in model.modules():
        if type(module).__name__ == "DeepseekV3TopkRouter":
            prepare(module, torch.float32)
    return prepare(model)


def in_fp32(model):
    """Give a causal language model a head that was asked for in fp32, and computes in it."""
    head = model.lm_head
    model.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=False, dtype=torch.float32)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    return model


MODELS["llama with a head in fp32"] = lambda: in_fp32(MODELS["llama"]())


def prepared(name, dtype):
    """Build a model in memory, for the reference."""
    model = MODELS[name]()
    if "in fp32" in name:
        prepare(model.lm_head, torch.float32)
    return prepare(model, dtype)


COMPUTES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build(name, seed=0, computes="bf16", **init):
    """Build a model from a seed: in memory, prepared for the reference; given Init's fields, offloaded."""
    torch.manual_seed(seed)
    if not init:
        return prepared(name, COMPUTES[computes])
    with Init(**init):
        return MODELS[name]()


def batch(number, rows=2, length=16):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 64, (rows, length), generator=generator)


def checkpointed(model, reentrant):
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


def clip_norm(model, optimizer, most):
    """Clip the norm of all gradients as the recipe does, or by torch, of an offloaded model."""
    if isinstance(optimizer, ReferenceAdamW):
        reference_clip(optimizer, most)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def by_step(step, micro):
    return batch(100 * step + micro)


def by_number(step, _micro):
    return batch(step)


def train(model, optimizer, steps, accumulate=1, clip=None, schedule=None, first=0, ids_of=by_step):
    """Train a causal language model on the tokens of each step and micro-batch; return the losses."""
    losses = []
    for step in range(first, first + steps):
        for micro in range(accumulate):
            ids = ids_of(step, micro)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            clip_norm(model, optimizer, clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return losses


def named_wholes(model):
    """Yield the parameters that a model has where no layer is cut, by name: each with what it is made of."""
    for prefix, module in model.named_modules():
        cut = isinstance(module, tiling.Tiled)
        if isinstance(module, tiling.tile.Piece):
            continue
        own = {name: one.pieces() for name, one in module.wholes().items()} if cut else {}
        own |= {name: [one] for name, one in module._parameters.items() if one is not None}
        for name, pieces in own.items():
            yield f"{prefix}.{name}" if prefix else name, pieces


def assert_same_state(model, optimizer, plain, reference):
    """Compare weights, masters and moments with the reference's, bit for bit."""
    found, expected = model.state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    engine = engine_of_model(model)
    ours = {}
    for name, pieces in named_wholes(model):
        ours.setdefault(id(pieces[0]), (name, pieces))
    for (name, pieces), theirs in zip(ours.values(), plain.parameters(), strict=True):
        state = reference.state[theirs]
        if not state:
            continue
        m, v = (moment.view(theirs.shape) for moment in widened(state, reference.state_dtype))
        for field, expected in (("master", state["master"]), ("m", m), ("v", v)):
            found = [engine.parameters.read(one, [field])[0] for one in pieces]
            assert torch.equal(found[0] if len(found) == 1 else torch.cat(found), expected), f"{name}.{field}"


def both(name, optimizer, init, *, checkpoint=None, update="forward"):
    """Return (model, optimizer, schedule) offloaded, and the same in memory."""
    return offloaded(name, optimizer, init, checkpoint, update), in_memory(name, optimizer, init, checkpoint)


def offloaded(name, optimizer, init, checkpoint=None, update="forward"):
    model = _ready(build(name, **init), checkpoint)
    return _scheduled(model, AdamW(model.parameters(), **optimizer, update=update))


def in_memory(name, optimizer, init, checkpoint=None):
    """Of Init's fields only those count that say what is computed."""
    model = _ready(build(name, computes=init.get("dtype", "bf16")), checkpoint)
    state_dtype = init.get("state_dtype", "fp32")
    return _scheduled(model, ReferenceAdamW(model.parameters(), **optimizer, state_dtype=state_dtype))


def _ready(model, checkpoint):
    if checkpoint is None:
        return model.train()
    checkpointed(model, checkpoint == "reentrant")
    return model


def _scheduled(model, optimizer):
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)


@functools.cache
def trained_in_memory(
    name, optimizer, init=(), checkpoint=None, *, steps, accumulate=1, clip=None, scheduled=False
):
    """Return losses, model and optimizer of a training in memory; of one that was done before, the same.

    optimizer, init: pairs of names and values.
    """
    model, recipe, schedule = in_memory(name, dict(optimizer), dict(init), checkpoint)
    losses = train(model, recipe, steps, accumulate, clip, schedule if scheduled else None)
    return losses, model, recipe


def compare(
    name,
    optimizer,
    init,
    *,
    steps,
    checkpoint=None,
    update="forward",
    accumulate=1,
    clip=None,
    scheduled=False,
):
    """Train offloaded, and hold losses and final state against those in memory; return (model, optimizer).

    The training in memory, of a model without dropout, depends on what is computed alone, not on where what
    lies: it is done once for all budgets.
    """
    computed = tuple((field, init[field]) for field in ("dtype", "state_dtype") if field in init)
    expected, plain, recipe = trained_in_memory(
        name,
        tuple(sorted(optimizer.items())),
        computed,
        checkpoint,
        steps=steps,
        accumulate=accumulate,
        clip=clip,
        scheduled=scheduled,
    )
    model, ours, schedule = offloaded(name, optimizer, init, checkpoint, update)
    assert train(model, ours, steps, accumulate, clip, schedule if scheduled else None) == expected
    assert_same_state(model, ours, plain, recipe)
    return model, ours
