"""An engine of each kind, and a nameless file of it."""

import pytest

from aio_cases import PIECE, open_or_skip
from infinity import aio


@pytest.fixture(params=aio.KINDS)
def engine(request, folder):
    with open_or_skip(folder, request.param) as engine:
        yield engine


@pytest.fixture
def file(engine, folder):
    with engine.open_nameless(folder) as file:
        file.allocate(0, 64 * PIECE)
        yield file
