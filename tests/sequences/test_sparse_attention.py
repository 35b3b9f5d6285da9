"""Sparse attention. Trusted: dense attention with the same mask, given by hand; sequences.sparse_layouts,
which is tested for itself.
"""

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import create_mask

import infinity
import models
from covers import matrix
from infinity import ConfigError, UnsupportedError
from infinity.engine.engine import engine_of_model
from infinity.sequences.sparse_layouts import DEFAULTS

pytestmark = pytest.mark.usefixtures("repeatable")

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, **changes}
    )
    return transformers.LlamaForCausalLM(config)


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=32)
    return transformers.BertForMaskedLM(config).eval()


def dense(layout, tokens, block=2):
    """Return a layout's mask, token by token."""
    whole = layout.repeat_interleave(block, 1).repeat_interleave(block, 2)
    return whole[:, :tokens, :tokens]


@pytest.mark.parametrize(
    *matrix(
        mode=tuple(DEFAULTS), make=(llama, bert), by_head=(False, True), padded=(False, True), tokens=(16, 13)
    )
)
def test_outputs_and_gradients_are_those_of_dense_attention_with_the_same_mask(
    mode, make, by_head, padded, tokens
):
    ids = models.batch(0, rows=3, length=tokens)
    padding = torch.ones(3, tokens, dtype=torch.bool)
    if padded:
        padding[0, :4] = padding[2, :1] = False
    model = make()
    sparse = infinity.SparseAttention(model, mode, block=2, different_layout_per_head=by_head)
    given = {"attention_mask": padding.long()} if padded else {}
    found = model(input_ids=ids, labels=ids, **given)
    found.loss.backward()
    grads = [one.grad.clone() for one in model.parameters()]
    sparse.remove()
    model.zero_grad()
    mask = dense(sparse.blocks(tokens), tokens) & padding[:, None, None, :]
    if make is llama:
        mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    expected = model(input_ids=ids, labels=ids, attention_mask=mask)
    expected.loss.backward()
    assert torch.equal(found.logits, expected.logits)
    assert all(torch.equal(one, other.grad) for one, other in zip(grads, model.parameters(), strict=True))
    assert (mode == "dense") == torch.equal(found.logits, model(input_ids=ids, **given).logits)


@pytest.mark.parametrize("settings", [{"host_memory": "64MiB"}, {"host_memory": "1MiB", "nvme": True}])
def test_an_offloaded_model_trains_with_the_bits_of_the_same_attention_in_memory(folder, settings):
    init = {**settings, **({"nvme": str(folder)} if settings.get("nvme") else {})}
    found = []
    for given in ({}, init):
        model = models.build("llama", **given)
        kind = infinity.AdamW if given else infinity.reference.ReferenceAdamW
        optimizer = kind(model.parameters(), lr=1e-2)
        models.checkpointed(model, reentrant=False)
        infinity.SparseAttention(model, "bigbird", block=2, different_layout_per_head=True)
        found.append((models.train(model, optimizer, 3, accumulate=2), model, optimizer))
    (losses, plain, reference), (ours, model, optimizer) = found
    assert ours == losses
    models.assert_same_state(model, optimizer, plain, reference)
    engine_of_model(model).close()


def test_the_function_for_flex_attention_says_what_the_mask_of_a_cpu_says():
    sparse = infinity.SparseAttention(llama(), "bslongformer", block=4, global_block_indices=[2])
    layout = sparse.blocks(20)
    made = create_mask(sparse.pattern(layout[0]), 1, 1, 20, 20, device="cpu")
    assert torch.equal(made[0], dense(layout, 20, block=4))
    assert sparse.share(20) == pytest.approx(float(layout.float().mean()))


@pytest.mark.parametrize("options", [{"mode": "sliding"}, {"mode": "bigbird", "attention": "unidirectional"}])
def test_generating_with_a_cache_attends_as_a_forward_of_all_tokens_does(options):
    model, prompt = llama().eval(), models.batch(0, rows=2, length=7)
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
    infinity.SparseAttention(
        model, **options, block=2, different_layout_per_head=options["mode"] == "bigbird"
    )
    found = model.generate(prompt, max_new_tokens=12, do_sample=False)
    again = model.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=False)
    assert torch.equal(found, again)
    assert not torch.equal(found, plain)


def test_documents_in_one_row_stay_apart():
    ids = models.batch(0, rows=1)
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    model = llama()
    sparse = infinity.SparseAttention(model, "sliding", block=4)
    found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    sparse.remove()
    mask = dense(sparse.blocks(16), 16, block=4) & torch.ones(16, 16, dtype=torch.bool).tril()
    mask[:, 6:, :6] = False
    expected = model(input_ids=ids, position_ids=positions, attention_mask=mask[None], use_cache=False).logits
    assert torch.equal(found, expected)


def test_layers_may_leave_tokens_out_as_well():
    model = llama(num_hidden_layers=3).train()
    infinity.SparseAttention(model, "sliding", block=2)
    infinity.RandomLTD(model, 8, 16, steps=1, multiple=1)
    given = []
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda _, __, kwargs: given.append(kwargs["attention_mask"]), with_kwargs=True
    )
    model(input_ids=models.batch(0)).logits.sum().backward()
    assert given[0].shape == (2, 1, 8, 8)
    assert not given[0].tril(-4).any()  # the window is that of the places in the row


def test_removing_it_gives_the_model_back():
    model, ids = llama(), models.batch(0)
    before = model(input_ids=ids).logits
    sparse = infinity.SparseAttention(model, block=2)
    with pytest.raises(ConfigError, match="sparse already"):
        infinity.SparseAttention(model)
    sparse.remove()
    sparse.remove()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=ids).logits, before)
    infinity.SparseAttention(model, "dense")
    assert torch.equal(model(input_ids=ids).logits, before)


def eager():
    model = llama()
    model.set_attn_implementation("eager")
    return model


def t5():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


@pytest.mark.parametrize(
    ("make", "options", "error", "says"),
    [
        (eager, {}, UnsupportedError, 'implementation="sdpa"'),
        (t5, {}, UnsupportedError, "from a decoder to an encoder"),
        (lambda: torch.nn.Linear(2, 2), {}, UnsupportedError, "not a model of transformers"),
        (llama, {"implementation": "flash_attention_2"}, UnsupportedError, "'flash_attention_2'"),
        (
            llama,
            {"implementation": "flex_attention", "different_layout_per_head": True},
            UnsupportedError,
            "one mask for all heads",
        ),
        (llama, {"num_local_block": 2}, ConfigError, "did you mean 'num_local_blocks'"),
    ],
)
def test_models_and_options_that_do_not_fit_are_refused_and_stay_as_they_are(make, options, error, says):
    model = make()
    with pytest.raises(error) as raised:
        infinity.SparseAttention(model, **options)
    assert says in str(raised.value)
    assert "sparse" not in getattr(getattr(model, "config", None), "_attn_implementation", "")


def test_a_mask_of_queries_and_keys_is_refused_where_the_layout_would_be_lost():
    model, mask = llama(), torch.ones(2, 1, 16, 16, dtype=torch.bool)
    infinity.SparseAttention(model, block=2)
    for one in (model, model.model):
        with pytest.raises(UnsupportedError, match="no layout of blocks is added"):
            one(input_ids=models.batch(0), attention_mask=mask)
        with pytest.raises(UnsupportedError, match="no layout of blocks is added"):
            one(input_ids=models.batch(0), attention_mask={"full_attention": mask})


@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_another_attention_that_the_model_is_given_is_an_error_and_not_a_dense_forward(other):
    model, ids = llama(), models.batch(0)
    sparse = infinity.SparseAttention(model, "sliding", block=2)
    expected = model(input_ids=ids).logits
    model.set_attn_implementation(other)
    for one in (model, model.model):
        with pytest.raises(UnsupportedError, match=rf"set_attn_implementation\('{other}'\).*remove\(\)"):
            one(input_ids=ids)
    sparse.remove()
    model.set_attn_implementation(other)
    model(input_ids=ids)
    infinity.SparseAttention(model, "sliding", block=2, implementation="sdpa")
    assert torch.equal(model(input_ids=ids).logits, expected)
