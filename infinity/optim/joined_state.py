"""An optimizer's state_dict whose shapes do not depend on the budget.

[Note: whole shapes]
Whether an embedding is kept in blocks of rows is decided by the budget of memory, and an optimizer has the
blocks as its parameters. A state_dict has whole weights in their place, as torch's optimizers have, and is
cut into blocks when it is loaded. Blocks of one weight step together, so they have one step count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.tiling.whole import Whole, joining

_NAME_OF_BLOCK = re.compile(r"^(.*?)(?:\.tiles)?\.0(\.\w+)?$")


def joined_state(packed: dict[str, Any], groups: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
    """Return a state_dict with whole weights in the place of their blocks, where all of these are there.

    packed: with the blocks, numbered as torch numbers them. groups: the parameters of each group.
    """
    states, given, first = packed["state"], packed["param_groups"], 0
    joined: dict[int, Any] = {}
    joined_groups, number = [], 0
    for group, parameters in zip(given, groups, strict=True):
        numbers: list[int] = []
        names: list[str] = []
        for whole, count in _runs(parameters):
            found = [states[one] for one in range(first, first + count) if one in states]
            if whole is None and found:
                joined[number] = found[0]
            elif whole is not None and found:
                joined[number] = _joined(found, count)
            if "param_names" in group:
                name = group["param_names"][first - (group["params"] or [0])[0]]
                names.append(name if whole is None else _NAME_OF_BLOCK.sub(r"\1\2", name))
            numbers.append(number)
            first, number = first + count, number + 1
        named = {"param_names": names} if "param_names" in group else {}
        joined_groups.append({**group, **named, "params": numbers})
    return {**packed, "state": joined, "param_groups": joined_groups}


def cut_state(state_dict: Mapping[str, Any], groups: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
    """Return a state_dict with blocks in the place of whole weights, for the parameters of each group. A
    group that has as many parameters as there are with the blocks, is left as it is.

    Raises: ValueError for state of another shape than its weight's.
    """
    states, cut_groups, number = state_dict["state"], [], 0
    cut: dict[int, Any] = {}
    given = state_dict["param_groups"]
    if len(given) != len(groups):
        return dict(state_dict)  # torch says so
    for group, parameters in zip(given, groups, strict=True):
        runs: list[tuple[Whole | None, int]] = _runs(parameters)
        if len(group["params"]) != len(runs):
            runs = [(None, 1)] * len(group["params"])
        numbers: list[int] = []
        names: list[Any] = []
        for place, (old, (whole, count)) in enumerate(zip(group["params"], runs, strict=True)):
            if old in states:
                parts = [states[old]] if whole is None else _cut(states[old], whole, old)
                cut.update(zip(range(number, number + count), parts, strict=True))
            name = (group.get("param_names") or group["params"])[place]
            names += [name] if whole is None else [f"{name}.{one}" for one in range(count)]
            numbers += range(number, number + count)
            number += count
        named = {"param_names": names} if "param_names" in group else {}
        cut_groups.append({**group, **named, "params": numbers})
    return {**state_dict, "state": cut, "param_groups": cut_groups}


def _runs(parameters: Sequence[torch.Tensor]) -> list[tuple[Whole | None, int]]:
    """Return the whole weights of a group, each with the number of its blocks, and None for each other
    parameter.
    """
    runs: list[tuple[Whole | None, int]] = []
    place = 0
    while place < len(parameters):
        whole = joining(parameters[place])
        pieces = [] if whole is None else whole.pieces()
        there = parameters[place : place + len(pieces)]
        if whole is None or [id(one) for one in there] != [id(one) for one in pieces]:
            whole, pieces = None, pieces[:0]
        runs.append((whole, len(pieces) or 1))
        place += len(pieces) or 1
    return runs


def _joined(states: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Return the state of a whole weight.

    Raises: ValueError where its blocks have not stepped together.
    """
    steps = {float(one["step"]) for one in states}
    if len(states) != count or len(steps) != 1:
        raise ValueError(
            f"state_dict: of the {count} blocks of an embedding's rows {len(states)} have state, of "
            f"{sorted(steps)} steps: not that of one weight. Call it after step(), not between a backward "
            "and its step, and train all blocks alike; or keep the embedding whole: "
            'infinity.Init(experts="whole").'
        )
    tensors = {key: torch.cat([one[key] for one in states]) for key in states[0] if key != "step"}
    return {"step": states[0]["step"], **tensors}


def _cut(state: Mapping[str, Any], whole: Whole, number: int) -> list[dict[str, Any]]:
    """Return the states of a whole weight's blocks."""
    for key, value in state.items():
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        if shape and key != "step" and shape != tuple(whole.shape):
            raise ValueError(f"{key} of parameter {number}: {shape}, expected {tuple(whole.shape)}")
    return [
        {
            key: value[rows] if isinstance(value, torch.Tensor) and value.dim() and key != "step" else value
            for key, value in state.items()
        }
        for rows in whole.places()
    ]
