"""Where a model computes when nothing says so. Faked: what torch sees, since no accelerator is here."""

import logging

import pytest
import torch

import infinity
from infinity import Config, ConfigError
from infinity.device import device as devices


@pytest.fixture
def sees(monkeypatch):
    """Have torch see an accelerator of this kind, or none."""
    monkeypatch.delenv("INFINITY_DEVICE", raising=False)
    devices._say_device.cache_clear()

    def see(kind):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))

    yield see
    devices._say_device.cache_clear()


@pytest.mark.parametrize(
    ("kind", "device"), [(None, "cpu"), ("cuda", "cuda"), ("mps", "cpu"), ("xpu", "cpu")]
)
def test_the_accelerator_that_torch_sees_is_taken_if_it_is_supported_and_said_once(
    sees, caplog, kind, device
):
    sees(kind)
    with caplog.at_level(logging.INFO, "infinity"):
        assert [devices.choose_device(Config()) for _ in range(3)] == [device] * 3
    (record,) = caplog.records
    assert f"computing on {device!r}" in record.getMessage()
    assert (kind or "no accelerator") in record.getMessage()


def test_a_device_that_is_named_is_taken_and_the_environment_comes_before_torch(sees, monkeypatch):
    sees("cuda")
    assert devices.choose_device(Config(device="cpu")) == "cpu"
    monkeypatch.setenv("INFINITY_DEVICE", "cpu")
    assert devices.choose_device(Config()) == "cpu"
    assert devices.choose_device(Config(device="cuda:1")) == "cuda:1"
    monkeypatch.setenv("INFINITY_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="device='tpu'"):
        devices.choose_device(Config())


def test_device_memory_needs_a_device_that_has_some(sees):
    config = Config(device_memory="1GiB")
    sees("cuda")
    assert devices.choose_device(config) == "cuda"
    sees(None)
    with pytest.raises(ConfigError, match=r"device_memory='1GiB'.*host_memory"), infinity.Init(config):
        pass


def test_a_model_is_built_where_the_choice_says(sees, caplog):
    sees(None)
    with caplog.at_level(logging.INFO, "infinity"), infinity.Init(host_memory="4MiB"):
        layer = torch.nn.Linear(8, 8)
    assert layer.weight.device.type == "cpu"
    assert "computing on 'cpu'" in caplog.text
    assert "device=as torch finds one" in str(Config())
