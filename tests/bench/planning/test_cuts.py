"""Outlines with experts one by one, for `infinity plan`. Pure."""

from pathlib import Path

from infinity.bench.planning.cuts import in_slices
from infinity.bench.planning.sketch import outline_of

DEEPSEEK = str(Path(__file__).parents[2] / "planning" / "configs" / "deepseek-v3.json")
STACK_NBYTES = 256 * 3 * 7168 * 2048 * 2


def test_a_layer_of_256_experts_is_planned_by_those_in_use_and_not_as_the_stack():
    whole = outline_of(DEEPSEEK)
    assert max(2 * part.numel for part in whole.parts) == STACK_NBYTES
    cut, told = in_slices(whole, 8)
    assert "256 of 84.0 MiB in a layer, one by one" in told
    assert "in memory are one and a window, not a layer's 21.0 GiB" in told
    in_use = [part for part in cut.parts if not part.idle]
    assert max(2 * part.numel for part in in_use) < STACK_NBYTES / 11
    assert sum(part.numel for part in cut.parts) == sum(part.numel for part in whole.parts)
