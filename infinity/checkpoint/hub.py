"""A model's weights in Hugging Face's files: shards of safetensors, an index and the configuration.

[Note: names in files]
Some models and their files keep weights in different forms: Mixtral's experts are one tensor in the model,
and one tensor each in the files. transformers converts them back. It is called with meta tensors first, to
learn the names and shapes of the results, and then with one weight at a time. If a tensor of the files needs
several weights of the model, the model's own names are written, which from_pretrained reads as well.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.engine import state_dict
from infinity.errors import UnsupportedError
from infinity.storage.manifest import TensorSpec
from infinity.storage.safetensors_file import (
    TensorEntry,
    TensorFileError,
    TensorJoiner,
    TensorReader,
    TensorWriter,
    split_by_size,
)
from infinity.tensors import DTYPES, as_bytes, name_of_dtype
from infinity.tiling import Routed, Tiled

logger = logging.getLogger("infinity")

_INDEX = "model.safetensors.index.json"
MARK = {"written_by": "infinity"}
"""Metadata of the weights' files that Infinity writes: it marks a folder that may be replaced."""
EXPORT = "an export of infinity.save_pretrained"
_WEIGHTS = re.compile(r"(.*/)?(model(-\d{5}-of-\d{5})?|adapter_model)\.safetensors")
_BESIDE = re.compile(
    r"model\.safetensors\.index\.json|(generation_)?config\.json|(.*/)?(adapter_config\.json|README\.md)"
)
"""Files written beside weights; README.md is PEFT's, which keeps the contents of an older one."""


def check_names(model: nn.Module) -> None:
    """Check that no module gives its state_dict other names or values than its parameters have.

    Raises: UnsupportedError naming the first that does: files of its parameters would not fit the model.
    """
    for name, module in model.named_modules():
        for hook in module._state_dict_hooks.values():  # noqa: SLF001 - torch has no public name for it
            of_stacks = isinstance(module, Routed) and getattr(hook, "__module__", "") == Tiled.__module__
            if not of_stacks and getattr(hook, "__module__", "") != state_dict.__name__:
                raise UnsupportedError(
                    f"{name or type(model).__name__} ({type(module).__name__}) gives its state_dict other "
                    f"names or values than its parameters have ({getattr(hook, '__qualname__', hook)}), so "
                    "they cannot be streamed to files. Call model.save_pretrained(folder), which holds "
                    "all weights in memory."
                )


def is_hub_model(model: nn.Module) -> bool:
    """Whether a model has a configuration of transformers."""
    return hasattr(getattr(model, "config", None), "save_pretrained")


def stored_names(model: nn.Module, specs: Mapping[str, TensorSpec]) -> dict[str, dict[str, TensorSpec]]:
    """Return the spec of each tensor of a model in files, {name: {name in files: dtype and shape}}.

    See [Note: names in files].
    """
    own = {name: {name: spec} for name, spec in specs.items()}
    if not is_hub_model(model):
        return own
    alone = {name: _specs(_reverted(model, _hollow({name: spec}))) for name, spec in specs.items()}
    together = _specs(_reverted(model, _hollow(specs)))
    joined = [(name, spec) for of_one in alone.values() for name, spec in of_one.items()]
    if len(joined) == len(together) and dict(joined) == together:
        return alone
    logger.warning(
        "%s: its files join several weights of the model in one tensor; weights are written under the "
        "model's own names, which transformers' from_pretrained reads as well",
        type(model).__name__,
    )
    return own


def _hollow(specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(shape, dtype=DTYPES[dtype], device="meta") for name, (dtype, shape) in specs.items()
    }


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: (name_of_dtype(one, name), tuple(one.shape)) for name, one in tensors.items()}


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model in the form that its files have."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before 5.0 models and files had the same form
        return tensors
    return dict(revert_weight_conversion(model, tensors))


def exported_files(folder: Path) -> set[str] | None:
    """Return the files of an export by Infinity; None for any other folder, or one with other weights too."""
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    weights = [name for name in files if _WEIGHTS.fullmatch(name)]
    try:
        for name in weights:
            with TensorReader(folder / name) as reader:
                if not MARK.items() <= reader.metadata.items():
                    return None
    except (OSError, TensorFileError):
        return None
    adapters = any(name.endswith("adapter_model.safetensors") for name in weights)
    beside = [
        name for name in files if _BESIDE.fullmatch(name) and (adapters or not name.endswith("README.md"))
    ]
    return {*weights, *beside} if weights else None


class HubWriter:
    """The files of a model that one process or several are writing."""

    def __init__(
        self, folder: Path, model: nn.Module, specs: Mapping[str, TensorSpec], max_shard_nbytes: int
    ) -> None:
        """Lay out the shards. specs: dtype and shape of the model's tensors, by name."""
        self._folder = folder
        self._model = model
        self._stored = stored_names(model, specs)
        self.converted = {name for name, spec in specs.items() if list(self._stored[name].values()) != [spec]}
        """Names of tensors that have another form in files."""
        self._entries = [
            TensorEntry(name, dtype, shape)
            for of_one in self._stored.values()
            for name, (dtype, shape) in of_one.items()
        ]
        self._shards = split_by_size(self._entries, max_shard_nbytes)
        self._writer_of: dict[str, TensorWriter] = {}

    def create(self) -> None:
        """Create all shards; one process calls this."""
        self._open(TensorWriter)

    def join(self) -> None:
        """Open the shards that another process created."""
        self._open(TensorJoiner)

    def _open(self, make: Callable[[Path, Sequence[TensorEntry], Mapping[str, str]], TensorWriter]) -> None:
        for number, shard in enumerate(self._shards, 1):
            several = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            path = self._folder / (several if len(self._shards) > 1 else "model.safetensors")
            writer = make(path, shard, {"format": "pt", **MARK})
            self._writer_of.update(dict.fromkeys((entry.name for entry in shard), writer))

    def write(self, name: str, at: int, values: memoryview) -> None:
        """Write a part of a tensor that is not `converted`, from its byte `at` on."""
        (stored,) = self._stored[name]
        self._writer_of[stored].write(stored, at, values)

    def convert(self, name: str, whole: torch.Tensor) -> None:
        """Write all of a tensor, in the form that files have."""
        for key, tensor in _reverted(self._model, {name: whole}).items():
            self._writer_of[key].write(key, 0, as_bytes(tensor))

    def finish(self) -> int:
        """Bring what this process has written to the disk; return how many bytes of tensors that was."""
        writers = dict.fromkeys(self._writer_of.values())
        for writer in writers:
            writer.finish()
        return sum(writer.written_nbytes for writer in writers)

    def finish_all(self, written_nbytes: int, parameters: int) -> None:
        """See that all is written, and write the index, if there are several shards.

        written_nbytes: by all processes; parameters: elements of all parameters.

        Raises: TensorFileError if anything is missing.
        """
        total_nbytes = sum(entry.nbytes for entry in self._entries)
        if written_nbytes != total_nbytes:
            raise TensorFileError(
                f"{self._folder}: {written_nbytes} bytes of tensors were written, expected {total_nbytes}"
            )
        if len(self._shards) < 2:
            return
        index = {
            "metadata": {"total_parameters": parameters, "total_size": total_nbytes},
            "weight_map": {name: writer.path.name for name, writer in self._writer_of.items()},
        }
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def close(self) -> None:
        """Close the files."""
        for writer in self._writer_of.values():
            writer.close()


def write_configuration(model: nn.Module, folder: Path, dtype: str) -> None:
    """Write a model's configuration, with weights of `dtype` ("bfloat16"), and its generation_config."""
    if not is_hub_model(model):
        return
    config: Any = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def configuration(model: nn.Module) -> dict[str, Any] | None:
    """Return a transformers model's class and configuration as plain values; None for other models."""
    if not is_hub_model(model):
        return None
    config, generation = model.config, getattr(model, "generation_config", None)
    return {
        "class": type(model).__name__,
        "config": json.loads(config.to_json_string(use_diff=False)),  # type: ignore[union-attr, operator]
        "generation_config": None
        if generation is None
        else json.loads(generation.to_json_string(use_diff=False)),
    }


def kept_names(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return those of `names` that are written to files."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return [name for name in names if name not in ignored]


def file_name(model: nn.Module, parameter: nn.Parameter, name: str) -> str:
    """Return a parameter's name in files, where a tied parameter has only one of its names."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if name not in tied:
        return name
    same = (one for one, other in model.named_parameters(remove_duplicate=False) if other is parameter)
    return next((one for one in same if one not in tied), name)
