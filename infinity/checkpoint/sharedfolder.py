"""A folder that several ranks fill together, and that appears complete, or not at all.

[Note: a failing rank]
Rank 0 creates the folder, and puts it in place when all ranks have synced their files to disk. The others
learn of a rank that fails, or that was killed, where they wait for it. Then no rank goes on, and rank 0
removes what was written: what was at the path before stays. If rank 0 itself is killed, its lock on the
folder ends, and the next save removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
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
    """Give all ranks the same empty folder to fill, which is at `path` after the `with`. Each rank syncs its
    files within the `with`. After an error on any rank nothing is left.

    Raises: as atomic.new_folder; ConfigError if a rank does not see what rank 0 writes; RanksError naming the
    ranks that failed.
    """
    if ranks.size == 1:
        with new_folder(path, older) as filling:
            yield filling
        return
    nonce = secrets.token_hex(16)
    with ranks.together(f"putting {path} in place"), contextlib.ExitStack() as stack:
        name = ""
        with ranks.together(f"making a folder beside {path}"):
            if ranks.rank == 0:
                filling = stack.enter_context(new_folder(path, older))
                (filling / _SHARED).write_text(nonce)
                name = filling.name
        told = ranks.each(json.dumps([nonce, name]).encode(), f"meeting beside {path}")
        nonce, name = json.loads(told[0])
        filling = path.absolute().parent / name
        with ranks.together(f"looking for rank 0's folder beside {path}"):
            _check_shared(filling / _SHARED, nonce.encode())
        if ranks.rank == 0:
            (filling / _SHARED).unlink()
        with ranks.together(f"writing {path}"):
            yield filling


def check_named(ranks: Ranks, folder: str | os.PathLike[str], what: str) -> None:
    """Check that all ranks name one folder, for `what` they are about to do with it.

    Raises: ConfigError, on all of them, naming each one's.
    """
    said = ranks.each(os.fsencode(folder), what)
    if len({*said}) > 1:
        named = ranks.names.told([*map(os.fsdecode, said)])
        raise ConfigError(
            f"{what}: the ranks name different folders: {named}. Give all of them the same, such as the one "
            "that rank 0 chooses (torch.distributed.broadcast_object_list)"
        )


def _check_shared(file: Path, expected: bytes) -> None:
    """Check that this rank reads what rank 0 has written.

    Raises: ConfigError if it does not.
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
