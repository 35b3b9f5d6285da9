"""Statistics of an engine."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from infinity.aio.library import AioLibrary, CData, ffi

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts since the engine was opened."""

    requests: int  # submitted
    finished: int  # of these, ended
    failed: int  # of these, with an error
    pieces: int
    bytes_read: int
    bytes_written: int
    retries: int  # after EINTR, EAGAIN, or less than a block moved
    continued: int  # short transfers
    in_flight: int  # requests
    pieces_in_flight: int
    high_water: int  # most pieces in flight at once
    registered: int  # pieces that lay in registered memory

    @classmethod
    def of(cls, library: AioLibrary, engine: CData) -> "Self":
        """Read the counts of a C engine."""
        counts = ffi.new("struct aio_statistics *")
        library.aio_statistics(engine, counts)
        return cls(**{field.name: getattr(counts, field.name) for field in fields(cls)})
