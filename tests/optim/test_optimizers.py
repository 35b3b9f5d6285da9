"""Every optimizer makes its recipe's steps, on every record. Trusted: reference_steps, plain torch."""

import contextlib
import copy

import pytest
import torch
import transformers

import infinity
import models
from infinity import UnsupportedError
from infinity.engine.engine import engine_of_model
from infinity.reference import recipe as reference
from infinity.reference import steps as reference_steps

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

models.MODELS["one layer"] = lambda: transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**{**models.SIZES, "num_hidden_layers": 1})
)

# class: options, the state's names, its step in plain torch
KINDS = {
    "AdamW": ({"weight_decay": 0.1}, ("exp_avg", "exp_avg_sq"), reference.adamw_step),
    "Adam": ({"weight_decay": 0.1}, ("exp_avg", "exp_avg_sq"), reference_steps.adam_step),
    "SGD": ({}, ("momentum_buffer",), reference_steps.sgd_step),
    "SGD with momentum": (
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        ("momentum_buffer",),
        reference_steps.sgd_step,
    ),
    "Adagrad": (
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
        ("sum",),
        reference_steps.adagrad_step,
    ),
    "Lion": (
        {"weight_decay": 0.1},
        ("exp_avg",),
        lambda p, m, grad, clip, _step, group: reference_steps.lion_step(p, m, grad, clip, group),
    ),
}


def make(kind, parameters, **changes):
    return getattr(infinity, kind.split()[0])(parameters, lr=1e-2, **{**KINDS[kind][0], **changes})


class Plain:
    """The optimizer in memory, on a prepared model."""

    def __init__(self, model, group, kind):
        self.group, self.names, self.apply = group, *KINDS[kind][1:]
        self.state = {
            parameter: {
                "master": reference._adopt(parameter, parameter.dtype),
                **{
                    name: torch.full(parameter.shape, float(group.get("initial_accumulator_value", 0)))
                    for name in self.names
                },
            }
            for parameter in model.parameters()
        }
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for parameter, state in self.state.items():
            grad, factor = reference._stored(parameter)
            moments = [state[name] for name in self.names]
            self.apply(state["master"], *moments, grad, factor, self.count, self.group)
            parameter.copy_(reference.rounded(state["master"], parameter.dtype))

    def zero_grad(self):
        for parameter in self.state:
            parameter.grad = None


def train(model, optimizer, steps, first=0):
    return models.train(model, optimizer, steps, first=first, ids_of=models.by_number)


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("dtype", "memory", "update"),
    [
        ("bf16", "128KiB", "forward"),
        ("fp32", "64MiB", "backward"),
        ("fp16", "160KiB", "forward"),
    ],
)
def test_training_equals_the_steps_in_plain_torch(folder, kind, dtype, memory, update):
    ours = models.build("one layer", nvme=folder, host_memory=memory, dtype=dtype)
    optimizer = make(kind, ours.parameters(), update=update)
    plain = models.build("one layer", computes=dtype)
    recipe = Plain(plain, optimizer.param_groups[0], kind)
    assert train(ours, optimizer, 3) == train(plain, recipe, 3)
    packed = optimizer.state_dict()["state"]
    engine = engine_of_model(ours)
    for number, (one, state) in enumerate(zip(ours.parameters(), recipe.state.values(), strict=True)):
        assert torch.equal(engine.parameters.read(one, ["master"])[0], state["master"])
        assert packed[number]["step"] == 3
        kept = [name for name in recipe.names if kind != "SGD"]
        assert set(packed[number]) == {"step", *kept}
        for name in kept:
            assert torch.equal(packed[number][name], state[name]), name
    fields = {"AdamW": {"m", "v"}, "Adam": {"m", "v"}, "SGD": set(), "Adagrad": {"v"}}.get(kind, {"m"})
    assert {name for unit in engine.units for name in unit.record.fields} == {*engine.schema.weights, *fields}


@pytest.mark.parametrize("kind", ["Adam", "SGD", "SGD with momentum", "Adagrad", "Lion"])
def test_a_checkpoint_and_a_state_dict_carry_the_state(folder, tmp_path, kind):
    init = {"nvme": folder, "host_memory": "1MiB", "dtype": "fp32"}
    model = models.build("one layer", **init)
    optimizer = make(kind, model.parameters())
    train(model, optimizer, 2)
    infinity.save(model, optimizer, tmp_path / "saved")
    packed = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 2, first=2)
    again = models.build("one layer", seed=1, **init)
    loaded = make(kind, again.parameters())
    infinity.load(again, loaded, tmp_path / "saved")
    assert train(again, loaded, 2, first=2) == expected
    again.load_state_dict(packed[0])
    loaded.load_state_dict(packed[1])
    assert train(again, loaded, 2, first=2) == expected
    other = models.build("one layer", seed=2, **init)
    with pytest.raises(infinity.CheckpointError, match=rf"state of infinity\.{kind.split()[0]}, but .*AdamW"):
        infinity.load(other, infinity.AdamW(other.parameters()), tmp_path / "saved")


@pytest.mark.parametrize("kind", ["SGD with momentum", "Adagrad", "Adam"])
def test_a_state_dict_of_torchs_optimizer_is_taken(folder, kind):
    plain = torch.nn.Linear(8, 8)
    theirs = getattr(torch.optim, kind.split()[0])(plain.parameters(), lr=1e-2, **KINDS[kind][0])
    plain(torch.ones(2, 8)).sum().backward()
    theirs.step()
    with infinity.Init(nvme=folder, host_memory="1MiB", dtype="fp32"):
        layer = torch.nn.Linear(8, 8)
    optimizer = make(kind, layer.parameters())
    optimizer.load_state_dict(theirs.state_dict())
    name = KINDS[kind][1][-1]
    for number, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state[name], theirs.state_dict()["state"][number][name])
        assert state["step"] == 1


def test_two_optimizers_share_a_unit_and_each_keeps_its_own_state(folder):
    with infinity.Init(nvme=folder, host_memory="1MiB", dtype="fp32"):
        layer = torch.nn.Linear(40, 60)
    plain = torch.nn.Linear(40, 60)
    plain.load_state_dict(layer.state_dict())
    reference.prepare(plain, torch.float32)
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    pairs = [
        (infinity.AdamW([layer.weight]), reference.ReferenceAdamW([plain.weight])),
        (infinity.SGD([layer.bias], lr=0.1, momentum=0.9), None),
    ]
    momentum = torch.zeros(60)
    for step in range(3):
        x = torch.full((2, 40), 0.1 * (step + 1))
        for model in (layer, plain):
            model(x).square().sum().backward()
        for ours, theirs in pairs:
            ours.step()
            if theirs is not None:
                theirs.step()
        with torch.no_grad():
            reference_steps.sgd_step(plain.bias, momentum, plain.bias.grad, torch.ones(()), step + 1, group)
        layer.zero_grad()
        plain.zero_grad()
    assert all(map(torch.equal, layer.state_dict().values(), plain.state_dict().values()))


def test_what_an_optimizer_cannot_do_is_refused_by_name(folder):
    with infinity.Init(nvme=folder, host_memory="1MiB"):
        layer = torch.nn.Linear(8, 8)
    for options, says in (
        ({"nesterov": True}, "Nesterov needs a momentum above 0"),
        ({"dampening": 0.5}, "dampening"),
        ({"lr": -1.0}, "lr=-1.0"),
    ):
        with pytest.raises(ValueError, match=says):
            infinity.SGD(layer.parameters(), **options)
    with pytest.raises(ValueError, match="initial_accumulator_value=-1"):
        infinity.Adagrad(layer.parameters(), initial_accumulator_value=-1)
    optimizer = infinity.SGD(layer.parameters())
    layer(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="was made without momentum"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()
    with pytest.raises(ValueError, match="has no exp_avg"):
        infinity.AdamW(
            models.build("one layer", nvme=folder, host_memory="1MiB").parameters()
        ).load_state_dict({"state": {0: {"step": 1}}, "param_groups": [{"params": [0]}]})


@pytest.mark.parametrize(
    ("kind", "options", "memory"),
    [
        (torch.optim.RMSprop, {"momentum": 0.9, "weight_decay": 0.1}, "128KiB"),
        (torch.optim.RMSprop, {}, "64MiB"),
        (torch.optim.Adadelta, {"weight_decay": 0.1}, "128KiB"),
        (torch.optim.Adamax, {}, "128KiB"),
        (torch.optim.RAdam, {}, "128KiB"),
        (torch.optim.Rprop, {}, "128KiB"),
    ],
)
def test_an_elementwise_optimizer_of_torch_gives_its_own_bits(folder, tmp_path, kind, options, memory):
    ours = models.build("one layer", nvme=folder, host_memory=memory, dtype="fp32")
    optimizer = infinity.wrap_optimizer(kind, ours.parameters(), lr=1e-2, **options)
    plain = models.build("one layer", computes="fp32")
    theirs = kind(plain.parameters(), lr=1e-2, foreach=False, **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, theirs)]
    for number in range(3):
        assert train(ours, optimizer, 1, number) == train(plain, theirs, 1, number)
        for schedule in schedules:
            schedule.step()
    expected, found = theirs.state_dict()["state"], optimizer.state_dict()["state"]
    for number, state in expected.items():
        assert found[number].keys() == state.keys() | {"step"}
        assert all(torch.equal(found[number][name], value) for name, value in state.items())
    infinity.save(ours, optimizer, tmp_path / "saved")
    again = models.build("one layer", seed=1, nvme=folder, host_memory=memory, dtype="fp32")
    loaded = infinity.wrap_optimizer(kind, again.parameters(), lr=1e-2, **options)
    infinity.load(again, loaded, tmp_path / "saved")
    assert train(again, loaded, 2, 3) == train(plain, theirs, 2, 3)


def test_an_elementwise_optimizer_steps_exact_masters_of_16_bit_weights(folder):
    ours = models.build("one layer", nvme=folder, host_memory="128KiB")
    optimizer = infinity.wrap_optimizer(torch.optim.RMSprop, ours.parameters(), lr=1e-3)
    plain = models.build("one layer")
    masters = {one: torch.nn.Parameter(reference._adopt(one, one.dtype)) for one in plain.parameters()}
    theirs = torch.optim.RMSprop(masters.values(), lr=1e-3, foreach=False)
    for number in range(3):
        ids = models.batch(number)
        plain(input_ids=ids, labels=ids).loss.backward()
        for one, master in masters.items():
            master.grad, one.grad = one.grad.float(), None
        theirs.step()
        with torch.no_grad():
            for one, master in masters.items():
                one.copy_(reference.rounded(master))
    train(ours, optimizer, 3)
    engine = engine_of_model(ours)
    for one, master in zip(ours.parameters(), masters.values(), strict=True):
        assert torch.equal(engine.parameters.read(one, ["master"])[0], master)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (torch.optim.NAdam, {}, "NAdam keeps exp_avg, exp_avg_sq, mu_product: a record has room"),
        (
            torch.optim.RMSprop,
            {"centered": True, "momentum": 0.9},
            "keeps square_avg, momentum_buffer, grad_avg",
        ),
        (torch.optim.Adafactor, {}, "Adafactor is not elementwise"),
        (torch.optim.LBFGS, {}, "LBFGS cannot step flat parts"),
    ],
)
def test_what_finds_no_place_in_a_record_is_refused_by_name(folder, kind, options, says):
    with infinity.Init(nvme=folder, host_memory="1MiB"):
        layer = torch.nn.Linear(8, 8)
    with pytest.raises(UnsupportedError, match=says):
        infinity.wrap_optimizer(kind, layer.parameters(), **options)


def test_options_that_change_the_state_later_are_refused(folder):
    with infinity.Init(nvme=folder, host_memory="1MiB", dtype="fp32"):
        layer = torch.nn.Linear(8, 8)
    optimizer = infinity.wrap_optimizer(torch.optim.RMSprop, layer.parameters())
    layer(torch.ones(1, 8)).sum().backward()
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(
        ValueError,
        match=r"RMSprop was made with options that keep the state .*give them when the optimizer is made",
    ):
        optimizer.step()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kinds", [("AdamW", "AdamW"), ("SGD", "AdamW"), ("AdamW", "SGD with momentum")])
def test_an_optimizer_that_is_made_again_takes_over_as_in_torch(folder, kinds, fresh):
    """fresh: gradients are gone when it is made; else it steps with those that the earlier one has used."""
    ours = models.build("one layer", nvme=folder, host_memory="160KiB", dtype="fp32")
    plain = models.build("one layer", computes="fp32")
    earlier = make(kinds[0], ours.parameters())
    recipe = Plain(plain, earlier.param_groups[0], kinds[0])
    for one, model in ((earlier, ours), (recipe, plain)):
        train(model, one, 2)
        if not fresh:
            ids = models.batch(2)
            model(input_ids=ids, labels=ids).loss.backward()
            one.step()
    with pytest.warns(UserWarning, match="supersedes it"):
        second = make(kinds[1], ours.parameters())
    recipe = Plain(plain, second.param_groups[0], kinds[1])
    for one in (second, recipe):
        if not fresh:
            one.step()
        one.zero_grad()
    assert train(ours, second, 2, 3) == train(plain, recipe, 2, 3)
    engine = engine_of_model(ours)
    for one, state in zip(ours.parameters(), recipe.state.values(), strict=True):
        assert torch.equal(engine.parameters.read(one, ["master"])[0], state["master"])
        assert second.state[one]["step"] == 2 + (not fresh)


@pytest.mark.parametrize("speculate", [False, True])
def test_a_learning_rate_in_a_tensor_counts_as_it_is_at_step(folder, speculate):
    weights = []
    for ours in (False, True):
        torch.manual_seed(0)
        with (
            infinity.Init(nvme=folder, host_memory="1MiB", dtype="fp32") if ours else contextlib.nullcontext()
        ):
            layer = torch.nn.Linear(64, 64)
        lr = torch.tensor(1e-2)
        if ours:
            kind = torch.optim.RMSprop
            optimizer = infinity.wrap_optimizer(kind, layer.parameters(), lr=lr, speculate=speculate)
        else:
            optimizer = torch.optim.RMSprop(layer.parameters(), lr=lr, foreach=False)
        for _ in range(3):
            layer(torch.ones(1, 64)).square().sum().backward()
            lr.mul_(0.5)
            optimizer.step()
            lr.mul_(0.5)
            optimizer.zero_grad()
        weights.append({name: one.clone() for name, one in layer.state_dict().items()})
    assert all(torch.equal(weights[0][name], one) for name, one in weights[1].items())
