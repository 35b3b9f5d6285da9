"""PEFT's adapters on an offloaded base: what belongs to them, and their files, without the base's values.

[Note: PEFT chooses]
PEFT takes an adapter's weights out of the whole model's state_dict, which would hold the base in memory. It
is asked twice: first with tensors that have no memory, to see which it takes, then with the values of those.
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
from infinity.checkpoint.safetensors_file import add_metadata
from infinity.checkpoint.sharedfolder import shared_folder
from infinity.engine.engine import engine_of, engine_of_model

_CARD = "README.md"


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is one of PEFT's, which consists of a base and its adapters."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_state(model: nn.Module, field: str = "hi") -> dict[str, torch.Tensor]:
    """Return the values of all adapters of a model of PEFT, by their names in it. Every rank calls this.

    field: of those that were built in Init, "hi" or "master"; others are what they are.
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
    values = {}
    for name in (name for name in tensors if name in wanted):
        engine = engine_of(tensors[name])
        if engine is None:
            values[name] = tensors[name].detach()
        else:
            (values[name],) = engine.parameters.read(tensors[name], [field])  # type: ignore[arg-type]
    return values


def write_adapters(model: nn.Module, folder: Path, field: str = "hi", **options: Any) -> None:
    """Let PEFT write the adapters' files to `folder`, as its save_pretrained, which takes `options`, does.

    Every rank calls this; rank 0 writes.
    """
    state = adapter_state(model, field)
    ranks = engine_of_model(model).ranks
    with ranks.together(f"writing adapters to {folder}"):
        if ranks.rank == 0:
            kind: Any = type(model)  # on the model itself may be what the Trainer is given
            kind.save_pretrained(model, str(folder), **{**options, "state_dict": state})


def save_adapters(model: nn.Module, folder: Path, field: str, *, overwrite: bool = False) -> None:
    """Write the adapters' files to a folder that is new, or empty, and appears when they are in it.

    overwrite: as export.save_pretrained.
    """
    ranks = engine_of_model(model).ranks
    with shared_folder(ranks, folder, Older(EXPORT, exported_files, overwrite, rescues=True)) as filling:
        card = folder / _CARD
        if ranks.rank == 0 and overwrite and card.is_file():
            shutil.copy2(card, filling / _CARD)  # PEFT brings one that is there up to date
        write_adapters(model, filling, field)
        with ranks.together(f"marking adapters in {folder}"):
            if ranks.rank == 0:
                for file in sorted(filling.rglob("*.safetensors")):
                    add_metadata(file, MARK)
