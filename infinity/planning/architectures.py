"""Outlines of well-known language models of Hugging Face, read from what their config.json says. Pure:
neither torch nor transformers, no I/O.

[Note: what a block keeps]
The figures of activations are those of transformers' own code for bf16, counted tensor by tensor: per
token, a norm keeps its input in fp32, the normalized values and its output; attention keeps queries, keys,
values and its output; a gated MLP keeps four tensors of its intermediate width. The parts of experts are
kept for each expert that a token is routed to. A test counts them on real models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.planning.activations import Activations, KeptOfToken
from infinity.planning.outline import Outline, Stage, UnitOutline

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Block:
    """The units of one block: in the order in which its modules are registered, and as its forward uses them;
    and what it keeps of a token.
    """

    parts: list[UnitOutline] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    kept: KeptOfToken = field(default_factory=KeptOfToken)

    def add(self, name: str, *shapes: tuple[int, ...], **more: Any) -> None:
        """Add a unit that is used after those before it."""
        self.parts.append(UnitOutline(name, shapes, **more))
        self.order.append(name)

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False, **more: Any) -> None:
        """Add a linear layer."""
        shapes: Shapes = ((rows, columns), (rows,)) if bias else ((rows, columns),)
        self.add(name, *shapes, **more)

    def use_before(self, name: str, other: str) -> None:
        """Note that `name` is used right before `other`, whenever it is registered."""
        self.order.remove(name)
        self.order.insert(self.order.index(other), name)


class _UnusualError(Exception):
    """A config.json says what is not known here."""


class _Numbers:
    """What a config.json says."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.hidden = self("hidden_size")
        self.heads = self("num_attention_heads")
        self.kv_heads = self("num_key_value_heads", self.heads)
        self.head = self("head_dim", self.hidden // self.heads)
        self.layers = self("num_hidden_layers")
        self.vocabulary = self("vocab_size")
        self.intermediate = self("intermediate_size")
        if self.heads % self.kv_heads or (content.get("head_dim") is None and self.hidden % self.heads):
            raise _UnusualError

    def __call__(self, name: str, default: int | None = None) -> int:
        """Return a number; `default` where it is absent or null."""
        value = self._content.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _UnusualError
        return value

    def given(self, *names: str) -> int:
        """Return the number that goes by one of these names."""
        return self(next((name for name in names if self._content.get(name) is not None), names[0]))

    def says(self, name: str, *, default: bool = False) -> bool:
        """Whether something is switched on."""
        value = self._content.get(name)
        return default if value is None else bool(value)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer of a Qwen3 with experts has none."""
        dense = self._content.get("mlp_only_layers") or ()
        return layer in dense or (layer + 1) % self("decoder_sparse_step", 1) > 0


def outline_of_config(name: str, content: Mapping[str, Any]) -> Outline | None:
    """Return the outline of what a config.json of Hugging Face describes, blocks recomputed; None for a type
    of model that is not known here, or a file that says something unusual of it.
    """
    kind = str(content.get("model_type"))
    head, block = _KINDS.get(kind, ("", None))
    if block is None or content.get("architectures") not in (None, [], [head]):
        return None
    try:
        numbers = _Numbers(content)
        blocks = [block(numbers, layer) for layer in range(numbers.layers)]
    except _UnusualError:
        return None
    hidden, vocabulary = numbers.hidden, numbers.vocabulary
    parts = [UnitOutline("model.embed_tokens", ((vocabulary, hidden),), looked_up=True)]
    stages = [Stage((0,))]
    for layer, built in enumerate(blocks):
        place = {part.name: len(parts) + number for number, part in enumerate(built.parts)}
        parts += [replace(part, name=f"model.layers.{layer}.{part.name}") for part in built.parts]
        stages.append(Stage(tuple(place[one] for one in built.order), recomputed=True))
    norm = len(parts)
    parts.append(UnitOutline("model.norm", ((hidden,),)))
    if not numbers.says("tie_word_embeddings"):
        parts.append(UnitOutline("lm_head", ((vocabulary, hidden),)))
        stages.append(Stage((norm, norm + 1)))
    else:
        parts[0] = replace(parts[0], looked_up=False)  # as the head it computes, and its gradient needs it
        stages.append(Stage((norm, 0)))
    kept = Activations(hidden, vocabulary, tuple(built.kept for built in blocks))
    return Outline(name, tuple(parts), tuple(stages), kept)


# Blocks


def _llama(numbers: _Numbers, _layer: int, *, norms: bool = False, bias: bool | None = None) -> _Block:
    """Return a block of Llama, and of the many like it. norms: of queries and keys; bias: of the projections
    to these and to values, None for what "attention_bias" says of all four.
    """
    block = _Block()
    _attention(block, numbers, norms=norms, bias=bias)
    _mlp(block, numbers, "mlp", numbers.intermediate, bias=numbers.says("mlp_bias"))
    return _with_norms(block, numbers)


def _mixtral(numbers: _Numbers, _layer: int) -> _Block:
    block = _Block()
    _attention(block, numbers)
    experts, width = numbers("num_local_experts", 8), numbers.intermediate
    block.add("mlp.gate", (experts, numbers.hidden))
    _experts(block, numbers, experts, width)
    return _with_norms(block, numbers)


def _qwen3_moe(numbers: _Numbers, layer: int) -> _Block:
    if numbers.is_dense(layer):
        return _llama(numbers, layer, norms=True)
    block = _Block()
    _attention(block, numbers, norms=True)
    experts = numbers.given("num_experts", "num_local_experts")
    _experts(block, numbers, experts, numbers("moe_intermediate_size"), wide_scores=False)
    block.add("mlp.gate", (experts, numbers.hidden))
    block.use_before("mlp.gate", "mlp.experts")
    return _with_norms(block, numbers)


def _gpt_oss(numbers: _Numbers, _layer: int) -> _Block:
    """Attention with sinks, which transformers computes with all scores in memory."""
    block = _Block()
    hidden, width = numbers.hidden, numbers.intermediate
    block.add("self_attn", (numbers.heads,))
    _attention(block, numbers, bias=numbers.says("attention_bias", default=True), output_bias=True)
    scores = _SCORES * numbers.heads
    block.kept += KeptOfToken(narrow=2 * numbers.heads * numbers.head, pairs=scores, pairs_beside=scores)
    experts = numbers.given("num_local_experts", "num_experts")
    block.add("mlp.router", (experts, hidden), (experts,))
    _experts(block, numbers, experts, width, transposed=True, wide_scores=False)
    return _with_norms(block, numbers)


_SCORES = 2
"""Tensors of one number for each pair of tokens and head, which attention with sinks keeps."""
_SCORES_ON_CPU = 2


def _deepseek_v3(numbers: _Numbers, layer: int) -> _Block:
    """Multi-head latent attention; experts from `first_k_dense_replace` on, beside shared ones."""
    block = _Block()
    hidden, heads = numbers.hidden, numbers.heads
    rope, nope, values = (
        numbers(f"{name}_head_dim", default)
        for name, default in (("qk_rope", 64), ("qk_nope", 128), ("v", 128))
    )
    rank, bias = numbers("kv_lora_rank", 512), numbers.says("attention_bias")
    queries = heads * (rope + nope)
    if numbers.says("q_lora_rank"):
        low = numbers("q_lora_rank")
        block.linear("self_attn.q_a_proj", low, hidden, bias=bias)
        block.add("self_attn.q_a_layernorm", (low,))
        block.linear("self_attn.q_b_proj", queries, low)
        block.kept += _norm(low)
    else:
        block.linear("self_attn.q_proj", queries, hidden)
    block.linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
    block.add("self_attn.kv_a_layernorm", (rank,))
    block.linear("self_attn.kv_b_proj", heads * (nope + values), rank)
    work = heads * (rope + nope + values) // 2
    block.linear("self_attn.o_proj", hidden, heads * values, bias=bias, attention=work)
    # Values lie within what they were projected with; where they are not as wide as keys, attention on the
    # CPU keeps scores.
    block.kept += _norm(rank) + KeptOfToken(narrow=2 * queries + heads * (nope + 3 * values), wide=heads)
    if rope + nope != values:
        block.kept += KeptOfToken(pairs_on_cpu=_SCORES_ON_CPU * heads)
    if layer < numbers("first_k_dense_replace", 3):
        _mlp(block, numbers, "mlp", numbers.intermediate)
    else:
        experts = numbers.given("n_routed_experts", "num_local_experts")
        width = numbers("moe_intermediate_size", 2048)
        _experts(block, numbers, experts, width)
        block.add("mlp.gate", (experts, hidden))
        block.use_before("mlp.gate", "mlp.experts")
        block.kept += KeptOfToken(wide=hidden + 3 * experts)
        _mlp(block, numbers, "mlp.shared_experts", width * numbers("n_shared_experts", 1))
    return _with_norms(block, numbers)


_KINDS: Mapping[str, tuple[str, Callable[[_Numbers, int], _Block]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": ("MistralForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", lambda numbers, layer: _llama(numbers, layer, bias=True)),
    "qwen3": ("Qwen3ForCausalLM", lambda numbers, layer: _llama(numbers, layer, norms=True)),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
}
"""Types of models, by "model_type": the class that has to be named, if one is, and its blocks."""


# Parts of blocks


def _norm(width: int) -> KeptOfToken:
    return KeptOfToken(narrow=2 * width, wide=width + 1)


def _with_norms(block: _Block, numbers: _Numbers) -> _Block:
    """Add the two norms, which are registered last, and run before what they scale."""
    first = block.order[0]
    behind = next(name for name in block.order if name.startswith("mlp."))
    for name, other in (("input_layernorm", first), ("post_attention_layernorm", behind)):
        block.add(name, (numbers.hidden,))
        block.use_before(name, other)
        block.kept += _norm(numbers.hidden)
    return block


def _attention(
    block: _Block,
    numbers: _Numbers,
    *,
    norms: bool = False,
    bias: bool | None = None,
    output_bias: bool | None = None,
) -> None:
    hidden, head = numbers.hidden, numbers.head
    queries, keys = numbers.heads * head, numbers.kv_heads * head
    every = numbers.says("attention_bias")
    own = every if bias is None else bias
    for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
        block.linear(f"self_attn.{letter}_proj", rows, hidden, bias=own)
    of_output = (every if bias is None else False) if output_bias is None else own
    block.linear("self_attn.o_proj", hidden, queries, bias=of_output, attention=queries)
    block.kept += KeptOfToken(narrow=2 * queries + 2 * keys, wide=numbers.heads)
    if norms:
        for letter, other in (("q", "self_attn.k_proj"), ("k", "self_attn.v_proj")):
            block.add(f"self_attn.{letter}_norm", (head,))
            block.use_before(f"self_attn.{letter}_norm", other)
        both = numbers.heads + numbers.kv_heads
        block.kept += KeptOfToken(narrow=both * head, wide=both * head + both)


def _mlp(block: _Block, numbers: _Numbers, name: str, width: int, *, bias: bool = False) -> None:
    for one in ("gate_proj", "up_proj"):
        block.linear(f"{name}.{one}", width, numbers.hidden, bias=bias)
    block.linear(f"{name}.down_proj", numbers.hidden, width, bias=bias)
    block.kept += KeptOfToken(narrow=4 * width, gated=width, mlp=4 * width)


def _experts(
    block: _Block,
    numbers: _Numbers,
    experts: int,
    width: int,
    *,
    transposed: bool = False,
    wide_scores: bool = True,
) -> None:
    """Add experts in one unit, of which a token uses `num_experts_per_tok`. wide_scores: whether what they
    return is weighted by fp32 scores, which makes fp32 copies.
    """
    hidden, routed = numbers.hidden, numbers("num_experts_per_tok")
    shapes: Shapes = ((experts, 2 * width, hidden), (experts, hidden, width))
    if transposed:
        shapes = (
            *((experts, hidden, 2 * width), (experts, 2 * width)),
            *((experts, width, hidden), (experts, hidden)),
        )
    returned = (14 if wide_scores else 6) * hidden
    block.add("mlp.experts", *shapes, active=routed / experts)
    block.kept += routed * KeptOfToken(
        narrow=4 * width + 2 * hidden, wide=10, gated=width, returned=returned, mlp=4 * width
    )
    block.kept += KeptOfToken(wide=experts + 11)


def llama(name: str, layers: int, hidden: int, intermediate: int, vocabulary: int) -> Outline:
    """Return the outline of a LlamaForCausalLM of transformers in heads of 128, embeddings not tied."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    heads = hidden // 128 if hidden % 128 == 0 else 1
    kind = {"model_type": "llama", "vocab_size": vocabulary, "num_attention_heads": heads}
    outline = outline_of_config(name, {**sizes, **kind})
    if outline is None:
        raise ValueError(f"{name}: {sizes} describe no Llama: expected whole numbers, at least 1")
    return outline
