"""Training on CUDA. Runs where a GPU is (python3 dev.py gpu); nothing is faked."""

import pytest
import torch

import models
from infinity import AdamW
from infinity.reference import ReferenceAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def losses_of(model, optimizer, steps=5):
    losses = []
    for step in range(steps):
        ids = models.batch(step).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("update", ["forward", "backward"])
@pytest.mark.parametrize("checkpoint", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_training_on_cuda_equals_training_in_device_memory(folder, name, checkpoint, update):
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    plain = models.build(name).cuda()
    model = models.build(name, nvme=folder, host_memory="64MiB", device="cuda")
    model.to("cuda")
    for one in (plain, model):
        if checkpoint:
            models.checkpointed(one, checkpoint == "reentrant")
        else:
            one.train()
    expected = losses_of(plain, ReferenceAdamW(plain.parameters(), **settings))
    assert losses_of(model, AdamW(model.parameters(), update=update, **settings)) == expected
    found = model.state_dict()
    assert all(torch.equal(found[key].cpu(), value.cpu()) for key, value in plain.state_dict().items())


def test_released_units_take_no_device_memory(folder):
    before = torch.cuda.memory_allocated()
    model = models.build("llama", nvme=folder, host_memory="64MiB", device="cuda")
    model.to("cuda")
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert torch.cuda.memory_allocated() - before <= buffers + 512 * sum(1 for _ in model.parameters()) + (
        1 << 16
    )
