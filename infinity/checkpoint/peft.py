"""PEFT's adapters on an offloaded base: their weights and files, without reading the base.

[Note: PEFT's selection]
PEFT selects an adapter's weights from the whole model's state_dict, which would hold the base in memory. So
it is called twice: first with meta tensors, to see which it selects, then with the values of those alone.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.atomic import Older
from infinity.checkpoint.hub import EXPORT, MARK, exported_files
from infinity.checkpoint.sharedfolder import shared_folder
from infinity.engine.engine import engine_of, engine_of_model
from infinity.storage.safetensors_file import add_metadata
from infinity.tensors import is_distributed

SAVE_FIRST = (
    "infinity.save the training, load it in one process, and write the files there; or save "
    "model.state_dict(), which has DTensors, with torch.distributed.checkpoint"
)
_CARD = "README.md"


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a PeftModel."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_state(model: nn.Module, field: str = "hi") -> dict[str, torch.Tensor]:
    """Return the weights of all adapters of a PEFT model, by their names in it, whole. All ranks call this.

    field: "hi" or "master", of weights that were built in Init; others are returned as they are.
    """
    import peft

    tensors = dict(
        itertools.chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        )
    )
    hollow = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
    names = {id(one): name for name, one in hollow.items()}
    wanted = {name for name, one in tensors.items() if one.requires_grad}
    for adapter in model.peft_config:  # type: ignore[union-attr]
        taken = peft.get_peft_model_state_dict(model, state_dict=hollow, adapter_name=adapter)
        wanted |= {names[id(one)] for one in taken.values() if id(one) in names}
    return {name: _whole(model, tensors[name], field) for name in tensors if name in wanted}


def _whole(model: nn.Module, tensor: torch.Tensor, field: str) -> torch.Tensor:
    """Return the values of a tensor of a model; of a DTensor those that all ranks of its mesh have."""
    if not is_distributed(tensor):
        return _read(tensor, field)
    with engine_of_model(model).stages.everyone.together("reading an adapter"):
        part: Any = _read(tensor, field)
    whole: torch.Tensor = part.full_tensor()  # after it: torch's collective would wait for one that failed
    return whole


def _read(tensor: torch.Tensor, field: str) -> torch.Tensor:
    engine = engine_of(tensor)
    if engine is None:
        return tensor.detach()
    return engine.parameters.read(tensor, [field])[0]  # type: ignore[arg-type]


def write_adapters(model: nn.Module, folder: Path, field: str = "hi", **options: Any) -> None:
    """Write the adapters' files to `folder` with PEFT's save_pretrained, which gets `options`.

    All ranks call this; rank 0 writes.
    """
    stages = engine_of_model(model).stages
    stages.mesh.check_unmarked("files of adapters", model.named_parameters(), SAVE_FIRST)
    state, ranks = adapter_state(model, field), stages.everyone
    with ranks.together(f"writing adapters to {folder}"):
        if ranks.rank == 0:
            kind: Any = type(model)  # the model's own attribute may be a wrapper for the Trainer
            kind.save_pretrained(model, str(folder), **{**options, "state_dict": state})


def save_adapters(model: nn.Module, folder: Path, field: str, *, overwrite: bool = False) -> None:
    """Write the adapters' files to a new or empty folder, which appears when they are complete.

    overwrite: as for export.save_pretrained.
    """
    ranks = engine_of_model(model).stages.everyone
    with shared_folder(ranks, folder, Older(EXPORT, exported_files, overwrite, rescues=True)) as filling:
        card = folder / _CARD
        if ranks.rank == 0 and overwrite and card.is_file():
            shutil.copy2(card, filling / _CARD)  # PEFT updates an existing one
        write_adapters(model, filling, field)
        with ranks.together(f"marking adapters in {folder}"):
            if ranks.rank == 0:
                for file in sorted(filling.rglob("*.safetensors")):
                    add_metadata(file, MARK)
