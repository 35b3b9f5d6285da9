"""A folder that several ranks fill together, and that appears whole, or not at all.

[Note: a failing rank]
Rank 0 makes the folder, and puts it in place when all have said that what they wrote is on the disk. A rank
that fails says so where the others wait for it; one that is killed is missed there. Either way nobody gets
further, and rank 0 takes away what was written: what was there before stays. If rank 0 itself is killed, its
lock on the folder is gone, and the next who saves takes it away.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from infinity.checkpoint.atomic import Older, new_folder
from infinity.errors import ConfigError
from infinity.ranks.group import Ranks

_SHARED = "shared"
_APPEARS_S = 5.0
"""Seconds that a network file system may take to show a new file to another machine."""


@contextlib.contextmanager
def shared_folder(ranks: Ranks, path: Path, older: Older) -> Iterator[Path]:
    """Give every rank the same empty folder to fill; at the end of the `with` it is at `path`. What a rank
    has written has to be on the disk by then. After an error on any rank nothing is left.

    Raises: as atomic.new_folder; ConfigError where a rank does not see what rank 0 writes; RanksError naming
    the ranks that failed.
    """
    if ranks.size == 1:
        with new_folder(path, older) as filling:
            yield filling
        return
    nonce = secrets.token_hex(16).encode()
    with ranks.together(f"putting {path} in place"), contextlib.ExitStack() as stack:
        name = b""
        with ranks.together(f"making a folder beside {path}"):
            if ranks.rank == 0:
                filling = stack.enter_context(new_folder(path, older))
                (filling / _SHARED).write_bytes(nonce)
                name = filling.name.encode()
        told = ranks.each(nonce + name, f"meeting beside {path}")[0]
        filling = path.absolute().parent / told[len(nonce) :].decode()
        with ranks.together(f"looking for rank 0's folder beside {path}"):
            _check_shared(filling / _SHARED, told[: len(nonce)])
        if ranks.rank == 0:
            (filling / _SHARED).unlink()
        with ranks.together(f"writing {path}"):
            yield filling


def _check_shared(file: Path, expected: bytes) -> None:
    """See that this rank reads what rank 0 has written.

    Raises: ConfigError.
    """
    end_s = time.monotonic() + _APPEARS_S
    found = None
    while found != expected and time.monotonic() < end_s:
        try:
            found = file.read_bytes()
        except FileNotFoundError:
            time.sleep(0.1)
    if found != expected:
        raise ConfigError(
            f"{file.parent.parent} on {socket.gethostname()} is not the folder that rank 0 writes to: "
            f"{file.name} did not appear in {file.parent.name} within {_APPEARS_S:.0f} s. All ranks write "
            "one checkpoint: name a folder on a file system that they share (NFS, Lustre, ...)."
        )
