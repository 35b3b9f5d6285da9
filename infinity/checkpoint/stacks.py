"""Stacks whose slices are parameters of their own: checkpoints and exports have them whole, by their names.

A slice is a range of its stack's elements. So the pieces of a stack, in the manifest, are those of its
slices, and a checkpoint loads into a model whose experts are whole, and back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from infinity.checkpoint.kinds import first_of, shape_of
from infinity.planning.layout import STATE_BLOCK
from infinity.storage.manifest import MASTER, Manifest, Tensor, TensorPiece, TensorSpec
from infinity.tiling import Routed


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """Where a slice lies in its stack."""

    stack: str  # its name in the model
    first: int  # the element of the stack that the slice begins with
    shape: tuple[int, ...]  # of the stack


class Stacks:
    """The slices of one model, by their names."""

    def __init__(self, model: nn.Module, *, blocks: bool) -> None:
        """Find them. blocks: moments are kept in blocks, which slices have to be whole numbers of."""
        self.places: dict[str, SlicePlace] = {}
        for prefix, module in model.named_modules():
            if isinstance(module, Routed):
                for name, place in _places(module, f"{prefix}." if prefix else "", blocks=blocks):
                    self.places.setdefault(name, place)

    def told(self) -> list[list[Any]]:
        """Return them as plain values."""
        return [[name, *dataclasses.astuple(place)] for name, place in self.places.items()]

    def of_those(self, told: Iterable[Sequence[Any]]) -> Stacks:
        """Return other slices, of those that `told` has returned."""
        found = copy.copy(self)
        found.places = {name: SlicePlace(stack, first, tuple(shape)) for name, stack, first, shape in told}
        return found

    def name(self, name: str) -> str:
        """Return a parameter's name in files: for a slice its stack's."""
        place = self.places.get(name)
        return name if place is None else place.stack

    def names(self, names: Iterable[str]) -> list[str]:
        """Return parameters' names in files, each once, in their order."""
        return list(dict.fromkeys(map(self.name, names)))

    def first(self, name: str, kind: str = MASTER) -> int:
        """Return the element of the tensor of this kind in files that a parameter begins with."""
        place = self.places.get(name)
        return 0 if place is None else first_of(kind, place.first)

    def spec(self, name: str, spec: TensorSpec, kind: str = MASTER) -> TensorSpec:
        """Return the spec of the tensor of this kind in files that a parameter, of this spec, is part of."""
        place = self.places.get(name)
        return spec if place is None else (spec[0], shape_of(kind, place.shape))

    def joined(self, manifest: Manifest) -> Manifest:
        """Return a manifest with stacks in the place of their slices."""
        pieces: defaultdict[tuple[str, str], list[TensorPiece]] = defaultdict(list)
        specs: dict[tuple[str, str], TensorSpec] = {}
        for one in manifest.tensors:
            key = one.kind, self.name(one.name)
            specs.setdefault(key, self.spec(one.name, (one.dtype, one.shape), one.kind))
            first = self.first(one.name, one.kind)
            pieces[key] += [
                dataclasses.replace(piece, start=first + piece.start, stop=first + piece.stop)
                for piece in one.pieces
            ]
        tensors = tuple(
            Tensor(name, kind, *spec, tuple(sorted(pieces[kind, name], key=attrgetter("order"))))
            for (kind, name), spec in specs.items()
        )
        return dataclasses.replace(manifest, tensors=tensors)

    def specs(self, specs: Mapping[str, TensorSpec], kind: str = MASTER) -> dict[str, TensorSpec]:
        """Return the specs of tensors of this kind in files, from those of a model's."""
        return {self.name(name): self.spec(name, spec, kind) for name, spec in specs.items()}


def _places(module: Routed, prefix: str, *, blocks: bool) -> Iterator[tuple[str, SlicePlace]]:
    for name, whole in module.wholes().items():
        numels = [piece.numel() for piece in whole.pieces()]
        if blocks and any(numel % STATE_BLOCK for numel in numels[:-1]):
            continue
        first = 0
        for number, numel in enumerate(numels):
            yield f"{prefix}tiles.{number}.{name}", SlicePlace(prefix + name, first, tuple(whole.shape))
            first += numel
