"""What the tests of infinity.aio share: engines of small pieces, and memory of random bytes."""

import random

import pytest

from infinity import aio

PIECE = 4 * aio.BLOCK  # small, so that small requests have several pieces


def open_or_skip(folder, kind, **numbers):
    try:
        return aio.open_engine(folder, kind, **{"piece_nbytes": PIECE, "depth": 8, "threads": 4, **numbers})
    except aio.EngineUnavailableError as error:
        pytest.skip(str(error))


def random_memory(nbytes, seed=0):
    memory = aio.AlignedMemory(nbytes)
    memory.view[:] = random.Random(seed).randbytes(nbytes)
    return memory
