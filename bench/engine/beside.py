"""Measures how much updates and computing slow each other down when they run at the same time.

This can only be measured. Sharing the cores does not simply halve them: torch's threads spin while they wait
for each other, and each may have to wait for a core that is busy with updates.
"""

from __future__ import annotations

import threading
import time

import torch
import xxhash

from infinity import kernels

_SCALARS = kernels.AdamWScalars(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)


class LaneWork:
    """The lane's work on tiles without its transfers: hash a tile, update it, hash it again.

    tiles: enough that the caches do not hold them. numel: elements of each, as in training.
    """

    def __init__(self, tiles: int = 16, numel: int = 1 << 19) -> None:
        self._gradient = torch.full((numel,), 0.5, dtype=torch.bfloat16)
        halves = [[torch.full((numel,), 0.5, dtype=torch.bfloat16) for _ in range(2)] for _ in range(tiles)]
        self._tiles = [(*pair, torch.zeros(numel), torch.zeros(numel)) for pair in halves]
        self._views = [[one.view(torch.int8).numpy().data for one in tile] for tile in self._tiles]
        self._done, self._began_s, self._ended = 0, 0.0, False
        self._thread = threading.Thread(target=self._run, name="infinity-lane", daemon=True)

    def rate(self, seconds: float) -> float:
        """Work for some seconds; return tiles per second."""
        began, first = time.perf_counter(), self._done
        while time.perf_counter() - began < seconds:
            self._one()
        return (self._done - first) / (time.perf_counter() - began)

    def start(self) -> None:
        """Start a thread that works until `stop`."""
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
