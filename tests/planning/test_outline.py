"""Models without their numbers. Trusted: transformers' own model on the meta device."""

import pytest
import torch

from infinity.cli import presets
from infinity.cli.presets import PRESETS
from infinity.planning.architectures import llama
from infinity.planning.outline import Act, Outline, Stage, UnitOutline, timed, trace_of

TINY = presets.Preset(layers=2, hidden=8, intermediate=24, heads=2)


def of(preset, name="llama"):
    return llama(name, preset.layers, preset.hidden, preset.intermediate, presets.VOCABULARY)


def small(*, recomputed=False):
    parts = (
        UnitOutline("embed", ((4, 2),), looked_up=True),
        UnitOutline("a", ((2, 2),)),
        UnitOutline("b", ((2, 2),)),
    )
    return Outline("small", parts, (Stage((0,)), Stage((1, 2), recomputed=recomputed)))


def words(script):
    return [f"{act.verb} {act.phase.value}{act.unit}" for act in script if act.verb != "compute"]


def test_a_llama_has_the_units_that_transformers_builds():
    with torch.device("meta"):
        model = presets.llama(TINY, sequence=8)
    shapes = {
        name: tuple(tuple(one.shape) for one in module.parameters(recurse=False))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    assert [(part.name, part.shapes) for part in of(TINY).parts] == list(shapes.items())


@pytest.mark.parametrize("name", PRESETS)
def test_the_outline_of_a_preset_has_its_parameters(name):
    assert of(PRESETS[name]).parameters == PRESETS[name].parameters


def test_a_block_that_is_recomputed_holds_its_units_until_their_gradients_come():
    assert words(small(recomputed=True).script())[6:] == [
        *("use B1", "use B2", "gradient B2", "gradient B1"),
        "gradient B0",
    ]


def test_what_is_not_recomputed_is_used_once_more_unless_it_is_only_looked_up():
    assert words(small().script()) == [
        *("use F0", "release F0", "use F1", "release F1", "use F2", "release F2"),
        *("use B2", "gradient B2", "use B1", "gradient B1", "gradient B0"),
    ]


def test_a_gradient_is_complete_after_the_last_of_its_uses():
    tied = Outline("tied", (UnitOutline("w", ((2, 2),)),), (Stage((0,)), Stage((0,))))
    assert words(tied.script())[4:] == ["use B0", "release B0", "use B0", "gradient B0"]


def test_what_is_frozen_gets_no_gradient():
    frozen = Outline("frozen", (UnitOutline("w", ((2, 2),), trainable=False),), (Stage((0,)),))
    assert words(frozen.script())[2:] == ["use B0", "release B0"]


def test_micro_batches_repeat_the_whole_script():
    assert small().script(micro_batches=3) == small().script() * 3


def test_operations_are_two_per_weight_and_token_forward_and_four_backward_and_recomputation_two_more():
    def total(outline):
        return sum(act.amount for act in outline.script(tokens=10))

    assert (total(small()), total(small(recomputed=True))) == (8 * 10 * 6, 8 * 10 * 8)


def test_attention_grows_with_the_sequence():
    part = UnitOutline("o", ((8, 8),), attention=8)
    assert part.flops(16, 4) - part.flops(16, 2) == 2 * 16 * 8 * 2


def test_seconds_are_divided_as_operations_are():
    script = timed(small().script(tokens=5), 12.0)
    assert [act.amount for act in script if act.verb == "compute"] == [0, 2, 2, 4, 4, 0]
    assert trace_of(script) == trace_of(small().script())


def test_seconds_of_a_step_without_operations_cannot_be_divided():
    with pytest.raises(ValueError, match="without a single operation"):
        timed([Act("use", 0)], 1.0)


@pytest.mark.parametrize(
    ("parts", "stages", "says"),
    [((), (), "nothing to plan"), ((UnitOutline("a", ((1,),)),), (Stage((0, 7)),), r"stages use \[7\]")],
)
def test_an_outline_without_sense_is_refused(parts, stages, says):
    with pytest.raises(ValueError, match=says):
        Outline("strange", parts, stages)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "demo"])
def test_a_presets_name_says_its_size(name):
    power = {"m": 1e6, "b": 1e9, "t": 1e12}[name[-1]]
    assert of(PRESETS[name]).parameters == pytest.approx(float(name[:-1]) * power, rel=0.09)


@pytest.mark.parametrize("name", PRESETS)
def test_heads_of_a_preset_have_64_or_128_elements(name):
    assert PRESETS[name].hidden / PRESETS[name].heads in {64, 128}
