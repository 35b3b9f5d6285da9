"""Policies of caches as libcachesim has them (github.com/cacheMon/libCacheSim), where it is installed.

    pip install "zero-infinity[caches]"

Its caches take in whatever misses; ours in routing may leave it out, so that our Belady has a few more hits.
"""

from __future__ import annotations

import importlib.util
import itertools

from infinity.bench.planning.routing import PolicyResult, Run

_NEVER = 1 << 62
_TABLE = 12
"""Bits of its hash table; 24 by default, which takes 128 MiB."""


def is_installed() -> bool:
    """Whether libcachesim is there."""
    return importlib.util.find_spec("libcachesim") is not None


def cached_by(policy: str, run: Run, room: int) -> PolicyResult:
    """Return what one of its caches does, "Belady", "LRU", "LFU", ...: hits, and records read and written.

    Raises: ImportError where it is not installed; AttributeError for a policy that it does not have.
    """
    import libcachesim

    uses = list(itertools.chain.from_iterable(run))
    following = [_NEVER] * len(uses)
    next_use: dict[int, int] = {}
    for place in reversed(range(len(uses))):
        following[place] = next_use.get(uses[place], _NEVER)
        next_use[uses[place]] = place
    cache = getattr(libcachesim, policy)(cache_size=room, hashpower=_TABLE)
    hits = 0
    for place, (expert, after) in enumerate(zip(uses, following, strict=True)):
        given = {"obj_size": 1, "obj_id": expert, "clock_time": place, "next_access_vtime": after}
        hits += bool(cache.get(libcachesim.Request(**given, op=libcachesim.ReqOp.OP_GET)))
    misses = len(uses) - hits
    return PolicyResult(hits, len(uses), misses + max(0, misses - room))
