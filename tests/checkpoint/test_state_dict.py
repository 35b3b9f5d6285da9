"""Trusted: torch's state_dict and load_state_dict on a plain model. Faked: available memory, once."""

from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import HostMemoryError, UnsupportedError
from infinity.engine.engine import engine_of
from infinity.ranks import machine_memory
from parity import build_both, differences, engine_in, halves, optimizers, resident, tokens, train

pytestmark = pytest.mark.usefixtures("deterministic")

X = halves(3, 8)


def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model.register_buffer("scale", torch.ones(3))
    return model


def tied():
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    model[2].weight = model[0].weight
    return model


@pytest.fixture
def both(nvme):
    return build_both(build, nvme=nvme)


def masters(model):
    return [engine_of(one).parameters.read(one, ["master"])[0] for one in model.parameters()]


def test_a_state_dict_holds_plain_cpu_tensors_updates_applied(both):
    plain, ours = both
    for model, optimizer in zip(both, optimizers(plain, ours), strict=True):
        train(model, optimizer, X, steps=2)
    state = ours.state_dict()
    assert differences(dict(plain.state_dict()), dict(state)) == []
    assert list(state) == list(plain.state_dict())
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert not any(value.requires_grad for value in state.values())
    state["0.weight"].zero_()
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []
    assert resident(ours) == []


def test_a_state_dict_is_a_copy_of_its_time(both):
    plain, ours = both
    optimizer = optimizers(plain, ours)[1]
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    state = ours.state_dict()
    train(ours, optimizer, X, steps=2)
    assert differences(before, dict(state)) == []


def test_prefixes_and_submodules_work_as_in_torch(both):
    plain, ours = both
    assert list(ours.state_dict(prefix="model.")) == list(plain.state_dict(prefix="model."))
    assert differences(dict(plain[0].state_dict()), dict(ours[0].state_dict())) == []
    assert differences(dict(plain[2].state_dict(prefix="x.")), dict(ours[2].state_dict(prefix="x."))) == []
    into = {}
    ours.state_dict(destination=into)
    assert differences(dict(plain.state_dict()), into) == []


def test_keep_vars_gives_the_parameters_themselves(both):
    _, ours = both
    assert ours.state_dict(keep_vars=True)["0.weight"] is ours[0].weight


def test_tied_parameters_share_memory_in_the_state_dict(nvme):
    plain, ours = build_both(tied, nvme=nvme)
    for model, optimizer in zip((plain, ours), optimizers(plain, ours), strict=True):
        train(model, optimizer, tokens(16, 2, 3), steps=2)
    state = ours.state_dict()
    assert state["0.weight"].data_ptr() == state["2.weight"].data_ptr()
    assert differences(dict(plain.state_dict()), dict(state)) == []


def test_inside_gathered_the_state_dict_is_a_copy_too(both):
    plain, ours = both
    with infinity.gathered(ours):
        state = ours.state_dict()
    assert differences(dict(plain.state_dict()), dict(state)) == []


def test_a_state_dict_in_a_forward_is_a_copy_too(both):
    plain, ours = both
    taken = []
    ours[2].register_forward_hook(lambda *rest: taken.append(ours.state_dict()))
    ours(X(torch.Generator())[0])
    ours(X(torch.Generator())[0])
    assert differences(dict(plain.state_dict()), dict(taken[0])) == []


def test_fp32_values_reach_the_masters_exactly(both):
    _, ours = both
    torch.manual_seed(9)
    wanted = {name: torch.randn(value.shape) for name, value in ours.state_dict().items()}
    assert str(ours.load_state_dict(wanted)) == "<All keys matched successfully>"
    assert differences([wanted[name] for name, _ in ours.named_parameters()], masters(ours)) == []
    assert torch.equal(ours.scale, wanted["scale"])
    assert resident(ours) == []


def test_a_step_then_a_load_keeps_the_moments_as_in_torch(both):
    plain, ours = both
    torch.manual_seed(9)
    wanted = {name: torch.randn(value.shape).bfloat16() for name, value in plain.named_parameters()}
    wanted["scale"] = torch.zeros(3)

    def loop(model, optimizer):
        shown = train(model, optimizer, X, steps=2)
        model.load_state_dict(wanted)
        return shown + train(model, optimizer, X, steps=3, seed=11)

    expected, actual = map(loop, both, optimizers(plain, ours))
    assert differences(expected, actual) == []


def test_a_load_between_forward_and_backward_is_refused(both):
    plain, ours = both
    loss = ours(X(torch.Generator())[0].requires_grad_()).float().sum()
    ours.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="were changed"):
        loss.backward()


def test_missing_and_unexpected_keys_are_torchs_business(both):
    plain, ours = both
    state = dict(plain.state_dict())
    state["0.weight"] = torch.full((8, 8), 2.0)
    del state["2.bias"]
    state["other"] = torch.zeros(1)
    for model in both:
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*2.bias.*Unexpected key.*other"):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["2.bias"], ["other"])
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []


def test_another_shape_is_torchs_own_error_and_that_parameter_is_unchanged(both):
    plain, ours = both
    state = {**plain.state_dict(), "0.weight": torch.zeros(4, 4)}
    for model in both:
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: .*\[4, 4\].*\[8, 8\]"):
            model.load_state_dict(state)
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []
    assert resident(ours) == []


def test_a_submodule_can_be_loaded_by_itself(both):
    plain, ours = both
    wanted = {"weight": torch.eye(8), "bias": torch.ones(8)}
    for model in both:
        model[2].load_state_dict(wanted)
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []


def test_loading_tied_parameters_works(nvme):
    plain, ours = build_both(tied, nvme=nvme)
    state = {name: torch.randn(value.shape).bfloat16() for name, value in plain.state_dict().items()}
    state["2.weight"] = state["0.weight"]
    for model in (plain, ours):
        model.load_state_dict(state)
    assert differences(dict(plain.state_dict()), dict(ours.state_dict())) == []


def test_assigning_is_refused(both):
    plain, ours = both
    with pytest.raises(UnsupportedError, match="assign"):
        ours.load_state_dict(plain.state_dict(), assign=True)
    assert resident(ours) == []


def test_a_state_dict_that_memory_cannot_hold_is_refused_with_numbers(both, monkeypatch):
    _, ours = both
    memory = namedtuple("memory", "available")  # noqa: PYI024 - psutil's own kind
    monkeypatch.setattr(machine_memory.psutil, "virtual_memory", lambda: memory(100))
    with pytest.raises(HostMemoryError, match=r"take 32\d B, 100 B of memory"):
        ours.state_dict()
    monkeypatch.undo()
    assert len(ours.state_dict()) == 7


def test_a_load_into_gathered_parameters_is_kept_or_refused(both):
    plain, ours = both
    state = {name: torch.ones_like(value) for name, value in plain.state_dict().items()}
    with infinity.gathered(ours, write=True):
        ours.load_state_dict(state)
    assert differences(state, dict(ours.state_dict())) == []
    with pytest.raises(UnsupportedError, match="write=True"), infinity.gathered(ours):
        ours.load_state_dict(dict(plain.state_dict()))
    assert differences(state, dict(ours.state_dict())) == []
    assert engine_in(ours).units


def peak_of(call):
    """Return how far memory rises while something is called, in bytes; what it returns goes first."""

    def memory(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


@pytest.mark.disk
def test_one_parameter_after_the_other_is_copied_and_taken(folder):
    """Of 64 MiB in 16 bits: a state_dict is that, and loading it takes a few of its 4 MiB parameters."""
    with infinity.Init(nvme=folder, host_memory="8MiB"):
        model = nn.Sequential(*[nn.Linear(2048, 1024, bias=False) for _ in range(16)])
    model.load_state_dict(model.state_dict())  # what the first use takes is not counted
    states = []
    assert peak_of(lambda: states.append(model.state_dict())) < (64 + 16) << 20
    states[0]["3.weight"].fill_(3.0)
    assert peak_of(lambda: model.load_state_dict(states[0])) < 24 << 20
    assert torch.equal(model.state_dict()["3.weight"], states[0]["3.weight"])
