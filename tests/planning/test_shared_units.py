"""Units of blocks in outlines. Trusted: the engine's own, of the same models."""

from dataclasses import replace

import pytest

from infinity import Init
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError
from infinity.planning.architectures import llama, outline_of_config
from infinity.planning.demand import demand
from infinity.planning.outline import Outline, Stage, UnitOutline
from infinity.planning.setting import Setting
from infinity.planning.shared_units import in_shared_units
from models import MODELS

SMALL = llama("small", 4, 64, 192, 256)
LARGE = llama("large", 2, 1024, 2816, 256)
ROOM = Setting(64 << 20, units="auto")


def names(outline, setting=ROOM):
    return [part.name for part in in_shared_units(outline, setting).parts]


@pytest.mark.parametrize("units", ["auto", "module", "block"])
@pytest.mark.parametrize("memory", [1 << 20, 64 << 20])
def test_blocks_are_those_of_a_run(memory, units):
    with Init(host_memory=memory, units=units, device="cpu"):
        model = MODELS["llama"]()
    outline = outline_of_config("llama", model.config.to_dict())
    assert sorted(names(outline, Setting(memory, nvme=False, units=units))) == sorted(
        unit.name for unit in engine_of_model(model).units
    )


def test_a_blocks_unit_has_the_shapes_and_the_operations_of_its_parts():
    joined = in_shared_units(SMALL, ROOM)
    assert names(SMALL)[:3] == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    assert joined.parameters == SMALL.parameters
    assert sum(act.amount for act in joined.script(8, 8)) == sum(act.amount for act in SMALL.script(8, 8))
    assert (demand(joined, ROOM).uses, demand(SMALL, ROOM).uses) == (13, 77)


def test_a_block_that_is_fetched_for_longer_than_its_modules_are_followed_stays_in_modules_unless_asked_for():
    roomy = Setting(1 << 30, units="auto")
    assert len(names(LARGE, roomy)) == len(LARGE.parts)
    half = llama("half", 2, 256, 1100, 256)
    assert len(names(half, roomy)) == len(half.parts)
    assert "model.layers.1" in names(half, replace(roomy, units="block"))
    assert "model.layers.1" in names(half, replace(roomy, nvme=False))


def test_a_block_is_small_beside_each_budget():
    assert len(names(SMALL, Setting(1 << 20, units="auto"))) == len(SMALL.parts)
    assert len(names(SMALL, replace(ROOM, device_nbytes=1 << 20))) == len(SMALL.parts)


def outline(*parts, recomputed=True, more=()):
    numbers = tuple(range(len(parts)))
    return Outline("o", parts, (Stage(numbers, recomputed), *more))


def part(name, **more):
    return UnitOutline(f"layers.0.{name}", ((4, 4),), **more)


def test_what_is_frozen_what_experts_have_and_what_others_use_shares_nothing():
    three = part("a"), part("b"), part("c", trainable=False)
    assert names(outline(*three)) == ["layers.0", "layers.0.c"]
    assert names(outline(*three, part("d", trainable=False))) == ["layers.0", "layers.0"]
    assert len(names(outline(*three, part("experts", active=0.5)))) == 4
    assert len(names(outline(*three, more=[Stage((1,))]))) == 3
    assert len(names(outline(*three, recomputed=False))) == 3


def test_units_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match="units='layer'"):
        Setting(1 << 20, units="layer")
