"""Modules that PEFT trained whole (`modules_to_save`), in an adapter's file.

PEFT puts a copy of each such module beside the one of the base, whose values it needs for that. Merging needs
no copy: what the file has takes the place of the base's weights in what is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from infinity.errors import ConfigError

FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class TrainedModules:
    """The weights of such modules: those of a file's tensors that belong to none of the adapters."""

    def __init__(self, base: nn.Module, folder: Path, modules: Collection[str]) -> None:
        """Look for the tensors of `modules` in an adapter's folder; read only their shapes.

        base: as it was loaded, without adapters. modules: ends of names, as PEFT's configuration has them.

        Raises: ConfigError naming what the file lacks, or has too much, or in another shape.
        """
        self._file = folder / FILE
        if not self._file.is_file():
            raise ConfigError(
                f"{folder}: modules_to_save={sorted(modules)}, and there is no {FILE}. Load the adapters "
                "with PEFT, and save them again: save_pretrained(folder) writes it."
            )
        self._places: dict[str, tuple[str, torch.dtype]] = {}
        """By the names of the base's weights: the key in the file, and the type that is written."""
        with safe_open(self._file, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        names = [name for name, _ in base.named_modules(remove_duplicate=False)]
        for end in modules:
            found = [name for name in names if name.endswith(end)]
            if not found:
                raise ConfigError(f"{folder}: modules_to_save={end!r}, which no module of the base is called")
            for name in found:
                self._take(base, name, shapes)

    def _take(self, base: nn.Module, module: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """Note the tensors of one module."""
        start = f"{_PREFIX}{module}."
        rest = {key for key in shapes if key.startswith(start)}
        for part, parameter in base.get_submodule(module).named_parameters():
            name, key = f"{module}.{part}", f"{start}{part}"
            shape = tuple(parameter.shape)
            if shapes.get(key) != shape:
                has = list(shapes[key]) if key in shapes else "nothing"
                raise ConfigError(
                    f"{self._file}: {has} for {name}, a module of modules_to_save; the base has {list(shape)}"
                )
            tied = [
                other
                for other, one in base.named_parameters(remove_duplicate=False)
                if one is parameter and other != name
            ]
            if tied:
                raise ConfigError(
                    f"{name} was trained as a module of modules_to_save, and the base ties it to "
                    f"{', '.join(tied)}, which was not trained with it: they would have to be untied, which "
                    'is not done. Untie them in the base ("tie_word_embeddings": false in its config.json, '
                    "and both weights in its files), or merge in memory by PEFT's merge_and_unload()."
                )
            rest.discard(key)
            self._places[name] = key, parameter.dtype
        if rest:
            raise ConfigError(
                f"{self._file}: {min(rest)}: neither a weight of {module}, which was trained whole, nor one "
                "of the adapters. Buffers and adapters of modules_to_save are not merged here."
            )

    @property
    def names(self) -> set[str]:
        """See export.Others."""
        return set(self._places)

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read them one by one; see export.Others."""
        with safe_open(self._file, "pt") as file:
            for name, (key, dtype) in self._places.items():
                yield name, file.get_tensor(key).to(dtype)

    def adapters(self) -> dict[str, torch.Tensor]:
        """Return all that the file has besides: the weights of the adapters."""
        taken = {key for key, _ in self._places.values()}
        with safe_open(self._file, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys() if key not in taken}  # noqa: SIM118
