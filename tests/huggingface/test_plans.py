"""Models of transformers that are divided by their own plans: what needs no ranks. Those are real, in
tests/ranks/test_meshes.py. Trusted: transformers' own static cache. Faked: that the model was divided.
"""

import pytest

from infinity.huggingface import plans

transformers = pytest.importorskip("transformers")


def test_a_static_cache_for_a_prompt_in_chunks_holds_the_heads_of_one_rank():
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16,
    )
    model = transformers.LlamaForCausalLM(config)
    plans.hold_own_heads(model, 2)
    cache = model._prepare_static_cache("static", 3, 16, 5, {})
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(3, 2, 16, 4)] * 2
    assert model.tp_size is None, "a Trainer takes it for a mesh of its own"
