"""What `optimizer.state` shows. Trusted: the recipe's optimizer in memory. Faked: nothing."""

import copy
import io
from collections.abc import MutableMapping

import pytest
import torch
from torch import nn

import infinity
from infinity import NotResidentError, UnsupportedError
from parity import build_both, differences, halves, optimizers

X = halves(3, 8)

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(params=["in memory", pytest.param("on disk", marks=pytest.mark.disk)])
def stepped(request, tmp_path):
    """A model and its optimizer, in memory and offloaded, after two steps of all layers but the last."""
    models = build_both(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        nvme=tmp_path if request.param == "on disk" else None,
    )
    pairs = list(zip(models, optimizers(*models), strict=True))
    for model, optimizer in pairs:
        for _ in range(2):
            model[0](X(torch.Generator().manual_seed(3))[0]).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return pairs


def test_state_is_read_when_it_is_asked_for_and_is_the_recipes(stepped):
    (plain, theirs), (ours, optimizer) = stepped
    for mine, other in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        state, expected = optimizer.state[mine], theirs.state[other]
        assert (list(state), len(state), "exp_avg" in state) == (["step", "exp_avg", "exp_avg_sq"], 3, True)
        assert state["step"] == expected["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], expected[name])
            assert torch.equal({**state}[name], dict(state)[name])
        assert state.get("momentum_buffer") is None
        with pytest.raises(KeyError, match="exp_avg_sq"):
            state["momentum_buffer"]
        assert repr(state).startswith("{'step': 2, 'exp_avg': 'fp32 (8")
    assert set(optimizer.state) == set(ours[0].parameters())
    assert len(optimizer.state) == 2


def test_what_has_not_stepped_has_no_state_and_what_is_not_its_own_is_refused(stepped):
    _, (ours, optimizer) = stepped
    unused = ours[1].weight
    assert (unused in optimizer.state, dict(optimizer.state[unused]), bool(optimizer.state[unused])) == (
        False,
        {},
        False,
    )
    with pytest.raises(KeyError, match="none, before the first step"):
        optimizer.state[unused]["exp_avg"] = torch.zeros(8, 8)
    with pytest.raises(KeyError, match="is not a parameter of this AdamW"):
        optimizer.state[nn.Parameter(torch.zeros(1))]


def test_state_that_is_assigned_is_what_the_next_step_uses(stepped):
    (plain, theirs), (ours, optimizer) = stepped
    value = torch.linspace(0, 1, 64).view(8, 8)
    theirs.state[plain[0].weight].update(exp_avg=value.clone(), step=5)
    optimizer.state[ours[0].weight]["exp_avg"] = value
    optimizer.state[ours[0].weight] = {"step": 5}
    for model, one in stepped:
        model[0](X(torch.Generator())[0]).float().sum().backward()
        one.step()
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []
    with pytest.raises(
        ValueError, match=r"state\['exp_avg'\] = \(4, 4\): expected a tensor of shape \(8, 8\)"
    ):
        optimizer.state[ours[0].weight]["exp_avg"] = torch.zeros(4, 4)


@pytest.mark.parametrize("stepped", ["in memory"], indirect=True)
def test_a_released_parameter_is_no_state_since_its_values_are_not_here(stepped):
    _, (ours, optimizer) = stepped
    state, weight = optimizer.state[ours[0].weight], ours[0].weight
    before = state["exp_avg"].clone()
    with pytest.raises(NotResidentError, match="is not resident"):
        state["exp_avg"] = weight
    assert torch.equal(state["exp_avg"], before)


CHANGES = {
    "zero_": lambda one: one.zero_(),
    "mul_": lambda one: one.mul_(0.5),
    "augmented": lambda one: one.__iadd__(1),
    "item": lambda one: one.__setitem__(0, 1),
    "view": lambda one: one[0].view(-1).fill_(1),
    "data": lambda one: one.data.zero_(),
    "out": lambda one: torch.add(one, one, out=one),
    "foreach": lambda one: torch._foreach_zero_([one]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stepped", ["in memory"], indirect=True)
def test_changing_the_copy_in_place_is_refused_and_assigning_works(stepped, change):
    _, (ours, optimizer) = stepped
    state = optimizer.state[ours[0].weight]
    with pytest.raises(UnsupportedError, match=r"would be lost. Assign a tensor: optimizer\.state"):
        CHANGES[change](state["exp_avg"])
    copied = state["exp_avg"].clone()
    CHANGES[change](copied)
    state["exp_avg"] = copied
    assert torch.equal(state["exp_avg"], copied)


def test_state_may_be_moved_as_lightning_moves_it(stepped):
    """Lightning's `_optimizer_to_device` at the beginning and the end of `fit`."""
    (plain, theirs), (ours, optimizer) = stepped
    for state in optimizer.state.values():
        assert isinstance(state, MutableMapping)  # Lightning makes a new one of its type where it is none
        for name, value in state.items():
            if name != "step":
                state[name] = value.to("cpu", non_blocking=True)
    for mine, other in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        for name, value in optimizer.state[mine].items():
            assert differences(theirs.state[other][name], value) == []


@pytest.mark.parametrize("stepped", ["in memory"], indirect=True)
def test_a_copy_of_state_computes_and_is_saved_as_an_ordinary_tensor(stepped):
    _, (ours, optimizer) = stepped
    one = optimizer.state[ours[0].weight]["exp_avg_sq"]
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    results = [again, one.sqrt(), one + 0, one.clone(), copy.deepcopy(one) + 0, torch.stack([one])]
    assert {type(result) for result in results} == {torch.Tensor}
    assert torch.equal(again, one)
    assert torch.zeros(8, 8).copy_(one).equal(again)


@pytest.mark.parametrize("stepped", ["in memory"], indirect=True)
def test_state_is_dropped_by_making_a_new_optimizer(stepped):
    _, (ours, optimizer) = stepped
    refused = pytest.raises(UnsupportedError, match="Make a new optimizer, whose state begins with zeros")
    with refused:
        optimizer.state.clear()
    with refused:
        del optimizer.state[ours[0].weight]
    with refused:
        optimizer.state[ours[0].weight].clear()
    with refused:
        optimizer.state = {}
    with pytest.warns(UserWarning, match="supersedes"):
        again = infinity.AdamW(ours.parameters())
    assert (len(again.state), dict(again.state[ours[0].weight])) == (0, {})
    with pytest.raises(UnsupportedError, match="state of a superseded AdamW"):
        optimizer.state[ours[0].weight]["exp_avg"]


@pytest.mark.parametrize("stepped", ["in memory"], indirect=True)
def test_moving_state_to_a_device_as_lightning_does_reads_nothing(stepped, monkeypatch):
    _, (_, optimizer) = stepped
    monkeypatch.setattr("infinity.engine.parameters.Parameters.read", None)
    for parameter, state in optimizer.state.items():
        assert not isinstance(state, dict)
        optimizer.state[parameter] = state
    assert "read when asked for" in repr(optimizer.state)
