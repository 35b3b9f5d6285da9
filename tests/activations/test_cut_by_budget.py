"""MLPs in slices and losses without logits where the budget asks for it. Trusted: the same model in memory,
cut by infinity.tiling's own calls, with the reference recipe; tensors counted by watching every operation.
Nothing is faked, but for the other one of two ranks.
"""

import gc
import logging

import pytest
import torch
import transformers

import infinity
import models
from allocations import Allocations
from infinity import tiling
from infinity.activations.cut_by_budget import CutByBudget, position_wise
from infinity.engine.engine import engine_of_model
from infinity.huggingface.accumulation import accumulate_by_block
from infinity.tiling.causal_lm import Logits

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

LENGTH = 600
BUDGET = 3 << 20
AUTO = {"activation_memory": BUDGET, "sequence_tiles": "auto", "loss_tiles": "auto"}
SIZES = {**models.SIZES, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 2048}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OF_GPT2 = {**models.GPT2, "n_positions": 2048, "vocab_size": 256}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **EXPERTS)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**OF_GPT2, **NO_DROPOUT)),
    "dropout": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**OF_GPT2, **{**NO_DROPOUT, "resid_pdrop": 0.1})
    ),
}
SLICES = {"llama": 8, "mixtral": 8, "gpt2": 4, "dropout": 4}


def built(folder, name="llama", **more):
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="4MiB", **{**AUTO, **more}):
        model = MODELS[name]()
    return model.train()


def in_memory(name):
    """Return the model cut by hand as the budget would have it."""
    torch.manual_seed(0)
    model = infinity.reference.prepare(MODELS[name]()).train()
    model.config.use_cache = False
    for one in list(position_wise(model)):
        tiling.tile_sequence(one.module, SLICES[name], one.dim)
    return tiling.tile_loss_(model)


def batch(number=0, length=LENGTH, rows=2):
    return torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(number))


def train(model, optimizer, lengths=(LENGTH, LENGTH)):
    torch.manual_seed(1)
    losses = []
    for number, length in enumerate(lengths):
        ids = batch(number, length)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def told(model):
    return infinity.stats(model).activations


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one == "llama" else [pytest.mark.slow]) for one in MODELS]
)
def test_a_model_trains_with_the_bits_of_one_that_is_cut_by_hand(folder, name):
    ours, plain = built(folder, name), in_memory(name)
    found = train(ours, infinity.AdamW(ours.parameters(), lr=1e-2))
    assert f"in {SLICES[name]} slices" in told(ours)
    assert "make no logits" in told(ours)
    assert found == train(plain, infinity.reference.ReferenceAdamW(plain.parameters(), lr=1e-2))
    expected = plain.state_dict()
    assert [key for key, one in ours.state_dict().items() if not torch.equal(one, expected[key])] == []


def test_a_batch_that_fits_is_not_cut_and_has_the_bits_of_the_model_as_it_is(folder):
    lengths = (60, 40, 60)
    plain, ours = built(folder, sequence_tiles=None, loss_tiles=False), built(folder)
    losses = [train(one, infinity.AdamW(one.parameters(), lr=1e-2), lengths) for one in (plain, ours)]
    assert losses[0] == losses[1]
    assert "slices" not in told(ours)
    assert "logits" not in told(ours)


@pytest.mark.parametrize(
    "lengths",
    [(LENGTH, 60), pytest.param((LENGTH, 100, LENGTH + 200, 300, LENGTH), marks=pytest.mark.slow)],
)
def test_what_is_allocated_is_within_the_budget_at_every_length(folder, lengths):
    model = built(folder)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
    beside = 2 * sum(one.numel() for one in model.parameters())  # gradients, and weights that are fetched
    engine = engine_of_model(model)
    for length in lengths:
        ids = batch(0, length)
        gc.collect()
        with Allocations() as memory:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        assert memory.peak_nbytes <= BUDGET + beside + engine.kept.held_nbytes
        del loss
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_less_is_enough_than_for_whole_mlps_and_logits(folder):
    ids = batch()
    with pytest.raises(infinity.ConfigError, match='sequence_tiles="auto"') as error:
        built(folder, activation_memory="1KiB", sequence_tiles=None, loss_tiles=False)(ids, labels=ids)
    least = int(str(error.value).split("activation_memory=")[2].split(" ")[0])
    model = built(folder, activation_memory=least * 2 // 3)
    model(input_ids=ids, labels=ids).loss.backward()


def test_evaluation_and_prefill_are_cut_too_and_logits_are_made_when_used(folder):
    model = built(folder).eval()
    ids = batch(0, 800, rows=1)
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids, use_cache=False)
        assert isinstance(output.logits, Logits)
        assert "in 4 slices" in told(model)
        assert torch.equal(output.logits.argmax(-1), model(input_ids=ids, use_cache=False).logits.argmax(-1))
    assert model.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape == (1, 802)


@pytest.mark.slow
def test_a_model_that_scales_its_logits_makes_them_and_the_log_says_so_once(folder, caplog):
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="4MiB", **{**AUTO, "activation_memory": "128MiB"}):
        config = transformers.GraniteConfig(**{**SIZES, "vocab_size": 8192}, logits_scaling=2.0)
        model = transformers.GraniteForCausalLM(config)
    ids = batch(0, 300)
    caplog.set_level(logging.WARNING, "infinity")
    expected = None
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        assert expected in (None, loss.item())
        expected = loss.item()
        loss.backward()
    assert sum("applies" in one.message for one in caplog.records) == 1


@pytest.mark.slow
def test_a_model_whose_mlps_are_not_known_is_told_and_trains(folder, caplog):
    caplog.set_level(logging.WARNING, "infinity")
    with infinity.Init(nvme=str(folder), host_memory="4MiB", **AUTO):
        config = transformers.OPTConfig(
            vocab_size=256,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=32,
        )
        model = transformers.OPTForCausalLM(config)
    assert any("has an MLP that is known" in one.message for one in caplog.records)
    ids = batch(0, 64)
    model(input_ids=ids, labels=ids).loss.backward()


def test_the_users_own_slices_are_kept_and_undone_without_undoing_the_budgets(folder):
    model = built(folder)
    tiling.tile_loss_(tiling.tile_batch_(model, 1) and model)
    ids = batch(0, 16)
    assert isinstance(model(input_ids=ids, labels=ids).logits, Logits)
    tiling.untile_(tiling.untile_loss_(model))
    assert not isinstance(model(input_ids=ids, labels=ids).logits, Logits)
    ids = batch(0)
    assert isinstance(model(input_ids=ids, labels=ids).logits, Logits)
    assert "in 8 slices" in told(model)


def test_experts_that_are_given_tokens_sorted_by_expert_are_not_cut():
    kind = transformers.Llama4TextConfig
    config = kind(**models.SIZES, intermediate_size_mlp=64, head_dim=8, num_local_experts=2, pad_token_id=0)
    with torch.device("meta"):
        assert list(position_wise(transformers.Llama4ForCausalLM(config))) == []
        assert list(position_wise(MODELS["mixtral"]())) != []


class BesideAnother:
    """One of two ranks; the other one has `tokens` in its forward."""

    size = 2
    tokens = 0

    def least(self, number, _why):
        return min(number, -self.tokens)


def test_a_recomputation_is_cut_as_its_forward_was_where_another_one_has_been_since():
    ranks = BesideAnother()
    cuts = CutByBudget(ranks, lambda _: 1 << 20)
    llama = MODELS["llama"]()
    cuts.cut_sequences(llama, experts=True)
    ids, chosen, numbers = batch(0, 8, rows=1), [], []
    for ranks.tokens in (4096, 8):
        cuts.began(ids)
        numbers.append(cuts.latest)
        chosen.append(cuts.regime(ids))
        cuts.ended()
    assert numbers == [4096, 8]
    assert chosen[0] != chosen[1]
    with cuts.as_in(numbers[0]):
        assert cuts.regime(ids) == chosen[0]
    assert cuts.regime(ids) == chosen[1]


def test_of_several_ranks_none_makes_logits_with_its_loss_in_evaluation():
    cuts = CutByBudget(BesideAnother(), lambda _: 1 << 30)
    llama = MODELS["llama"]()
    cuts.cut_loss(llama)
    ids = batch(0, 8, rows=1)
    with torch.no_grad():
        assert isinstance(llama(ids, labels=ids).logits, Logits)
    cuts.began(ids)
    assert not isinstance(llama(ids, labels=ids).logits, Logits)


@pytest.mark.slow
def test_micro_batches_that_share_a_fetch_are_cut_too(folder):
    losses = []
    for more in ({}, {"sequence_tiles": 4, "loss_tiles": True}):
        model = built(folder, **more)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        is_last = iter((False, True))
        held = accumulate_by_block(model, optimizer, lambda is_last=is_last: next(is_last))
        for number in range(2):
            ids = batch(number)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        held.undo()
        assert tiling.runs_in_slices(model.model.layers[0].mlp)
    assert losses[0] == losses[1]
