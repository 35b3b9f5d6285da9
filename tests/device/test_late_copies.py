"""Training through the CUDA device with streams that copy as late as their events allow, beside training in
memory. Trusted: the reference recipe, and LateStreams, which stands in for torch.cuda.
"""

import time

import pytest
import torch

import models
from covers import matrix
from infinity.device.device import AcceleratorDevice
from infinity.engine import engine as engine_module
from infinity.engine.engine import engine_of_model
from infinity.lane import lane as lanes
from infinity.lane.lane import StreamLane
from streams import LateStreams

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture
def late(monkeypatch):
    streams = LateStreams()
    device = AcceleratorDevice(torch.device("cpu"), streams)
    monkeypatch.setattr(engine_module, "open_device", lambda *_: device)
    streams.free = 256 << 10  # twice a device_memory in which few records live
    # These copies end no sooner than the lane waits for them: what it waits before that is nothing but time.
    monkeypatch.setattr(lanes, "_PATIENCE_S", 0.005)
    return streams


@pytest.mark.parametrize(
    *matrix(
        together=1,
        way={
            "backward": ("backward", 1, {}),
            "clipped": ("forward", 1, {"max_norm": 0.5}),
            "accumulated": ("forward", 2, {}),
        },
        memory=["128KiB", "64MiB"],
    )
)
def test_nothing_is_read_or_used_again_before_its_copy_is_over(folder, late, memory, way):
    update, accumulate, settings = way
    init = {"nvme": folder, "host_memory": memory}
    ways = {"update": update, "accumulate": accumulate, "scheduled": True}
    models.compare("llama", {**SETTINGS, **settings}, init, steps=3, **ways)
    assert late.copies > 0


@pytest.mark.parametrize(
    ("memory", "update"), [("128KiB", "backward"), ("64MiB", "backward"), ("64MiB", "forward")]
)
def test_downloads_allocate_nothing_in_the_steady_state_however_slow_the_updates_get(
    folder, late, monkeypatch, memory, update
):
    init = {"nvme": folder, "host_memory": memory}
    model, optimizer, _ = models.offloaded("llama", SETTINGS, init, update=update)
    models.train(model, optimizer, 2)
    memory = engine_of_model(model).device.memory
    made = memory.made
    work = StreamLane._work
    monkeypatch.setattr(StreamLane, "_work", lambda lane, tile: (time.sleep(0.004), work(lane, tile)))
    models.train(model, optimizer, 2, first=2)
    assert memory.made == made > 0
