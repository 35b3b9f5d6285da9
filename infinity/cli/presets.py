"""Llama models of fixed shapes, named after their number of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 256
"""One token per byte."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A shape: `layers` blocks of width `hidden`, feed-forward width `intermediate`, heads of 64 or 128."""

    layers: int
    hidden: int
    intermediate: int
    heads: int

    @property
    def parameters(self) -> int:
        """The number of all parameters' elements; input and output embeddings are not tied."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + 2 * VOCABULARY * self.hidden + self.hidden


PRESETS = {
    "1m": Preset(layers=4, hidden=128, intermediate=384, heads=2),
    "25m": Preset(layers=8, hidden=512, intermediate=1376, heads=8),
    "125m": Preset(layers=18, hidden=768, intermediate=2048, heads=12),
    "demo": Preset(layers=24, hidden=1024, intermediate=2816, heads=16),
    "350m": Preset(layers=27, hidden=1024, intermediate=2816, heads=16),
    "750m": Preset(layers=27, hidden=1536, intermediate=4096, heads=12),
    "1.1b": Preset(layers=22, hidden=2048, intermediate=5632, heads=16),
    "3b": Preset(layers=27, hidden=3072, intermediate=8192, heads=24),
    "7b": Preset(layers=35, hidden=4096, intermediate=11008, heads=32),
    "13b": Preset(layers=41, hidden=5120, intermediate=13824, heads=40),
    "30b": Preset(layers=56, hidden=6656, intermediate=17920, heads=52),
    "70b": Preset(layers=72, hidden=8192, intermediate=28672, heads=64),
    "175b": Preset(layers=96, hidden=12288, intermediate=32768, heads=96),
    "500b": Preset(layers=157, hidden=16384, intermediate=43008, heads=128),
    "1t": Preset(layers=128, hidden=25600, intermediate=68096, heads=200),
    "10t": Preset(layers=195, hidden=65536, intermediate=174592, heads=512),
}


def llama(preset: Preset, sequence: int) -> Any:
    """Build an unmodified LlamaForCausalLM of this shape, for sequences of up to `sequence` tokens.

    Raises: ImportError where transformers is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.intermediate,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "max_position_embeddings": sequence,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**shape))


def recompute_blocks(model: Any) -> None:
    """Turn on gradient checkpointing of each block of a transformers model.

    Raises: ValueError for a model without it.
    """
    model.config.use_cache = False  # a cache for generation, of which it warns here
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:  # before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
