"""What Hugging Face's Trainer is told about a model built in Init, besides its events; it stays as it is.

[Note: no DistributedDataParallel]
Accelerate's prepare wraps a model of several ranks in DistributedDataParallel, which would hold and reduce
what Infinity holds and reduces. `prepare_model(evaluation_mode=True)` does all that prepare does but that,
and marks the model as prepared, so that the Trainer's own prepare leaves it alone. Adapters that were not
built in Init are ordinary parameters, and DistributedDataParallel is right for them: there it is told to
leave ours out.

[Note: who saves]
The Trainer lets rank 0 alone save a model, with model.save_pretrained, which would hold all of it in memory.
On one rank the model's files are streamed instead, and so they are on several, in on_save, which every rank
comes to, where rank 0 asks while a checkpoint is made. Of PEFT's models only the adapters are read. Whoever
asks transformers for more than the files (push_to_hub, a state_dict of one's own) gets its own.

[Note: generation]
Ranks generate texts of different lengths, and those that have finished have to go on computing with the
others. transformers sees to that for modules that carry the mark of FSDP's, whose parameters are cut as ours.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint.atomic import Older, check_replaceable
from infinity.checkpoint.export import save_pretrained
from infinity.checkpoint.hub import check_names, is_hub_model
from infinity.checkpoint.peft import is_adapted, write_adapters
from infinity.checkpoint.save_load import CHECKPOINT, checkpoint_files
from infinity.engine.engine import engine_of, engine_of_model
from infinity.errors import ConfigError, UnsupportedError

logger = logging.getLogger("infinity")

FOLDER = "infinity"
"""Of masters and moments, in a checkpoint of the Trainer."""
_FILLING = "infinity-weights"
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_USUAL: Mapping[str, Any] = {
    "is_main_process": True,
    "safe_serialization": True,
    "save_peft_format": True,
    "save_original_format": True,
    "push_to_hub": False,
    "distributed_checkpoint": False,
}
"""What save_pretrained of transformers does without options; None where nothing is said here."""
_SPECIAL = ("_auto_class", "hf_quantizer", "_hf_peft_config_loaded")
"""Attributes of models that have more to save than weights and configuration."""
_CUT = "_is_fsdp_managed_module"
"""See [Note: generation]."""
_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"
"""What DistributedDataParallel looks for on a model; see [Note: no DistributedDataParallel]."""


def settle_in(model: nn.Module, args: Any) -> None:
    """Let the ranks of a Trainer train `model`; `args` are its TrainingArguments.

    Raises: UnsupportedError where the Trainer's ranks are not those of the model.
    """
    ranks = engine_of_model(model).ranks
    if ranks.size != args.world_size:
        raise UnsupportedError(
            f"the Trainer has {args.world_size} ranks, the model {ranks.size}: under the Trainer every rank "
            "takes its own batches. Start with torchrun, and give Init no process_group"
        )
    save_streamed(model)
    if ranks.size == 1:
        return
    if args.push_to_hub:
        raise UnsupportedError(
            "TrainingArguments(push_to_hub=True) sends a checkpoint before all ranks have written it; call "
            "infinity.save_pretrained(model, folder) on every rank, and upload the folder"
        )
    if any(one.requires_grad and engine_of(one) is None for one in model.parameters()):
        ours = [name for name, one in model.named_parameters() if engine_of(one) is not None]
        setattr(model, _LEFT_OUT, ours)
    else:
        _prepare(model)
    for module in model.modules():
        setattr(module, _CUT, True)


def check_output(model: nn.Module, args: Any, done: int) -> None:
    """See that checkpoints of the steps behind `done` can be put where `args` say, before any is trained.

    Raises: ConfigError for a place that cannot be written; FileExistsError for what is in the way of one;
    UnsupportedError for a file system on which it cannot be replaced; RanksError for that on another rank.
    """
    with engine_of_model(model).ranks.together("looking at output_dir"):
        if not args.should_save:
            return
        out = Path(args.output_dir).absolute()
        above = next(one for one in (out, *out.parents) if os.path.lexists(one))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            what = "cannot be written to by this user" if above.is_dir() else "is no folder"
            raise ConfigError(
                f"TrainingArguments(output_dir={args.output_dir!r}): {above} {what}, so nothing "
                "could be saved. Name another folder"
            )
        for old in out.glob("checkpoint-*") if args.save_strategy != "no" else ():
            number = old.name.removeprefix("checkpoint-")
            if number.isdigit() and int(number) > done:
                if not old.is_dir():
                    raise FileExistsError(
                        errno.EEXIST, "a checkpoint is to be saved there: move it away", str(old)
                    )
                check_replaceable(old / FOLDER, Older(CHECKPOINT, checkpoint_files, overwrite=True))


def save_streamed(model: nn.Module) -> None:
    """Let a model's save_pretrained be ours; see [Note: who saves]."""
    if (engine_of_model(model).ranks.size > 1 or is_hub_model(model)) and saving(model) is None:
        model.save_pretrained = Saving(model)  # type: ignore[assignment]


def saving(model: nn.Module) -> Saving | None:
    """Return what stands for the model's save_pretrained, if anything does."""
    found = model.__dict__.get("save_pretrained")
    return found if isinstance(found, Saving) else None


def _prepare(model: nn.Module) -> None:
    """See [Note: no DistributedDataParallel]."""
    import accelerate

    kept = accelerate.state.GradientState().plugin_kwargs  # shared with the Trainer's own Accelerator
    plugin = accelerate.utils.GradientAccumulationPlugin(**kept)
    accelerator = accelerate.Accelerator(gradient_accumulation_plugin=plugin)
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)


class Saving:
    """Stands for a model's save_pretrained; see [Note: who saves]."""

    def __init__(self, model: nn.Module) -> None:
        """Stand for that of `model`, which is replaced."""
        self._model = weakref.ref(model)
        self.expected: Path | None = None
        """The checkpoint that may come now, to which all ranks will come."""

    def expect(self, checkpoint: Path | None) -> None:
        """Say which checkpoint may come now; None for no one."""
        self.expected = checkpoint

    def __call__(self, save_directory: Any, *more: Any, **options: Any) -> None:
        """Be called, of several ranks by rank 0 alone; options are those of transformers, or of PEFT.

        Raises: UnsupportedError outside a checkpoint of the Trainer, on several ranks; else as
        infinity.save_pretrained, or as the model's own.
        """
        model = self._alive()
        if engine_of_model(model).ranks.size > 1:
            if self.expected is None or Path(save_directory).absolute() != self.expected:
                raise UnsupportedError(
                    f"{save_directory}: on several ranks the weights are in all of them, and "
                    "trainer.save_model() and model.save_pretrained() ask rank 0 alone. Call "
                    f"infinity.save_pretrained(model, {str(save_directory)!r}) on every rank"
                )
        elif is_adapted(model):
            write_adapters(model, Path(save_directory), **options)
        elif more or not _plainly(model, options):
            kind: Any = type(model)
            kind.save_pretrained(model, save_directory, *more, **options)
        else:
            _stream(model, Path(save_directory), options.get("max_shard_size", "5GB"))

    def write(self, folder: Path) -> None:
        """Write the model's files into `folder`, a checkpoint, on every rank."""
        model = self._alive()
        if engine_of_model(model).ranks.size == 1:  # they are there
            return
        if is_adapted(model):
            write_adapters(model, folder)
        else:
            _stream(model, folder)

    def _alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("save_pretrained of a model that is gone")
        return model


def _plainly(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether save_pretrained is asked for a model's files, as they are, and nothing else."""
    more = [name for name, value in options.items() if name != "max_shard_size" and value != _USUAL.get(name)]
    special = (getattr(model, name, None) for name in _SPECIAL)
    lent = any(unit.attached for unit in engine_of_model(model).units)  # inside `gathered`, which may write
    if more or lent or any(special):
        return False
    try:
        check_names(model)
    except UnsupportedError as error:
        logger.warning("%s", error)
        return False
    return True


def _stream(model: nn.Module, folder: Path, max_shard_size: int | str = "5GB") -> None:
    """Write a model's files into a folder, which may have others in it. Every rank calls this."""
    filling, ranks = folder / _FILLING, engine_of_model(model).ranks
    with ranks.together(f"making room in {folder}"):
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if filling.exists():  # a save that was killed here
                shutil.rmtree(filling)
    save_pretrained(model, filling, max_shard_size=max_shard_size)
    with ranks.together(f"putting weights into {folder}"):
        if ranks.rank == 0:
            written = {path.name for path in filling.iterdir()}
            for name in written:
                (filling / name).replace(folder / name)
            for path in folder.glob("model*.safetensors*"):  # of an earlier save, in other shards
                if path.name not in written and _SHARD.fullmatch(path.name):
                    path.unlink()
            filling.rmdir()
