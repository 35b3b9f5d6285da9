"""Modules of small blocks that share a unit. Trusted: the reference recipe in memory; plain torch modules."""

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
import models
from covers import matrix
from infinity import AdamW, CheckpointError, Init
from infinity.engine.blocks import UnitKind, blocks_of, by_settings
from infinity.engine.built_parameter import BuiltParameter
from infinity.engine.engine import engine_of_model
from infinity.planning.layout import FP32
from parity import compare, differences

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}

pytestmark = pytest.mark.usefixtures("deterministic")


def found(model, most_nbytes=1 << 20, units="block", *, nvme=True):
    """Return, by the names of the blocks of a model, the names in it of the modules that share units."""

    def kind(parameter):
        return UnitKind(FP32, in_files=False, trained=parameter.requires_grad)

    names = {id(module): name for name, module in model.named_modules()}
    blocks = blocks_of(list(model.named_modules()), kind, by_settings(units, most_nbytes, nvme=nvme))
    return {one.name: [[names[id(part)] for part in group] for group in one.groups] for one in blocks}


def units(model):
    return [unit.name for unit in engine_of_model(model).units]


class Layer(nn.Module):
    """A block of two linear layers, the second of which it may checkpoint, or reach into."""

    def __init__(self, width, within=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.within = within

    def forward(self, x):
        hidden = self.up(self.norm(x)).relu()
        if self.within == "checkpoint":
            return x + checkpoint(self.down, hidden, use_reentrant=False)
        if self.within == "weight":
            return x + nn.functional.linear(hidden, self.down.weight) + self.down.bias
        return x + self.down(hidden)


class Stack(nn.Module):
    def __init__(self, within=None, frozen=(), width=32, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, within) for _ in range(depth))
        self.head = nn.Linear(width, width)
        for name in frozen:
            self.get_submodule(name).requires_grad_(requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def floats(generator):
    return [torch.randn(2, 5, 32, generator=generator).bfloat16()]


def of_blocks(build, **settings):
    torch.manual_seed(0)
    with Init(device="cpu", **{"units": "block", "host_memory": "16MiB", **settings}):
        return build()


# Which modules share a unit


def test_a_block_is_the_outermost_member_of_a_list_that_is_small_enough():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 8))
    assert found(nn.ModuleList([model, nn.Linear(8, 8)])) == {"0": [["0.0.0", "0.0.2", "0.1"]]}
    assert found(nn.ModuleList([model, nn.Linear(8, 8)]), 2 * 2 * 72) == {"0.0": [["0.0.0", "0.0.2"]]}
    assert found(nn.ModuleList([model, nn.Linear(8, 8)]), 2 * 2 * 72 - 1) == {}


def test_by_default_a_block_is_one_that_is_fetched_in_the_time_of_the_uses_that_it_saves():
    def pair(width):
        return nn.Sequential(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)))

    assert found(pair(256), 1 << 30, "auto") == {}
    assert found(pair(255), 1 << 30, "auto") == {"0": [["0.0", "0.1"]]}
    assert found(pair(256), 1 << 30, "auto", nvme=False) == {"0": [["0.0", "0.1"]]}
    assert found(pair(725), 1 << 30, "auto", nvme=False) == {}
    assert found(pair(255), 2 * 2 * 255 * 256 - 1, "auto") == found(pair(4), 1 << 30, "module") == {}


def test_a_module_whose_forward_may_choose_among_members_of_a_list_is_no_block():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(4, 2)
            self.experts = nn.ModuleList(Layer(8) for _ in range(2))

    of_expert = ["norm", "up", "down"]
    assert found(nn.Sequential(Choosing(), nn.Linear(4, 4))) == {
        f"0.experts.{number}": [[f"0.experts.{number}.{one}" for one in of_expert]] for number in range(2)
    }


def test_what_is_frozen_shares_no_unit_with_what_trains_and_what_is_tied_shares_none():
    model = Stack(frozen=["layers.0.up", "layers.0.down"])
    model.layers[0].gate = nn.Linear(32, 32)
    model.layers[1].up.weight = model.layers[2].up.weight
    assert found(model) == {
        "layers.0": [["layers.0.norm", "layers.0.gate"], ["layers.0.up", "layers.0.down"]],
        "layers.1": [["layers.1.norm", "layers.1.down"]],
        "layers.2": [["layers.2.norm", "layers.2.down"]],
    }


@pytest.mark.disk
def test_blocks_are_units_of_their_own_names_and_modules_beside_them_keep_theirs(folder):
    model = of_blocks(lambda: Stack(frozen=["layers.1.up", "layers.1.down"]))
    assert units(model) == ["layers.0", "layers.1.norm", "layers.1", "layers.2", "head"]
    by_module = units(of_blocks(Stack, nvme=folder, host_memory="128KiB"))  # none is small enough
    assert by_module == [*(f"layers.{at}.{one}" for at in range(3) for one in ("norm", "up", "down")), "head"]


def test_a_part_without_parameters_may_be_in_several_blocks():
    act, shared = nn.ReLU(), nn.Linear(8, 8)
    of_act = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8)) for _ in range(3)))
    assert found(of_act) == {f"{at}": [[f"{at}.0", f"{at}.2"]] for at in range(3)}
    of_linear = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), shared) for _ in range(2)))
    assert found(of_linear) == {"0": [["0.0", "0.1"]]}


# Training


@pytest.mark.parametrize("within", [None, "checkpoint", "weight"])
def test_a_step_uses_a_block_once_in_each_direction(within):
    model = of_blocks(lambda: Stack(within))
    optimizer = AdamW(model.parameters())
    used = []
    for _ in range(2):
        before = infinity.stats(model).uses
        model(torch.randn(2, 5, 32).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        used.append(infinity.stats(model).uses - before)
    assert used == [8, 8]


@pytest.mark.parametrize(
    *matrix(
        together=1,
        within=[None, "checkpoint", "weight"],
        frozen=[(), ("layers.1",), ("layers.0.up", "layers.2.norm")],
    )
)
def test_what_blocks_show_is_what_modules_show_in_memory(within, frozen, monkeypatch):
    monkeypatch.setattr(infinity, "Init", lambda **settings: Init(units="block", **settings))
    compare(lambda: Stack(within, frozen), floats)


class Recomputed(Stack):
    """Layers in a checkpoint each."""

    def __init__(self, *, reentrant):
        super().__init__(depth=2)
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_block_that_is_partly_frozen_after_init_is_there_until_its_backward_is_done(reentrant, update):
    torch.manual_seed(0)
    models_of = {
        "plain": infinity.reference.prepare(Recomputed(reentrant=reentrant)),
        "ours": of_blocks(lambda: Recomputed(reentrant=reentrant)),
    }
    shown = {}
    for which, model in models_of.items():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(requires_grad="down" in name)
        kind = AdamW if which == "ours" else infinity.reference.ReferenceAdamW
        options = {**SETTINGS, "update": update} if which == "ours" else SETTINGS
        optimizer = kind([one for one in model.parameters() if one.requires_grad], **options)
        shown[which] = []
        for step in range(2):
            x = floats(torch.Generator().manual_seed(step))[0].requires_grad_()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            shown[which] += [loss.detach(), x.grad]
        shown[which].append(dict(model.state_dict()))
    assert differences(shown["plain"], shown["ours"]) == []
    assert not any(bool(torch.isnan(one).any()) for one in shown["ours"][:-1])


@pytest.mark.disk
def test_a_module_of_a_block_that_reentrant_checkpoints_run_twice_gets_both_gradients(folder):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            for one in (self.up, self.down, self.up):
                x = checkpoint(one, x, use_reentrant=True)
            return x

    shown = []
    for kind in ("module", "block"):
        model = of_blocks(
            lambda: nn.Sequential(*(Twice() for _ in range(4))), units=kind, nvme=folder, host_memory="1MiB"
        )
        optimizer = AdamW(model.parameters(), **SETTINGS, update="backward")
        for step in range(2):
            x = torch.randn(2, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            loss = model(x.requires_grad_()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        shown.append([loss.detach(), dict(model.state_dict())])
    assert differences(*shown) == []


@pytest.mark.disk
@pytest.mark.parametrize(
    *matrix(
        together=1,
        checkpoint=["non-reentrant", "reentrant", None],
        memory=["2MiB", "64MiB"],
        name=["llama", "gpt2", "mixtral"],
        update=["forward", "backward"],
    )
)
@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:.*gradient_checkpointing.*")
def test_training_in_units_of_blocks_equals_training_in_memory(folder, name, memory, checkpoint, update):
    init = {"nvme": folder, "host_memory": memory, "units": "block"}
    model, _ = models.compare(name, SETTINGS, init, steps=3, checkpoint=checkpoint, update=update)
    within = "transformer.h" if name == "gpt2" else "model.layers"
    assert any(one.startswith(within) and one.count(".") == 2 for one in units(model))


def test_a_module_of_a_block_that_is_called_alone_after_an_error_in_it_and_a_round_change_no_bit():
    model, plain = of_blocks(Stack), None
    torch.manual_seed(0)
    plain = infinity.reference.prepare(Stack())
    batch = torch.randn(2, 5, 32).bfloat16()

    def fails(*_):
        raise KeyError("planted")

    shown = []
    for one in (plain, model):
        planted = one.layers[1].up.register_forward_hook(fails)
        with pytest.raises(KeyError, match="planted"):
            one(batch)
        planted.remove()
        with torch.no_grad():
            before = one(batch), one.layers[1].up(batch)
        loss = one(batch).sum() + one.layers[2].up(batch).sum()
        loss.backward()
        shown.append([*before, loss.detach(), {name: p.grad.clone() for name, p in one.named_parameters()}])
    assert differences(*shown) == []
    assert not any(unit.residence.users or unit.attached for unit in engine_of_model(model).units)


def test_weights_are_read_and_edited_module_by_module():
    model = of_blocks(Stack)
    with infinity.gathered(model.layers[1].up, write=True):
        model.layers[1].up.weight.data.fill_(0.5)
    state = model.state_dict()
    assert bool((state["layers.1.up.weight"] == 0.5).all())
    assert not bool((state["layers.1.down.weight"] == 0.5).any())


# What is kept


@pytest.mark.disk
@pytest.mark.parametrize(
    ("first", "then"), [("module", "block"), pytest.param("block", "module", marks=pytest.mark.slow)]
)
def test_a_checkpoint_of_either_units_is_loaded_in_the_other(folder, first, then):
    shown = []
    for number, (kind, load) in enumerate(((first, False), (then, True), (then, False))):
        torch.manual_seed(0)
        with Init(nvme=folder, host_memory="2MiB", units=kind):
            model = models.MODELS["llama"]()
        optimizer = AdamW(model.parameters(), **SETTINGS)
        if load:
            infinity.load(model, optimizer, folder / "saved")
        else:
            models.train(model, optimizer, 2)
        if not number:
            infinity.save(model, optimizer, folder / "saved")
        shown.append(models.train(model, optimizer, 1, first=2))
    assert shown[0] == shown[1] == shown[2]


@pytest.mark.disk
@pytest.mark.parametrize(
    *matrix(
        together=1,
        first=["module", "auto", "block"],
        then=["auto", "module", "block"],
        frozen=[(), ("layers.0.up", "layers.0.down")],
    )
)
def test_a_durable_run_goes_on_with_the_units_that_it_began_with(folder, first, then, frozen):
    def run(kind):
        torch.manual_seed(0)
        with Init(nvme=folder, host_memory="2MiB", units=kind, durable=True):
            model = Stack(frozen=frozen)
        trained = [one for one in model.parameters() if one.requires_grad]
        return model, AdamW(trained, **SETTINGS)

    def step(model, optimizer, number):
        loss = model(*floats(torch.Generator().manual_seed(number))).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    shown, model, began = [], None, None
    for kind in (first, then, first):
        model, optimizer = run(kind)
        assert infinity.resume(model, optimizer) == len(shown)
        began = began or units(model)
        assert units(model) == began
        shown.append(step(model, optimizer, len(shown)))
        infinity.commit(model)
        after = dict(model.state_dict())
        engine_of_model(model).close()
    assert ("layers.1" in began) == (first != "module")
    torch.manual_seed(0)
    plain = infinity.reference.prepare(Stack(frozen=frozen))
    optimizer = infinity.reference.ReferenceAdamW(
        [one for one in plain.parameters() if one.requires_grad], **SETTINGS
    )
    assert (
        differences(
            [*(step(plain, optimizer, number) for number in range(3)), dict(plain.state_dict())],
            [*shown, after],
        )
        == []
    )


@pytest.mark.disk
def test_a_durable_run_has_the_block_that_it_began_with_and_not_one_around_it_of_the_same_modules(folder):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.within = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
            self.large = nn.Linear(8, 16384).requires_grad_(requires_grad=False)

    names = []
    for done in (0, 1):
        model = of_blocks(lambda: nn.Sequential(Around()), nvme=folder, host_memory="2MiB", durable=True)
        optimizer = AdamW(model[0].within.parameters())
        assert infinity.resume(model, optimizer) == done
        names.append(units(model))
        model[0].within(torch.randn(2, 8).bfloat16()).sum().backward()
        optimizer.step()
        infinity.commit(model)
        engine_of_model(model).close()
    assert names[0] == names[1] == ["0.within.0", "0.large"]


@pytest.mark.disk
def test_a_durable_run_of_which_other_parts_are_frozen_is_refused_by_name(folder):
    def run(frozen):
        with Init(nvme=folder, host_memory="2MiB", units="block", durable=True):
            model = Stack(frozen=frozen)
        return model, AdamW([one for one in model.parameters() if one.requires_grad])

    model, optimizer = run(())
    assert infinity.resume(model, optimizer) == 0
    model(torch.randn(2, 5, 32).bfloat16()).sum().backward()
    optimizer.step()
    infinity.commit(model)
    engine_of_model(model).close()
    model, optimizer = run(("layers.1.up",))
    with pytest.raises(CheckpointError, match=r"the same parameters.*frozen"):
        infinity.resume(model, optimizer)
    engine_of_model(model).close()
    model, optimizer = run(())
    assert infinity.resume(model, optimizer) == 1


@pytest.mark.disk
@pytest.mark.parametrize("memory", [pytest.param("128KiB", marks=pytest.mark.slow), "64MiB"])
def test_a_frozen_base_stays_in_its_files_block_by_block(folder, memory):
    torch.manual_seed(1)
    models.MODELS["llama"]().to(torch.bfloat16).save_pretrained(folder / "model", max_shard_size="60kB")
    with Init(nvme=folder, host_memory=memory, frozen=True, units="block"):
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    engine = engine_of_model(ours)
    assert all(unit.record.in_files is not None for unit in engine.units)
    assert ("model.layers.1" in units(ours)) == (memory == "64MiB")
    assert infinity.stats(ours).written_nbytes == {}
    with torch.no_grad():
        ids = models.batch(0)
        assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.disk
def test_units_are_the_same_whether_a_module_that_lies_partly_in_files_was_evicted(folder):
    config = models.MODELS["llama"]().to(torch.bfloat16).config
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    config.attention_bias = True  # the biases do not lie in the files
    shown, values = [], []
    for window in (1, 1 << 30):
        with Init(nvme=folder, host_memory="64MiB", frozen=True, units="block") as init:
            init._construction._window_nbytes = window
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", config=config)
            model.requires_grad_(requires_grad=False)
        shown.append([(unit.name, unit.record.in_files is not None) for unit in engine_of_model(model).units])
        values.append(dict(model.state_dict()))
    assert differences(*values) == []
    assert shown[0] == shown[1]
    assert {("model.layers.0", False), ("model.layers.0 no. 2", True)} <= set(shown[0])


@pytest.mark.disk
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_blocks_that_were_evicted_while_the_model_was_built_have_the_same_values(folder, dtype, monkeypatch):
    """The window of half the budget is smaller than the model: some modules had records of their own."""
    torch.manual_seed(0)
    plain, left = Stack(depth=14), []
    leave = BuiltParameter.leave_record
    monkeypatch.setattr(BuiltParameter, "leave_record", lambda one: left.append(leave(one)) or left[-1])
    model = of_blocks(lambda: Stack(depth=14), nvme=folder, host_memory="320KiB", dtype=dtype)
    assert None in left
    assert any(one is not None and not one.fields for one in left)
    assert units(model) == [*(f"layers.{number}" for number in range(14)), "head"]
    expected = infinity.reference.prepare(plain, models.COMPUTES[dtype]).state_dict()
    assert differences(dict(expected), dict(model.state_dict())) == []
    held = sum(unit.record.nbytes("nvme") for unit in engine_of_model(model).units)
    assert infinity.stats(model).nvme_nbytes == held
