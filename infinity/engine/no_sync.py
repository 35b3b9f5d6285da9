"""Gradient accumulation over several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from infinity.engine.engine import engine_of_model


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of the backwards inside the `with` on each rank, whole and unreduced; the first
    backward after it, or the step, adds to them and reduces the sum, once, in fp32.

    As DistributedDataParallel.no_sync: less traffic for more memory, 2 bytes per parameter and rank (4 from
    the second backward on), in host_memory. With one rank, and with update="backward", it changes
    nothing. `tiling.tile_batch` saves the same traffic, and the memory.

    Raises: HostMemoryError, in a backward, where the gradients do not fit; ValueError for a model that was
    not built in Init.
    """
    with engine_of_model(model).gradients.deferring():
        yield
