"""Small moments of every optimizer, on weights of every type. Trusted: plain torch. A real disk."""

import itertools

import pytest
import torch
import transformers

import infinity
import models
from infinity.engine.engine import engine_of_model
from infinity.reference import recipe as reference
from infinity.reference import steps as reference_steps
from infinity.reference.moments import state_key, step_stored, store, widened, zero_moments
from models import train

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

models.MODELS["one layer"] = lambda: transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**{**models.SIZES, "num_hidden_layers": 1})
)

# class: options, the moments' names in records and in the state, its step in plain torch on both of them
KINDS = {
    "AdamW": ({"weight_decay": 0.1}, {"m": "exp_avg", "v": "exp_avg_sq"}, reference.adamw_small_step),
    "Adam": ({"weight_decay": 0.1}, {"m": "exp_avg", "v": "exp_avg_sq"}, reference_steps.adam_step),
    "SGD": (
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"m": "momentum_buffer"},
        lambda p, m, _v, *rest: reference_steps.sgd_step(p, m, *rest),
    ),
    "Adagrad": (
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
        {"v": "sum"},
        lambda p, _m, v, *rest: reference_steps.adagrad_step(p, v, *rest),
    ),
    "Lion": (
        {"weight_decay": 0.1},
        {"m": "exp_avg"},
        lambda p, m, _v, grad, clip, _step, group: reference_steps.lion_step(p, m, grad, clip, group),
    ),
}


def make(kind, parameters, **changes):
    return getattr(infinity, kind)(parameters, lr=1e-2, **{**KINDS[kind][0], **changes})


class Plain:
    """The optimizer in memory, on a prepared model."""

    def __init__(self, model, group, kind, state_dtype):
        self.group, self.apply, self.state_dtype, self.count = group, KINDS[kind][2], state_dtype, 0
        self.state = {}
        for parameter in model.parameters():
            master = reference._adopt(parameter, parameter.dtype)
            self.state[parameter] = {"master": master, **zero_moments(master, state_dtype)}
            begin = torch.full(master.shape, float(group.get("initial_accumulator_value", 0)))
            store(self.state[parameter], torch.zeros(master.shape), begin, 0, state_dtype)

    @torch.no_grad()
    def step(self):
        self.count += 1
        for number, (parameter, state) in enumerate(self.state.items()):
            rest = *reference._stored(parameter), self.count, self.group

            def on_moments(m, v, master=state["master"], rest=rest):
                self.apply(master, m, v, *rest)

            step_stored(state, state_key(0, number, self.count), self.state_dtype, on_moments)
            parameter.copy_(reference.rounded(state["master"], parameter.dtype))

    def zero_grad(self):
        for parameter in self.state:
            parameter.grad = None


CASES = list(itertools.product(KINDS, ("bf16", "fp16", "fp32"), ("bf16", "int8", "int4")))
DEFAULT = {
    ("Lion", "bf16", "int4"),
    ("SGD", "fp16", "int4"),
    ("Adagrad", "fp32", "int4"),
    ("Lion", "bf16", "int8"),
    ("SGD", "fp32", "bf16"),
    ("Adagrad", "bf16", "int8"),
    ("AdamW", "bf16", "int4"),
}
DEFAULT |= {("AdamW", "fp16", "int8"), ("Adam", "fp32", "int4")}


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize(
    ("kind", "dtype", "state_dtype"),
    [pytest.param(*one, marks=[] if one in DEFAULT else pytest.mark.slow) for one in CASES],
)
def test_training_saving_and_setting_moments_equal_the_steps_in_plain_torch(
    folder, tmp_path, kind, dtype, state_dtype
):
    small = ("bf16", "fp16").count(dtype) and kind != "Adagrad"
    init = {"host_memory": "320KiB" if small else "64MiB", "dtype": dtype, "state_dtype": state_dtype}
    ours = models.build("one layer", nvme=folder, **init)
    optimizer = make(kind, ours.parameters(), update="forward" if dtype == "fp16" else "backward")
    plain = models.build("one layer", computes=dtype)
    recipe = Plain(plain, optimizer.param_groups[0], kind, state_dtype)
    assert train(ours, optimizer, 3) == train(plain, recipe, 3)
    engine, names = engine_of_model(ours), KINDS[kind][1]
    packed = optimizer.state_dict()["state"]
    for number, (one, state) in enumerate(zip(ours.parameters(), recipe.state.values(), strict=True)):
        assert torch.equal(engine.parameters.read(one, ["master"])[0], state["master"])
        assert set(packed[number]) == {"step", *names.values()}
        exact = dict(zip(("m", "v"), widened(state, state_dtype), strict=True))
        for field, name in names.items():
            assert torch.equal(packed[number][name], exact[field].view(one.shape)), name
    kept = set(engine.schema.moments_of(names))
    assert {name for unit in engine.units for name in unit.record.fields} == {*engine.schema.weights, *kept}
    infinity.save(ours, optimizer, tmp_path / "saved")
    expected = train(ours, optimizer, 2, first=3)
    again = models.build("one layer", seed=1, nvme=folder, **init)
    loaded = make(kind, again.parameters())
    infinity.load(again, loaded, tmp_path / "saved")
    assert train(again, loaded, 2, first=3) == expected


@pytest.mark.parametrize("state_dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("memory", ["320KiB", "64MiB"])
def test_a_new_optimizer_of_any_kind_starts_with_moments_of_zero(folder, memory, state_dtype):
    with infinity.Init(nvme=folder, host_memory=memory, state_dtype=state_dtype):
        layers = torch.nn.Sequential(torch.nn.Linear(40, 600), torch.nn.Linear(600, 40))

    def stepped(optimizer):
        layers(torch.ones(2, 40, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    optimizer = stepped(infinity.AdamW(layers.parameters()))
    for kind in ("Lion", "AdamW", "SGD", "Adagrad", "AdamW"):
        with pytest.warns(UserWarning, match="supersedes it"):
            optimizer = make(kind, layers.parameters())
        begin = KINDS[kind][0].get("initial_accumulator_value", 0)
        engine, places = engine_of_model(layers), KINDS[kind][1]
        for one in layers.parameters():
            assert all((values == begin).all() for values in engine.parameters.read(one, list(places)))
        stepped(optimizer)
        for one in layers.parameters():
            assert all(optimizer.state[one][name].count_nonzero() for name in places.values())


@pytest.mark.parametrize("state_dtype", ["int8", "int4"])
def test_the_units_other_optimizer_keeps_its_moments_where_one_of_this_is_set(folder, state_dtype):
    with infinity.Init(nvme=folder, host_memory="1MiB", state_dtype=state_dtype):
        layer = torch.nn.Linear(40, 60)
    optimizer = infinity.AdamW(layer.parameters(), lr=1e-2)
    layer(torch.ones(2, 40, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    before = {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[layer.weight]["exp_avg"] = before["exp_avg"] * -2
    after = optimizer.state[layer.weight]
    assert torch.equal(after["exp_avg"], before["exp_avg"] * -2)
    assert torch.equal(after["exp_avg_sq"], before["exp_avg_sq"])
