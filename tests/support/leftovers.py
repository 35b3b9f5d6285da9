"""What a test leaves behind: threads and file descriptors that were not there before.

Counts do not do: what an earlier test let go of may be closed during this one, and so hide or fake a leak.
"""

import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """Descriptors with what they lead to, and threads, at one moment."""

    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[threading.Thread]


def held():
    """Return the descriptors and threads of this process, after a collection of garbage."""
    gc.collect()
    return Held(frozenset(_descriptors()), frozenset(threading.enumerate()))


def left_since(before):
    """Return the descriptors and threads that are new since `before`, in words."""
    now, old = held(), before.descriptors
    new = [f"descriptor {number}: {target}" for number, target in sorted(now.descriptors - old)]
    return new + [f"thread {thread.name}" for thread in now.threads - before.threads]


def _descriptors():
    for entry in Path("/proc/self/fd").iterdir():
        try:
            yield int(entry.name), str(entry.readlink())
        except FileNotFoundError:  # the descriptor by which the folder itself is listed
            continue


def settled(count):
    """Return what `count()` gives three times in a row: a joined thread is listed a moment longer."""
    seen = [count()]
    while (len(seen) < 3 or len(set(seen[-3:])) > 1) and len(seen) < 1000:
        time.sleep(0.02)
        seen.append(count())
    return seen[-1]
