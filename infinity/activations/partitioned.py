"""Inputs of checkpoints of which every rank of a group holds a copy (tensor parallelism): each keeps a part.

That is P_a of ZeRO (arXiv 1910.02054, section 6.1). A part waits for the backward where offload_activations
says, or where it was; when the backward takes it, the ranks gather the whole, which lives until the block is
recomputed.

[Note: copies]
Ranks that hold no copies would recompute from a patchwork. Where the program says which ranks hold copies,
the first input of a run is compared among them. Where a mesh has ranks beside each other, these are taken by
themselves, and each input of the first forward is compared before it is divided: from one on that differs,
as where a plan divides the sequence between blocks, all stay whole, on all ranks alike. On a CPU every part
has the digest of its whole with it, and the ranks compare these when they gather: inputs that differ later
are an error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from infinity.activations.boundaries import (
    Boundaries,
    Boundary,
    flattened,
    is_boundary,
    is_input,
    is_movable,
    stands_between,
)
from infinity.errors import RanksError
from infinity.ranks.group import Channel, Ranks, open_ranks
from infinity.sizes import BLOCK
from infinity.tensors import digest

logger = logging.getLogger("infinity")
stands_between(__name__)


@dataclass(frozen=True, slots=True)
class CopyHolders:
    """Which ranks hold copies of the same activations; see [Note: copies]."""

    group: Any = None
    """A process group or DeviceMesh; None: those of a mesh that are beside each other."""
    asked: bool = True
    """Whether the program has said so."""

    def connected(self, beside: Ranks, device: str, timeout_s: float) -> Ranks:
        """Return these ranks. beside: those of the mesh. device: the name of where they compute."""
        return beside if self.group is None else open_ranks(self.group, device, timeout_s)


class BoundaryPart:
    """What this rank keeps of one boundary."""

    __slots__ = ("_all", "_digest", "_dtype", "_held", "_name", "_numel", "_shape", "_stride", "nbytes")

    def __init__(
        self, parts: PartitionedBoundaries, tensor: torch.Tensor, number: int, seen: int | None = None
    ) -> None:
        """Keep this rank's part of `tensor`, which may be changed or go afterwards. seen: its digest, to be
        compared; None: it is not.
        """
        self._all, self._digest = parts, seen
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

        Raises: RanksError where they do not, or held no copies; what Boundary.take raises.
        """
        held = self._held.take() if isinstance(self._held, Boundary) else self._held
        whole = self._all.gather(held, self._name, self._digest)
        return whole.as_strided(self._shape, self._stride)


class PartitionedBoundaries:
    """The partitioned boundaries of one engine's models. Called from the threads that compute."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        offload: Boundaries | None,
        copies: CopyHolders | None = None,
    ) -> None:
        """Divide boundaries among `ranks`; `offload` is where the parts wait, None: on the device. copies:
        how the ranks were chosen; None: the program has said which they are.
        """
        self.offload = offload
        self.saved = 0
        """Boundaries that were divided so far."""
        self._ranks, self._device = ranks, device
        self._copies = copies or CopyHolders(ranks)
        self._channel: Channel | None = None  # from the first gather on
        self._on_host = device.type == "cpu"
        self._divides = self._compares = True

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that autograd is about to save is a boundary; asked from the hook it calls."""
        if self._compares and not self._copies.asked:
            return is_input(tensor, self._device)
        if self._divides:
            return is_boundary(tensor, self._device)
        return self.offload is not None and self.offload.takes(tensor)

    def save(self, tensor: torch.Tensor) -> BoundaryPart | Boundary | torch.Tensor:
        """Return what autograd keeps in the place of a boundary."""
        seen = _seen(tensor) if self._compares or (self._divides and self._on_host) else None
        if seen is not None and self._compares:
            self._compare(tensor, seen)
        if self._divides and is_movable(tensor, self._device):
            self.saved += 1
            return BoundaryPart(self, tensor, self.saved, seen if self._on_host else None)
        if self.offload is not None and self.offload.takes(tensor):
            return self.offload.save(tensor)
        return tensor

    def _compare(self, tensor: torch.Tensor, seen: int) -> None:
        """See whether the ranks hold copies of a boundary, and go on as [Note: copies] has it."""
        self._ranks.agree("comparing the input of a checkpoint")
        if self._ranks.same(seen, "comparing the input of a checkpoint"):
            self._compares = not self._copies.asked
            return
        if self._copies.asked:
            raise RanksError(
                f"partition_activations: the first input of a checkpoint, {tuple(tensor.shape)}, is not the "
                f"same on the {self._ranks.size} ranks of the group, which are to hold copies of it. Likely "
                "cause: the group is the data-parallel one, or its ranks got different batches or dropout. "
                "Give the tensor-parallel group, or leave partition_activations out."
            )
        self._divides = self._compares = False
        logger.info(
            "inputs of checkpoints stay whole on each rank of the mesh: one of %s is not the same on the %d "
            "ranks beside each other",
            tuple(tensor.shape),
            self._ranks.size,
        )

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a tensor, copied, with zeros behind where it ends."""
        numel = -(-flat.numel() // (2 * self._ranks.size)) * 2  # whole 16-bit elements of any dtype
        start = min(self._ranks.rank * numel, flat.numel())
        own = flat[start : start + numel]
        part = torch.zeros(numel, dtype=flat.dtype, device=flat.device)
        part[: own.numel()] = own
        return part

    def gather(self, part: torch.Tensor, name: str, seen: int | None = None) -> torch.Tensor:
        """Return all parts, one behind the other. seen: the digest of the whole that this rank has seen.

        Raises: RanksError where the ranks gather different boundaries, or have seen different values of one.
        """
        self._compares = False  # the first forward is over
        if self._channel is None:
            self._channel = self._ranks.channel()
        mine = [xxhash.xxh3_64_intdigest(name.encode()) >> 1, seen or 0]
        rows = self._channel.integers(mine, name)
        if any(row[0] != mine[0] for row in rows):
            self._channel.agree(name)  # which raises, and names what each rank gathers
        if any(row != mine for row in rows):
            texts = [f"digest {row[1]:016x}" for row in rows]
            raise RanksError(
                f"partition_activations: {name}: the ranks, of which each has kept a part of this input of a "
                f"checkpoint, had different values of it ({self._ranks.names.told(texts)}): the block would "
                "be computed again from a patchwork. Likely cause: dropout or a branch that differs between "
                "ranks with parts of the same layers. Give them the same random numbers, or set "
                "Init(partition_activations=False)."
            )
        whole = torch.empty(self._ranks.size * part.numel(), dtype=part.dtype, device=part.device)
        self._channel.gather(whole.view(torch.uint8), part.view(torch.uint8), name)
        return whole

    def close(self) -> None:
        """Close the connections that were opened for this alone."""
        if self._copies.group is not None:
            self._ranks.close()


def _seen(tensor: torch.Tensor) -> int:
    """Return a digest of what a tensor is, in 63 bits: of its values, and of how they lie in memory."""
    how = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
    return digest(tensor.detach().resolve_neg()) ^ (xxhash.xxh3_64_intdigest(how.encode()) >> 1)


def open_parts(
    copies: CopyHolders, ranks: Ranks, device: torch.device, offload: Boundaries | None
) -> PartitionedBoundaries | None:
    """Return what divides boundaries among `ranks`, which `copies` has chosen; None for one rank."""
    return PartitionedBoundaries(ranks, device, offload, copies) if ranks.size > 1 else None
