"""Tiny models for sequences in parts, the whole batches that they train on, and Ulysses' arithmetic once
more, in a few plain lines of one process.
"""

from types import SimpleNamespace

import torch
import transformers
from torch.nn import functional as F

from infinity.sequences.attention import sdpa

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"num_key_value_heads": 8}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {"head_dim": 8}),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, EXPERTS),
    "gpt-oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig,
        {**EXPERTS, "head_dim": 8, "sliding_window": 6},
    ),
}
"""By name: class, its configuration's, and what differs from SIZES."""


def model_of(name, **more):
    """Build a model, in fp32, from the generator's state."""
    kind, config, own = MODELS[name]
    return kind(config(**{**SIZES, **own, **more}))


def batch_of(number, *, rows=2, length=16, style="labels"):
    """Return a batch of whole sequences. style: "labels" with some ignored, "packed" documents, "padded"
    rows.
    """
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(number))
    labels = ids.clone()
    labels[0, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    if style == "packed":
        places = torch.arange(length)
        batch["position_ids"] = torch.where(places < 7, places, places - 7).expand(rows, -1)
    if style == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, length - 3 :] = 0
        labels[1, length - 3 :] = -100
    return batch


class HeadsByHand(torch.autograd.Function):
    """[batch, heads, tokens / N, width] to [batch, heads of the rank, tokens, width], by slices alone."""

    @staticmethod
    def forward(ctx, group, own, count, tensor):
        ctx.group, ctx.own, ctx.count = group, own, count
        ctx.tokens = tensor.shape[2]
        everywhere = group._all((tensor, own))
        return torch.cat([one[:, own[0] : own[1]] for one, _ in everywhere], dim=2)

    @staticmethod
    def backward(ctx, gradient):
        """Each head's gradients from the ranks that had it, summed in fp32 in their order."""
        everywhere = ctx.group._all((gradient, ctx.own))
        start = ctx.group.rank * ctx.tokens
        sums = [None] * ctx.count
        for one, (first, last) in everywhere:
            for head in range(first, last):
                part = one[:, head - first, start : start + ctx.tokens].float()
                sums[head] = part if sums[head] is None else sums[head] + part
        return None, None, None, torch.stack(sums, 1).to(gradient.dtype)


class TokensByHand(torch.autograd.Function):
    """[batch, tokens, heads / N, width] to [batch, tokens / N, heads, width], by slices alone."""

    @staticmethod
    def forward(ctx, group, tensor):
        ctx.group, ctx.heads = group, tensor.shape[2]
        tokens = tensor.shape[1] // group.size
        start = group.rank * tokens
        return torch.cat([one[:, start : start + tokens] for one in group._all(tensor)], dim=2)

    @staticmethod
    def backward(ctx, gradient):
        start = ctx.group.rank * ctx.heads
        return None, torch.cat(
            [one[:, :, start : start + ctx.heads] for one in ctx.group._all(gradient)], dim=1
        )


def attention_by_hand(group):
    """Return a function of transformers' attention interface: causal, for the ranks of `group`. With sinks
    it attends as the library does, which has its own test.
    """

    def attend(module, query, key, value, _mask, *, scaling, s_aux=None, sliding_window=None, **_):
        heads, keys = query.shape[1], key.shape[1]
        mine = heads // group.size
        first = group.rank * mine
        of_key = heads // keys
        own = (first // of_key, -(-(first + mine) // of_key))
        query = HeadsByHand.apply(group, (first, first + mine), heads, query)
        key, value = (HeadsByHand.apply(group, own, keys, one) for one in (key, value))
        shared = mine > own[1] - own[0]
        if s_aux is not None:
            places = torch.arange(query.shape[2])
            near = places.unsqueeze(1) - places < (sliding_window or len(places))
            mask = near.tril() if sliding_window else None
            ours = SimpleNamespace(is_causal=True, num_key_value_groups=mine // (own[1] - own[0]))
            sinks = s_aux[first : first + mine]
            out, _ = sdpa(ours, query, key, value, mask, s_aux=sinks, scaling=scaling)
            return TokensByHand.apply(group, out), None
        out = F.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True, enable_gqa=shared
        )
        return TokensByHand.apply(group, out.transpose(1, 2).contiguous()), None

    return attend
