"""What an optimizer's state_dict holds, checked before it is made and before it is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.ranks.machine_memory import check_available
from infinity.records.update_rules import Recipe


def check_room(recipe: Recipe, parameters: Sequence[torch.Tensor]) -> None:
    """See that plain copies of the state of these fit the machine's memory.

    Raises: HostMemoryError, with the numbers.
    """
    needed = sum(4 * len(recipe.state) * one.numel() for one in parameters)
    check_available(needed, "optimizer.state_dict: the moments")


def checked_states(
    recipe: Recipe, states: Mapping[int, Mapping[str, Any]], parameters: Mapping[int, torch.Tensor]
) -> dict[int, Mapping[str, Any]]:
    """Return those states of a state_dict that belong to parameters, by number, and have begun.

    Raises: ValueError for one that another optimizer has made, or of another shape.
    """
    found = {}
    for number, state in states.items():
        keys = recipe.state.values()
        if number not in parameters or any(state.get(key, number) is None for key in keys):
            continue  # torch's SGD has None for a momentum that has not begun
        for key in keys:
            if key not in state:
                raise ValueError(f"parameter {number} has no {key}: its state is of another optimizer")
            shape, expected = tuple(state[key].shape), tuple(parameters[number].shape)
            if shape != expected:
                raise ValueError(f"{key} of parameter {number}: {shape}, expected {expected}")
        found[number] = state
    return found
