"""Config(sequence_tiles=..., loss_tiles=...): what is cut when Init ends. Nothing is faked."""

import pytest
import torch
import transformers
from torch import nn

import infinity
import models
from infinity.tiling import LogitsUsedError, runs_in_slices

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("three_layers")]


def built(make, **config):
    with infinity.Init(host_memory="16MiB", **config):
        return make()


def test_numbers_cut_every_call_and_need_no_budget():
    model = built(models.MODELS["llama"], sequence_tiles=2, loss_tiles=True)
    assert [runs_in_slices(block.mlp) for block in model.model.layers] == [True] * 3
    ids = models.batch(0)
    assert type(model(input_ids=ids, labels=ids).logits).__name__ == "Logits"


def test_of_a_mixture_the_experts_are_cut_and_the_router_is_not():
    model = built(models.MODELS["mixtral"], sequence_tiles=2)
    for block in model.model.layers:
        assert [runs_in_slices(one) for one in (block.mlp, block.mlp.gate, block.mlp.experts)] == [
            *(False, False, True)
        ]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"sequence_tiles": 0}, 'a number of slices, "auto" or None'),
        ({"sequence_tiles": True}, "sequence_tiles=True"),
        ({"sequence_tiles": "some"}, "sequence_tiles='some'"),
        ({"loss_tiles": 4}, 'loss_tiles=4: expected True, False or "auto"'),
        ({"sequence_tiles": "auto"}, 'sequence_tiles="auto" goes by the budget of activations'),
        ({"loss_tiles": "auto"}, 'loss_tiles="auto" goes by the budget of activations'),
    ],
)
def test_what_config_does_not_know_is_refused(config, said):
    with pytest.raises(infinity.ConfigError, match=said):
        infinity.Config(**config)


def test_a_number_for_a_model_without_known_mlps_or_losses_is_refused():
    for config in ({"sequence_tiles": 2}, {"loss_tiles": True}):
        with pytest.raises(infinity.UnsupportedError, match="no model of transformers"):
            built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **config)

    def classifier():
        config = transformers.LlamaConfig(**models.SIZES, num_labels=2)
        return transformers.LlamaForSequenceClassification(config)

    with pytest.raises(infinity.UnsupportedError, match="LlamaForSequenceClassification cannot make a loss"):
        built(classifier, loss_tiles=True)


def test_a_model_that_scales_its_logits_is_refused_where_no_logits_are_demanded():
    model = built(
        lambda: transformers.GraniteForCausalLM(
            transformers.GraniteConfig(**models.SIZES, logits_scaling=2.0)
        ),
        loss_tiles=True,
    )
    with pytest.raises(LogitsUsedError, match="nor with loss_tiles"):
        model(input_ids=models.batch(0), labels=models.batch(0))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_model_with_adapters_that_were_made_in_init_is_cut():
    peft = pytest.importorskip("peft")

    def adapted():
        settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
        return peft.get_peft_model(models.MODELS["llama"](), settings)

    model = built(adapted, sequence_tiles=2, loss_tiles=True)
    ids = models.batch(0)
    output = model(input_ids=ids, labels=ids)
    assert type(output.logits).__name__ == "Logits"
    output.loss.backward()
    assert [runs_in_slices(block.mlp) for block in model.get_base_model().model.layers] == [True] * 3


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_weights_that_a_backward_has_updated_are_refused(tied):
    config = transformers.LlamaConfig(**models.SIZES, tie_word_embeddings=tied)
    model = built(lambda: transformers.LlamaForCausalLM(config), loss_tiles=True)
    optimizer = infinity.AdamW(model.parameters(), lr=0.1, update="backward")
    ids = models.batch(0)
    output = model(input_ids=ids, labels=ids)
    assert output.logits.isfinite().all()
    output.loss.backward()
    optimizer.zero_grad()
    with pytest.raises(LogitsUsedError, match="weights have changed since"):
        output.logits.sum()


def test_a_model_that_is_part_of_another_module_is_cut():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = models.MODELS["llama"]()

        def forward(self, ids):
            return self.inner(input_ids=ids, labels=ids)

    wrapper = built(Wrapper, sequence_tiles=2, loss_tiles=True)
    loss = wrapper(models.batch(0)).loss
    loss.backward()
    assert torch.isfinite(loss)
