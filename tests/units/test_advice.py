"""What errors advise, each carried out. Trusted: torch on models in memory. Faked: timm's average."""

import copy
import re

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity
from infinity import NotResidentError, UnsupportedError
from infinity.reference import ReferenceAdamW
from parity import differences, engine_in, resident

X = torch.linspace(-1, 1, 8).view(2, 4)

pytestmark = pytest.mark.usefixtures("deterministic")


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def offloaded(build=plain, **settings):
    with infinity.Init(**{"host_memory": "16MiB", "dtype": "fp32", **settings}):
        return build()


def train(model, optimizer, after=lambda: None):
    for _ in range(3):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


TAKEN = {
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "fused": True},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "foreach": False},
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Adadelta": {"rho": 0.8},
    "Adamax": {},
    "RAdam": {"lr": 0.01},
    "Rprop": {"etas": (0.4, 1.1)},
}


def advised(error, params):
    """Make the optimizer that a message tells to use."""
    call = re.search(r"use `(infinity\..*)`", str(error))[1]
    return eval(call, {"infinity": infinity, "torch": torch, "params": params})  # noqa: S307 - our own words


@pytest.mark.parametrize("name", TAKEN)
def test_an_optimizer_of_torch_is_refused_when_it_is_made_and_the_one_it_names_trains(name):
    model, other, kind = offloaded(), plain(), getattr(torch.optim, name)
    with pytest.raises(UnsupportedError, match=rf"{name} cannot step parameters that were built in") as error:
        kind(model.parameters(), **TAKEN[name])
    ours = advised(error.value, model.parameters())
    theirs = kind(other.parameters(), **TAKEN[name])
    for key, given in TAKEN[name].items():
        assert ours.param_groups[0].get(key, given) in (given, False)
    train(model, ours)
    train(other, theirs)
    for ours_now, theirs_now in zip(values(model).values(), values(other).values(), strict=True):
        torch.testing.assert_close(ours_now, theirs_now, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_none_of_ours_replaces_is_refused_too():
    model = offloaded()
    with pytest.raises(UnsupportedError, match=r"LBFGS cannot step .*infinity\.AdamW, Adam, SGD"):
        torch.optim.LBFGS(model.parameters())
    with pytest.raises(UnsupportedError, match=r"use `infinity\.AdamW\(params\)`.* Leave out amsgrad=True"):
        torch.optim.AdamW(model.parameters(), amsgrad=True)


def test_an_optimizer_of_torch_takes_frozen_parameters_and_ordinary_ones_beside_ours():
    model, more = offloaded().requires_grad_(requires_grad=False), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *more.parameters()], lr=0.1)
    before = values(more)
    more(model(X)).sum().backward()
    optimizer.step()
    assert len(differences(before, values(more))) == 2
    model.requires_grad_(requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"use `infinity\.AdamW\(params, lr=0\.1\)`"):
        optimizer.add_param_group({"params": list(offloaded().parameters())})


MADE_UNSEEN = {
    "AdamW": {},
    "Adam": {"foreach": True},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "RMSprop": {"foreach": True},
}


@pytest.mark.parametrize("name", MADE_UNSEEN)
def test_an_optimizer_that_was_made_where_values_are_is_refused_at_its_first_step(name):
    model = offloaded()
    with infinity.gathered(model):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **MADE_UNSEEN[name])
    model(X).sum().backward()
    with pytest.raises((UnsupportedError, NotResidentError), match=rf"{name} cannot step") as error:
        optimizer.step()
    ours = advised(error.value, model.parameters())
    model.zero_grad()
    train(model, ours)


def test_a_model_of_a_deepspeed_script_takes_an_optimizer_of_torch_until_it_steps(tmp_path):
    with infinity.deepspeed.zero.Init(
        config_dict_or_path={"train_batch_size": 2, "infinity": {"host_memory": "8MiB"}}
    ):
        model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(X).sum().backward()
    with pytest.raises(NotResidentError, match=r"use `infinity\.AdamW\(params, lr=0\.01\)`"):
        optimizer.step()


class ModelEma(nn.Module):
    """As timm's: a copy of the model, and its update."""

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model), decay

    def update(self, model):
        with torch.no_grad():
            pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
            for mine, other in pairs:
                mine.copy_(self.decay * mine + (1 - self.decay) * other)


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@pytest.mark.parametrize("kind", [averaged, ModelEma])
def test_an_average_that_would_copy_the_model_says_how_to_keep_one(kind):
    with pytest.raises(NotResidentError, match=r"cannot be .*copied.*An average of the weights is") as error:
        kind(offloaded())
    assert "average[name].lerp_(value.float(), 1 - decay)" in str(error.value)
    assert "inside `with infinity.Init(...):`, beside its model" in str(error.value)


def test_an_average_beside_its_model_or_in_plain_tensors_is_that_of_torch():
    other = plain()
    expected = averaged(other)
    train(other, ReferenceAdamW(other.parameters(), lr=0.01), lambda: expected.update_parameters(other))
    with infinity.Init(host_memory="16MiB", dtype="fp32"):
        model = plain()
        average = averaged(model)
    kept = {}

    def update():
        with infinity.gathered(model), infinity.gathered(average, write=True):
            average.update_parameters(model)
        for name, value in model.state_dict().items():
            kept.setdefault(name, value.float()).lerp_(value.float(), 1 - 0.9)

    optimizer = infinity.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, update)
    assert differences(dict(expected.state_dict()), dict(average.state_dict())) == []
    assert differences(dict(expected.module.state_dict()), kept) == []
    with pytest.raises(NotResidentError, match="updated inside"):
        average.update_parameters(model)
    assert torch.equal(average(X), expected(X))


@pytest.mark.parametrize("of", ["model", "layer", "parameter"])
def test_a_copy_says_where_copies_work(of):
    model = offloaded()
    one = {"model": model, "layer": model[0], "parameter": model[0].weight}[of]
    with pytest.raises(NotResidentError, match=r"inside `with infinity\.Init\(\.\.\.\):`, where copies work"):
        copy.deepcopy(one)
    with infinity.Init(host_memory="16MiB", dtype="fp32"):
        first = plain()
        second = copy.deepcopy(first)
    for other in (second, plain()):
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(X), model(X))
    with infinity.gathered(model):
        assert torch.equal(copy.deepcopy(model[0].weight), plain()[0].weight)


EXPORTS = {
    "torch.jit.script": torch.jit.script,
    "torch.jit.trace": lambda model: torch.jit.trace(model, X),
    "torch.export": lambda model: torch.export.export(model, (X,)).module(),
}


@pytest.mark.parametrize("where", ["outside", "inside gathered"])
@pytest.mark.parametrize("what", EXPORTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_scripts_traces_and_exports_are_refused_by_name_and_work_on_an_ordinary_model(what, where):
    model = offloaded()
    refused = pytest.raises((UnsupportedError, NotResidentError), match=rf"{what} cannot follow.*an ordinary")
    if where == "outside":
        with refused:
            EXPORTS[what](model)
    else:
        with infinity.gathered(model), refused:
            EXPORTS[what](model)
    other = plain()
    other.load_state_dict(model.state_dict())
    assert torch.equal(EXPORTS[what](other)(X), model(X))
    assert resident(model) == []


SURGERY = {
    "prune": lambda model: torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.5),
    "weight_norm": lambda model: torch.nn.utils.parametrizations.weight_norm(model[0]),
    "spectral_norm": lambda model: torch.nn.utils.parametrizations.spectral_norm(model[0]),
}


@pytest.mark.parametrize("name", SURGERY)
def test_surgery_on_modules_is_sent_into_init_where_it_works(name):
    def build():
        model = plain()
        SURGERY[name](model)
        return model

    with pytest.raises(NotResidentError, match=r"reparametrize modules inside `with infinity\.Init"):
        SURGERY[name](offloaded())
    model, other = offloaded(build), build()
    for one in (model, other):
        one(X).sum().backward()
    assert (
        differences([one.grad for one in other.parameters()], [+one.grad for one in model.parameters()]) == []
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_resizing_embeddings_is_sent_into_init_where_it_works():
    transformers = pytest.importorskip("transformers")

    def build():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
        config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
        return transformers.LlamaForCausalLM(config)

    def resized():
        model = build()
        model.resize_token_embeddings(40, mean_resizing=False)
        return model

    with pytest.raises(
        NotResidentError, match=r"resize_token_embeddings\(\.\.\.\) inside `with infinity\.In"
    ):
        offloaded(build).resize_token_embeddings(40)
    model = offloaded(resized)
    assert differences(dict(resized().state_dict()), dict(model.state_dict())) == []
    assert model(torch.tensor([[39]])).logits.shape == (1, 1, 40)


def test_attributes_that_a_user_sets_on_a_parameter_stay():
    model = offloaded()
    one = model[0].weight
    one.group = "first"
    train(model, infinity.AdamW(model.parameters()))
    with infinity.gathered(model, write=True):
        assert one.group == "first"
    assert (model[0].weight.group, engine_in(model).parameters.keeps(one)) == ("first", True)
    del one.group
    assert not hasattr(one, "group")
