"""What a run may use: paths, budgets, precision. Checked once, here; trusted everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.errors import ConfigError
from infinity.sizes import format_size, parse_size

_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16"}
_AIO = (None, "io_uring", "threads", "buffered")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one `Init`: what it may use, never how it should go about it.

    nvme: a folder on the NVMe device, or None for no NVMe tier (all state stays in host memory).
    host_memory: bytes, or text like "4GiB": a hard budget for what Infinity keeps in host memory (pools,
    gradients,
        pinned state). The units in use, activations and the model's buffers come on top, as in plain
        training. None: half of the memory that is available when `Init` is entered.
    device: where the model computes, "cpu" or "cuda" (one device).
    dtype: the 16-bit type that computes; "bf16".
    aio: the I/O engine, "io_uring", "threads" or "buffered"; None picks the best that works (and honours
    INFINITY_AIO).
    verify: check every record read back against the hash of what was written.

    Raises: ConfigError, naming the field, what it holds and what it may hold.
    """

    nvme: str | Sequence[str] | None = None
    host_memory: int | str | None = None
    device: str = "cpu"
    dtype: object = "bf16"
    aio: str | None = None
    verify: bool = True
    host_nbytes: int | None = field(init=False)
    """`host_memory` in bytes, or None."""
    nvme_folder: str | None = field(init=False)
    """The one folder of `nvme`, or None."""

    def __post_init__(self) -> None:
        """Check every field, and derive what is written in more than one way."""
        object.__setattr__(self, "nvme_folder", self._folder())
        object.__setattr__(self, "host_nbytes", self._host_nbytes())
        if _DTYPES.get(str(self.dtype)) is None:
            raise ConfigError(f'dtype={self.dtype!r}: this version computes in "bf16" (torch.bfloat16)')
        object.__setattr__(self, "dtype", _DTYPES[str(self.dtype)])
        if self.aio not in _AIO:
            raise ConfigError(f"aio={self.aio!r}: expected one of {', '.join(map(repr, _AIO))}")
        if str(self.device).split(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f'device={self.device!r}: expected "cpu", "cuda" or "cuda:N"')
        object.__setattr__(self, "device", str(self.device))

    def _folder(self) -> str | None:
        if self.nvme is None:
            return None
        folders = (
            [self.nvme]
            if isinstance(self.nvme, str) or not isinstance(self.nvme, Sequence)
            else list(self.nvme)
        )
        if len(folders) != 1:
            raise ConfigError(f"nvme={self.nvme!r}: this version takes one folder, got {len(folders)}")
        if not str(folders[0]):
            raise ConfigError("nvme='': expected a folder, or None for no NVMe tier")
        return str(folders[0])

    def _host_nbytes(self) -> int | None:
        if self.host_memory is None:
            return None
        try:
            nbytes = parse_size(self.host_memory, "host_memory")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if nbytes == 0:
            raise ConfigError(
                "host_memory=0: the engine needs memory for its transfers; give at least a few MiB"
            )
        return nbytes

    def __str__(self) -> str:
        """The settings in one line."""
        host = "half of what is available" if self.host_nbytes is None else format_size(self.host_nbytes)
        return f"nvme={self.nvme_folder}, host_memory={host}, device={self.device}, dtype={self.dtype}"
