"""Files to and from aligned memory, asynchronously: io_uring, or threads where it is refused.

    engine = aio.open_engine("/mnt/nvme")
    file = engine.open_nameless("/mnt/nvme")
    file.allocate(0, nbytes)
    engine.write(file, 0, address, nbytes, what="layers.17.hi", owner=slot).wait()

Every result that the kernel reports is checked: a request ends with the right bytes moved, or with an error
that names it. Addresses are plain integers; this package does not use torch.
"""

from infinity.aio.completion import Completion
from infinity.aio.counts import EngineStatistics
from infinity.aio.engine import IoEngine
from infinity.aio.errors import (
    EngineClosedError,
    EngineUnavailableError,
    ForkedError,
    IoEngineFailedError,
    IoError,
    IoTimeoutError,
    StorageFullError,
)
from infinity.aio.files import File
from infinity.aio.library import BLOCK, RINGS, Priority
from infinity.aio.memory import AlignedMemory
from infinity.aio.probe import KINDS, open_engine, open_reader

__all__ = [
    "BLOCK",
    "KINDS",
    "RINGS",
    "AlignedMemory",
    "Completion",
    "EngineClosedError",
    "EngineStatistics",
    "EngineUnavailableError",
    "File",
    "ForkedError",
    "IoEngine",
    "IoEngineFailedError",
    "IoError",
    "IoTimeoutError",
    "Priority",
    "StorageFullError",
    "open_engine",
    "open_reader",
]
