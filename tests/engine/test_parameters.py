"""Parameters are found in finished models, and their values read and written there. Nothing is faked."""

import pytest
import torch
from torch import nn

from infinity import AdamW, Init
from infinity.engine.engine import engine_of, engine_of_model
from infinity.errors import UnsupportedError

HOST = {"host_memory": "16MiB"}


@pytest.fixture
def model():
    with Init(**HOST):
        return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))


def test_a_parameter_is_found_by_unit_index_and_name(model):
    parameters = engine_of_model(model).parameters
    unit, index = parameters.unit_of(model[1].bias)
    assert unit.parameters[index] is model[1].bias
    assert parameters.name_of(model[1].bias) == "1.bias"
    assert parameters.part_numel(model[1].bias) == 2
    assert not parameters.keeps(nn.Parameter(torch.zeros(2)))


def test_while_the_model_is_built_its_parameters_are_not_found_yet():
    with Init(**HOST):
        layer = nn.Linear(8, 4)
        parameters = engine_of(layer.weight).parameters
        with pytest.raises(UnsupportedError, match=r"\(4, 8\).*still being built"):
            parameters.unit_of(layer.weight)
    assert parameters.keeps(layer.weight)


def test_a_parameter_that_was_replaced_inside_init_is_refused_with_the_reason():
    with Init(**HOST):
        layer = nn.Linear(8, 4)
        before = layer.bias
        layer.bias = nn.Parameter(torch.ones(4))
    parameters = engine_of_model(layer).parameters
    assert not parameters.keeps(before)
    with pytest.raises(UnsupportedError, match="another parameter in the place of this one"):
        parameters.unit_of(before)


def test_what_is_written_is_read_whole_and_as_this_ranks_part(model):
    optimizer = AdamW(model.parameters())
    parameters, weight = engine_of_model(model).parameters, model[0].weight
    values = {"master": torch.randn(4, 8), "v": torch.rand(4, 8)}
    parameters.write(weight, values)
    for field, expected in values.items():
        (found,) = parameters.read(weight, [field])
        assert torch.equal(found, expected)
        assert torch.equal(parameters.read_part(weight, field), expected.flatten())
    assert not parameters.read(weight, ["m"])[0].any()
    assert optimizer.state_dict()["state"] == {}
