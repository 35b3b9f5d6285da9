"""Options of torch's optimizers that change nothing here, or are refused. Trusted: torch.optim."""

import inspect

import pytest
import torch
from torch import nn

import infinity
from infinity import UnsupportedError
from parity import differences

X = torch.linspace(-1, 1, 8).view(2, 4)
KINDS = ("AdamW", "Adam", "SGD", "Adagrad")


def offloaded():
    torch.manual_seed(0)
    with infinity.Init(host_memory="16MiB", dtype="fp32"):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def train(model, optimizer, sign=1):
    for _ in range(2):
        (sign * model(X).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_torch_is_taken_where_it_changes_nothing(kind):
    names = inspect.signature(getattr(torch.optim, kind).__init__).parameters
    names = set(names) - {"self", "params"}
    ours = inspect.signature(getattr(infinity, kind).__init__).parameters
    extra = dict.fromkeys(names - set(ours), False) | ({"amsgrad": False} if "amsgrad" in names else {})
    assert set(extra) >= {"foreach", "maximize", "differentiable"}
    first = offloaded()
    expected = train(first, getattr(infinity, kind)(first.parameters(), lr=0.1))
    for choice in ({}, {"foreach": True}, {"fused": True}, {"foreach": None, "fused": None}):
        model = offloaded()
        optimizer = getattr(infinity, kind)(model.parameters(), lr=0.1, **{**extra, **choice})
        assert differences(expected, train(model, optimizer)) == []


REFUSED = [
    *((kind, option) for kind in KINDS for option in ("maximize", "differentiable")),
    *((kind, option) for kind in ("AdamW", "Adam") for option in ("capturable", "amsgrad")),
]


@pytest.mark.parametrize(("kind", "option"), REFUSED)
def test_an_option_that_changes_a_step_is_refused_by_name_however_it_comes(kind, option):
    model, make = offloaded(), getattr(infinity, kind)
    says = rf"{kind}\({option}=True\) is not supported: .*leave it out"
    with pytest.raises(UnsupportedError, match=says):
        make(model.parameters(), **{option: True})
    with pytest.raises(UnsupportedError, match=says):
        make([{"params": list(model.parameters()), option: True}])
    optimizer = make(model[0].parameters())
    with pytest.raises(UnsupportedError, match=says):
        optimizer.add_param_group({"params": model[1].parameters(), option: True})
    state = optimizer.state_dict()
    state["param_groups"][0][option] = True
    with pytest.raises(UnsupportedError, match=says):
        optimizer.load_state_dict(state)


def test_amsgrad_is_refused_with_what_it_would_keep():
    model = offloaded()
    for given in (list(model.parameters()), [{"params": list(model.parameters())}]):
        with pytest.raises(UnsupportedError, match=r"third state of 4 bytes per parameter.*\(160 B more\)"):
            infinity.AdamW(given, 1e-3, (0.9, 0.999), 1e-8, 1e-2, True)


def test_adam_with_decoupled_decay_is_named_as_what_it_is():
    model = offloaded()
    with pytest.raises(UnsupportedError, match=r"that is infinity\.AdamW"):
        infinity.Adam(model.parameters(), decoupled_weight_decay=True)
    with pytest.raises(UnsupportedError, match=r"use `infinity\.AdamW\(params, weight_decay=0\.1\)`"):
        torch.optim.Adam(model.parameters(), weight_decay=0.1, decoupled_weight_decay=True)


def test_a_negative_loss_maximizes_as_torch_does():
    model = offloaded()
    ours = train(model, infinity.AdamW(model.parameters(), lr=0.01), sign=-1)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    theirs = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, maximize=True))
    for one, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "option", "says"),
    [
        ("AdamW", "beta", "AdamW has no option 'beta'; did you mean 'betas'"),
        ("AdamW", "weight_deacy", "did you mean 'weight_decay'"),
        ("SGD", "max_nrom", "did you mean 'max_norm'"),
        ("SGD", "amsgrad", "SGD has no option 'amsgrad'. It has params, lr, momentum"),
        ("Adagrad", "fusde", "did you mean 'fused'"),
        ("Lion", "foreach", "Lion has no option 'foreach'. It has params, lr, betas"),
    ],
)
def test_an_unknown_option_is_refused_with_what_may_have_been_meant(kind, option, says):
    with pytest.raises(TypeError, match=says):
        getattr(infinity, kind)(offloaded().parameters(), **{option: 1})


def test_an_elementwise_optimizer_maximizes_by_torchs_own_steps():
    model = offloaded()
    kind, options = torch.optim.RMSprop, {"lr": 0.01, "maximize": True}
    ours = train(model, infinity.wrap_optimizer(kind, model.parameters(), **options))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    theirs = train(plain, kind(plain.parameters(), foreach=False, **options))
    assert differences(theirs, ours) == []
