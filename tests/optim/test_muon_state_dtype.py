"""Muon with its momentum in 16, 8 and 4 bits: the bits of the plain steps on moments that are stored so.

Real training on a real disk. Trusted: the plain step, and the reference's moments.
"""

import copy

import pytest
import torch

import infinity
from covers import matrix
from plain_muon import MUONS, PlainMuon, assert_same, built, groups_of, train

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize(
    *matrix(
        state_dtype=["bf16", "int8", "int4"],
        dtype=["bf16", "fp16", "fp32"],
        memory=["320KiB", "1MiB", "64MiB"],
        update=["forward", "backward"],
    )
)
def test_training_on_small_moments_equals_the_plain_steps(folder, dtype, memory, update, state_dtype):
    update = "forward" if dtype == "fp16" else update
    ours = built(dtype, nvme=folder, host_memory=memory, state_dtype=state_dtype)
    plain = built(dtype)
    optimizer = infinity.Muon(groups_of(ours), update=update)
    theirs = PlainMuon(plain, MUONS, state_dtype=state_dtype)
    assert train(ours, optimizer, 4) == train(plain, theirs, 4)
    assert_same(ours, optimizer, theirs)


@pytest.mark.parametrize("state_dtype", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory", ["320KiB", "64MiB"])
def test_state_that_is_assigned_leaves_that_of_the_same_layers_other_parameters(folder, memory, state_dtype):
    model = built(nvme=folder, host_memory=memory, state_dtype=state_dtype)
    optimizer = infinity.Muon(groups_of(model))
    train(model, optimizer, 2)
    up, names = model.up, ("exp_avg", "exp_avg_sq")
    momentum, moments = (
        optimizer.state[up.weight]["momentum_buffer"],
        [optimizer.state[up.bias][n] for n in names],
    )
    optimizer.state[up.weight]["momentum_buffer"] = momentum * -2
    assert torch.equal(optimizer.state[up.weight]["momentum_buffer"], momentum * -2)
    assert all(torch.equal(optimizer.state[up.bias][n], one) for n, one in zip(names, moments, strict=True))
    optimizer.state[up.bias]["exp_avg_sq"] = moments[1] * 4
    assert torch.equal(optimizer.state[up.weight]["momentum_buffer"], momentum * -2)
    assert torch.equal(optimizer.state[up.bias]["exp_avg"], moments[0])
    assert torch.equal(optimizer.state[up.bias]["exp_avg_sq"], moments[1] * 4)


def test_a_state_dict_goes_to_momenta_in_fewer_bits_and_back(folder):
    models_of = {
        state: built(nvme=folder, host_memory="64MiB", state_dtype=state) for state in ("fp32", "int4")
    }
    exact, small = (infinity.Muon(groups_of(model)) for model in models_of.values())
    for model, optimizer in zip(models_of.values(), (exact, small), strict=True):
        train(model, optimizer, 2)
    packed = copy.deepcopy(small.state_dict())
    exact.load_state_dict(packed)
    for number, state in exact.state_dict()["state"].items():
        assert all(torch.equal(one, packed["state"][number][key]) for key, one in state.items())
    train(models_of["int4"], small, 1)
    small.load_state_dict(exact.state_dict())
    for number, state in small.state_dict()["state"].items():
        assert all(torch.equal(one, packed["state"][number][key]) for key, one in state.items())
