"""Tiles as units: Config(tile_above=...), and slices of sequence and batch over an offloaded model.

Trusted: the same model in memory, with the reference recipe; and infinity.tiling, tested by itself.
"""

import pytest
import torch
import transformers
from torch import nn

import infinity
import models
from covers import matrix
from infinity import tiling
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW, prepare
from infinity.units.residency import UnitResidency

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]
ABOVE = 1 << 11
"""Bytes: every matrix of the small models is cut."""


def tiled_in_memory(name):
    torch.manual_seed(0)
    model = models.MODELS[name]()
    tiling.tile_(model, above=ABOVE)
    return prepare(model)


def pair(name, folder, *, checkpoint=None, update="forward"):
    ours = models.build(name, nvme=str(folder), host_memory="1MiB", tile_above=ABOVE)
    plain = tiled_in_memory(name)
    for model in (ours, plain):
        if checkpoint is None:
            model.train()
        else:
            models.checkpointed(model, checkpoint == "reentrant")
    return (
        (ours, infinity.AdamW(ours.parameters(), lr=1e-2, update=update)),
        (plain, ReferenceAdamW(plain.parameters(), lr=1e-2)),
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_tiles_are_built_with_the_values_and_names_of_the_whole(folder, name):
    ours = models.build(name, nvme=str(folder), host_memory="1MiB", tile_above=ABOVE)
    whole = models.build(name)
    assert any(isinstance(module, tiling.Tiled) for module in ours.modules())
    found, expected = ours.state_dict(), whole.state_dict()
    assert list(found) == list(expected)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize(
    *matrix(
        together=1,
        checkpoint=[None, "reentrant", "non-reentrant"],
        update=["forward", "backward"],
        name=["llama", "gpt2", "mixtral"],
    )
)
def test_a_model_in_tiles_trains_as_in_memory(folder, name, update, checkpoint):
    ours, plain = pair(name, folder, checkpoint=checkpoint, update=update)
    assert models.train(*ours, 3) == models.train(*plain, 3)
    found, expected = ours[0].state_dict(), plain[0].state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_a_recomputation_holds_one_tile_at_a_time(folder):
    (ours, _), _ = pair("llama", folder, checkpoint="non-reentrant")
    engine, most = engine_of_model(ours), [0]
    tiles = {id(module) for module in ours.modules() if isinstance(module, tiling.Tile)}
    units = {
        engine.parameters.unit_of(parameter)[0]
        for module in ours.modules()
        if id(module) in tiles
        for parameter in module._parameters.values()
        if parameter is not None
    }
    hold = engine.residency.hold

    def watched(unit, phase):
        hold(unit, phase)
        most[0] = max(most[0], sum(one.residence.users > 0 for one in units))

    engine.residency.hold = watched
    ids = models.batch(0)
    ours(input_ids=ids, labels=ids).loss.backward()
    assert most[0] <= 2, "one in use, and one leased by the node before"


def test_a_backward_after_a_step_is_refused_though_a_tile_takes_its_weight_anew(folder):
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", tile_above=ABOVE):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    loss = model(x).float().square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed"):
        loss.backward()


def test_a_layer_that_is_nobodys_child_is_refused(folder):
    with (
        pytest.raises(infinity.UnsupportedError, match="is in no other module"),
        infinity.Init(nvme=str(folder), host_memory="1MiB", tile_above=ABOVE),
    ):
        kept = nn.Linear(64, 64)
    assert kept is not None


@pytest.mark.parametrize(*matrix(together=1, sliced=["batch", "sequence"], update=["forward", "backward"]))
def test_slices_train_as_in_memory_and_fetch_a_unit_once_for_all_of_them(folder, sliced, update):
    def cut(model):
        model.config.use_cache = False
        for layer in model.model.layers:
            if sliced == "batch":
                tiling.tile_batch(layer, 1)
            else:
                tiling.tile_sequence(layer.mlp, 4)

    ours, plain = models.both(
        "llama", {"lr": 1e-2}, {"nvme": str(folder), "host_memory": "1MiB"}, update=update
    )
    cut(ours[0])
    cut(plain[0])
    assert models.train(*ours[:2], 4) == models.train(*plain[:2], 4)
    models.assert_same_state(ours[0], ours[1], plain[0], plain[1])
    before = infinity.stats(ours[0])
    models.train(*ours[:2], 1, first=4)
    uses = infinity.stats(ours[0]).since(before).uses
    parts = len(engine_of_model(ours[0]).units)
    assert uses <= 3 * parts, (
        f"{uses} uses of {parts} units: once in the forward, once or twice in the backward"
    )


def test_units_are_held_as_often_for_eight_slices_as_for_one(folder, monkeypatch):
    held, hold = [], UnitResidency.hold

    def counted(residency, unit, phase):
        held.append(unit)
        hold(residency, unit, phase)

    monkeypatch.setattr(UnitResidency, "hold", counted)

    def holds(rows):
        model = models.build("llama", nvme=str(folder), host_memory="1MiB")
        tiling.tile_batch_(model, 1)
        tiling.tile_loss_(model)
        ids = models.batch(0, rows=rows, length=8)
        held.clear()
        model(input_ids=ids, labels=ids).loss.backward()
        return len(held)

    assert holds(8) == holds(1) > 0


@pytest.mark.parametrize("sliced", ["batch", "sequence"])
def test_frozen_weights_stay_until_the_last_slice_is_recomputed(folder, sliced):
    """Most are frozen, and no gradient says when they are done with; nothing reaches the first block's."""

    def uses(rows):
        model = models.build("llama", nvme=str(folder), host_memory="1MiB")
        for name, one in model.named_parameters():
            one.requires_grad_("layers.1.post_attention_layernorm" in name)
        if sliced == "batch":
            tiling.tile_batch_(model, 1)
        else:
            model.config.use_cache = False
            for layer in model.model.layers:
                tiling.tile_sequence(layer.mlp, rows)
        ids = models.batch(0, rows=rows, length=8)
        loss = model(input_ids=ids, labels=ids).loss
        before = infinity.stats(model)
        loss.backward()
        return infinity.stats(model).since(before).uses, engine_of_model(model)

    (one, _), (four, engine) = uses(1), uses(4)
    assert four == one > 0
    assert not any(unit.residence.users for unit in engine.units)


@pytest.mark.parametrize("memory", ["1MiB", "64MiB"])
def test_a_gradient_that_is_kept_keeps_no_others_of_its_call_in_slices(memory, folder):
    shape = models.SIZES | {"hidden_size": 256, "intermediate_size": 512}
    with infinity.Init(nvme=str(folder), host_memory=memory):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    tiling.tile_batch_(model, 1)
    ids = models.batch(0, rows=2, length=8)
    model(input_ids=ids, labels=ids).loss.backward()
    kept = [one.grad.gradient.tensor for one in model.parameters()]
    kept = [one for one in kept if one is not None]
    assert kept
    assert {one.untyped_storage().nbytes() - one.nbytes for one in kept} == {0}


def test_steps_of_eight_micro_batches_move_the_bytes_of_one(folder):
    """A piece of a unit stays in memory until the next step or not: single steps differ by 0.7 bytes."""
    steps = 5

    def moved(micro_batches):
        shape = models.SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
        with infinity.Init(nvme=str(folder), host_memory="384KiB"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, update="backward")
        tiling.tile_loss_(model)
        tiling.tile_batch_(model, 1)
        ids = models.batch(0, rows=micro_batches, length=8)
        for number in range(2 + steps):
            if number == 2:
                engine_of_model(model).lane.drain()
                before = infinity.stats(model)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine_of_model(model).lane.drain()
        moved = infinity.stats(model).since(before)
        nbytes = sum(moved.read_nbytes.values()) + sum(moved.written_nbytes.values())
        return nbytes / model.num_parameters() / steps

    one, eight = moved(1), moved(8)
    assert eight <= 26.5
    assert abs(eight - one) <= 0.5


def test_a_layer_eight_times_the_budget_trains(folder):
    def losses(model, optimizer):
        found = []
        for step in range(2):
            x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(step)).bfloat16()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="256KiB", tile_above="64KiB"):
        ours = nn.Sequential(nn.Linear(1024, 1024))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1024, 1024))
    tiling.tile_(plain, above=1 << 16)
    plain = prepare(plain)
    engine = engine_of_model(ours)
    assert 8 * engine.budget.total_nbytes == 2 * 1024 * 1024
    found = losses(ours, infinity.AdamW(ours.parameters(), lr=1e-3))
    assert found == losses(plain, ReferenceAdamW(plain.parameters(), lr=1e-3))
    assert torch.equal(ours.state_dict()["0.weight"], plain.state_dict()["0.weight"])
    assert engine.held_nbytes() <= engine.budget.total_nbytes
