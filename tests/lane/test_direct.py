"""Weights that come from NVMe to a device directly. Faked: kvikio, by a module that reads with pread; the
accelerator, by streams that are late. A real disk.
"""

import os
import sys
import types

import pytest
import torch
from torch import nn

import infinity
from infinity import AdamW, Init
from infinity.aio import IoError
from infinity.device import direct
from infinity.device.device import AcceleratorDevice
from infinity.engine.engine import engine_of_model
from streams import LateStreams, compute_late

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

WIDTH, LAYERS = 128, 4
ROOM = 256 << 10
"""Bytes of the device: no unit stays there."""


class CuFile:
    """As kvikio's, for memory of the host."""

    opened, reads, short = [], [], 0

    def __init__(self, path, flags):
        self.fd, self.closed = os.open(path, os.O_RDONLY), False
        assert flags == "r"
        CuFile.opened.append(self)

    def pread(self, memory, size, file_offset):
        values = os.pread(self.fd, size, file_offset)
        memory.copy_(torch.frombuffer(bytearray(values), dtype=torch.uint8))
        CuFile.reads.append(size)
        results = [size - CuFile.short]
        return types.SimpleNamespace(done=lambda: True, get=results.pop)  # the result is there once

    def close(self):
        os.close(self.fd)
        self.closed = True


@pytest.fixture
def kvikio(monkeypatch):
    """Install the stand-in; return its module."""
    module = types.ModuleType("kvikio")
    module.CuFile = CuFile
    module.defaults = types.SimpleNamespace(compat_mode=lambda: False)
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setattr(CuFile, "opened", [])
    monkeypatch.setattr(CuFile, "reads", [])
    monkeypatch.setattr(CuFile, "short", 0)
    direct._say.cache_clear()
    return module


@pytest.fixture
def late(monkeypatch):
    return compute_late(monkeypatch, 2 * ROOM)


def trained(folder, **config):
    """Train a tower for some steps; return its weights, and what its engine counted of hi."""
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory="1MiB", **config):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = AdamW(model.parameters(), lr=1e-2, update="backward")
    for number in range(3):
        torch.manual_seed(number)
        model(torch.randn(3, WIDTH).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: one.clone() for name, one in model.state_dict().items()}
    engine_of_model(model).close()
    return values


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("late", "kvikio")
def test_weights_come_without_host_memory_and_have_the_same_bits(folder, caplog):
    expected = trained(folder, verify="off")
    assert not CuFile.reads
    assert same(trained(folder, verify="off", aio="gds"), expected)
    assert CuFile.reads
    assert len(CuFile.opened) == 1, "one file"
    assert CuFile.opened[0].closed
    assert "gds" not in caplog.text


@pytest.mark.usefixtures("late", "kvikio")
def test_a_read_that_ends_early_is_an_error_of_the_file(folder, monkeypatch):
    monkeypatch.setattr(CuFile, "short", 512)
    with pytest.raises((IoError, infinity.EngineFailedError), match="came from byte"):
        trained(folder, verify="off", aio="gds")


def test_where_it_cannot_be_all_goes_through_host_memory_and_the_log_says_why_once(
    folder, caplog, kvikio, monkeypatch
):
    expected = trained(folder)
    for _ in range(2):
        assert same(trained(folder, verify="off", aio="gds"), expected)
    assert caplog.text.count('aio="gds": reads go through host memory, since the CPU computes') == 1
    device = AcceleratorDevice(torch.device("cpu"), LateStreams())
    reasons = []
    monkeypatch.setattr(direct, "_say", reasons.append)
    direct.read_directly(device, infinity.Config(nvme=str(folder), aio="gds"))
    kvikio.defaults.compat_mode = lambda: True
    off = infinity.Config(nvme=str(folder), aio="gds", verify="off")
    direct.read_directly(device, off)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    direct.read_directly(device, off)
    assert [one.split()[0] for one in reasons] == ['verify="always"', "kvikio", "kvikio"]
    assert "compatibility mode" in reasons[1]
    assert "cannot be imported" in reasons[2]
    assert device.direct_target(torch.zeros(4)) is None
    assert not CuFile.reads


def test_the_key_of_deepspeeds_json_asks_for_it(folder):
    config = infinity.Config.from_deepspeed(
        {"aio": {"use_gds": True}, "train_micro_batch_size_per_gpu": 1}, infinity={"nvme": str(folder)}
    )
    assert config.aio == "gds"
    assert config.engine_kind is None
