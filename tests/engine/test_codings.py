"""Who sends coded weights and gradients. Faked: the other ranks' settings."""

import logging
import types

import pytest
import torch

import infinity
from infinity import Config, ConfigError
from infinity.engine.codings import codings
from infinity.gradients.coding import Coding

HOST, OTHER = (types.SimpleNamespace(is_host=is_host) for is_host in (True, False))
BOTH = {"quantized_weights": "int8", "quantized_gradients": "int4"}


class Pair:
    size, device = 2, "cuda:1"

    def __init__(self, others):
        self.others = others

    def of_all(self, values, _what):
        return [list(values), self.others]


def test_ranks_with_the_same_settings_code_by_them():
    assert codings(Config(**BOTH), Pair([8, 4]), HOST) == (Coding(8), Coding(4))
    assert codings(Config(quantized_gradients="int8"), Pair([0, 8]), HOST) == (None, Coding(8))
    assert codings(Config(), Pair([0, 0]), OTHER) == (None, None)


def test_ranks_with_different_settings_are_all_told_which():
    said = (
        "rank 0: quantized_weights='int8', quantized_gradients='int4'; rank 1: quantized_weights=None, quan"
    )
    with pytest.raises(ConfigError, match=said):
        codings(Config(**BOTH), Pair([0, 4]), HOST)


def test_an_accelerator_is_refused_with_the_cure():
    with pytest.raises(ConfigError, match=r"'int4' with device='cuda:1': .* \(device=\"cpu\"\)"):
        codings(Config(**BOTH), Pair([8, 4]), OTHER)


def test_one_rank_says_so_once_and_computes_with_its_weights_as_they_are(caplog):
    caplog.set_level(logging.WARNING, "infinity")
    with infinity.Init(Config(host_memory="16MiB", **BOTH)):
        model = torch.nn.Linear(300, 300)
    said = [one.message for one in caplog.records if "quantized" in one.message]
    assert len(said) == 1
    assert said[0].startswith("quantized_weights='int8', quantized_gradients='int4': there is one rank")
    weight = model.state_dict()["weight"]
    inputs = torch.randn(4, 300, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(inputs, weight, model.state_dict()["bias"])
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)
