"""TrainerCallback, with which Hugging Face's Trainer, unmodified, trains a model built in Init.

[Note: checkpoints of the Trainer]
The Trainer saves the 16-bit weights, its own state, the schedule and the generators as usual. Masters and
moments do not fit its optimizer.pt, which is assembled in memory; infinity.save streams them to a folder
beside it, `checkpoint-N/infinity`, and optimizer.pt holds the param groups alone. trainer_state.json has the
folder's name and a random token, which is in the folder, too; a training that resumes compares the two.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers.trainer_callback import ExportableState

from infinity.checkpoint import generators
from infinity.checkpoint.save_load import load, read_manifest, save
from infinity.engine.engine import engine_of, engine_of_model
from infinity.engine.further_fetches import tell_of_accumulation
from infinity.engine.stats import Stats, stats
from infinity.errors import UnsupportedError
from infinity.huggingface import durable_training
from infinity.huggingface.accumulation import HeldBatches, accelerate_steps, release
from infinity.huggingface.mesh_training import check_on_mesh, train_on_mesh
from infinity.huggingface.parallelism import admit, take_over
from infinity.huggingface.running_trainer import made_trainer, other_losses, running_trainer
from infinity.huggingface.split_sequences import check_split, split_sequences
from infinity.huggingface.trainer_setup import (
    FOLDER,
    check_output,
    save_streamed,
    saving,
    settle_built,
    settle_in,
)
from infinity.optim.base import OffloadedOptimizer
from infinity.storage.manifest import CheckpointError

logger = logging.getLogger("infinity")

_PREFIX = "infinity_"
_GB = 1e9


class TrainerCallback(transformers.TrainerCallback, ExportableState):
    """Saves, resumes and logs a Trainer's run, and refuses unsupported settings before it starts.

    ::

        trainer = Trainer(
            model=model,  # built in infinity.Init
            args=args,
            optimizer_cls_and_kwargs=(infinity.AdamW, {"lr": args.learning_rate}),
            callbacks=[infinity.huggingface.TrainerCallback()],
        )

    by_block: the micro-batches of gradient_accumulation_steps share one fetch of the weights; see
    infinity.huggingface.accumulate_by_block. Not for a Trainer whose compute_loss uses the logits, as TRL's
    SFTTrainer does (an UnsupportedError), or weights the losses of micro-batches one by one. After an error
    in `train` the next forward outside of it finds the model as it was.

    Ranks that have parts of the same layers train as one; ParallelismConfig(tp_size=...) may say so, and is
    compared with the model's mesh.

    A durable run (Config(durable=...)) begins, or goes on, with train_durably. AdamW(update="backward"), and
    AdamW(max_norm=...), which then clips, need TrainingArguments(max_grad_norm=0).

    Adds to the logs infinity_nvme_read_gb, infinity_nvme_written_gb, infinity_stall_s and infinity_misses
    since the previous log, and the current infinity_host_gb.

    Raises: UnsupportedError for settings of TrainingArguments that cannot work with offloaded parameters, and
    for another optimizer; ValueError for a model that was not built in Init; on resuming, what infinity.load
    raises.
    """

    def __init__(self, *, by_block: bool = False) -> None:
        """Start without a checkpoint."""
        admit(TrainerCallback)
        self.by_block = by_block
        self._together: HeldBatches | None = None
        self.folder: str | None = None
        self.token: str | None = None
        self._next: Path | None = None
        self._seen: Stats | None = None
        self._state_dict_hook: Any = None

    def state(self) -> dict[str, Any]:
        """Return the folder of masters and moments; the Trainer asks just before a checkpoint is complete."""
        self.folder = None if self._next is None else str(self._next)
        self.token = secrets.token_hex(8)
        return {
            "args": {"by_block": self.by_block},
            "attributes": {"folder": self.folder, "token": self.token},
        }

    # Events, in their order

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse unsupported settings."""
        schema = engine_of_model(kwargs["model"]).schema
        for name, wanted, cure in (
            ("n_gpu", args.n_gpu > 1, "nn.DataParallel copies parameters: start with torchrun"),
            ("torch_compile", args.torch_compile, "it cannot follow fetching and releasing; leave it out"),
            (
                "fp16",
                args.fp16 and schema.dtype == "bf16",
                'the weights are bf16, which need no scaled loss; set bf16=True, or Init(dtype="fp16")',
            ),
            (
                "fp16",
                not args.fp16 and schema.dtype == "fp16",
                'fp16 weights need a scaled loss: set fp16=True, or Init(dtype="bf16")',
            ),
            ("fp16_full_eval", args.fp16_full_eval, "the weights have one type; leave it out"),
            ("deepspeed", args.deepspeed, "Infinity replaces DeepSpeed; leave it out"),
            ("fsdp", args.fsdp, "Infinity partitions parameters itself; leave it out"),
        ):
            if wanted:
                raise UnsupportedError(f"TrainingArguments({name}={getattr(args, name)!r}): {cure}")
        take_over(kwargs["model"], args)
        settle_in(kwargs["model"], args)
        settle_built(made_trainer(), args)
        train_on_mesh(kwargs["model"], args)
        split_sequences(kwargs["model"], args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the optimizer; load masters and moments where a training resumes, a durable one too."""
        model = kwargs["model"]
        save_streamed(model)  # model_init may have just built it
        check_output(model, args, state.global_step)
        check_on_mesh(model)
        check_split(model, args, state, kwargs.get("train_dataloader"))
        self._seen = stats(model)
        if not _trains_ours(model):
            self._accumulate(model, kwargs["optimizer"], args)
            return
        optimizer = _optimizer(kwargs["optimizer"])
        unscaled = getattr(kwargs["optimizer"], "scaler", None) is None
        if engine_of_model(model).schema.dtype == "fp16" and unscaled:
            raise UnsupportedError(
                "TrainingArguments(fp16=True): Accelerate makes no GradScaler on a CPU, but the loss of "
                'fp16 weights has to be scaled; train on a GPU, or with Init(dtype="bf16")'
            )
        if optimizer.update == "backward" and args.max_grad_norm > 0:
            raise UnsupportedError(
                'AdamW(update="backward") keeps no gradients, but TrainingArguments max_grad_norm='
                f'{args.max_grad_norm} needs their norm; set max_grad_norm=0, or use update="forward"'
            )
        if optimizer.max_norm is not None and args.max_grad_norm > 0:
            raise UnsupportedError(
                f"AdamW has max_norm={optimizer.max_norm}, TrainingArguments max_grad_norm="
                f"{args.max_grad_norm}; leave max_norm out, or set max_grad_norm=0"
            )
        _leave_norms_out(optimizer)
        restored = _begin_durably(kwargs["optimizer"], kwargs["lr_scheduler"], model, state)
        if state.global_step > 0 and not restored:
            self._resume(model, optimizer, args, state)
        self._accumulate(model, kwargs["optimizer"], args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the optimizer's full state_dict."""
        self._restore_state_dict(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare for a checkpoint, which may follow."""
        self._prepare(args, state, kwargs["model"], kwargs["optimizer"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare for a checkpoint, which may follow."""
        self._prepare(args, state, kwargs["model"], kwargs["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save masters and moments into the Trainer's checkpoint; on several ranks also the weights."""
        model, folder = kwargs["model"], _checkpoint(args, state)
        self._restore_state_dict(model)
        if (shared := saving(model)) is not None:
            shared.write(folder)
        if not args.save_only_model and _trains_ours(model):
            optimizer = _optimizer(kwargs["optimizer"])
            save(model, optimizer, folder / FOLDER, extra={"token": self.token}, overwrite=True)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add the traffic since the previous log."""
        if self._seen is None or logs is None:
            return
        now = stats(kwargs["model"])
        figures = _figures(now, now.since(self._seen))
        self._seen = now
        norm = getattr(getattr(kwargs["optimizer"], "optimizer", None), "grad_norm", None)
        if "loss" in logs and norm is not None:
            figures["grad_norm"] = norm
        for one in (logs, *state.log_history[-1:]):
            one.update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the optimizer's full state_dict, and the model's forward."""
        self._restore_state_dict(kwargs["model"])
        self._let_go(kwargs["model"])

    # Accumulation

    def _let_go(self, model: nn.Module) -> None:
        """Undo what shares a fetch, also where an error ended the training before."""
        release(model)
        if self._together is not None:
            self._together.undo()
            self._together = None

    def _accumulate(self, model: nn.Module, optimizer: Any, args: Any) -> None:
        """Let the micro-batches of a step share one fetch of the weights, or say what they cost."""
        self._let_go(model)
        steps, trainer = args.gradient_accumulation_steps, running_trainer()
        if steps == 1:
            return
        if self.by_block:
            for name in other_losses(args, trainer):
                raise UnsupportedError(
                    f"TrainerCallback(by_block=True) with {name}: the Trainer makes that loss of each "
                    "micro-batch's logits; leave one out"
                )
            lasts = (lambda: True) if trainer is None else (lambda: running_trainer() is not None)
            self._together = HeldBatches(model, optimizer, accelerate_steps, lasts)
            return
        tell_of_accumulation(model, steps, "TrainerCallback(by_block=True) lets them share one fetch")

    # Checkpoints

    def _prepare(self, args: Any, state: Any, model: nn.Module, optimizer: Any) -> None:
        """Take moments out of the optimizer's state_dict; see [Note: checkpoints of the Trainer]."""
        checkpoint, ours = _checkpoint(args, state), _trains_ours(model)
        self._next = checkpoint / FOLDER if ours and not args.save_only_model else None
        if (shared := saving(model)) is not None:
            shared.expect(checkpoint)
        if ours and self._state_dict_hook is None:
            self._state_dict_hook = _optimizer(optimizer).register_state_dict_post_hook(_without_moments)

    def _restore_state_dict(self, model: nn.Module) -> None:
        if (shared := saving(model)) is not None:
            shared.expect(None)
        if self._state_dict_hook is not None:
            self._state_dict_hook.remove()
            self._state_dict_hook = None

    def _resume(self, model: nn.Module, optimizer: OffloadedOptimizer, args: Any, state: Any) -> None:
        said = state.stateful_callbacks.get(type(self).__name__, {})
        known = said.get("attributes", {}) if isinstance(said, Mapping) else {}
        if not known.get("folder"):
            logger.warning(
                "the checkpoint was saved without infinity.huggingface.TrainerCallback: masters start from "
                "its weights, and moments from its optimizer.pt, if there is one"
            )
            return
        places = [known["folder"], _checkpoint(args, state) / FOLDER]
        if isinstance(args.resume_from_checkpoint, str):
            places.append(Path(args.resume_from_checkpoint) / FOLDER)
        for place in map(Path, places):
            if place.is_dir() and read_manifest(place).extra == {"token": known["token"]}:
                states = generators.capture()  # the Trainer restores them itself, later
                load(model, optimizer, place)
                generators.restore(states)
                return
        raise CheckpointError(
            f"{known['folder']}: the masters and moments of step {state.global_step} are missing. "
            "Either the checkpoint was moved, or saving was interrupted: move it back, set "
            "TrainingArguments(resume_from_checkpoint=...) to its new place, or resume from an earlier one"
        )


def _begin_durably(optimizer: Any, scheduler: Any, model: nn.Module, state: Any) -> bool:
    """Begin a durable run, if the model is one's and it has not begun; return whether it was restored."""
    durable = engine_of_model(model).durable
    if durable is None or durable.source is not None:
        return False
    found, scaler = bool(durable.found), getattr(optimizer, "scaler", None)
    durable_training.begin(model, _optimizer(optimizer), scheduler, state, scaler)
    return found


def _leave_norms_out(optimizer: OffloadedOptimizer) -> None:
    """Keep the Trainer, which since transformers 5 asks for a norm also where it clips nothing, from doing so
    where there is none, or the optimizer knows it. Outside of this training, also after an error in it, the
    Accelerator clips as ever.
    """
    trainer = running_trainer()
    if trainer is None:
        return
    accelerator: Any = trainer.accelerator
    if isinstance(accelerator.__dict__.get("clip_grad_norm_"), _NoNorm):
        accelerator.clip_grad_norm_ = accelerator.clip_grad_norm_.usual  # of an earlier training
    unclipped = (
        optimizer.update == "auto" and not trainer.args.max_grad_norm
    )  # a norm would keep all gradients
    if optimizer.update == "backward" or optimizer.max_norm is not None or unclipped:
        accelerator.clip_grad_norm_ = _NoNorm(accelerator.clip_grad_norm_)


class _NoNorm:
    """An Accelerator's clip_grad_norm_, which a Trainer that trains is told nothing by."""

    def __init__(self, usual: Callable[..., Any]) -> None:
        """usual: what is called elsewhere."""
        self.usual = usual

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do nothing, or what is usual."""
        return self.usual(*args, **kwargs) if running_trainer() is None else None


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}"


def _trains_ours(model: nn.Module) -> bool:
    """Whether parameters that were built in Init are trained. If only adapters from outside are, state and
    checkpoints are small, and the Trainer's own.
    """
    return any(one.requires_grad and engine_of(one) is not None for one in model.parameters())


def _without_moments(_optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {}}


def _optimizer(optimizer: Any) -> OffloadedOptimizer:
    """Return the optimizer inside Accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, OffloadedOptimizer):
        raise UnsupportedError(
            f"the optimizer is {type(inner).__name__}: give Trainer "
            'optimizer_cls_and_kwargs=(infinity.AdamW, {"lr": ...}), or, where that is no argument, '
            "optimizers=(infinity.AdamW(model.parameters(), lr=...), None)"
        )
    return inner


def _figures(now: Stats, moved: Stats) -> dict[str, float]:
    figures = {
        "nvme_read_gb": moved.nvme_read_nbytes / _GB,
        "nvme_written_gb": moved.nvme_written_nbytes / _GB,
        "stall_s": moved.stall_s,
        "misses": float(moved.misses),
        "host_gb": now.budget_held_nbytes / _GB,
    }
    return {_PREFIX + name: round(value, 6) for name, value in figures.items()}
