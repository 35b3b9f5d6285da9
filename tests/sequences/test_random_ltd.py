"""Layers that leave tokens out. Trusted: the layers themselves on the tokens that are kept, plain PyTorch,
infinity.reference, and planning.kept_tokens, which is tested for itself.
"""

import copy
import functools
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
import models
from covers import matrix
from infinity import ConfigError, UnsupportedError, tiling
from infinity.engine.engine import engine_of_model
from infinity.huggingface import accumulate_by_block
from infinity.sequences.group import SequenceGroup
from infinity.sequences.parallel import SequenceParallel
from thread_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("repeatable", "three_layers")

LAYERS = {"llama": None, "gpt2-dropout": None, "mixtral": [1]}


def routed(model, name="llama", **changes):
    """Let a model's layers keep 4, then 8, 12, and all 16 tokens from the third step on."""
    numbers = {"shortest": 4, "longest": 16, "steps": 3, "multiple": 4, "layers": LAYERS[name], **changes}
    return infinity.RandomLTD(model, **numbers)


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**models.SIZES, "num_hidden_layers": 4, **changes})
    return transformers.LlamaForCausalLM(config).train()


def seen(model):
    """Note what each block is given, and what it returns."""
    found = []
    for block in model.model.layers:
        block.register_forward_hook(
            lambda _, args, kwargs, out: found.append((args[0], kwargs, out)), with_kwargs=True
        )
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_computes_on_the_kept_tokens_at_their_own_places_and_the_others_go_around_it(
    attention, padded
):
    model = llama(attn_implementation=attention)
    routed(model, shortest=8, multiple=1)
    ids, mask = models.batch(0, rows=3), torch.ones(3, 16, dtype=torch.long)
    if padded:
        mask[0, :3] = mask[2, :5] = 0
    calls = seen(model)
    model(input_ids=ids, attention_mask=mask if padded else None, use_cache=False)
    choices = []
    for number, (given, kwargs, out) in enumerate(calls):
        changed = (given != out).any(-1)
        assert changed.sum(1).tolist() == [8 if number in (1, 2) else 16] * 3
        if number not in (1, 2):
            continue
        choices.append(changed)
        for row in range(3):
            at = changed[row].nonzero().flatten()
            cos, sin = (one[0 if len(one) == 1 else row][at][None] for one in kwargs["position_embeddings"])
            causal = torch.ones(8, 8, dtype=torch.bool).tril() & (mask[row, at] != 0)
            causal |= torch.eye(8, dtype=torch.bool)  # what padding sees is nobody's concern
            bias = torch.zeros(1, 1, 8, 8).masked_fill(~causal, torch.finfo(torch.float32).min)
            block = model.model.layers[number]
            expected = type(block).forward(
                block, given[row, at][None], attention_mask=bias, position_embeddings=(cos, sin)
            )
            real = mask[row, at] != 0
            assert torch.allclose(out[row, at][real], expected[0][real], atol=1e-5)
    assert not torch.equal(*choices)  # drawn anew for each layer, and each row
    assert not torch.equal(choices[0][0], choices[0][1])


def test_every_token_is_kept_as_often_as_any_other():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(3)))
    routed(model, shortest=4, multiple=1)
    kept = []
    model[1].register_forward_hook(lambda _, args, out: kept.append(args[0] != out))
    torch.manual_seed(0)
    model(torch.randn(4000, 16, 1))
    counts = kept[0].sum(0).flatten()
    assert counts.sum() == 16_000
    assert (counts - 1000).abs().max() < 120  # four standard deviations


def losses_of(model, optimizer, ltd, steps=4, accumulate=2):
    torch.manual_seed(1)
    found = []
    for step in range(steps):
        for micro in range(accumulate):
            ids = models.batch(10 * step + micro)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        ltd.step()
    return found


SETTINGS = {
    "in memory": {"host_memory": "64MiB"},
    "on NVMe": {"host_memory": "1MiB", "nvme": True},
    "inputs on NVMe": {"host_memory": "2MiB", "nvme": True, "offload_activations": "nvme"},
    "activation_memory": {"host_memory": "64MiB", "activation_memory": "192KiB"},
}


@functools.cache
def expected(name):
    model = models.build(name)
    optimizer = infinity.reference.ReferenceAdamW(model.parameters(), lr=1e-2)
    losses = losses_of(model.train(), optimizer, routed(model, name))
    return losses, model, optimizer


@pytest.mark.parametrize(
    *matrix(
        together=1,
        name=tuple(LAYERS),
        settings=SETTINGS,
        checkpointing=(None, "reentrant", "another"),
        possible=lambda settings, checkpointing, **_: (
            "activation_memory" not in settings or not checkpointing
        ),
    )
)
def test_an_offloaded_model_trains_with_the_bits_of_the_same_layers_in_memory(
    folder, name, settings, checkpointing
):
    changes = {"nvme": str(folder)} if settings.get("nvme") else {}
    model = models.build(name, **{**settings, **changes})
    model.train()
    if checkpointing:
        models.checkpointed(model, checkpointing == "reentrant")
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    ltd = routed(model, name)
    losses, plain, reference = expected(name)
    assert losses_of(model, optimizer, ltd) == losses
    models.assert_same_state(model, optimizer, plain, reference)
    assert ltd.left_out == 4 * (12 + 8 + 4) * len(LAYERS[name] or [1])
    engine_of_model(model).close()


def test_where_all_tokens_are_kept_nothing_differs_not_even_dropout():
    found = []
    for routes in (False, True):
        model = models.build("gpt2-dropout").train()
        if routes:
            routed(model, shortest=16, layers=range(3))
        torch.manual_seed(1)
        ids = models.batch(0)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss, torch.get_rng_state(), *(one.grad for one in model.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Checkpointed(nn.Module):
    """Blocks that are called through torch's checkpoint, whose recomputation draws again."""

    def __init__(self, **options):
        super().__init__()
        self.options = options
        layers = [
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(4)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options) if self.options else layer(x)
        return x.square().mean()


def checkpointed(between=lambda ltd, model: None, seeds=(1, 2), **options):
    """Return the gradients of one backward of forwards that wait for it together."""
    torch.manual_seed(0)
    model = Checkpointed(**options).train()
    ltd = routed(model, shortest=4)
    inputs = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    losses = []
    for seed in seeds:
        torch.manual_seed(seed)
        losses.append(model(inputs))
        between(ltd, model)
    sum(losses).backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_keeps_the_tokens_of_its_forward_whatever_came_between(reentrant):
    def nothing(ltd, _):
        pass

    def step(ltd, _):
        ltd.seek(ltd.steps + 3)  # all tokens from here on

    def step_and_evaluate(ltd, model):
        ltd.step()
        with torch.no_grad():
            model.eval().layers[1](torch.randn(2, 16, 8))
        model.train()

    for between in (nothing, step, step_and_evaluate):
        for seeds in ((1, 2), (1, 1)):
            if seeds == (1, 1) and between is not nothing:
                with pytest.raises(UnsupportedError, match="kept different numbers of tokens"):
                    checkpointed(between, seeds, use_reentrant=reentrant)
                continue
            plain = checkpointed(between, seeds)
            again = checkpointed(between, seeds, use_reentrant=reentrant)
            assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_a_layer_that_is_recomputed_with_other_numbers_is_refused():
    with pytest.raises(UnsupportedError, match="preserve_rng_state=True"):
        checkpointed(use_reentrant=False, preserve_rng_state=False)


def test_seeding_each_step_alike_does_not_confuse_steps_of_another_schedule():
    found = []
    for options in ({}, {"use_reentrant": True}):
        torch.manual_seed(0)
        model = Checkpointed(**options).train()
        ltd = routed(model, steps=1)
        inputs = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for _ in range(3):
            torch.manual_seed(1)
            model(inputs).backward()
            ltd.step()
        found.append([inputs.grad, *(one.grad for one in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_evaluation_and_generation_keep_all_tokens():
    model = llama()
    ids = models.batch(0)
    whole = model.eval()(input_ids=ids).logits
    answers = model.generate(ids, max_new_tokens=4, do_sample=False)
    ltd = routed(model)
    assert torch.equal(model(input_ids=ids).logits, whole)
    assert torch.equal(model.train().generate(ids, max_new_tokens=4, do_sample=False), answers)
    assert (ltd.computed, ltd.left_out) == (0, 0)
    assert not torch.equal(model(input_ids=ids).logits, whole)
    assert (ltd.computed, ltd.left_out) == (16, 48)


def test_blocks_in_slices_and_micro_batches_that_share_a_fetch_leave_tokens_out_too():
    def trained(change):
        with infinity.Init(host_memory="64MiB"):
            model = llama()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        ltd = routed(model)
        change(model, optimizer)
        losses = losses_of(model, optimizer, ltd, accumulate=1)
        assert (ltd.computed, ltd.left_out) == (2 * 2 * (4 + 8 + 12 + 16), 2 * 2 * (12 + 8 + 4))
        return losses

    plain = trained(lambda *_: None)
    assert trained(lambda model, _: tiling.tile_batch_(model, 2)) == plain  # one slice, drawn in one order
    assert trained(lambda model, _: tiling.tile_batch_(model, 1))[0] != plain[0]
    by_block = trained(lambda model, optimizer: accumulate_by_block(model, optimizer, lambda: True))
    assert by_block[:2] == pytest.approx(plain[:2], rel=1e-2)  # its loss sums in another order


class Biased(nn.Module):
    """A block with an argument that transformers' have not."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, bias):
        return self.inner(x) + bias, bias.sum()


class OfBiased(nn.Module):
    """Blocks, one after the other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(3))

    def forward(self, x, bias):
        for block in self.blocks:
            x, _ = block(x, bias=bias)
        return x


def test_other_arguments_are_refused_until_their_dimensions_are_named():
    x, bias = torch.randn(2, 16, 4), torch.randn(16, 2, 4)
    model = OfBiased()
    ltd = routed(model, seq_first=True)
    with pytest.raises(UnsupportedError, match=r"may be of the 16 tokens.*arguments="):
        model(x.transpose(0, 1), bias)
    ltd.remove()
    ltd = routed(model, seq_first=True, arguments={"bias": "tb."})
    out = []
    model.blocks[1].register_forward_hook(
        lambda _, args, kwargs, output: out.append((args[0], *output)), with_kwargs=True
    )
    model(x.transpose(0, 1), bias)
    given, returned, total = out[0]
    kept = (given != returned).any(-1)
    assert kept.sum(0).tolist() == [4, 4]
    block = model.blocks[1]
    assert torch.allclose(returned[kept], block.inner(given[kept]) + bias[kept])
    assert torch.allclose(total, bias[kept].sum())
    assert ltd.kept == 4


def test_what_a_layer_cannot_do_with_some_tokens_is_refused_by_name():
    ids = models.batch(0)
    model = llama()
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
    name, cache = next((name, one) for name, one in output.items() if isinstance(one, transformers.Cache))
    routed(model)
    with pytest.raises(UnsupportedError, match="a DynamicCache that holds tokens"):
        model(input_ids=ids, **{name: cache})
    with pytest.raises(UnsupportedError, match="where documents begin"):
        model(input_ids=ids, use_cache=False, max_length_q=16)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="'flash_attention_2' does not take the mask"):
        model.model.layers[1](torch.randn(1, 16, 32))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: routed(nn.Linear(2, 2)), UnsupportedError, "Linear has no blocks"),
        (lambda: routed(llama(), layers=[1, 4]), ConfigError, "numbers of the 4 blocks, from 0 to 3"),
        (lambda: routed(llama(), layers=[1, 1]), ConfigError, "different numbers"),
        (lambda: routed(llama(num_hidden_layers=2)), ConfigError, "all but the first and the last"),
        (lambda: routed(llama(), shortest=2), ConfigError, "rounded down to no token"),
        (lambda: routed(llama(), arguments={"bias": "t"}), ConfigError, "expected a letter"),
    ],
)
def test_models_and_numbers_that_do_not_fit_are_refused(make, error, says):
    with pytest.raises(error) as raised:
        make()
    assert says in str(raised.value)


def test_a_block_leaves_tokens_out_once_and_not_in_slices_or_on_ranks_that_share_a_sequence():
    model = llama()
    ltd = routed(model)
    with pytest.raises(UnsupportedError, match="leaves tokens out already"):
        routed(model)
    ltd.remove()
    routed(model).remove()
    tiling.tile_batch_(model, 1)
    with pytest.raises(UnsupportedError, match="runs in slices"):
        routed(model)

    def on_rank(exchange):
        parts = llama()
        SequenceParallel(parts, SequenceGroup(exchange), (0, 1), None)
        with pytest.raises(UnsupportedError, match="ranks share the sequences"):
            routed(parts)

    on_ranks(1, on_rank)


def test_removing_it_gives_the_model_back_also_below_what_came_later():
    model = llama()
    before, ids = model(input_ids=models.batch(0)).logits, models.batch(0)
    ltd = routed(model)
    twin = copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="cannot be pickled"):
        pickle.dumps(model)
    ltd.remove()
    ltd.remove()
    assert torch.equal(model(input_ids=ids).logits, before)
    assert all("forward" not in block.__dict__ for block in model.model.layers)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    assert torch.equal(twin.eval()(input_ids=ids).logits, before)  # with weights of its own
    torch.manual_seed(3)
    assert not torch.equal(twin.train()(input_ids=ids).logits, before)  # a copy keeps leaving tokens out
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.copy_(twin.model.layers[1].mlp.down_proj.weight)
    ltd = routed(model)
    tiling.tile_batch_(model, 1)
    ltd.remove()
    assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-5)


def test_removing_it_from_below_a_budget_of_activations_lets_all_tokens_through():
    with infinity.Init(host_memory="64MiB", activation_memory="1MiB"):
        model = llama()
        ltd = routed(model)  # what decides on activations comes on top of it
    for left_out in (48, 48):
        model(input_ids=models.batch(0)).logits.float().sum().backward()
        assert ltd.left_out == left_out
        ltd.remove()
    assert routed(model).kept == 4
    engine_of_model(model).close()


def test_a_durable_run_goes_on_with_the_schedule_where_it_was(folder):
    def build():
        with infinity.Init(nvme=str(folder), host_memory="64MiB", durable=True):
            model = llama()
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        ltd = routed(model)
        optimizer.track(ltd=ltd)
        return model, optimizer, ltd, infinity.resume(model, optimizer)

    model, optimizer, ltd, _ = build()
    losses_of(model, optimizer, ltd, steps=2)
    infinity.commit(model)
    state = ltd.state_dict()
    engine_of_model(model).close()
    model, optimizer, ltd, _ = build()
    assert ltd.state_dict() == state
    assert (ltd.steps, ltd.kept) == (2, 12)
    engine_of_model(model).close()
