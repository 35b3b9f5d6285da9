"""DeepSpeed's settings on a GPU. Trusted: the shapes of models, and the names that its documentation has."""

import pytest

from infinity.bench.device import rival
from infinity.bench.engine.runs import SHAPES


@pytest.mark.parametrize("place", rival.CASES.values())
def test_both_its_parameters_and_its_optimizer_are_in_the_place_that_is_measured(place):
    zero = rival.settings(place, "/folder", SHAPES["8b"])["zero_optimization"]
    assert zero["stage"] == 3
    for part in ("offload_param", "offload_optimizer"):
        assert (zero[part]["device"], zero[part]["pin_memory"]) == (place, True)
        assert zero[part].get("nvme_path") == ("/folder" if place == "nvme" else None)


def test_a_buffer_of_parameters_on_nvme_holds_the_largest():
    sizes = SHAPES["8b"]
    found = rival.settings("nvme", "/folder", sizes)["zero_optimization"]["offload_param"]
    assert found["buffer_size"] >= sizes["hidden_size"] * sizes["vocab_size"]
