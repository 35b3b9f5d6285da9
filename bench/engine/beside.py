"""Updates that go on while something computes: how much do they slow each other down?

Nothing but a trial tells. Cores that both share are not just halved: torch's threads spin while they wait for
each other, and each of them may have to wait for a core that updates.
"""

from __future__ import annotations

import threading
import time

import torch
import xxhash

from infinity import kernels

_SCALARS = kernels.AdamWScalars(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


class LaneWork:
    """What Infinity's lane does to tiles, without its transfers: hash one, update it, hash it; the next one.

    tiles: so many that the caches do not hold them. numel: of each, as large as training has them.
    """

    def __init__(self, tiles: int = 16, numel: int = 1 << 19) -> None:
        """Take the memory."""
        self._gradient = torch.full((numel,), 0.5, dtype=torch.bfloat16)
        halves = [[torch.full((numel,), 0.5, dtype=torch.bfloat16) for _ in range(2)] for _ in range(tiles)]
        self._tiles = [(*pair, torch.zeros(numel), torch.zeros(numel)) for pair in halves]
        self._views = [[one.view(torch.int8).numpy().data for one in tile] for tile in self._tiles]
        self._done, self._began_s, self._ended = 0, 0.0, False
        self._thread = threading.Thread(target=self._run, name="infinity-lane", daemon=True)

    def rate(self, seconds: float) -> float:
        """Work for so long; return tiles per second."""
        began, first = time.perf_counter(), self._done
        while time.perf_counter() - began < seconds:
            self._one()
        return (self._done - first) / (time.perf_counter() - began)

    def start(self) -> None:
        """Work on a thread until `stop`."""
        self._done, self._began_s = 0, time.perf_counter()
        self._thread.start()

    def stop(self) -> float:
        """Return the tiles per second since `start`."""
        self._ended = True
        self._thread.join()
        return self._done / (time.perf_counter() - self._began_s)

    def _run(self) -> None:
        while not self._ended:
            self._one()

    def _one(self) -> None:
        at = self._done % len(self._tiles)
        tile, contents = self._tiles[at], self._views[at]
        for content in contents:
            xxhash.xxh3_64_intdigest(content)
        hi, lo, m, v = (one.data_ptr() for one in tile)
        kernels.adamw(self._gradient.numel(), hi, lo, m, v, self._gradient.data_ptr(), "bf16", _SCALARS)
        for content in contents:
            xxhash.xxh3_64_intdigest(content)
        self._done += 1
