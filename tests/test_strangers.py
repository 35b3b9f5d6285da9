"""Parameters that nobody reduces are told of. Trusted: torch. Faked: what an engine keeps."""

import logging

import pytest
import torch
from torch import nn

from infinity.strangers import Strangers


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def told(model, kept, caplog):
    strangers = Strangers(lambda parameter: any(parameter is one for one in kept))
    with caplog.at_level(logging.WARNING, "infinity"):
        for _ in range(2):
            strangers.look(model)
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
