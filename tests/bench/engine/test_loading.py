"""Checkpoints with holes in the place of weights. Trusted: transformers' loading."""

import pytest

from infinity.bench.engine.loading import write_sparse

transformers = pytest.importorskip("transformers")
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 24,
}


def test_a_sparse_checkpoint_is_a_model_of_zeros(tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(write_sparse(tmp_path / "base", SHAPE))
    assert model.config.num_hidden_layers == 2
    assert not any(one.any() for one in model.parameters())
