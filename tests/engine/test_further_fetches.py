"""What is said of micro-batches that fetch the weights once each. Faked: that ranks share sequences."""

import logging

import pytest

import infinity
import models
from infinity.engine import further_fetches as module
from infinity.engine.further_fetches import tell_of_accumulation


@pytest.mark.parametrize("shared", [False, True])
def test_a_cure_is_named_where_there_is_one(monkeypatch, caplog, shared):
    monkeypatch.setattr(module, "is_divided", lambda _model: shared)
    with infinity.Init(host_memory="64MiB"):
        model = models.MODELS["llama"]()
    again = infinity.sizes.format_size(2 * 3 * 2 * sum(one.numel() for one in model.parameters()))
    with caplog.at_level(logging.INFO, "infinity"):
        tell_of_accumulation(model, 4, "Hand them over together")
    said = caplog.records[-1].getMessage()
    assert "gradient_accumulation_steps=4: each micro-batch fetches the weights anew" in said
    assert f"of these {again} more" in said
    assert ("Hand them over together" in said) is not shared
    assert ("Ranks share sequences" in said) is shared
