"""What blocks keep by a budget: Config(activation_memory=...). Trusted: the same model in memory, by the
reference recipe; tensors counted by watching every operation. Nothing is faked.
"""

import gc
import inspect
import logging
import weakref

import pytest
import torch
import transformers
from torch import nn

import infinity
import models
from allocations import Allocations
from covers import matrix
from infinity import tiling
from infinity.engine.engine import engine_of_model
from infinity.engine.recomputation import blocks_of
from infinity.planning.recomputation import HOST, KEEP, NVME, RECOMPUTE
from reach import collected

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning"),
]

PLENTY = "64MiB"
SHAPE = {**models.SIZES, "vocab_size": 128, "num_hidden_layers": 6}


class Block(nn.Module):
    """Keeps four times its input."""

    def __init__(self, width=64):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def stack(blocks=24):
    return nn.Sequential(nn.Linear(64, 64), *(Block() for _ in range(blocks)))


def small(kind, **more):
    return lambda: transformers.AutoModelForCausalLM.from_config(kind(**{**SHAPE, **more}))


ARCHITECTURES = {
    "llama": small(transformers.LlamaConfig),
    "eager attention": small(transformers.LlamaConfig, attn_implementation="eager"),
    "mixtral": small(transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "gemma": small(transformers.Gemma2Config, head_dim=8, sliding_window=32),
    "dropout": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**models.GPT2, "n_layer": 5})),
    "encoder and decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0
        )
    ),
    "no checkpointing of its own": stack,
}


def built(folder, budget, make=ARCHITECTURES["llama"], memory="8MiB", **more):
    torch.manual_seed(0)
    nvme = None if folder is None else str(folder)
    with infinity.Init(nvme=nvme, host_memory=memory, activation_memory=budget, **more):
        return make().train()


def batch(number=0, rows=2, length=64, **_):
    return torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(number))


def loss_of(model, number=0, **shape):
    if isinstance(model, nn.Sequential):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(shape.get("rows", 1024), 64, generator=generator).bfloat16()
        return model(x).float().square().mean()
    ids = batch(number, **shape)
    return model(input_ids=ids, labels=ids).loss


def step(model, optimizer, number=0, **shape):
    loss = loss_of(model, number, **shape)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def budget_of(model):
    return engine_of_model(model).activations


def places(model):
    """Return what each call of a block keeps, as was decided last."""
    return list(budget_of(model).decisions[-1].places.values())


def ends(folder, make, **shape):
    """Return the smallest budget that works, and the smallest that keeps all."""
    with pytest.raises(infinity.ConfigError, match="The smallest that works is") as error:
        loss_of(built(folder, "1KiB", make), **shape)
    least = int(str(error.value).split("activation_memory=")[2].split(" ")[0])
    model = built(folder, PLENTY, make)
    loss_of(model, **shape)
    assert set(places(model)) == {KEEP}
    return least, budget_of(model).decisions[-1].plan.peak_nbytes


BETWEEN = {}


def between(folder, name, share):
    """Return a budget for the batches of models.train, between the smallest and what keeps all."""
    if name not in BETWEEN:
        BETWEEN[name] = ends(None, models.MODELS[name], length=16)
    least, most = BETWEEN[name]
    return int(least + share * (most - least))


def model_says(model):
    return infinity.stats(model).activations


@pytest.mark.parametrize(
    *matrix(
        name=["llama", "gpt2-dropout", "mixtral"],
        share={"all": 1, "some": 0.7, "none": 0},
        accumulate=[1, 2],
        reentrant=[None, "non-reentrant"],
    )
)
def test_models_train_with_the_bits_of_plain_training(folder, name, share, accumulate, reentrant):
    budget = between(folder, name, share)
    init = {"nvme": str(folder), "host_memory": "2MiB", "activation_memory": budget}
    ours = models.offloaded(name, {"lr": 1e-2}, init, reentrant)
    plain = models.in_memory(name, {"lr": 1e-2}, init)
    plain[0].config.use_cache = False  # a cache lays keys out in another way, as without checkpointing
    results = []
    for model, optimizer, _ in (ours, plain):
        torch.manual_seed(3)
        results.append(models.train(model, optimizer, 3, accumulate))
    assert results[0] == results[1]
    models.assert_same_state(ours[0], ours[1], plain[0], plain[1])
    if name != "mixtral":  # whose memory changes with what tokens are routed to
        first = places(ours[0])[:-1]  # the backward begins with the last one, and has all of it anyway
        assert set(first) <= {1: {KEEP}, 0.7: {KEEP, RECOMPUTE}, 0: {RECOMPUTE}}[share]
        assert share == 0 or KEEP in places(ours[0])


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[] if one == "llama" else pytest.mark.slow) for one in ARCHITECTURES],
)
def test_what_is_allocated_is_within_the_budget_and_grows_with_it(folder, name):
    make = ARCHITECTURES[name]
    least, most = ends(folder, make)
    before = 0
    for share in (0, 0.6, 1):
        budget = int(least + share * (most - least))
        model = built(folder, budget, make, memory="2MiB")
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        beside = 2 * sum(one.numel() for one in model.parameters())  # gradients, and weights that are fetched
        engine = engine_of_model(model)
        for number in range(2):
            gc.collect()
            before_it = engine.kept.held_nbytes
            with Allocations() as memory:
                loss = loss_of(model, number)
                # What is being written, and what waits in host memory, counts in host_memory. Experts that
                # were kept before may go meanwhile: their memory was not counted here, nor is it taken off.
                waits = max(0, engine.kept.held_nbytes - before_it)
                in_host = waits + engine.outgoing_share.ledger.peak_nbytes
                loss.backward()
                del loss
            assert memory.peak_nbytes <= budget + beside + in_host
            optimizer.step()
            optimizer.zero_grad()
        chosen = places(model)
        assert before <= chosen.count(KEEP)
        before = chosen.count(KEEP)
    assert before == len(chosen)


@pytest.mark.parametrize("tier", [HOST, NVME])
def test_inputs_wait_elsewhere_where_they_do_not_fit_and_the_bits_are_the_same(folder, tier):
    memory = "16MiB" if tier == HOST else "1MiB"
    plain = built(folder, None, stack, memory)
    ours = built(folder, 2 << 20, stack, memory)  # 24 inputs of 128 KiB are more
    results = []
    for model in (plain, ours):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        results.append([step(model, optimizer, number) for number in range(3)])
    assert results[0] == results[1]
    same = zip(plain.state_dict().values(), ours.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
    chosen = places(ours)
    assert tier in chosen
    assert KEEP not in chosen
    # The first block's input needs no gradient, and waits for none.
    assert chosen[1:] == sorted(chosen[1:], key=[HOST, NVME, RECOMPUTE].index)  # the first ones leave
    assert f"of their inputs wait {'in host memory' if tier == HOST else 'on NVMe'}" in model_says(ours)


def test_without_nvme_and_host_memory_the_smallest_budget_is_named(folder):
    model = built(None, "2MiB", lambda: stack(40), memory="10MiB")
    with pytest.raises(infinity.ConfigError, match=r"Give that, or a folder on NVMe \(nvme=...\)"):
        loss_of(model)


def test_the_first_step_recomputes_all_and_the_next_ones_do_as_was_decided(folder, caplog):
    caplog.set_level(logging.INFO, "infinity")
    model = built(folder, PLENTY)
    calls = []
    for number, block in enumerate(blocks_of(model)):
        block.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
    assert "nothing is measured yet" in model_says(model)
    step(model, optimizer)
    assert calls == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    calls.clear()
    step(model, optimizer, 1)
    assert calls == [0, 1, 2, 3, 4, 5]
    reasons = [one.getMessage() for one in caplog.records if "blocks kept" in one.getMessage()]
    assert reasons == [f"activation_memory: {model_says(model)}"]
    assert "6 of 6 blocks kept" in repr(infinity.stats(model))


def test_shorter_batches_do_as_was_decided_and_larger_ones_are_measured_anew(folder):
    model = built(folder, PLENTY)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
    decisions = budget_of(model).decisions
    for shape, expected in (
        ({"length": 32}, 1),
        ({"length": 16}, 1),
        ({"length": 32, "rows": 1}, 1),
        ({"length": 64}, 2),
        ({"length": 64, "rows": 1}, 2),
        ({"length": 8, "rows": 4}, 3),
        ({"length": 32}, 3),
    ):
        step(model, optimizer, **shape)
        assert len(decisions) == expected, shape
    ids = batch(length=64)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
    assert len(decisions) == 4  # another kind: attention works with a mask


def test_evaluation_in_between_changes_nothing(folder):
    models_of = [built(folder, budget) for budget in ("400KiB", None)]
    losses = []
    for model in models_of:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        found = [step(model, optimizer)]
        with torch.no_grad():
            found.append(loss_of(model, 5).item())
        model.eval()
        found += model.generate(batch(length=4), max_new_tokens=3, do_sample=False).flatten().tolist()
        model.state_dict()
        found.append(loss_of(model, 6).item())  # with gradients, in eval mode: of another kind
        model.train()
        losses.append([*found, step(model, optimizer, 1)])
    assert losses[0] == losses[1]
    assert len(budget_of(models_of[0]).decisions) == 2


def test_a_second_forward_before_the_backward_recomputes_all_and_says_so(folder, caplog):
    model = built(folder, PLENTY)
    loss_of(model).backward()
    first, second = loss_of(model, 1), loss_of(model, 2)
    assert "another waited for its backward" in model_says(model)
    (first + second).backward()
    loss_of(model, 3).backward()
    assert "6 of 6 blocks kept" in model_says(model)
    dropped = loss_of(model, 4)
    del dropped  # nothing waits any more
    kept = [loss_of(model, 5)]  # what is logged keeps the graph, whose tensors are gone
    kept[0].backward()
    loss_of(model, 6).backward()
    assert "6 of 6 blocks kept" in model_says(model)
    assert [one.message.count("another waited") for one in caplog.records].count(1) == 1


def test_an_error_in_the_measuring_step_leaves_it_to_the_next(folder):
    model = built(folder, PLENTY)
    for error in (ValueError, KeyboardInterrupt):
        broken = list(blocks_of(model))[3].register_forward_pre_hook(
            lambda *_, error=error: (_ for _ in ()).throw(error())
        )
        with pytest.raises(error) as kept:  # and with it the graph
            loss_of(model)
        broken.remove()
        assert kept.value.__traceback__ is not None
        assert not budget_of(model).decisions
    plain = built(folder, None)
    optimizers = [infinity.AdamW(one.parameters(), lr=1e-3) for one in (model, plain)]
    assert step(model, optimizers[0]) == step(plain, optimizers[1])
    assert set(places(model)) == {KEEP}

    def plant(*_):
        raise ValueError("planted")

    planted = next(blocks_of(model)).mlp.register_full_backward_pre_hook(plant)
    with pytest.raises(ValueError, match="planted"):
        loss_of(model).backward()
    planted.remove()
    assert step(model, optimizers[0], 1) == step(plain, optimizers[1], 1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_models_own_switch_is_turned_off_and_that_is_said(folder, caplog, reentrant):
    model = built(folder, PLENTY)
    models.checkpointed(model, reentrant)
    plain = built(folder, None)
    optimizers = [infinity.AdamW(one.parameters(), lr=1e-3) for one in (model, plain)]
    losses = [
        [step(*one, number) for number in range(2)] for one in zip((model, plain), optimizers, strict=True)
    ]
    assert losses[0] == losses[1]
    assert not any(one.gradient_checkpointing for one in blocks_of(model))
    assert set(places(model)) == {KEEP}
    assert sum("activation checkpointing is switched off" in one.message for one in caplog.records) == 1


def test_a_cache_of_keys_that_training_fills_by_default_is_left_out_and_one_with_tokens_refused(folder):
    model = built(folder, 400 << 10)
    ids = batch()
    assert model.config.use_cache
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=True).loss.backward()
    with torch.no_grad():
        cache = model(input_ids=ids).past_key_values
    assert cache.get_seq_length() == 64
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    with pytest.raises(infinity.UnsupportedError, match=r"a DynamicCache.*use_cache=False.*prefix tuning"):
        model(input_ids=ids, **{name: cache})


def test_blocks_that_change_their_buffers_are_refused_before_they_are_recomputed(folder):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(64, affine=False), nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(self.norm(x.float()).bfloat16())

    model = built(folder, PLENTY, lambda: nn.Sequential(Normed(), Normed()))
    with pytest.raises(infinity.UnsupportedError, match=r"Normed changes its buffers norm.num_batches"):
        loss_of(model)


def test_models_without_blocks_are_refused_by_name(folder):
    with pytest.raises(infinity.UnsupportedError, match=r"activation_memory: Sequential has no blocks"):
        built(folder, PLENTY, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))


def test_blocks_are_what_stands_in_lists_and_none_is_in_another():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.Sequential(*(Block() for _ in range(2))) for _ in range(2))
            self.last = nn.Sequential(Block(), nn.Linear(64, 64))

    model = Model()
    assert list(blocks_of(model)) == list(model.stages)
    assert list(blocks_of(model.stages[0])) == list(model.stages[0])
    assert list(blocks_of(model.last)) == []


def test_blocks_in_slices_recompute_by_themselves_and_that_is_said(folder, caplog):
    ours, plain = built(folder, PLENTY), built(folder, None)
    losses = []
    for model in (ours, plain):
        tiling.tile_batch_(model, 1)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        losses.append([step(model, optimizer, number) for number in range(2)])
    assert losses[0] == losses[1]
    assert "recompute by themselves" in model_says(ours)
    tiling.untile_(ours)
    loss_of(ours).backward()
    assert set(places(ours)) == {KEEP}


def test_adapters_train_beside_frozen_weights(folder):
    peft = pytest.importorskip("peft")
    losses = []
    for budget in (1200 << 10, None):
        model = built(folder, budget)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        losses.append([step(model, optimizer, number) for number in range(3)])
        if budget:
            assert {KEEP, RECOMPUTE} == set(places(model.get_base_model()))
    assert losses[0] == losses[1]


def test_a_block_that_is_called_twice_has_a_decision_for_each_call(folder):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return x.float().square().mean()

    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = []
    for budget in (1200 << 10, None):
        model = built(folder, budget, Twice)
        for _ in range(2):
            model.zero_grad()
            model(x).backward()
        gradients.append([one.grad.clone() for one in model.parameters()])
        if budget:
            assert len(places(model)) == 6
            assert {KEEP, RECOMPUTE} == set(places(model))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_nobody_keeps_a_model_that_is_dropped(folder):
    model = built(folder, PLENTY)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
    for number in range(2):
        step(model, optimizer, number)
    engine = weakref.ref(engine_of_model(model))
    waiting = loss_of(model, 2)
    del model, optimizer
    waiting.backward()
    del waiting
    assert collected(lambda: engine() is None)


def test_auto_takes_what_is_free(folder, monkeypatch):
    monkeypatch.setattr("infinity.engine.recomputation.available_nbytes", lambda: 100 << 20)
    model = built(folder, "auto")
    loss_of(model).backward()
    engine = engine_of_model(model)
    free = (100 << 20) - (engine.budget.total_nbytes - engine.held_nbytes())
    assert budget_of(model)._nbytes == pytest.approx(free * 9 // 10, rel=0.05)
    assert set(places(model)) == {KEEP}
    monkeypatch.setattr("infinity.engine.recomputation.available_nbytes", lambda: 1 << 20)
    with pytest.raises(infinity.ConfigError, match="no memory is free"):
        loss_of(built(folder, "auto"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"activation_memory": "2 GiBi"}, "activation_memory"),
        ({"activation_memory": 0}, "activation_memory=0"),
        ({"activation_memory": "1GiB", "offload_activations": "host"}, "leave offload_activations='host'"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields, why):
    with pytest.raises(infinity.ConfigError, match=why):
        infinity.Config(**fields)


class Listed(nn.Module):
    """Blocks between two layers; `calls` says how they are called."""

    def __init__(self, block, calls=lambda block, x: block(x)):
        super().__init__()
        self.first, self.calls = nn.Linear(64, 64), calls
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.calls(block, x)
        return x.float().square().mean()


X = torch.ones(256, 64, dtype=torch.bfloat16)


def call_and_change(block, x):
    given = x + 0
    output = block(given)
    given.add_(1)
    return output


class Changing(Block):
    """Changes its input, which plain torch allows here."""

    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


class Abs(Block):
    """Saves nothing of its input."""

    def forward(self, x):
        return self.up(torch.relu(x + 1))


@pytest.mark.parametrize(
    "make", [lambda: Listed(Changing), lambda: Listed(Abs, call_and_change)], ids=["by itself", "by another"]
)
def test_a_block_whose_input_changes_in_place_is_refused_before_its_recomputation_is_used(make):
    model = built(None, PLENTY, make)
    loss = model(X)
    with pytest.raises(RuntimeError, match=r"changed in place after it was saved.*activation_memory"):
        loss.backward()


def test_blocks_that_put_another_buffer_in_the_place_of_one_are_refused(folder):
    class Average(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.detach().float().mean() * 0.1
            return super().forward(x) * (1 + self.mean).bfloat16()

    with pytest.raises(infinity.UnsupportedError, match="Average changes its buffers mean"):
        built(folder, PLENTY, lambda: Listed(Average))(X)


def test_a_cache_that_a_forward_with_gradients_left_empty_is_refused_when_it_is_used(folder):
    model = built(folder, PLENTY).eval()
    cache = model(input_ids=batch()).past_key_values
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    with pytest.raises(infinity.UnsupportedError, match="used again"):
        model(input_ids=batch()[:, :1], **{name: cache})
    with torch.no_grad(), pytest.raises(infinity.UnsupportedError, match="used again"):
        model(input_ids=batch()[:, :1], **{name: cache})


def test_a_forward_waits_for_its_backward_though_its_first_blocks_are_frozen(folder):
    def half_frozen():
        model = Listed(Block)
        for one in (*model.first.parameters(), *model.blocks[0].parameters()):
            one.requires_grad_(False)
        return model

    model = built(folder, PLENTY, half_frozen)
    model(X).backward()
    first, second = model(X), model(X)
    assert "another waited for its backward" in model_says(model)
    (first + second).backward()


def test_a_measuring_forward_that_no_backward_follows_leaves_no_graph(folder):
    model = built(folder, PLENTY, lambda: Listed(Block))
    gc.collect()
    gc.disable()
    try:
        loss = model(X)
        waiting = budget_of(model)._waiting[-1]
        del loss
        assert waiting() is None
    finally:
        gc.enable()


def test_blocks_that_two_models_share_are_wrapped_once(folder):
    with infinity.Init(nvme=str(folder), host_memory="8MiB", activation_memory=PLENTY):
        one, other = Listed(Block), Listed(Block)
        other.blocks = one.blocks
    assert not any(hasattr(block.forward.__wrapped__, "__wrapped__") for block in one.blocks)
