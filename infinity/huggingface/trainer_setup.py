"""Changes to a model built in Init so that Hugging Face's Trainer, unmodified, trains and saves it.

[Note: no DistributedDataParallel]
Accelerate's prepare wraps a model of several ranks in DistributedDataParallel, which would keep and reduce
the gradients that Infinity keeps and reduces. `prepare_model(evaluation_mode=True)` does everything else,
and marks the model as prepared, so that the Trainer's own prepare leaves it alone. Adapters that were not
built in Init are ordinary parameters, which DistributedDataParallel handles; it ignores the others.

[Note: streamed saving]
The Trainer saves a model on rank 0 alone, with model.save_pretrained, which would hold all of it in memory.
On one rank the model's files are streamed instead. On several ranks, rank 0's call inside a checkpoint does
nothing, and on_save, which every rank calls, streams them. Of PEFT's models only the adapters are read. A
call with further options (push_to_hub, a state_dict) gets transformers' own function.

[Note: generation]
Ranks generate texts of different lengths, and those that have finished have to take part in the others'
collectives. transformers does that for modules with FSDP's mark, whose parameters are sharded as here.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import weakref
from collections.abc import Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_utils import number_of_arguments

from infinity.checkpoint.atomic import Older, check_replaceable
from infinity.checkpoint.export import save_pretrained
from infinity.checkpoint.hub import check_names, is_hub_model
from infinity.checkpoint.peft import is_adapted, write_adapters
from infinity.checkpoint.save_load import CHECKPOINT, checkpoint_files
from infinity.engine.engine import engine_of, engine_of_model
from infinity.errors import ConfigError, UnsupportedError
from infinity.huggingface.parallelism import take_marks_off

logger = logging.getLogger("infinity")

FOLDER = "infinity"
"""The folder of masters and moments in a checkpoint of the Trainer."""
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
"""The defaults of transformers' save_pretrained; None for its other options."""
_SPECIAL = ("_auto_class", "hf_quantizer", "_hf_peft_config_loaded")
"""Attributes of models that save more than weights and configuration."""
_CUT = "_is_fsdp_managed_module"
"""See [Note: generation]."""
_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"
"""The attribute that names parameters to DistributedDataParallel; see [Note: no DistributedDataParallel]."""


def settle_in(model: nn.Module, args: Any) -> None:
    """Set `model` up for a Trainer's ranks; `args` are its TrainingArguments.

    Raises: UnsupportedError where the Trainer's ranks are not those of the model.
    """
    ranks = engine_of_model(model).stages.everyone
    if ranks.size != args.world_size:
        raise UnsupportedError(
            f"the Trainer has {args.world_size} ranks, the model {ranks.size}: under the Trainer every rank "
            "has its own batches, or those of the ranks beside it on a mesh. Start with torchrun, and give "
            "Init no process_group, and no pipeline_group, or a mesh of all ranks"
        )
    if engine_of_model(model).config.sequence_parallel > 1 and args.label_smoothing_factor:
        raise UnsupportedError(
            f"TrainingArguments(label_smoothing_factor={args.label_smoothing_factor}): the Trainer makes "
            "that loss of a rank's tokens alone, and sequence_parallel has others elsewhere; leave it out"
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


def settle_built(trainer: Any, args: Any) -> None:
    """Let the models that a Trainer's model_init builds anew, at the begin of each training, be set up as
    `settle_in` does.
    """
    build = getattr(trainer, "model_init", None)
    if build is None:
        return

    def built(*trial: Any) -> nn.Module:
        model: nn.Module = build(*trial)
        take_marks_off(model)
        settle_in(model, args)
        return model

    takes: int = number_of_arguments(build)  # type: ignore[no-untyped-call]
    places = [Parameter(f"_{at}", Parameter.POSITIONAL_ONLY) for at in range(takes)]
    vars(built)["__signature__"] = Signature(places)  # by which the Trainer gives it a trial, or not
    trainer.model_init = built


def check_output(model: nn.Module, args: Any, done: int) -> None:
    """Check, before any step, that checkpoints of the steps after `done` can be written to args.output_dir.

    Raises: ConfigError for a folder that cannot be written; FileExistsError for a file at a checkpoint's
    path; UnsupportedError for a file system without atomic replacement; RanksError for these on another rank.
    """
    with engine_of_model(model).stages.everyone.together("looking at output_dir"):
        if not args.should_save:
            return
        out = Path(args.output_dir).absolute()
        above = next(one for one in (out, *out.parents) if os.path.lexists(one))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            what = "is not writable for this user" if above.is_dir() else "is not a folder"
            raise ConfigError(
                f"TrainingArguments(output_dir={args.output_dir!r}): {above} {what}, so that nothing "
                "could be saved. Name another folder"
            )
        for old in out.glob("checkpoint-*") if args.save_strategy != "no" else ():
            number = old.name.removeprefix("checkpoint-")
            if number.isdigit() and int(number) > done:
                if not old.is_dir():
                    raise FileExistsError(
                        errno.EEXIST, "a checkpoint will be saved here: move this file away", str(old)
                    )
                check_replaceable(old / FOLDER, Older(CHECKPOINT, checkpoint_files, overwrite=True))


def save_streamed(model: nn.Module) -> None:
    """Replace a model's save_pretrained; see [Note: streamed saving]."""
    if (engine_of_model(model).stages.everyone.size > 1 or is_hub_model(model)) and saving(model) is None:
        model.save_pretrained = Saving(model)  # type: ignore[assignment]


def saving(model: nn.Module) -> Saving | None:
    """Return the replacement of the model's save_pretrained, if there is one."""
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
    """Replaces a model's save_pretrained; see [Note: streamed saving]."""

    def __init__(self, model: nn.Module) -> None:
        """Replace that of `model`."""
        self._model = weakref.ref(model)
        self.expected: Path | None = None
        """The checkpoint that the Trainer may save now, with on_save on every rank."""

    def expect(self, checkpoint: Path | None) -> None:
        """Set the checkpoint that the Trainer may save now; None for none."""
        self.expected = checkpoint

    def __call__(self, save_directory: Any, *more: Any, **options: Any) -> None:
        """Save the model; options are those of transformers, or of PEFT. Of several ranks, rank 0 calls this.

        Raises: UnsupportedError on several ranks outside a checkpoint of the Trainer; otherwise what
        infinity.save_pretrained or the model's own function raises.
        """
        model = self._alive()
        if engine_of_model(model).stages.everyone.size > 1:
            if self.expected is None or Path(save_directory).absolute() != self.expected:
                raise UnsupportedError(
                    f"{save_directory}: every rank holds a part of the weights, but trainer.save_model() and "
                    "model.save_pretrained() run on rank 0 alone. Call "
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
        if engine_of_model(model).stages.everyone.size == 1:  # __call__ has written them
            return
        if is_adapted(model):
            write_adapters(model, folder)
        else:
            _stream(model, folder)

    def _alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("save_pretrained of a model that was freed")
        return model


def _plainly(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether save_pretrained is to write a model's files with the default options."""
    more = [name for name, value in options.items() if name != "max_shard_size" and value != _USUAL.get(name)]
    special = (getattr(model, name, None) for name in _SPECIAL)
    gathered = any(unit.attached for unit in engine_of_model(model).units)  # which may write
    if more or gathered or any(special):
        return False
    try:
        check_names(model)
    except UnsupportedError as error:
        logger.warning("%s", error)
        return False
    return True


def _stream(model: nn.Module, folder: Path, max_shard_size: int | str = "5GB") -> None:
    """Write a model's files into a folder, which may hold other files. Every rank calls this."""
    filling, ranks = folder / _FILLING, engine_of_model(model).stages.everyone
    with ranks.together(f"making room in {folder}"):
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if filling.exists():  # left by a save that was killed
                shutil.rmtree(filling)
    save_pretrained(model, filling, max_shard_size=max_shard_size)
    with ranks.together(f"putting weights into {folder}"):
        if ranks.rank == 0:
            written = {path.name for path in filling.iterdir()}
            for name in written:
                (filling / name).replace(folder / name)
            for path in folder.glob("model*.safetensors*"):  # of an earlier save, with other shards
                if path.name not in written and _SHARD.fullmatch(path.name):
                    path.unlink()
            filling.rmdir()
