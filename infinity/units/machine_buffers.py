"""Large buffers of modules that are the same on all ranks of a machine, and so lie in its memory once.

What a rank sees is a private mapping: a buffer that a rank changes becomes a copy, page by page, of what is
changed, and forked processes have it as they have other memory. Buffers that something else than their module
refers to (a view, a NumPy array) stay where they are; and buffers of zeros, which programs fill in. Where a
buffer is zero for long, no memory is taken before a rank writes there.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

import torch
import xxhash
from torch import nn

from infinity.ranks.group import Ranks
from infinity.ranks.shared_memory import PAGE, SharedMemory, is_zeros, let_be_zeros, open_shared
from infinity.sizes import round_up
from infinity.tensors import sharers

LEAST_NBYTES = 1 << 20
"""Smaller buffers stay as they are."""
_PIECE = 256 << 10
"""Bytes that are zero together, at least, where a buffer takes no memory."""
_PIECES = 64
"""In so many a buffer is looked at, at most: each is a mapping."""

_Places = list[tuple[nn.Module, str]]
"""Under which names, of which modules, one buffer is registered."""


def share_buffers(
    modules: Iterable[tuple[str, nn.Module]], ranks: Ranks, timeout_s: float, *, saved: bool = True
) -> int:
    """Let the large buffers of modules, given with their names, be views of one copy where all ranks have the
    same. Every rank calls it. Return the bytes of these. saved: also those that a state_dict has: loading one
    writes to them, and a machine whose ranks all do so takes a copy more than without.

    Raises: as `open_shared`.
    """
    found = [places for places in _registered(modules) if _is_alone(places) and (saved or not _saved(places))]
    said = [f"{places[0][1]} {_buffer(places).shape} {_buffer(places).dtype}" for places in found]
    what = "compare buffers"
    if not ranks.same(xxhash.xxh3_64_intdigest("\n".join(said).encode()) >> 1, what) or not found:
        return 0
    mine = [_hash(_buffer(places)) for places in found]
    rows = ranks.of_all(mine, what)
    same = [places for number, places in enumerate(found) if len({row[number] for row in rows}) == 1]
    zeros = [_zeros_of(_buffer(places)) for places in same]  # of the same bytes, so alike on all ranks
    chosen = [
        (places, holes)
        for places, holes in zip(same, zeros, strict=True)
        if sum(map(len, holes)) < _buffer(places).nbytes
    ]
    if not chosen:
        return 0
    sizes = [_buffer(places).nbytes for places, _ in chosen]
    memory = open_shared(ranks, sum(round_up(size, PAGE) for size in sizes), timeout_s)
    offset = 0
    for (places, holes), nbytes in zip(chosen, sizes, strict=True):
        with ranks.together("sharing buffers"):  # which all have, or none has, of what the first has copied
            if ranks.rank == ranks.near[0]:
                _copy(_buffer(places), memory, offset, holes)
            seen = memory.private(offset, nbytes, forks=True)
            for hole in holes:
                let_be_zeros(seen, hole.start, len(hole))
        _replace(places, seen)
        offset += round_up(nbytes, PAGE)
    memory.close()
    return sum(sizes) - sum(len(hole) for _, holes in chosen for hole in holes)


def _hash(buffer: torch.Tensor) -> int:
    """Return a hash of its bytes, in 63 bits. Not by NumPy, after which torch would not resize it."""
    content = (ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())
    return xxhash.xxh3_64_intdigest(content) >> 1


def _zeros_of(buffer: torch.Tensor) -> list[range]:
    """Return the bytes of a buffer, from page to page, of which so many are zero that they need no memory."""
    nbytes, address = buffer.nbytes, buffer.data_ptr()
    piece = max(_PIECE, round_up(-(-nbytes // _PIECES), PAGE))
    found: list[range] = []
    for start in range(0, nbytes, piece):
        stop = min(start + piece, nbytes)
        if not is_zeros(address + start, stop - start):
            continue
        begin = found.pop().start if found and found[-1].stop == start else start
        found.append(range(begin, stop))
    return found


def _copy(buffer: torch.Tensor, memory: SharedMemory, offset: int, holes: list[range]) -> None:
    """Bring a buffer to where all see it, but for what is zero there."""
    begin = 0
    for hole in [*holes, range(buffer.nbytes, buffer.nbytes)]:
        ctypes.memmove(memory.address + offset + begin, buffer.data_ptr() + begin, hole.start - begin)
        begin = hole.stop


def _replace(places: _Places, seen: Any) -> None:
    """Let a buffer be what is seen there."""
    old = _buffer(places)
    with torch.inference_mode(mode=False), torch.no_grad():
        new = torch.frombuffer(seen, dtype=old.dtype, count=old.numel()).view(old.shape)
    new.__dict__.update(old.__dict__)  # that it is an nn.Buffer, and marks of the program's
    for module, key in places:
        module._buffers[key] = new  # noqa: SLF001 - register_buffer would forget whether it is saved


def _saved(places: _Places) -> bool:
    """Whether a state_dict has a buffer, under any of its names."""
    return any(key not in module._non_persistent_buffers_set for module, key in places)  # noqa: SLF001


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
    return sharers(buffer) == sharers(torch.empty(1, device="cpu")) + base
