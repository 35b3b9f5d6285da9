"""Changes of parameters that would be lost, in a forward, a backward or `gathered`. Trusted: torch's own
results outside of Init. Faked: nothing.
"""

import copy
import ctypes
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from covers import matrix
from infinity import EngineFailedError, UnsupportedError
from infinity.units.changes import Changes
from parity import differences, resident

pytestmark = pytest.mark.disk

X = torch.ones(2, 16, dtype=torch.bfloat16)
HALF = torch.full((16, 16), 0.5, dtype=torch.bfloat16)


def share_memory(values, change):
    """Change values through NumPy, which knows no bfloat16."""
    change(values.view(torch.int16).numpy())


CHANGES = {
    "no version": lambda weight: weight.data.fill_(0.5),
    "one element": lambda weight: weight.data[3].narrow(0, 5, 1).add_(1),
    "copied": lambda weight: weight.data.copy_(HALF),
    "replaced": lambda weight: setattr(weight, "data", HALF.clone()),
    "replaced by a view": lambda weight: setattr(weight, "data", weight.data.t()),
    "set_": lambda weight: weight.set_(HALF.clone()),
    "numpy": lambda weight: share_memory(weight.data, lambda array: array.fill(1)),
    "numpy, one element": lambda weight: share_memory(weight.detach(), lambda array: array[3].put(5, 1)),
    "data of data": lambda weight: weight.data.data.mul_(2),
    "detached, then data": lambda weight: weight.detach().data.mul_(2),
    "in place": lambda weight: weight.clamp_(-0.01, 0.01),
    "foreach": lambda weight: torch._foreach_add_([weight.data], 1.0),
}


HIDDEN = {
    "data of a view": lambda weight: weight.view(-1).data[5].zero_(),
    "numpy of a view": lambda weight: share_memory(weight.t().detach(), lambda array: array.put(9, 1)),
    "storage": lambda weight: weight.untyped_storage().fill_(0),
    "a pointer": lambda weight: ctypes.memset(weight.data_ptr() + 34, 0, 2),
}


class Scale(nn.Module):
    """Multiplies by its weight, as the norms of transformers do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.weight * x


class Changing(nn.Module):
    """Changes a weight in its forward: its own layer's, or that of a layer it does not call."""

    def __init__(self, *, sibling=False):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.sibling = sibling
        self.change = None

    def forward(self, x):
        if self.change is not None and self.sibling:
            with torch.no_grad():
                self.change(self.b.weight)
        return self.a(x)


def change_in_forward(model, change):
    """Have `change` done to a.weight while the layer `a` runs."""

    def before(module, _args):
        with torch.no_grad():
            change(module.weight)

    return model.a.register_forward_pre_hook(before)


BUDGETS = ["in memory", "on disk", "pinned"]


@pytest.fixture(params=BUDGETS)
def built(request):
    """Return what builds a model: in host memory; on NVMe with hardly any memory; on NVMe with all pinned."""

    def build(*, used=True, **options):
        torch.manual_seed(0)
        nvme = None if request.param == "in memory" else str(request.getfixturevalue("folder"))
        memory = "1MiB" if request.param == "on disk" else "64MiB"
        with infinity.Init(nvme=nvme, host_memory=memory):
            model = Changing(**options)
        if used:
            model(X).sum().backward()
            model.zero_grad()
        return model

    return build


def by_turns(changes):
    """Return parametrize's arguments for all changes at each budget, by default at one."""
    return matrix(together=1, change=list(changes), built=BUDGETS)


def is_gone(model, weights):
    """Whether nothing is left of the change: the values are as before, or the engine goes no further."""
    try:
        model(X)
        return differences(weights, dict(model.state_dict())) == [] and resident(model) == []
    except EngineFailedError:
        return True


@pytest.mark.parametrize(*by_turns(CHANGES), indirect=["built"])
def test_a_change_in_a_forward_is_refused_by_name_whatever_the_budget(built, change):
    model = built()
    weights = copy.deepcopy(dict(model.state_dict()))
    hook = change_in_forward(model, CHANGES[change])
    with pytest.raises(UnsupportedError, match=r"a.weight was changed in place.*gathered"):
        model(X)
    hook.remove()
    assert is_gone(model, weights)


@pytest.mark.parametrize(*by_turns(HIDDEN), indirect=["built"])
def test_what_is_hidden_from_torch_is_found_by_its_content_at_the_first_use(built, change):
    model = built(used=False)
    weights = copy.deepcopy(dict(model.state_dict()))
    hook = change_in_forward(model, HIDDEN[change])
    with pytest.raises(UnsupportedError, match=r"a.weight was changed in place.*gathered"):
        model(X)
    hook.remove()
    assert is_gone(model, weights)


@pytest.mark.parametrize("change", ["no version", "replaced", "numpy", "in place"])
def test_so_is_a_change_of_a_layer_that_the_forward_does_not_call(built, change):
    model = built(sibling=True)
    weights = copy.deepcopy(dict(model.state_dict()))
    model.change = CHANGES[change]
    with pytest.raises(UnsupportedError, match=r"b.weight was changed in place.*gathered"):
        model(X)
    model.change = None
    assert is_gone(model, weights)


@pytest.mark.parametrize("change", ["no version", "replaced", "numpy"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_change_in_a_backward_is_refused_by_name(built, change, grad):
    model = built()
    weights = copy.deepcopy(dict(model.state_dict()))
    x = X.clone().requires_grad_()
    out = model(x)

    def back(_grad):
        with torch.no_grad():
            CHANGES[change](model.a.weight)

    (x if grad else out).register_hook(back)
    with pytest.raises(UnsupportedError, match=r"a.weight was changed in place.*gathered"):
        out.sum().backward()
    assert is_gone(model, weights)


@pytest.mark.parametrize(*by_turns(CHANGES), indirect=["built"])
def test_a_change_in_gathered_without_write_is_refused_by_name(built, change):
    model = built()
    weights = copy.deepcopy(dict(model.state_dict()))
    with (
        pytest.raises(UnsupportedError, match=r"a.weight was changed inside.*write=True"),
        torch.no_grad(),
        infinity.gathered(model),
    ):
        CHANGES[change](model.a.weight)
    assert differences(weights, dict(model.state_dict())) == []
    assert resident(model) == []
    model(X)


@pytest.mark.parametrize(*by_turns(CHANGES), indirect=["built"])
def test_the_advice_keeps_the_change_that_a_forward_makes(built, change):
    plain, model = Changing().bfloat16(), built()
    plain.load_state_dict(model.state_dict())
    shown = []
    for one in (plain, model):
        hook = change_in_forward(one, CHANGES[change])
        if one is model:
            with infinity.gathered(one.a, write=True):
                out = one(X)
        else:
            out = one(X)
        hook.remove()
        shown.append([out.detach(), one(X).detach(), *one.state_dict().values()])
    assert differences(*shown) == []


def test_reading_through_data_in_a_forward_is_fine(built):
    plain, model = Changing().bfloat16(), built()
    plain.load_state_dict(model.state_dict())
    shown = []
    for one in (plain, model):
        seen = []
        change_in_forward(
            one,
            lambda weight, seen=seen: seen.extend(
                [
                    weight.data.sum().item(),
                    weight.detach().view(torch.int16).numpy().sum().item(),
                    str(weight),
                ]
            ),
        )
        one(X).sum().backward()
        shown.append([*seen, one.a.weight.grad.float().sum().item()])
    assert shown[0] == shown[1]


def test_a_module_that_moves_to_where_it_is_changes_nothing_in_a_forward(built):
    model = built()
    change_in_forward(model, lambda weight: model.a.to(torch.bfloat16))
    model(X)


def test_in_a_forward_a_parameter_is_copied_pickled_and_wrapped_as_an_ordinary_one(built):
    model = built()
    seen = []

    def look(weight):
        assert isinstance(weight, nn.Parameter)
        seen.extend([copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))])  # noqa: S301 - ours
        wrapped = nn.Parameter(weight)
        assert isinstance(wrapped, nn.Parameter)
        assert wrapped.requires_grad
        seen.append(nn.Parameter(weight.clone()))

    change_in_forward(model, look)
    model(X)
    weight = model.state_dict()["a.weight"]
    assert [type(one) for one in seen] == [nn.Parameter] * 3
    assert all(torch.equal(one, weight) for one in seen)


def test_nothing_is_compared_where_nothing_is_handed_out(built, monkeypatch):
    model = built()
    digests = []
    monkeypatch.setattr(Changes, "_digest", lambda _changes, index: digests.append(index))
    optimizer = infinity.AdamW(model.parameters())
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert digests == []


def test_a_checkpoint_that_saves_what_it_recomputes_hands_nothing_out(monkeypatch):
    """It saves the weight of a product itself, detached, where a linear layer's is saved as a view."""
    with infinity.Init(host_memory="64MiB"):
        scale = Scale()

    def step():
        x = X.clone().requires_grad_()
        checkpoint(scale, x, use_reentrant=False).sum().backward()
        scale.zero_grad()

    step()
    digests = []
    monkeypatch.setattr(Changes, "_digest", lambda _changes, index: digests.append(index))
    step()
    assert digests == []
