"""The states of the random number generators that a training uses, as plain values."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from infinity.config.settings import UNPROVEN


def capture() -> dict[str, Any]:
    """Return the states of torch's and Python's generators, and numpy's if it is imported."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": _out(torch.get_rng_state()),
        "python": [version, list(words), gauss],
    }
    if torch.cuda.is_initialized():
        states["cuda"] = [_out(state) for state in torch.cuda.get_rng_state_all()]
    for kind, module in _others():
        states[kind] = [_out(state) for state in module.get_rng_state_all()]
    if "numpy" in sys.modules:
        name, words, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [name, [int(word) for word in words], *rest]
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Set the states that `capture` returned; those of missing devices are skipped."""
    torch.set_rng_state(_in(states["torch"]))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    if torch.cuda.is_available():
        for number, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_in(state), number)
    for kind, module in _others():
        for number, state in enumerate(states.get(kind, ())[: module.device_count()]):
            module.set_rng_state(_in(state), number)
    if "numpy" in states and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, words, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(words, dtype=numpy.uint32), *rest))


def begin(states: Mapping[str, Any], number: int) -> None:
    """Seed all generators from another rank's states, as `capture` returned them, and this rank's `number`:
    reproducible, and different from that rank's draws.
    """
    seed = xxhash.xxh3_64_intdigest(f"{number} {states['torch']}".encode()) >> 1
    torch.manual_seed(seed)  # of CUDA as well
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _others() -> Iterator[tuple[str, Any]]:
    """Yield the type of accelerator that torch sees and its module, where that is not CUDA's and has any."""
    seen = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module: Any = torch.get_device_module(seen) if seen is not None and seen.type in UNPROVEN else None
    if seen is not None and hasattr(module, "get_rng_state_all"):
        yield seen.type, module


def _out(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _in(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
