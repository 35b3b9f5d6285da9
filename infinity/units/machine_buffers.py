"""Large buffers of modules that are the same on all ranks of a machine, and so lie in its memory once.

What a rank sees is a private mapping: a buffer that a rank changes becomes a copy, page by page, of what is
changed. Buffers that something else than their module refers to (a view, a NumPy array) stay where they are.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch
import xxhash
from torch import nn

from infinity.ranks.group import Ranks
from infinity.ranks.shared_memory import PAGE, open_shared
from infinity.sizes import round_up
from infinity.tensors import as_bytes

LEAST_NBYTES = 1 << 20
"""Smaller buffers stay as they are."""

_Places = list[tuple[nn.Module, str]]
"""Under which names, of which modules, one buffer is registered."""


def share_buffers(modules: Iterable[tuple[str, nn.Module]], ranks: Ranks, timeout_s: float) -> int:
    """Let the large buffers of modules, given with their names, be views of one copy where all ranks have the
    same. Every rank calls it. Return the bytes of these.

    Raises: as `open_shared`.
    """
    found = [places for places in _registered(modules) if _is_alone(places)]
    said = [f"{places[0][1]} {_buffer(places).shape} {_buffer(places).dtype}" for places in found]
    what = "compare buffers"
    if not ranks.same(xxhash.xxh3_64_intdigest("\n".join(said).encode()) >> 1, what) or not found:
        return 0
    mine = [xxhash.xxh3_64_intdigest(as_bytes(_buffer(places).flatten())) >> 1 for places in found]
    rows = ranks.of_all(mine, what)
    same = [places for number, places in enumerate(found) if len({row[number] for row in rows}) == 1]
    if not same:
        return 0
    sizes = [_buffer(places).nbytes for places in same]
    memory = open_shared(ranks, sum(round_up(size, PAGE) for size in sizes), timeout_s)
    offset = 0
    for places, nbytes in zip(same, sizes, strict=True):
        if ranks.rank == ranks.near[0]:
            ctypes.memmove(memory.address + offset, _buffer(places).data_ptr(), nbytes)
        offset += round_up(nbytes, PAGE)
    starts = [sum(round_up(size, PAGE) for size in sizes[:number]) for number in range(len(sizes))]
    with ranks.together("sharing buffers"):  # which all have, or none has
        shown = [memory.private(*one, forks=True) for one in zip(starts, sizes, strict=True)]
    for places, seen in zip(same, shown, strict=True):
        old = _buffer(places)
        with torch.inference_mode(mode=False), torch.no_grad():
            new = torch.frombuffer(seen, dtype=old.dtype, count=old.numel()).view(old.shape)
        new.__dict__.update(old.__dict__)  # that it is an nn.Buffer, and marks of the program's
        for module, key in places:
            module._buffers[key] = new  # noqa: SLF001 - register_buffer would forget whether it is saved
    memory.close()
    return sum(sizes)


def _registered(modules: Iterable[tuple[str, nn.Module]]) -> list[_Places]:
    """Return where each large buffer is registered."""
    found: dict[int, _Places] = {}
    for _, module in modules:
        for key, buffer in module._buffers.items():  # noqa: SLF001 - its iterators skip what comes twice
            if buffer is not None and buffer.nbytes >= LEAST_NBYTES:
                places = found.setdefault(id(buffer), [])
                if (module, key) not in places:
                    places.append((module, key))
    return list(found.values())


def _buffer(places: _Places) -> torch.Tensor:
    module, key = places[0]
    buffer = module._buffers[key]  # noqa: SLF001
    if buffer is None:
        raise AssertionError(f"{key}: expected a buffer, got None")
    return buffer


def _is_alone(places: _Places) -> bool:
    """Whether a buffer is an ordinary tensor in host memory to which nothing but its modules refers."""
    module, key = places[0]
    holders = sys.getrefcount(module._buffers[key]) - 1  # noqa: SLF001 - not counting the argument
    if holders > len(places):
        return False
    buffer = _buffer(places)
    plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided and buffer.device.type == "cpu"
    if not plain or buffer.requires_grad or not buffer.is_contiguous():
        return False
    if buffer.is_conj() or buffer.is_neg() or buffer.is_quantized:  # bytes are not all that there is of it
        return False
    storage = buffer.untyped_storage()
    if storage.nbytes() != buffer.nbytes:
        return False
    base = 0
    if buffer._is_view():  # noqa: SLF001 - as torch.tril(...).view(1, 1, n, n), of what nobody has any more
        if sys.getrefcount(buffer._base) - 1 > 1:  # noqa: SLF001
            return False
        base = 1
    return _shares(buffer) == _shares(torch.empty(1, device="cpu")) + base


def _shares(tensor: torch.Tensor) -> int:
    """Return how many tensors share the storage of one."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
