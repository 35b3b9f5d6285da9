"""The checks of an optimizer: of a record's format, of the memory for its state, of a state_dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.engine.engine import Engine
from infinity.errors import HostMemoryError, UnsupportedError
from infinity.planning.layout import RecordSchema
from infinity.ranks.machine_memory import check_available
from infinity.records.update_rules import Recipe
from infinity.records.weights import WEIGHTS
from infinity.sizes import format_size
from infinity.tensors import local

_WHO = {
    "bf16": "AdamW, Adam, SGD, Adagrad, Lion and Muon",
    "int8": "AdamW, Adam, SGD, Adagrad, Lion and Muon",
    "int4": "AdamW, Adam, SGD, Adagrad, Lion and Muon",
}
"""Which optimizers have what state_dtype, for the error."""


def check_fits(engine: Engine, what: str, nbytes: int) -> None:
    """Check, without an NVMe tier, that `nbytes` of new state and a step's gradients fit host memory.

    what: the optimizer, for the error.

    Raises: HostMemoryError with the smallest host_memory that works.
    """
    if engine.nvme_store is not None:
        return
    gradients, kept = engine.gradients_nbytes(), engine.kept
    if kept.held_nbytes + nbytes + gradients > kept.limit_nbytes:
        largest = max(engine.units, key=lambda unit: unit.resident_nbytes)
        raise HostMemoryError(
            f"{what}: without an NVMe tier all state stays in host memory (its largest unit is "
            f"{largest.name}): weights {format_size(kept.held_nbytes)}, moments {format_size(nbytes)}, "
            f"gradients {format_size(gradients)}, but host_memory={format_size(engine.budget.total_nbytes)} "
            f"leaves {format_size(kept.limit_nbytes)} for them. The smallest host_memory that works is "
            f"{format_size(engine.least_total(more_nbytes=nbytes))}; or give Config a folder on NVMe "
            "(nvme=...)."
        )


def check_record(recipe: Recipe, schema: RecordSchema, update: str) -> None:
    """Check that an optimizer can update records of this format.

    Raises: UnsupportedError naming the option to change.
    """
    if schema.master_dtype != "fp32" and not any(kept == schema.kept for kept, _ in recipe.kernels):
        raise UnsupportedError(
            f"{recipe.name} needs exact masters, and the model was built with "
            f"master_dtype={schema.master_dtype!r}, which AdamW and Adam have: leave it out"
        )
    if (schema.kept, schema.state_dtype) not in recipe.kernels:
        known = [state for kept, state in recipe.kernels if kept == schema.kept]
        if not known:
            others = " or ".join(dict.fromkeys(repr(dtype) for dtype, _ in recipe.kernels))
            raise UnsupportedError(
                f"{recipe.name} does not update weights of dtype={schema.dtype!r}: use "
                f"Config(dtype={others}), or another optimizer, as AdamW"
            )
        raise UnsupportedError(
            f"{recipe.name} keeps its state in {' or '.join(known)}, and the model was built with "
            f"state_dtype={schema.state_dtype!r}, which {_WHO[schema.state_dtype]} have: use "
            f"Config(state_dtype={known[-1]!r})"
        )
    if WEIGHTS[schema.dtype].overflows and update == "backward":
        raise UnsupportedError(
            f'update="backward" with dtype={schema.dtype!r}: gradients would be applied before it is '
            'known whether they have overflowed. Use update="forward", or dtype="bf16".'
        )


def check_room(parameters: Sequence[tuple[Recipe, torch.Tensor]]) -> None:
    """Check that fp32 copies of these parameters' state, each by its recipe, fit the machine's memory.

    Raises: HostMemoryError with both sizes.
    """
    needed = sum(4 * len(recipe.state) * local(one).numel() for recipe, one in parameters)
    check_available(needed, "optimizer.state_dict: the moments", "infinity.save streams them to files.")


def checked_states(
    recipes: Mapping[int, Recipe],
    states: Mapping[int, Mapping[str, Any]],
    parameters: Mapping[int, torch.Tensor],
) -> dict[int, Mapping[str, Any]]:
    """Return those states of a state_dict, by parameter's number, that belong to `parameters` and have begun.

    Raises: ValueError for the state of another optimizer, or of another shape.
    """
    found = {}
    for number, state in states.items():
        keys = recipes[number].state.values() if number in recipes else ()
        if number not in parameters or any(state.get(key, number) is None for key in keys):
            continue  # torch's SGD has None as the momentum before the first step
        for key in keys:
            if key not in state:
                raise ValueError(f"parameter {number} has no {key}: its state is that of another optimizer")
            shape, expected = tuple(state[key].shape), tuple(parameters[number].shape)
            if shape != expected:
                raise ValueError(f"{key} of parameter {number}: {shape}, expected {expected}")
        found[number] = state
    return found
