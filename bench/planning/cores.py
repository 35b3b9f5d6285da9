"""Measures this machine's cores for `infinity plan`: updates, hashes and copies, in about a second. Without
torch, whose import takes longer than that.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import xxhash

from infinity import kernels

_ELEMENTS = 1 << 22
_REPEATS = 5
_HALF = 0x3F00
"""0.5 in bf16: with zeros, numbers would become subnormal, and these take longer."""

BESIDE: dict[str, Any] = {
    "computing": 0.28,
    "working": 0.8,
    "request_s": 25e-6,
    "asking": 0.7,
    "computing_asked": 0.2,
    "use_s": 500e-6,
}
"""How computing and the lane slow each other down where they share the cores, and what Python takes: see
simulator.Rates. To measure it takes a model that computes; these are what `infinity bench step` has measured
beside its runs on two machines with two cores (bench/results): computing 0.20 to 0.48, working 0.66 to 0.92,
16 to 38 us a request, 0.3 to 0.7 ms a use.
"""


@dataclass(frozen=True, slots=True)
class Cores:
    """The speed of this machine's cores beside computing; see simulator.Rates."""

    update: float
    checked: float
    copied: float
    shared: bool
    computing: float = 0.5
    working: float = 0.5
    request_s: float = 0.0
    asking: float = 0.5
    computing_asked: float = 0.5
    use_s: float = 0.0


def best(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the seconds of the fastest of some calls: other processes can only slow a call down."""
    fastest = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def cores(state_dtype: str) -> Cores:
    """Measure the cores for a dtype of moments, with the threads of training; takes a second."""
    return Cores(update_rate(state_dtype), hash_rate(), copy_rate(), shares_cores())


def update_rate(state_dtype: str) -> float:
    """Return the elements per second of the update's kernel, on records larger than any cache, as are those
    that come from the drive.
    """
    n = 4 * _ELEMENTS
    widths = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 1}
    halves = [np.full(n, _HALF, np.int16) for _ in range(3)]
    moments = [np.zeros(n * widths[state_dtype], np.int8) for _ in range(2)]
    scales = np.zeros(2 * n // kernels.STATE_BLOCK, np.float32)
    hi, lo, gradient = (one.ctypes.data for one in halves)
    m, v = (one.ctypes.data for one in moments)
    scalars = kernels.AdamWScalars(1e-4, 0.9, 0.999, 1e-8, 0.01, 1)
    at = {"hi": hi, "lo": lo, "m": m, "v": v, "mv": m, "scale": scales.ctypes.data}
    state: Any = state_dtype

    def step() -> None:
        if state_dtype == "fp32":
            kernels.adamw(n, hi, lo, m, v, gradient, "bf16", scalars)
        else:
            kernels.small_step("adamw", "bf16", state, n, at, gradient, "bf16", scalars, 0, 0)

    return n / best(step)


def hash_rate() -> float:
    """Return the bytes per second of hashing records."""
    content = np.ones(16 * _ELEMENTS, np.int8).data  # larger than any cache
    return content.nbytes / best(lambda: xxhash.xxh3_64_intdigest(content))


def copy_rate() -> float:
    """Return the bytes per second of copying in memory."""
    source, target = (np.ones(4 * _ELEMENTS, np.int8) for _ in range(2))
    return source.size / best(lambda: kernels.copy(source.size, target.ctypes.data, source.ctypes.data))


def shares_cores() -> bool:
    """Whether updates run on the cores that compute, because torch's threads leave none free."""
    return torch_threads() >= len(os.sched_getaffinity(0))


def torch_threads() -> int:
    """Return how many threads torch computes with; where it is not imported, how many it would: as many as
    the environment says, or as there are physical cores.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        told = os.environ.get(name, "")
        if told.isdigit() and int(told):
            return int(told)
    usable = len(os.sched_getaffinity(0))
    return min(psutil.cpu_count(logical=False) or usable, usable)
