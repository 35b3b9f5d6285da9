"""What an optimizer checks before it takes parameters: that it can update them, and has room for state."""

from __future__ import annotations

from infinity.engine.engine import Engine
from infinity.errors import HostMemoryError, UnsupportedError
from infinity.planning.layout import Format
from infinity.records.update_rules import Recipe
from infinity.records.weights import WEIGHTS
from infinity.sizes import format_size


def check_fits(engine: Engine, what: str, nbytes: int) -> None:
    """See that `nbytes` more, and a step's gradients, fit where records lie, if that is host memory.

    Raises: HostMemoryError with the smallest host_memory that works.
    """
    if engine.nvme_store is not None:
        return
    gradients, kept = engine.gradients_nbytes(), engine.kept
    if kept.held_nbytes + nbytes + gradients > kept.limit_nbytes:
        largest = max(engine.units, key=lambda unit: unit.resident_nbytes)
        raise HostMemoryError(
            f"{what}: without an NVMe tier all state stays in host memory (its largest unit is "
            f"{largest.name}): weights "
            f"{format_size(kept.held_nbytes)}, moments "
            f"{format_size(nbytes)}, gradients {format_size(gradients)}, but "
            f"host_memory={format_size(engine.budget.total_nbytes)} leaves "
            f"{format_size(kept.limit_nbytes)} for them. The smallest host_memory that works is "
            f"{format_size(engine.least_total(more_nbytes=nbytes))}; or give Config a folder on NVMe "
            "(nvme=...)."
        )


def check_record(recipe: Recipe, form: Format, update: str) -> None:
    """See that an optimizer can update records of this format.

    Raises: UnsupportedError.
    """
    if (form.dtype, form.state_dtype) not in recipe.kernels:
        raise UnsupportedError(
            f"{recipe.name} keeps its state in fp32, and the model was built with "
            f'state_dtype={form.state_dtype!r}, which is for AdamW: Config(state_dtype="fp32")'
        )
    if WEIGHTS[form.dtype].overflows and update == "backward":
        raise UnsupportedError(
            f'update="backward" with dtype={form.dtype!r}: gradients would be applied before anybody can '
            'see that they have overflowed. Use update="forward", or dtype="bf16".'
        )
