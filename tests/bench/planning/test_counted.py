"""Activations counted without memory beside those of real steps. Real: transformers."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from infinity.bench.planning.counted import UncountedError, activations_of
from infinity.bench.planning.live_tensors import LiveTensors
from infinity.bench.planning.meta import counted_outline
from infinity.planning.activations import Method, usage
from infinity.planning.architectures import outline_of_config

GPT2 = {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 512}
GEMMA = {
    "model_type": "gemma2",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 512,
}
LLAMA = {**GEMMA, "model_type": "llama"}
pytestmark = pytest.mark.filterwarnings("ignore")


def real_peak(content, batch, sequence, *, checkpointing):
    """Peak bytes of the second of two steps, weights and their gradients apart."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in content.items() if key != "model_type"}
    config = AutoConfig.for_model(content["model_type"], **sizes, use_cache=False)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    for _ in range(2):
        live = LiveTensors([*model.parameters(), *model.buffers(), ids])
        with live:
            model(input_ids=ids, labels=ids).loss.backward()
    return live.peak_nbytes


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("content", [GPT2, GEMMA], ids=["gpt2", "gemma2"])
def test_a_family_that_plan_does_not_know_is_counted_as_a_real_step_takes(content, checkpointing):
    outline = counted_outline(content, "config.json", "x")
    assert outline.uncounted == ""
    planned = usage(outline.activations, Method(2 * 96, 96, checkpointing=checkpointing), 2)
    got = real_peak(content, 2, 96, checkpointing=checkpointing)
    assert planned.peak_nbytes == pytest.approx(got, rel=0.1)


def test_what_is_counted_of_a_known_family_is_what_its_formula_says():
    counted, known = counted_outline(LLAMA, "config.json", "x"), outline_of_config("x", LLAMA)
    method = Method(2048, 1024, checkpointing=False)
    peaks = [usage(one.activations, method, 2).peak_nbytes for one in (counted, known)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


def test_a_model_that_cannot_be_counted_says_why():
    with torch.device("meta"):
        plain = nn.Linear(4, 4)
    with pytest.raises(UncountedError, match="vocab_size"):
        activations_of(plain, [])

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.config = AutoConfig.for_model("llama")

        def forward(self, input_ids, labels, use_cache):
            return self.blocks[0](input_ids.float()) if input_ids.sum().item() else None

    with torch.device("meta"):
        looks = Looks()
    with pytest.raises(UncountedError, match="without values failed"):
        activations_of(looks, list(looks.blocks))
