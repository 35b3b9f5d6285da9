"""What a plan lets live on a device that has the room of an engine's."""

from __future__ import annotations

from infinity.bench.planning.meta import outline_of_model, shapes_alone
from infinity.planning.demand import Demand, demand
from infinity.planning.setting import Setting


def plan_beside(plain, engine, inputs=None, **setting) -> tuple[Demand, list[str], set[int]]:
    """Plan a model in memory with the room that an engine has for units on its device; return the plan, and
    the units that live there: their names, sorted, and numbers. inputs: see outline_of_model; setting: see
    Setting.
    """
    outline = outline_of_model(shapes_alone(plain), inputs=inputs)
    need = demand(outline, Setting(64 << 20, device_nbytes=engine.tier.budget.window_nbytes, **setting))
    there = {unit for (unit, _), tier in need.placement.items() if tier == "device"}
    return need, sorted(outline.parts[unit].name for unit in there), there
