"""Accelerators that are known by their name alone, which nobody has tried. Trusted: torch's names of devices,
and of backends. Faked: what torch sees, since no accelerator is here; test_simulated_device.py trains on one.
"""

import types

import pytest
import torch
import torch.distributed as dist

from infinity import Config, ConfigError
from infinity.config.settings import ACCELERATORS, UNPROVEN
from infinity.device import device as devices
from infinity.device.device import AcceleratorDevice, open_device
from infinity.device.named import NamedStreams
from infinity.ranks.groups import backend_of, check_backend


@pytest.fixture
def sees_xpu(monkeypatch):
    """Have torch see an XPU, whose module has these calls."""

    def see(**calls):
        module = types.SimpleNamespace(**calls)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)

    return see


def calls(**more):
    return {"current_device": lambda: 0, "set_device": None, "mem_get_info": lambda device: (7, 9), **more}


@pytest.mark.parametrize("kind", UNPROVEN)
def test_such_a_device_may_be_named(kind):
    assert devices.choose_device(Config(device=kind)) == kind
    assert ACCELERATORS[kind] == "infinity.device.named:NamedStreams"


def test_a_type_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"device='tpu': expected .*\"cuda\".* one of xpu, mtia"):
        devices.choose_device(Config(device="tpu"))


def test_a_device_that_torch_does_not_see_is_refused_with_the_number_that_it_sees():
    with pytest.raises(ConfigError, match=r"device='xpu': torch .* sees 0 XPU devices"):
        open_device("xpu")


def test_a_type_whose_package_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"device='npu': torch .* does not know such devices.*package"):
        open_device("npu")


def test_what_torch_lacks_for_a_device_is_named(sees_xpu):
    sees_xpu(current_device=lambda: 0)
    with pytest.raises(ConfigError, match=r"lacks torch\.xpu\.mem_get_info, torch\.xpu\.set_device"):
        open_device("xpu")


def test_a_device_that_nobody_has_tried_says_so_when_it_is_opened(sees_xpu, monkeypatch, caplog):
    sees_xpu(**calls())
    monkeypatch.setattr(NamedStreams, "open", lambda self: object())
    device = open_device("xpu:0")
    assert isinstance(device, AcceleratorDevice)
    assert device.free_nbytes() == 7
    assert "nobody has run Infinity on such a device" in caplog.text


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl"), ("xpu", "xccl"), ("npu:0", "hccl")]
)
def test_ranks_exchange_by_the_backend_of_their_device(device, backend):
    assert backend_of(device) == backend


def test_ranks_on_a_device_whose_backend_torch_lacks_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend == "gloo")
    check_backend("cpu")
    with pytest.raises(ConfigError, match=r"device='xpu:0' on several ranks: they need XCCL"):
        check_backend("xpu:0")
