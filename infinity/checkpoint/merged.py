"""PEFT's adapters merged into their base, layer by layer, and written to a new folder.

[Note: merging]
PEFT merges in place: `merge_and_unload` changes the weights of a whole model, which an offloaded one would
write to records of its own first. Here each adapted layer is merged by itself while the files are written: a
copy of the base layer, in memory, takes its place, PEFT's own `merge` changes that, its values are written,
and it goes. So the arithmetic is PEFT's, of LoRA, DoRA and what else can merge, the base stays where it is,
and the adapters go on training afterwards. For the names in the files the model is *unwrapped* meanwhile:
each wrapped layer's parent has the layer itself, or the trained copy of `modules_to_save`.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.export import Others, write_model
from infinity.checkpoint.peft import is_adapted
from infinity.engine.engine import Engine, engine_of, engine_of_model
from infinity.engine.gathered import gathered
from infinity.errors import UnsupportedError
from infinity.tiling import Whole

_MERGE = ("adalora", "ia3", "lora", "oft", "vera")
"""Packages of PEFT's tuners whose layers merge one by one, and have been compared with merge_and_unload."""


def save_merged(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = False,
) -> None:
    """Write a PEFT model with its active adapters merged into the base, streamed, as `save_pretrained` writes
    models: for `from_pretrained` without PEFT and without Infinity.

    The files have the bits of `merge_and_unload()` and `save_pretrained` in memory. The model stays as it is:
    one layer is in memory at a time, and the base is not written to. All ranks call this, as save_pretrained.

    model: by peft.get_peft_model or PeftModel.from_pretrained, over a base built in Init. dtype: needed where
    the base is packed (fp8, nf4, int8, ...), which adapters cannot be merged into: the 16-bit type that
    computes, in which all is then written; None elsewhere. folder, max_shard_size, overwrite: as for
    save_pretrained.

    Raises: ValueError for a model without adapters; UnsupportedError for adapters that PEFT cannot merge, or
    that are not those of whole layers, and for a packed base without `dtype`; else as save_pretrained.
    """
    if not is_adapted(model):
        raise ValueError(
            f"{type(model).__name__} has no adapters of PEFT: infinity.save_pretrained writes it as it is"
        )
    write_merged(model, Path(folder), dtype, max_shard_size, overwrite=overwrite)


def write_merged(
    model: nn.Module,
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    *,
    overwrite: bool = False,
    trained: Others | None = None,
) -> None:
    """Write a model as `save_merged` does, which says what this raises; `trained`: weights of the base that
    were trained whole, and are written with these values.
    """
    engine = engine_of_model(model)
    _check_tuner(model)
    _check_types(engine, dtype)
    peft_model: Any = model
    base: nn.Module = peft_model.get_base_model()
    wrapped = list(_wrapped(base))
    with _unwrapped(wrapped):
        others = MergedLayers(base, [one for one in wrapped if one.merges], trained)
        write_model(base, folder, dtype, max_shard_size, overwrite=overwrite, others=others)


def _check_tuner(model: Any) -> None:
    """See that PEFT can merge the adapters. Raises: UnsupportedError."""
    tuner = model.base_model
    if not hasattr(tuner, "merge_and_unload"):
        kind = getattr(model.active_peft_config, "peft_type", type(tuner).__name__)
        raise UnsupportedError(f"adapters of the kind {kind} have no weights to merge: save the adapters")
    if (check := getattr(tuner, "_check_merge_allowed", None)) is not None:
        try:
            check()
        except ValueError as error:
            raise UnsupportedError(f"PEFT cannot merge these adapters: {error}") from error


def _check_types(engine: Engine, dtype: torch.dtype | None) -> None:
    """See that what is written is what the base computes in, and chosen where the base is packed.

    Raises: UnsupportedError, ValueError.
    """
    computes = engine.weights.dtype
    if dtype not in (None, computes):
        raise ValueError(f"dtype={dtype}: adapters are merged in {computes}, in which the base computes")
    packed = [unit for unit in engine.units if unit.record.packed_nbytes is not None]
    if packed and dtype is None:
        raise UnsupportedError(
            f"{packed[0].name} and {len(packed) - 1} others of the base are packed in fewer bits, which "
            f"adapters cannot be merged into. Choose: dtype={computes} writes what the base is widened to, "
            "with the adapters merged, in 16 bits; or save the adapters alone (infinity.save_pretrained), "
            "and load them on the packed base"
        )


@dataclass(frozen=True)
class WrappedLayer:
    """A layer that PEFT has put another in the place of."""

    parent: nn.Module
    place: str
    """Its name in the parent."""
    wrapper: Any
    inner: nn.Module
    """What takes the wrapper's place in the files: the layer, or a trained copy of it."""
    merges: bool
    """Whether adapters are merged into `inner`."""


def _wrapped(base: nn.Module) -> Iterator[WrappedLayer]:
    """Yield the wrapped layers of a model.

    Raises: UnsupportedError naming one whose adapters are no layer's.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper
    from peft.utils.other import AuxiliaryTrainingWrapper

    inside: tuple[str, ...] = ()
    for name, module in list(base.named_modules()):
        if name.startswith(inside) or not name:
            continue
        copies = isinstance(module, ModulesToSaveWrapper)
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        if not copies and type(module).__module__.removeprefix("peft.tuners.").split(".")[0] not in _MERGE:
            raise UnsupportedError(
                f"{name} ({type(module).__name__}): layers of {', '.join(_MERGE)} and modules_to_save are "
                "merged here, others are not. In memory, model.merge_and_unload() may do it."
            )
        inside = (*inside, f"{name}.")
        path, _, place = name.rpartition(".")
        inner = _copy_in(module) if copies else module.get_base_layer()
        special = not copies and (
            hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "parameter_name")
        )
        if special or any(isinstance(one, Whole) for one in inner._parameters.values()):
            raise UnsupportedError(
                f"{name} ({type(module).__name__}): its adapters are not those of a whole layer, and are not "
                "merged here. In memory, model.merge_and_unload() may do it."
            )
        if copies and isinstance(inner, BaseTunerLayer):
            raise UnsupportedError(f"{name}: a module of modules_to_save that has adapters of its own")
        yield WrappedLayer(base.get_submodule(path), place, module, inner, merges=not copies)


def _copy_in(wrapper: Any) -> nn.Module:
    """Return the trained copy that a module of modules_to_save computes with, or the module itself."""
    active = wrapper.active_adapters
    found: nn.Module = wrapper.modules_to_save[active[0]] if active else wrapper.original_module
    return found


@contextlib.contextmanager
def _unwrapped(wrapped: list[WrappedLayer]) -> Iterator[None]:
    """Give parents the layers themselves, and the wrappers back: see [Note: merging]."""
    try:
        for one in wrapped:
            one.parent.register_module(one.place, one.inner)
        yield
    finally:
        for one in wrapped:
            one.parent.register_module(one.place, one.wrapper)


class MergedLayers:
    """The weights that adapters are merged into, and those that were trained whole: see export.Others."""

    def __init__(self, base: nn.Module, layers: list[WrappedLayer], trained: Others | None = None) -> None:
        """base: the unwrapped model. trained: weights of it with other values, none of them adapted.

        Raises: UnsupportedError for a weight of two adapted layers, or that was trained whole as well.
        """
        names = {id(parameter): name for name, parameter in base.named_parameters()}
        self._layers: list[tuple[WrappedLayer, Mapping[str, str]]] = []
        self.names: set[str] = set()
        for layer in layers:
            own = {part: names[id(one)] for part, one in layer.inner._parameters.items() if one is not None}
            if twice := self.names & set(own.values()):
                raise UnsupportedError(
                    f"{', '.join(sorted(twice))}: tied, and adapted in two layers, whose adapters would both "
                    "be merged into it"
                )
            self.names |= set(own.values())
            self._layers.append((layer, own))
        self._trained = trained
        if trained is not None:
            if twice := self.names & set(trained.names):
                raise UnsupportedError(f"{', '.join(sorted(twice))}: adapted, and trained whole")
            self.names |= set(trained.names)

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Merge layer by layer; see export.Others."""
        if self._trained is not None:
            yield from self._trained.values()
        for layer, own in self._layers:
            for part, values in _merged(layer.wrapper, layer.inner).items():
                yield own[part], values


def _merged(wrapper: Any, inner: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a layer with its wrapper's active adapters merged, in new memory."""
    offloaded = [one for one in (*wrapper.parameters(), *inner.parameters()) if engine_of(one) is not None]
    cached: dict[str, Any] = vars(wrapper).get("_caches", {})  # DoRA's, for unmerging
    before, already = dict(cached), list(wrapper.merged_adapters)
    with contextlib.ExitStack() as stack, torch.no_grad():
        if offloaded:
            stack.enter_context(gathered(offloaded))
        plain = copy.copy(inner)
        plain.__dict__["_parameters"] = {
            name: None if one is None else nn.Parameter(one.detach().clone(), requires_grad=False)
            for name, one in inner._parameters.items()
        }
        wrapper.base_layer = plain
        try:
            wrapper.merge()
            if wrapper.base_layer is not plain:
                raise UnsupportedError(f"{type(wrapper).__name__}: its merge put another layer in its place")
        finally:
            wrapper.base_layer = inner
            wrapper.merged_adapters[:] = already
            cached.clear()
            cached.update(before)
    return {name: one.detach() for name, one in plain._parameters.items() if one is not None}
