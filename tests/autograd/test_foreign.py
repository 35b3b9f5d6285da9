"""Parameters that nobody reduces are told of. Trusted: torch. Faked: what an engine keeps."""

import logging

import pytest
import torch
from torch import nn

from infinity import Init, stats
from infinity.autograd.foreign import ForeignParameters, ForeignSteps
from infinity.engine.engine import engine_of_model


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def told(model, kept, caplog):
    foreign = ForeignParameters(lambda parameter: any(parameter is one for one in kept))
    with caplog.at_level(logging.WARNING, "infinity"):
        for _ in range(2):
            foreign.look(model)
    return [record.getMessage() for record in caplog.records]


def test_trainable_parameters_from_elsewhere_are_told_once_with_a_name_and_a_cure(model, caplog):
    (message,) = told(model, list(model[0].parameters()), caplog)
    assert message.startswith("2 trainable parameters of Sequential were not built inside Init (1.weight, …)")
    assert "Build them inside Init" in message


def test_nothing_is_said_where_all_is_kept_or_frozen(model, caplog):
    model[1].requires_grad_(requires_grad=False)
    assert told(model, list(model[0].parameters()), caplog) == []


def test_nothing_is_said_inside_distributed_data_parallel(model, caplog, monkeypatch):
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", torch.nn.Identity())
    assert told(model, [], caplog) == []


def test_a_foreign_step_is_over_when_a_forward_follows_a_backward():
    closed, foreign = [], [True]
    steps = ForeignSteps(lambda: closed.append("closed"), lambda: foreign[0])
    steps.forward_began(None)
    steps.forward_began(None)
    assert closed == [], "no backward yet"
    for times in (1, 2):
        steps.backward_ended()
        steps.backward_ended()
        assert len(closed) == times - 1, "the next forward has not begun"
        steps.forward_began(None)
        steps.forward_began(None)
        assert len(closed) == times
    foreign[0] = False  # an optimizer of ours has come
    steps.backward_ended()
    steps.forward_began(None)
    assert len(closed) == 2


@pytest.mark.disk
def test_a_frozen_base_beside_adapters_comes_to_lie_in_host_memory_as_far_as_the_budget_goes(folder):
    torch.manual_seed(3)
    with Init(nvme=folder, host_memory="32MiB"):
        base = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).requires_grad_(requires_grad=False)
    adapter = nn.Linear(256, 256)
    optimizer, read = torch.optim.SGD(adapter.parameters(), lr=0.1), []
    for _ in range(4):
        before = stats(base).nvme_read_nbytes
        base(adapter(torch.ones(4, 256)).to(torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine_of_model(base).lane.drain()
        read.append(stats(base).nvme_read_nbytes - before)
    assert read[0] > 0
    assert read[-1] == 0, read
    assert stats(base).steps == 3, "the fourth is over when a fifth begins"
