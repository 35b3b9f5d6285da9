"""Inputs of checkpoints of which every rank of a group holds a copy (tensor parallelism): each keeps a part.

That is P_a of ZeRO (arXiv 1910.02054, section 6.1). A part waits for the backward where offload_activations
says, or where it was; when the backward takes it, the ranks gather the whole, which lives until the block is
recomputed. The first one of a run is compared among the ranks: ranks that hold no copies would recompute from
a patchwork.
"""

from __future__ import annotations

from typing import Any

import torch

from infinity.activations.boundaries import Boundaries, Boundary, flattened, is_boundary, stands_between
from infinity.errors import RanksError
from infinity.ranks.group import Channel, Ranks, open_ranks
from infinity.ranks.mesh import opened
from infinity.sizes import BLOCK
from infinity.tensors import digest

stands_between(__name__)


class BoundaryPart:
    """What this rank keeps of one boundary."""

    __slots__ = ("_all", "_dtype", "_held", "_name", "_numel", "_shape", "_stride", "nbytes")

    def __init__(self, parts: PartitionedBoundaries, tensor: torch.Tensor, number: int) -> None:
        """Keep this rank's part of `tensor`, which may be changed or go afterwards."""
        self._all = parts
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._numel = tensor.numel()
        self._name = f"gathering activation {number} {tuple(tensor.shape)}"
        part = parts.part_of(flattened(tensor))
        self.nbytes = part.nbytes
        """Bytes that this rank keeps."""
        offload = parts.offload
        self._held: Boundary | torch.Tensor = part
        if offload is not None and self.nbytes >= BLOCK:
            self._held = offload.save(part)

    def take(self) -> torch.Tensor:
        """Return the whole tensor, for a backward. Every rank of the group does so, in the same order.

        Raises: RanksError where they do not; what Boundary.take raises.
        """
        held = self._held.take() if isinstance(self._held, Boundary) else self._held
        whole = self._all.gather(held, self._name)
        return whole.as_strided(self._shape, self._stride)


class PartitionedBoundaries:
    """The partitioned boundaries of one engine's models. Called from the threads that compute."""

    def __init__(self, ranks: Ranks, device: torch.device, offload: Boundaries | None) -> None:
        """Divide boundaries among `ranks`; `offload` is where the parts wait, None: on the device."""
        self.offload = offload
        self._ranks, self._device = ranks, device
        self._channel: Channel = ranks.channel()
        self._saved = 0

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that autograd is about to save is a boundary; asked from the hook it calls."""
        return is_boundary(tensor, self._device)

    def save(self, tensor: torch.Tensor) -> BoundaryPart:
        """Return what autograd keeps in the place of a boundary."""
        self._saved += 1
        if self._saved == 1:
            self._check_copies(tensor)
        return BoundaryPart(self, tensor, self._saved)

    def _check_copies(self, tensor: torch.Tensor) -> None:
        if not self._ranks.same(digest(flattened(tensor)), "comparing the first activation"):
            raise RanksError(
                f"partition_activations: the first input of a checkpoint, {tuple(tensor.shape)}, is not the "
                f"same on the {self._ranks.size} ranks of the group, which are to hold copies of it. Likely "
                "cause: the group is the data-parallel one, or its ranks got different batches or dropout. "
                "Give the tensor-parallel group, or leave partition_activations out."
            )

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a tensor, copied, with zeros behind where it ends."""
        numel = -(-flat.numel() // (2 * self._ranks.size)) * 2  # whole 16-bit elements of any dtype
        start = min(self._ranks.rank * numel, flat.numel())
        own = flat[start : start + numel]
        part = torch.zeros(numel, dtype=flat.dtype, device=flat.device)
        part[: own.numel()] = own
        return part

    def gather(self, part: torch.Tensor, name: str) -> torch.Tensor:
        """Return all parts, one behind the other."""
        self._channel.agree(name)
        whole = torch.empty(self._ranks.size * part.numel(), dtype=part.dtype, device=part.device)
        self._channel.gather(whole.view(torch.uint8), part.view(torch.uint8), name)
        return whole

    def close(self) -> None:
        """Close the connections."""
        self._ranks.close()


def open_parts(
    group: Any, name: str, timeout_s: float, device: torch.device, offload: Boundaries | None
) -> PartitionedBoundaries | None:
    """Connect the ranks of `group`, a process group or DeviceMesh, or ranks of the world, for the device
    `name`; None for one.
    """
    open_group = opened if isinstance(group, tuple) else open_ranks
    ranks = open_group(group, name, timeout_s)
    return PartitionedBoundaries(ranks, device, offload) if ranks.size > 1 else None
