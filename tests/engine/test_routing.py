"""Stacked experts and rows of embeddings, slice by slice: what is not used costs nothing, and no bit changes.

Real training on a real disk, against the reference recipe in memory and against whole fetching.
"""

import functools
import itertools
import logging

import pytest
import torch
from torch import nn

import infinity
import models
from covers import matrix
from infinity import AdamW, Init, tiling
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError
from infinity.optim import missed as optim
from infinity.planning import tile_size
from infinity.reference import ReferenceAdamW
from parity import build_both

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
ROWS, WIDTH = 4096, 64


def ids_of(number, length=6):
    return torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(number))


def train(model, optimizer, steps, *, first=0, accumulate=1, length=6):
    """Train on few tokens, so that each step routes to some experts only; return the losses."""
    few = {"ids_of": lambda step, micro: ids_of(100 * step + micro, length)}
    return models.train(model, optimizer, steps, accumulate, first=first, **few)


def slices_of(model):
    """Return the units of a model's experts."""
    return [unit for unit in engine_of_model(model).units if ".experts.tiles." in unit.name]


def moved(model, steps):
    """Return the NVMe bytes per parameter and step of what `steps` does."""
    engine_of_model(model).lane.drain()
    before = infinity.stats(model)
    count = steps()
    engine_of_model(model).lane.drain()
    done = infinity.stats(model).since(before)
    return (done.nvme_read_nbytes + done.nvme_written_nbytes) / done.parameters / count


@functools.cache
def three_steps_of_the_recipe(name, how, checkpoint):
    """Train in memory, once for all budgets; return losses, model and optimizer."""
    plain = models.prepared_of_experts(name, how)
    if checkpoint is not None:
        models.checkpointed(plain, checkpoint == "reentrant")
    reference = ReferenceAdamW(plain.parameters(), **SETTINGS)
    return three_steps(plain, reference), plain, reference


def three_steps(model, optimizer):
    long = 24  # tokens: some experts get more than torch sorts in their order
    return train(model, optimizer, 1, length=long) + train(model, optimizer, 2, first=1)


@pytest.mark.parametrize(
    *matrix(
        together=1,
        in_all=2,
        name=list(models.OF_EXPERTS),
        how=["grouped_mm", "eager"],
        memory=["2MiB", "64MiB"],
        checkpoint=[None, "non-reentrant"],
        update=["forward", "backward"],
    )
)
def test_experts_train_one_by_one_with_the_bits_of_the_recipe(folder, name, how, memory, checkpoint, update):
    expected, plain, reference = three_steps_of_the_recipe(name, how, checkpoint)
    with Init(nvme=folder, host_memory=memory):
        ours = models.of_experts(name, how)
    if checkpoint is not None:
        models.checkpointed(ours, checkpoint == "reentrant")
    optimizer = AdamW(ours.parameters(), **SETTINGS, update=update)
    assert three_steps(ours, optimizer) == expected
    assert len(slices_of(ours)) >= 12
    models.assert_same_state(ours, optimizer, plain, reference)


TWENTY = [
    (name, memory, checkpoint)
    for name, (memory, checkpoint) in zip(
        itertools.cycle(models.OF_EXPERTS),
        itertools.product(["1MiB", "4MiB", "64MiB"], [None, "reentrant", "non-reentrant"]),
        strict=False,
    )
]
"""Each budget with each way of checkpointing, of the architectures by turns: these meet in three steps."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "memory", "checkpoint"), TWENTY)
def test_twenty_steps_have_the_bits_of_whole_fetching_and_of_the_recipe(folder, name, memory, checkpoint):
    plain = models.prepared_of_experts(name)
    reference = ReferenceAdamW(plain.parameters(), **SETTINGS)
    runs = [(plain, reference)]
    for experts in ("slices", "whole"):
        (folder / experts).mkdir()
        with Init(nvme=folder / experts, host_memory=memory, experts=experts):
            model = models.of_experts(name)
        runs.append((model, AdamW(model.parameters(), **SETTINGS)))
    losses = []
    for model, optimizer in runs:
        if checkpoint is not None:
            models.checkpointed(model, checkpoint == "reentrant")
        losses.append(train(model, optimizer, 20, length=4))
    assert losses[0] == losses[1] == losses[2]
    assert len(slices_of(runs[1][0])) >= 12
    assert slices_of(runs[2][0]) == []
    for ours, optimizer in runs[1:]:
        models.assert_same_state(ours, optimizer, plain, reference)


def test_whole_fetching_has_the_same_bits_and_keys(folder):
    runs = []
    for experts in ("slices", "whole"):
        (folder / experts).mkdir()
        with Init(nvme=folder / experts, host_memory="4MiB", experts=experts):
            model = models.of_experts("mixtral")
        optimizer = AdamW(model.parameters(), **SETTINGS, max_norm=0.5)
        losses = train(model, optimizer, 3, accumulate=2)
        runs.append((losses, model.state_dict(), len(slices_of(model))))
    (losses, ours, slices), (expected, whole, none) = runs
    assert (losses, slices > 0, none) == (expected, True, 0)
    assert list(ours) == list(whole)
    assert [key for key in whole if not torch.equal(ours[key], whole[key])] == []


def test_a_step_moves_the_bytes_of_the_dense_part_and_of_the_experts_it_routes_to(folder):
    with Init(nvme=folder, host_memory="2MiB"):
        model = models.of_experts(
            "mixtral", num_local_experts=32, num_experts_per_tok=1, intermediate_size=512, vocab_size=64
        )
    optimizer, ids, used = AdamW(model.parameters(), **SETTINGS), torch.tensor([[3, 3]]), set()
    units = engine_of_model(model).units

    def steps(count=4):
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            used.update(one for one in units if any(each.grad is not None for each in one.parameters))
            optimizer.step()
            optimizer.zero_grad()
        return count

    steps()
    used.clear()
    per_parameter = moved(model, steps)
    share = sum(one.layout.numel for one in used) / sum(one.layout.numel for one in units)
    assert share < 0.06
    assert per_parameter <= 1.05 * 26 * share <= 3


@pytest.mark.parametrize("tiles", [False, True])
def test_a_generated_token_reads_the_experts_that_it_is_routed_to_less_what_is_kept(folder, tiles):
    plain = models.prepared_of_experts("mixtral", "grouped_mm").eval()
    with Init(nvme=folder, host_memory="512KiB"):
        model = models.of_experts("mixtral", "grouped_mm")
    model.eval()
    if tiles:
        infinity.tile_generation_(model, sequences=1)
    ids = torch.cat([ids_of(1), ids_of(2)])
    given = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(ids, **given)
    engine_of_model(model).lane.drain()
    before, uses = infinity.stats(model), [unit.residence.uses for unit in engine_of_model(model).units]
    tokens = model.generate(ids, **given)
    engine_of_model(model).lane.drain()
    units = engine_of_model(model).units
    used = zip(units, uses, strict=True)
    needed = sum((unit.residence.uses - count) * unit.record.field_nbytes("hi") for unit, count in used)
    read = infinity.stats(model).since(before).nvme_read_nbytes
    every = 10 * sum(unit.record.field_nbytes("hi") for unit in units)
    assert torch.equal(tokens, plain.generate(ids, **given))
    assert 0 < read <= needed < every


def test_a_token_that_finds_all_in_memory_holds_the_experts_alone_that_it_is_routed_to():
    plain = models.prepared_of_experts("mixtral").eval()
    with Init(host_memory="64MiB"):
        model = models.of_experts("mixtral").eval()
    with torch.no_grad():
        model(ids_of(0))
        before = [unit.residence.uses for unit in slices_of(model)]
        assert torch.equal(model(ids_of(1, 1)).logits, plain(ids_of(1, 1)).logits)
    used = [unit.residence.uses - one for unit, one in zip(slices_of(model), before, strict=True)]
    assert sorted(used) == [0] * 20 + [1] * 4, "2 of 12 in each of 2 layers"


OF_MANY = {
    "64": ("mixtral", {"num_local_experts": 64, "num_experts_per_tok": 2}),
    "256": ("deepseek_v3", {"n_routed_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 2}),
}


@pytest.mark.parametrize("experts", ["64", pytest.param("256", marks=pytest.mark.slow)])
def test_no_more_than_the_routed_experts_and_the_window_is_resident(folder, experts):
    name, sizes = OF_MANY[experts]
    with Init(nvme=folder, host_memory="2MiB"):
        model = models.of_experts(name, **sizes)
    engine, most = engine_of_model(model), [0]
    of_stack, hold = set(slices_of(model)), engine.residency.hold
    window = engine.residency._ahead.limit_nbytes

    def watched(unit, phase):
        hold(unit, phase)
        resident = [one for one in of_stack if one.residence.fetch is not None and not one.in_place]
        most[0] = max(most[0], sum(one.resident_nbytes for one in resident))

    engine.residency.hold = watched
    train(model, AdamW(model.parameters(), **SETTINGS), 2)
    largest = max(one.resident_nbytes for one in of_stack)
    assert 0 < most[0] <= window + 3 * largest < sum(one.resident_nbytes for one in of_stack) / 4


def test_steps_that_a_slice_missed_are_replayed_at_the_latest_after_a_hundred(folder, monkeypatch):
    monkeypatch.setattr(optim, "MISSED_LIMIT", 3)
    plain = models.prepared_of_experts("mixtral")
    with Init(nvme=folder, host_memory="2MiB"):
        ours = models.of_experts("mixtral")
    reference = ReferenceAdamW(plain.parameters(), **SETTINGS)
    optimizer = AdamW(ours.parameters(), **SETTINGS)
    assert train(ours, optimizer, 9, length=2) == train(plain, reference, 9, length=2)
    waiting = [len(update.missed) for unit in slices_of(ours) for update in unit.pending.values()]
    assert 0 < max(waiting) < 3
    models.assert_same_state(ours, optimizer, plain, reference)


def test_a_frozen_stack_and_gradients_that_are_not_set_to_none_change_no_bit(folder):
    plain = models.prepared_of_experts("mixtral")
    with Init(nvme=folder, host_memory="2MiB"):
        ours = models.of_experts("mixtral")
    pairs = []
    for model, kind in ((plain, ReferenceAdamW), (ours, AdamW)):
        model.model.layers[0].mlp.experts.requires_grad_(requires_grad=False)
        trained = [one for one in model.parameters() if one.requires_grad]
        pairs.append((model, kind(trained, **SETTINGS)))
    for number in range(5):
        losses = []
        for model, optimizer in pairs:
            loss = model(input_ids=ids_of(number), labels=ids_of(number)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            losses.append(loss.item())
        assert losses[0] == losses[1]
    found, expected = ours.state_dict(), plain.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_an_implementation_that_is_not_known_gets_the_stacks_whole_and_says_so_once(folder, caplog):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

    ALL_EXPERTS_FUNCTIONS.register("of the user", batched_mm_experts_forward)
    runs = []
    caplog.set_level(logging.WARNING, logger="infinity")
    for experts in ("slices", "whole"):
        (folder / experts).mkdir()
        with Init(nvme=folder / experts, host_memory="4MiB", experts=experts):
            model = models.of_experts("mixtral", "of the user")
        optimizer = AdamW(model.parameters(), **SETTINGS)
        runs.append((train(model, optimizer, 3), model.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert [key for key, one in runs[1][1].items() if not torch.equal(one, runs[0][1][key])] == []
    said = [one for one in caplog.messages if "uses its stacks whole" in one]
    assert len(said) == 2, "once for each of the two layers"


def test_an_expert_that_is_not_there_is_named(folder):
    with Init(nvme=folder, host_memory="4MiB"):
        model = models.of_experts("mixtral")
    experts = model.model.layers[0].mlp.experts
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match="experts 3 to 12 were routed to, but the layer has 12"):
        experts(x, torch.tensor([[3, 12]]), torch.ones(1, 2))


def test_a_stack_of_another_module_is_refused_by_name_and_a_module_in_two_places_trains(folder):
    plain = models.prepared_of_experts("mixtral")
    with Init(nvme=folder, host_memory="2MiB"):
        ours = models.of_experts("mixtral")
        one, other = (layer.mlp.experts for layer in ours.model.layers)
        with pytest.raises(TypeError, match=r"gate_up_proj consists of 12 tiles, not replaceable by a Whole"):
            one.gate_up_proj = other.gate_up_proj
        ours.model.layers[0].mlp.experts = other
    plain.model.layers[0].mlp.experts = plain.model.layers[1].mlp.experts
    reference = ReferenceAdamW(plain.parameters(), **SETTINGS)
    optimizer = AdamW(ours.parameters(), **SETTINGS)
    assert train(ours, optimizer, 3) == train(plain, reference, 3)
    models.assert_same_state(ours, optimizer, plain, reference)


EDITS = {
    "a row": lambda stack: stack[3].mul_(2),
    "rows": lambda stack: stack[2:5].mul_(2),
    "an item": lambda stack: stack.__setitem__((slice(None), 0), 1.0),
    "each": lambda stack: [one.neg_() for one in stack.unbind()],
    "a mask": lambda stack: stack.__setitem__(torch.arange(12) % 2 == 0, 0.5),
}


def test_slices_of_a_stack_are_edited_in_gathered_as_in_plain_pytorch_and_nowhere_else(folder):
    plain = models.prepared_of_experts("mixtral")
    with Init(nvme=folder, host_memory="2MiB"):
        ours = models.of_experts("mixtral")
    stack, expected = (one.model.layers[0].mlp.experts.down_proj for one in (ours, plain))
    for name, edit in EDITS.items():
        with torch.no_grad():
            edit(expected)
            with pytest.raises(infinity.NotResidentError, match=r"down_proj.* is not resident"):
                edit(stack)
            with infinity.gathered(ours, write=True):
                edit(stack)
        found = ours.state_dict()["model.layers.0.mlp.experts.down_proj"]
        assert torch.equal(found, expected), name


def test_a_slice_of_a_stack_that_a_forward_changes_is_an_error_that_names_it(folder):
    with Init(nvme=folder, host_memory="2MiB"):
        model = models.of_experts("mixtral")
    layer = model.model.layers[0]

    def hook(*_):
        with torch.no_grad():
            layer.mlp.experts.down_proj[2:5].mul_(2)

    layer.register_forward_hook(hook)
    with pytest.raises(infinity.UnsupportedError, match="would change a copy of the down_proj of experts"):
        model(input_ids=ids_of(0))


@pytest.mark.parametrize(("width", "experts", "tiles"), [(32, 4, []), (64, 24, [6, 6])])
def test_small_experts_share_a_slice_and_a_small_stack_stays_whole(folder, width, experts, tiles):
    with Init(nvme=folder, host_memory="4MiB"):
        model = models.of_experts("mixtral", intermediate_size=width, num_local_experts=experts)
    assert [len(one.tiles) for one in model.modules() if isinstance(one, tiling.TiledExperts)] == tiles
    assert len(slices_of(model)) == sum(tiles)


def test_another_setting_for_experts_is_refused():
    with pytest.raises(ConfigError, match="experts='some': expected one of 'slices', 'whole'"):
        infinity.Config(experts="some")


class Lookup(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, width), nn.Linear(width, 8)

    def forward(self, ids):
        return self.head(self.embed(ids)).float().square().sum()


def lookups(folder, rows):
    """Return a model in memory, and the same offloaded, whose embedding is in blocks of rows."""
    settings = {"nvme": folder, "memory": "2MiB", "tile_above": "16KiB", "waits": True}
    return build_both(lambda: Lookup(rows, 128), **settings)


def test_rows_of_an_embedding_that_are_not_looked_up_are_neither_read_nor_written(folder):
    plain, ours = lookups(folder, 4096)
    pairs = (
        (plain, ReferenceAdamW(plain.parameters(), **SETTINGS)),
        (ours, AdamW(ours.parameters(), **SETTINGS)),
    )

    def step(ids):
        losses = []
        for model, optimizer in pairs:
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]

    def steps(count=4):
        for _ in range(count):
            step(torch.tensor([3, 70, 3, 4000]))
        return count

    step(torch.arange(0, 4096, 64))
    steps()
    assert moved(ours, steps) <= 1
    step(torch.arange(0, 4096, 61))
    models.assert_same_state(ours, pairs[1][1], plain, pairs[0][1])


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_gradient_that_is_assigned_to_rows_that_missed_steps_is_applied_behind_these(folder, update):
    plain, ours = lookups(folder, 1024)
    pairs = (
        (plain, ReferenceAdamW(plain.parameters(), **SETTINGS)),
        (ours, AdamW(ours.parameters(), **SETTINGS, update=update)),
    )
    last = list(ours.embed.parameters())[-1]
    for number in range(4):
        for model, optimizer in pairs:
            if number == 3 and model is ours:
                last.grad = torch.ones_like(last)
            model(torch.tensor([3, 7] if number else [3, 1000])).backward()
            if number == 3 and model is plain:
                plain.embed.weight.grad[-len(last) :] = 1
            optimizer.step()
            optimizer.zero_grad()
    models.assert_same_state(ours, pairs[1][1], plain, pairs[0][1])


class Deep(nn.Module):
    """Layers that fit the window of units that wait, which is 64 KiB, with an eighth left to blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden.float().square().sum()


def test_blocks_leave_the_room_that_layers_wait_in_for_their_backward(folder, monkeypatch):
    monkeypatch.setattr(tile_size, "LEAST_FEW_ROWS_NBYTES", 32 * 2 * WIDTH)
    with Init(nvme=folder, host_memory="512KiB"):
        model = Deep()
    optimizer, engine = AdamW(model.parameters(), **SETTINGS), engine_of_model(model)
    for _ in range(2):
        model(torch.arange(0, ROWS, 100)).backward()
        optimizer.step()
        optimizer.zero_grad()
    layers = [unit for unit in engine.units if unit.name.startswith("layers.")]
    assert engine.budget.ahead_nbytes // 2 < sum(one.resident_nbytes for one in layers)
    assert [engine.residency.frequencies.fetches(one.index) for one in layers] == [1.0] * 4


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
def test_a_layer_without_any_token_returns_none_as_a_plain_one_does(folder, how):
    with Init(nvme=folder, host_memory="4MiB"):
        model = models.of_experts("mixtral", how)
    none = torch.empty(0, 64, dtype=torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    assert experts(none, torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2)).shape == (0, 64)
