"""An accelerator whose memory is handed over between steps. Faked: it, by streams that are late.
Trusted: the same training where the CPU computes.
"""

import pytest
import torch
from torch import nn

import infinity
from infinity import AdamW, Init, UnsupportedError, stats
from infinity.engine.engine import engine_of_model
from streams import compute_late

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

WIDTH = 64


@pytest.fixture
def late(monkeypatch):
    return compute_late(monkeypatch, 64 << 20)


class Training:
    def __init__(self, folder):
        with Init(nvme=str(folder), host_memory="1MiB"):
            torch.manual_seed(0)
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.done = 0

    def backward(self):
        torch.manual_seed(self.done)
        self.model(torch.randn(3, WIDTH).bfloat16()).float().square().mean().backward()
        self.done += 1

    def train(self, steps):
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self):
        return {name: one.clone() for name, one in self.model.state_dict().items()}


def test_all_that_lives_there_leaves_and_training_goes_on_asleep_and_awake(folder, tmp_path, monkeypatch):
    plain = Training(tmp_path)
    plain.train(9)
    assert infinity.sleep(plain.model) == 0, "the CPU computes"
    expected = plain.values()
    compute_late(monkeypatch)
    training = Training(folder)
    training.train(3)
    assert stats(training.model).device_nbytes > 0
    held = stats(training.model).device_held_nbytes
    freed = infinity.sleep(training.model)
    assert freed > 0
    assert stats(training.model).device_held_nbytes == held - freed
    assert stats(training.model).device_nbytes == 0
    training.train(2)
    assert stats(training.model).device_nbytes == 0
    infinity.wake(training.model)
    training.train(4)
    values = training.values()
    assert all(torch.equal(values[name], one) for name, one in expected.items())


@pytest.mark.slow
@pytest.mark.usefixtures("late")
def test_gradients_that_wait_there_leave_as_well(folder):
    training, other = Training(folder), None
    training.train(3)
    training.backward()
    infinity.sleep(training.model)
    engine = engine_of_model(training.model)
    assert all(not unit.record.on_device for unit in engine.units)
    training.optimizer.step()
    training.optimizer.zero_grad()
    values = training.values()
    engine.close()
    other = Training(folder)
    other.train(4)
    assert all(torch.equal(values[name], one) for name, one in other.values().items())


@pytest.mark.usefixtures("late")
def test_it_is_refused_within_a_forward(folder):
    training = Training(folder)
    training.model[1].register_forward_pre_hook(lambda *_: infinity.sleep(training.model) and None)
    with pytest.raises(UnsupportedError, match="between steps"):
        training.train(1)
