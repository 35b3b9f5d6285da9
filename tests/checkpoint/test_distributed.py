"""infinity.load_dcp in one process. Trusted: a training in memory, and torch.distributed.checkpoint, which
saves it. Faked: nothing. Meshes load so in tests/ranks/test_meshes.py.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import infinity
from infinity.engine.engine import engine_of
from infinity.storage.manifest import CheckpointError

pytestmark = [
    pytest.mark.disk,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

FIELDS = {"master": "master", "m": "exp_avg", "v": "exp_avg_sq"}


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


@pytest.fixture
def plain(seed):
    """A model that was trained in memory, with its optimizer."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def start(folder, optimizer=infinity.AdamW):
    with infinity.Init(dtype="fp32", nvme=folder, host_memory="64MiB"):
        model = network()
    return model, optimizer(model.parameters(), lr=0.01)


def by_name(model, optimizer):
    return get_state_dict(model, optimizer)[1]["state"]


def by_number(_model, optimizer):
    return optimizer.state_dict()["state"]


def with_plain_steps(model, optimizer):
    return {name: {**of, "step": int(of["step"])} for name, of in by_name(model, optimizer).items()}


@pytest.mark.parametrize("moments", [by_name, by_number, with_plain_steps])
def test_what_torch_has_saved_is_loaded_with_its_moments_and_steps(folder, plain, moments):
    saved = {"model": plain[0].state_dict(), "optim": {"state": moments(*plain)}}
    dcp.save(saved, checkpoint_id=folder / "saved", no_dist=True)
    model, optimizer = start(folder)
    infinity.load_dcp(model, optimizer, folder / "saved")
    for ours, theirs in zip(model.parameters(), plain[0].parameters(), strict=True):
        expected = {"master": theirs.detach(), **plain[1].state[theirs]}
        values = engine_of(ours).parameters.read(ours, list(FIELDS))
        for found, name in zip(values, FIELDS.values(), strict=True):
            assert torch.equal(found.view_as(theirs), expected[name])
        assert optimizer.counts[ours] == {"step": 2}
    assert all(map(torch.equal, model.buffers(), plain[0].buffers()))


def lost(state, *words):
    """A state without what has one of the words in its name."""
    return {
        name: lost(one, *words) if isinstance(one, dict) else one
        for name, one in state.items()
        if name not in words
    }


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda moments: {}, "has no moments .* optimizer=None"),
        (lambda moments: lost(moments, "step"), r"has no step of 0\.weight, "),
        (
            lambda moments: {**moments, "0.bias": {**moments["0.bias"], "exp_avg_sq": torch.ones(7)}},
            r"(?s)nothing was loaded.*0\.bias.*7",
        ),
    ],
)
def test_moments_that_do_not_fit_are_named_and_the_weights_can_be_loaded_alone(folder, plain, changed, says):
    saved = {"model": plain[0].state_dict(), "optim": changed(by_name(*plain))}
    dcp.save(saved, checkpoint_id=folder / "saved", no_dist=True)
    model, optimizer = start(folder)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=says):
        infinity.load_dcp(model, optimizer, folder / "saved")
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    infinity.load_dcp(model, None, folder / "saved")
    assert all(torch.equal(plain[0].state_dict()[name], one) for name, one in model.state_dict().items())


def test_what_is_no_checkpoint_of_the_model_is_refused_with_what_does_not_fit(folder, plain):
    model, optimizer = start(folder, infinity.SGD)
    dcp.save({"model": {"0.weight": torch.ones(3)}}, checkpoint_id=folder / "saved", no_dist=True)
    with pytest.raises(CheckpointError, match=r"(?s)does not fit; nothing was loaded.*0\.weight"):
        infinity.load_dcp(model, None, folder / "saved")
    with pytest.raises(CheckpointError, match=r"Adam's moments are loaded into AdamW or Adam, .* is SGD"):
        infinity.load_dcp(model, optimizer, folder / "saved")
    with pytest.raises((CheckpointError, FileNotFoundError), match="metadata"):
        infinity.load_dcp(model, None, folder / "none")
