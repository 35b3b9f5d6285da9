"""What Hugging Face's Trainer is told about a model built in Init, besides its events; it stays as it is.

[Note: no DistributedDataParallel]
Accelerate's prepare wraps a model of several ranks in DistributedDataParallel, which would hold and reduce
what Infinity holds and reduces. `prepare_model(evaluation_mode=True)` does all that prepare does but that,
and marks the model as prepared, so that the Trainer's own prepare leaves it alone. Adapters that were not
built in Init are ordinary parameters, and DistributedDataParallel is right for them: there it is told to
leave ours out.

[Note: who saves]
The Trainer lets rank 0 alone save a model, with model.save_pretrained. What rank 0 asks for while a
checkpoint is made is done in on_save, which every rank comes to, streamed: nobody holds the whole model. Of
PEFT's models only the adapters are read, on one rank, too.

[Note: generation]
Ranks generate texts of different lengths, and those that have finished have to go on computing with the
others. transformers sees to that for modules that carry the mark of FSDP's, whose parameters are cut as ours.
"""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from infinity.adapters import is_adapted, write_adapters
from infinity.engine import engine_of, engine_of_model
from infinity.errors import UnsupportedError
from infinity.export import save_pretrained

_FILLING = "infinity-weights"
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
    if (ranks.size > 1 or is_adapted(model)) and saving(model) is None:
        model.save_pretrained = Saving(model)  # type: ignore[assignment]
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


def saving(model: nn.Module) -> Saving | None:
    """Return what stands for the model's save_pretrained, on several ranks."""
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

    def __call__(self, save_directory: Any, **options: Any) -> None:
        """Be called, of several ranks by rank 0 alone.

        Raises: UnsupportedError outside a checkpoint of the Trainer, on several ranks.
        """
        model = self._alive()
        if engine_of_model(model).ranks.size == 1:
            write_adapters(model, Path(save_directory), **options)
        elif self.expected is None or Path(save_directory).absolute() != self.expected:
            raise UnsupportedError(
                f"{save_directory}: on several ranks the weights are in all of them, and "
                "trainer.save_model() and model.save_pretrained() ask rank 0 alone. Call "
                f"infinity.save_pretrained(model, {str(save_directory)!r}) on every rank"
            )

    def write(self, folder: Path) -> None:
        """Write the model's files into `folder`, a checkpoint, on every rank."""
        model = self._alive()
        ranks = engine_of_model(model).ranks
        if ranks.size == 1:  # they are there
            return
        if is_adapted(model):
            write_adapters(model, folder)
            return
        filling = folder / _FILLING
        with ranks.together(f"making room in {folder}"):
            if ranks.rank == 0 and filling.exists():  # a save that was killed here
                shutil.rmtree(filling)
        save_pretrained(model, filling)
        with ranks.together(f"putting weights into {folder}"):
            if ranks.rank == 0:
                for path in filling.iterdir():
                    path.replace(folder / path.name)
                filling.rmdir()

    def _alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("save_pretrained of a model that is gone")
        return model
