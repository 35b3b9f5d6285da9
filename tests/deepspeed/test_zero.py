"""Models as DeepSpeed's tests build them: weights used and returned elsewhere, outputs of any kind, modules
that come late, checkpoints before and after the first step. Trusted: plain torch.
"""

import contextlib
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from infinity import ConfigError, NotResidentError, UnsupportedError, deepspeed
from infinity.engine.engine import engine_of
from infinity.reference import ReferenceAdamW, prepare

pytestmark = pytest.mark.usefixtures("repeatable")

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 0.5,
    "infinity": {"host_memory": "16MiB"},
}


def batch(number):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(number))


def trained(engine, steps=3, loss=lambda output: output.square().mean()):
    for number in range(steps):
        engine.backward(loss(engine(batch(number))))
        engine.step()
    return engine.module.state_dict()


def trained_plain(model, steps=3, loss=lambda output: output.square().mean()):
    model = prepare(model, torch.float32)
    optimizer = ReferenceAdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for number in range(steps):
        loss(model(batch(number))).backward()
        infinity.reference.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def different(one, other):
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


class External(nn.Module):
    """Uses the weight of a module in another one's place, and a bias that a module returns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Dangling(8, 8)

    def forward(self, inputs):
        found, bias = self.second(self.first(inputs))
        return functional.linear(found, self.first.weight) + bias


class Dangling(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs), self.bias


class Bare(nn.Module):
    """Sets its own parameters while it is built, as its parents did."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.scale.data = (self.scale.data + 1).data
        self.below = nn.Linear(8, 8)
        with torch.no_grad():
            self.below.bias.zero_()

    def forward(self, inputs):
        return self.below(inputs) * self.scale


@pytest.mark.parametrize("kind", [External, Bare])
def test_weights_that_are_used_returned_and_changed_elsewhere_train_as_in_plain_torch(kind):
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = kind()
    assert all(engine_of(one) is not None for one in model.parameters())
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    torch.manual_seed(0)
    assert different(trained(engine), trained_plain(kind())) == []


def test_an_init_or_initialize_inside_an_init_is_refused_and_one_after_the_other_works():
    inner = deepspeed.zero.Init(config_dict_or_path=CONFIG)
    with (
        deepspeed.zero.Init(config_dict_or_path=CONFIG),
        pytest.raises(UnsupportedError, match="one after the"),
    ):
        inner.__enter__()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):

        class Late(nn.Module):
            def __init__(self):
                super().__init__()
                self.below = nn.Linear(8, 8)

            def forward(self, inputs):
                return self.below(inputs)

        torch.manual_seed(0)
        first = Late()
        with pytest.raises(UnsupportedError, match="call initialize after the `with`"):
            deepspeed.initialize(model=first, config=CONFIG)
    found = trained(deepspeed.initialize(model=first, config=CONFIG)[0])
    outside = nn.Linear(8, 8)
    assert engine_of(outside.weight) is None
    torch.manual_seed(0)
    assert different(found, trained_plain(Late())) == []


class Pair(NamedTuple):
    output: Any
    more: Any


@dataclass
class Record:
    output: Any
    more: Any


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.below, self.make = nn.Linear(8, 8), make

    def forward(self, inputs):
        return self.make(self.below(inputs), None)


MAKES = {
    "tuple": (lambda *found: found, lambda found: found[0]),
    "list": (lambda *found: list(found), lambda found: found[0]),
    "dict": (lambda one, more: {"a": {"output": one}, "b": more}, lambda found: found["a"]["output"]),
    "namedtuple": (Pair, lambda found: found.output),
    "dataclass": (Record, lambda found: found.output),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("user", [False, True])
def test_outputs_of_any_kind_go_backward(name, user):
    make, take = MAKES[name]
    config = {**CONFIG, "gradient_accumulation_steps": 2}
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Returns(make)
    engine = deepspeed.initialize(model=model, config=config)[0]
    torch.manual_seed(0)
    plain = prepare(Returns(make), torch.float32)
    optimizer = ReferenceAdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for number in range(4):
        loss = take(engine(batch(number))).square().mean()
        loss.backward() if user else engine.backward(loss)
        engine.step()
        (take(plain(batch(number))).square().mean() / 2).backward()
        if number % 2:
            infinity.reference.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert different(model.state_dict(), plain.state_dict()) == []


def test_parameters_are_there_inside_gathered_and_released_after():
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(NotResidentError, match=r"infinity\.gathered"):
        _ = model[0].weight.sum()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected = model[0].weight.detach().clone()
        with deepspeed.zero.GatheredParameters(model[0].weight):  # which DeepSpeed refuses
            assert torch.equal(model[0].weight, expected)
    with pytest.raises(NotResidentError):
        _ = model[0].weight.sum()
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0), torch.no_grad():
        model[1].bias.fill_(2)
    assert model.state_dict()["1.bias"].tolist() == [2.0] * 8
    with (
        pytest.raises(ValueError, match="there are 1 ranks"),
        deepspeed.zero.GatheredParameters(model[1].bias, modifier_rank=1),
    ):
        pass
    with deepspeed.zero.GatheredParameters(model[1].bias, enabled=False), pytest.raises(NotResidentError):
        _ = model[1].bias.sum()


def test_what_ranks_send_of_a_modifiers_values_may_outlive_the_with():
    """A thread of gloo's has it for some milliseconds more."""
    kept, weight = [], nn.Parameter(torch.zeros(8))

    def spread(values, _root, _what):
        values.fill_(3)
        kept.append(values)

    ranks = types.SimpleNamespace(
        size=2,
        together=lambda _: contextlib.nullcontext(),
        same=lambda *_: True,
        each=lambda *_: [b"\1", b"\0"],
        spread=spread,
    )
    with deepspeed.zero._changed_by(0, types.SimpleNamespace(ranks=ranks), [weight]), torch.no_grad():
        weight.fill_(2)
    assert weight.tolist() == [3.0] * 8
    assert kept[0].untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


def test_a_module_that_comes_after_initialize_is_an_ordinary_one():
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(8, 8))
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    late = nn.Linear(8, 8)
    engine.module.append(late)
    before = late.weight.detach().clone()
    trained(engine)
    assert torch.equal(late.weight, before)
    assert late.weight.grad is not None


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"load_optimizer_states": False}, {"load_module_only": True}],
    ids=["all", "weights", "module"],
)
def test_checkpoints_load_before_and_after_the_first_step(tmp_path, steps, options):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
    config = {**CONFIG, "scheduler": schedule}

    def build(seed):
        torch.manual_seed(seed)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        return deepspeed.initialize(model=model, config=config)[0]

    engine, again = build(0), build(1)
    trained(engine, steps)
    engine.save_checkpoint(tmp_path, tag="here")
    path, _ = again.load_checkpoint(tmp_path, tag="here", **options)
    assert path == str(tmp_path / "here")
    assert different(engine.module.state_dict(), again.module.state_dict()) == []
    whole = options == {}
    moments = [one.optimizer.state_dict()["state"] for one in (engine, again)]
    if whole:
        assert (again.global_steps, again.get_lr()) == (engine.global_steps, engine.get_lr())
        assert different(trained(engine, 2), trained(again, 2)) == []
    elif steps:
        assert moments[0]
        assert not moments[1] or not any(one["exp_avg"].any() for one in moments[1].values())
        trained(again, 1)


def test_what_latest_names_is_loaded_and_a_folder_without_it_is_told(tmp_path):
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(8, 8))
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    with pytest.warns(UserWarning, match="latest does not exist"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    trained(engine, 1)
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert engine.load_checkpoint(tmp_path)[0].endswith("global_step1")


def test_parameters_of_two_stages_of_precision_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"zero\.Init"):
        deepspeed.zero.Init(config_dict_or_path=CONFIG, dtype=torch.float16)


class Half(nn.Module):
    """A large layer beside a small one, which is trained."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(64, 64), nn.Linear(64, 2)

    def forward(self, inputs):
        return self.small(self.large(inputs))


@pytest.mark.disk
@pytest.mark.parametrize("place", ["in Init", "an argument of Init", "in memory", "in memory, loaded"])
def test_frozen_weights_are_quantised_where_the_configuration_says_so(folder, place):
    """DeepSpeed's zero_quantized_nontrainable_weights, or its quantized_initialization, which freezes all."""
    offload = {"device": "nvme", "nvme_path": str(folder)}
    config = {
        **CONFIG,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": offload},
    }
    if place not in {"an argument of Init", "in memory, loaded"}:
        config["zero_optimization"]["zero_quantized_nontrainable_weights"] = True
    if place == "in memory, loaded":
        config["weight_quantization"] = {"quantized_initialization": {"num_bits": 4, "group_size": 64}}
    torch.manual_seed(0)
    given = {"zero_quantized_nontrainable_weights": True} if place == "an argument of Init" else {}
    if "memory" in place:
        model = Half()
    else:
        with deepspeed.zero.Init(config_dict_or_path=config, **given):
            model = Half()
            model.large.requires_grad_(False)
    if place == "in memory":
        model.large.requires_grad_(False)
    if "memory" in place:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    found = {unit.name: unit.record.packed_nbytes for unit in engine_of(model.large.weight).units}
    assert 0 < found["large"] < 1.2 * 64 * 64
    assert found["small"] is None
    assert model.small.weight.requires_grad == (place != "in memory, loaded")
    with pytest.raises(ConfigError, match=r"what is trained is not quantised"):
        deepspeed.zero.Init(module=nn.Linear(64, 64), config_dict_or_path=quantising(config))


def quantising(config):
    """Return a configuration that quantises what is frozen, and freezes nothing."""
    zero = {**config["zero_optimization"], "zero_quantized_nontrainable_weights": True}
    return {
        **{name: one for name, one in config.items() if name != "weight_quantization"},
        "zero_optimization": zero,
    }
