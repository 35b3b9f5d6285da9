"""Batch tiles for whole models. Trusted: the model untouched, and gradients accumulated by the reference
recipe."""

import copy

import pytest
import torch
from torch import nn

from allocations import Allocations
from infinity.reference import prepare
from infinity.tiling import runs_in_slices, tile_batch_, tile_loss_, untile_
from models import MODELS, batch

pytestmark = pytest.mark.usefixtures("repeatable")

HALF_ULP = 2**-8
"""Of bf16, relative to a value: half the distance to its neighbour, at most."""


def sliced(model, micro_batch):
    tile_batch_(model, micro_batch)
    return tile_loss_(model)


def gradients(model):
    return {name: one.grad.float() for name, one in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_blocks_norms_and_embeddings_are_cut_and_can_be_put_back(name):
    model = MODELS[name]()
    whole = list(model.state_dict())
    cut = tile_batch_(model, 2)
    layers = [f"model.layers.{one}" for one in range(model.config.num_hidden_layers)]
    expected = ["model.embed_tokens", *layers, "model.norm"]
    if name == "gpt2":
        layers = [f"transformer.h.{one}" for one in range(model.config.num_hidden_layers)]
        expected = ["transformer.wte", "transformer.wpe", *layers, "transformer.ln_f"]
    assert cut == expected
    assert list(model.state_dict()) == whole
    assert not any(runs_in_slices(one) for one in untile_(model).modules())


def test_a_model_of_ones_own_names_its_blocks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.LayerNorm(4))
    assert tile_batch_(model, 2, blocks=nn.Linear) == ["0", "1.0", "2"]
    with pytest.raises(ValueError, match="no block"):
        tile_batch_(nn.Sequential(nn.Linear(4, 4)), 2)
    with pytest.raises(ValueError, match="1 is a block inside the block"):
        tile_batch_(model, 2, blocks=nn.Sequential)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("micro_batches", [2, 8])
def test_gradients_are_those_accumulated_in_fp32_rounded_once(name, micro_batches, seed):
    plain = prepare(MODELS[name]())
    plain.config.use_cache = False
    ours = sliced(prepare(copy.deepcopy(plain)), 2)
    tile_loss_(plain)
    ids = batch(1, rows=2 * micro_batches, length=17)  # 16 labels each: the mean's factor is a power of 2
    loss = ours(input_ids=ids, labels=ids).loss
    loss.backward()
    total = 0.0
    sums = {}
    for part in ids.split(2):
        plain.zero_grad()
        part_loss = plain(input_ids=part, labels=part).loss / micro_batches
        part_loss.backward()
        total += part_loss.item()
        for key, grad in gradients(plain).items():
            sums[key] = sums.get(key, 0) + grad
    assert loss.item() == pytest.approx(total, rel=1e-6)
    # One product over all tokens, one sum over all samples, where accumulation rounds each micro-batch's.
    at_once = {"lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"}
    for key, grad in gradients(ours).items():
        if key in at_once:
            scale = sums[key].abs().max()
            assert (grad - sums[key]).abs().max() <= HALF_ULP * (micro_batches**0.5 + 1) * scale, key
        else:
            assert torch.equal(grad, sums[key].bfloat16().float()), key


def test_dropout_is_drawn_for_each_sample_and_is_the_same_again_in_the_backward(seed):
    model = sliced(MODELS["gpt2-dropout"]().train(), 1)
    ids = batch(1, rows=1).expand(4, -1).contiguous()
    states = model.transformer(input_ids=ids).last_hidden_state
    assert not torch.equal(states[0], states[1])
    torch.manual_seed(seed)
    model(input_ids=ids, labels=ids).loss.backward()
    again = copy.deepcopy(untile_(model))
    first = gradients(model)
    again.zero_grad()
    numbers = torch.manual_seed(seed).get_state()
    tile_batch_(again, 1)
    torch.set_rng_state(numbers)
    again(input_ids=ids, labels=ids).loss.backward()
    assert all(torch.equal(one, first[key]) for key, one in gradients(again).items())


def test_a_step_holds_one_micro_batch_and_the_boundaries():
    """Of 8 micro-batches of 1 x 64 tokens, width 32: the slope over blocks is one boundary each."""
    import transformers

    def peak(layers, rows, micro_batch):
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=256,
            num_attention_heads=2,
            num_hidden_layers=layers,
        )
        model = sliced(transformers.LlamaForCausalLM(config), micro_batch)
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        ids = torch.randint(64, (rows, 64))
        with Allocations() as counted:
            model(input_ids=ids, labels=ids).loss.backward()
        return counted.peak_nbytes

    boundary = 8 * 64 * 32 * 4
    few, many = peak(2, 8, 1), peak(6, 8, 1)
    assert 4 * boundary <= many - few <= 4 * boundary + 1000
    assert many <= peak(6, 1, 1) + (6 + 8) * boundary, "8 around the blocks: hidden states, their gradients"
    assert peak(6, 8, 8) >= many + 20 * boundary


def test_a_generation_with_a_cache_goes_on():
    model = MODELS["llama"]().eval()
    ids = batch(1, rows=2, length=4)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert torch.equal(sliced(model, 1).generate(ids, **options), expected)
