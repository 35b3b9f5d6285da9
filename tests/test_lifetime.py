"""Trusted: the kernel's lists of file descriptors, threads and mappings. Faked: nothing."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from parity import engine_in, engines, halves, total

pytestmark = pytest.mark.disk


def mappings():
    """Count the pages that are mapped as io_uring, pools and host stores map theirs."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def handles():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(engines())


def build(nvme, *, memory="16MiB"):
    with infinity.Init(nvme=nvme, host_memory=memory):
        return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4))


def step(model, optimizer):
    x = halves(3, 32)(torch.Generator().manual_seed(1))[0]
    total(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("on_disk", [False, True])
def test_everything_is_given_back_when_model_and_optimizer_are_gone(on_disk, folder):
    nvme = str(folder) if on_disk else None

    def cycles(number):
        for cycle in range(number):
            model = build(nvme)
            optimizer = infinity.AdamW(model.parameters())
            for _ in range(cycle % 3):
                step(model, optimizer)

    cycles(6)  # what torch and malloc keep for good
    before, mapped = handles(), mappings()
    cycles(20)
    assert handles() == before
    assert abs(mappings() - mapped) < 20
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("memory", ["16MiB", "640KiB"])
def test_gradients_left_on_a_model_do_not_keep_its_engine(memory, folder):
    model = build(str(folder), memory=memory)
    optimizer = infinity.AdamW(model.parameters())
    engine = weakref.ref(engine_in(model))
    for _ in range(2):
        total(model(halves(3, 32)(torch.Generator())[0])).backward()
    kept = model[0].weight.grad
    assert kept.norm() > 0
    del model, optimizer
    gc.collect()
    assert engine() is None
    with pytest.raises(infinity.NotResidentError, match="after its model and optimizer are gone"):
        kept.norm()


def test_the_engine_lives_as_long_as_model_or_optimizer(folder):
    model = build(str(folder))
    optimizer = infinity.AdamW(model.parameters())
    engine = weakref.ref(engine_in(model))
    step(model, optimizer)
    del optimizer
    gc.collect()
    assert engine() is not None
    assert torch.isfinite(model(halves(3, 32)(torch.Generator())[0])).all()
    del model
    gc.collect()
    assert engine() is None


def test_a_parameter_that_outlives_its_model_is_refused_clearly(folder):
    model = build(str(folder))
    parameter = model[0].weight
    del model
    gc.collect()
    assert parameter.shape == (32, 32)
    with pytest.raises(infinity.NotResidentError, match="engine is gone"):
        parameter.sum()


def test_a_graph_that_outlives_its_model_still_gives_gradients(folder):
    model = build(str(folder))
    x = halves(3, 32)(torch.Generator())[0].requires_grad_()
    loss = total(model(x))
    del model
    gc.collect()
    loss.backward()
    assert torch.isfinite(x.grad).all()
