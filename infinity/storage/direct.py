"""Memory that a drive's bytes come to without a host's memory in between: see device/direct.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from infinity.storage.store import Future, Transfer

if TYPE_CHECKING:
    import torch


class DirectTarget:
    """Memory of a device. As an owner of a request's memory, it is what reads. No ABC: each read asks whether
    something is one.
    """

    def read(self, fd: int, offset: int, address: int, nbytes: int, what: str) -> Transfer:
        """Begin to bring `nbytes` of a file from `offset` on to `address`, which is in this memory."""
        raise NotImplementedError


def target_among(owner: object) -> DirectTarget | None:
    """Return the target that owns a request's memory; None where that is the host's."""
    for one in owner if isinstance(owner, tuple) else (owner,):
        if isinstance(one, DirectTarget):
            return one
    return None


class FilesToDevice(Protocol):
    """What reads files to a device's memory."""

    def into(self, flat: torch.Tensor, free: Future) -> DirectTarget:
        """Return a unit's memory as a target of reads; free: when it may be written."""

    def close(self) -> None:
        """Close the files."""
