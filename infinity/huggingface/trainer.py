"""TrainerCallback: what Hugging Face's Trainer needs to train a model built in Init, unmodified.

[Note: checkpoints of the Trainer]
The Trainer saves the 16-bit weights, its own state, the schedule and the generators as ever. Masters and
moments would not fit its optimizer.pt, which is made in memory; infinity.save streams them to a folder beside
it, `checkpoint-N/infinity`, and optimizer.pt holds the param groups alone. The folder's name stands in
trainer_state.json, with a number that says which save it is; a training that resumes finds it by that.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers.trainer_callback import ExportableState

from infinity.checkpoint import generators
from infinity.checkpoint.save_load import load, read_manifest, save
from infinity.engine.engine import engine_of, engine_of_model
from infinity.engine.stats import Stats, stats
from infinity.errors import UnsupportedError
from infinity.huggingface.trainer_setup import FOLDER, check_output, save_streamed, saving, settle_in
from infinity.optim.base import OffloadedOptimizer
from infinity.storage.manifest import CheckpointError

logger = logging.getLogger("infinity")

_PREFIX = "infinity_"
_GB = 1e9


class TrainerCallback(transformers.TrainerCallback, ExportableState):
    """Saves, resumes and logs a Trainer's run, and refuses what cannot work, before it starts.

    ::

        trainer = Trainer(
            model=model,  # built in infinity.Init
            args=args,
            optimizer_cls_and_kwargs=(infinity.AdamW, {"lr": args.learning_rate}),
            callbacks=[infinity.huggingface.TrainerCallback()],
        )

    The logs get infinity_nvme_read_gb, infinity_nvme_written_gb, infinity_stall_s and infinity_misses, since
    the log before, and infinity_host_gb, of now.

    Raises: UnsupportedError for settings of TrainingArguments that cannot work with offloaded parameters, and
    for another optimizer; ValueError for a model that was not built in Init; on resuming, what infinity.load
    raises.
    """

    def __init__(self) -> None:
        """Know of no checkpoint yet."""
        self.folder: str | None = None
        self.token: str | None = None
        self._next: Path | None = None
        self._seen: Stats | None = None
        self._brief: Any = None

    def state(self) -> dict[str, Any]:
        """Return where the checkpoint's masters and moments will be; asked just before it is complete."""
        self.folder = None if self._next is None else str(self._next)
        self.token = secrets.token_hex(8)
        return {"args": {}, "attributes": {"folder": self.folder, "token": self.token}}

    # Events, in their order

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot work."""
        form = engine_of_model(kwargs["model"]).form
        for name, wanted, cure in (
            ("n_gpu", args.n_gpu > 1, "nn.DataParallel copies parameters: start with torchrun"),
            ("torch_compile", args.torch_compile, "it cannot follow fetching and releasing; leave it out"),
            (
                "fp16",
                args.fp16 and form.dtype == "bf16",
                'weights are bf16, which need no scaled loss; set bf16=True, or Init(dtype="fp16")',
            ),
            (
                "fp16",
                not args.fp16 and form.dtype == "fp16",
                'weights are fp16, whose loss is scaled with fp16=True alone; or Init(dtype="bf16")',
            ),
            ("fp16_full_eval", args.fp16_full_eval, "weights have one type; leave it out"),
            ("deepspeed", args.deepspeed, "Infinity takes DeepSpeed's place; leave it out"),
            ("fsdp", args.fsdp, "Infinity divides parameters itself; leave it out"),
        ):
            if wanted:
                raise UnsupportedError(f"TrainingArguments({name}={getattr(args, name)!r}): {cure}")
        settle_in(kwargs["model"], args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See that the optimizer is ours; load masters and moments where a training resumes."""
        model = kwargs["model"]
        save_streamed(model)  # one that model_init has just built
        check_output(model, args, state.global_step)
        self._seen = stats(model)
        if not _trains_ours(model):
            return
        optimizer = _optimizer(kwargs["optimizer"])
        unscaled = getattr(kwargs["optimizer"], "scaler", None) is None
        if engine_of_model(model).form.dtype == "fp16" and unscaled:
            raise UnsupportedError(
                "TrainingArguments(fp16=True): Accelerate has made no GradScaler, as on every CPU, and "
                'the loss of fp16 weights has to be scaled; train on a GPU, or with Init(dtype="bf16")'
            )
        if optimizer.update == "backward":
            raise UnsupportedError(
                'AdamW(update="backward") keeps no gradients, and the Trainer asks for their norm at every '
                'step; use update="forward"'
            )
        if optimizer.max_norm is not None and args.max_grad_norm > 0:
            raise UnsupportedError(
                f"AdamW has max_norm={optimizer.max_norm}, TrainingArguments max_grad_norm="
                f"{args.max_grad_norm}; leave max_norm out"
            )
        if state.global_step > 0:
            self._resume(model, optimizer, args, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the optimizer's state_dict be whole."""
        self._whole(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Get ready for a checkpoint, which may come between two steps."""
        self._get_ready(args, state, kwargs["model"], kwargs["optimizer"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Get ready for a checkpoint."""
        self._get_ready(args, state, kwargs["model"], kwargs["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save masters and moments beside what the Trainer has saved; on several ranks weights, too."""
        model, folder = kwargs["model"], _checkpoint(args, state)
        self._whole(model)
        if (shared := saving(model)) is not None:
            shared.write(folder)
        if not args.save_only_model and _trains_ours(model):
            optimizer = _optimizer(kwargs["optimizer"])
            save(model, optimizer, folder / FOLDER, extra={"token": self.token}, overwrite=True)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add to the logs what moved since the last."""
        if self._seen is None or logs is None:
            return
        now = stats(kwargs["model"])
        figures = _figures(now, now.since(self._seen))
        self._seen = now
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the optimizer's state_dict be whole."""
        self._whole(kwargs["model"])

    # Checkpoints

    def _get_ready(self, args: Any, state: Any, model: nn.Module, optimizer: Any) -> None:
        """Make the optimizer's state_dict brief; see [Note: checkpoints of the Trainer]."""
        checkpoint, ours = _checkpoint(args, state), _trains_ours(model)
        self._next = checkpoint / FOLDER if ours and not args.save_only_model else None
        if (shared := saving(model)) is not None:
            shared.expect(checkpoint)
        if ours and self._brief is None:
            self._brief = _optimizer(optimizer).register_state_dict_post_hook(_without_moments)

    def _whole(self, model: nn.Module) -> None:
        if (shared := saving(model)) is not None:
            shared.expect(None)
        if self._brief is not None:
            self._brief.remove()
            self._brief = None

    def _resume(self, model: nn.Module, optimizer: OffloadedOptimizer, args: Any, state: Any) -> None:
        said = state.stateful_callbacks.get(type(self).__name__, {})
        known = said.get("attributes", {}) if isinstance(said, Mapping) else {}
        if not known.get("folder"):
            logger.warning(
                "the checkpoint was saved without infinity.huggingface.TrainerCallback: masters start from "
                "its weights, and moments from its optimizer.pt, if it has one"
            )
            return
        places = [known["folder"], _checkpoint(args, state) / FOLDER]
        if isinstance(args.resume_from_checkpoint, str):
            places.append(Path(args.resume_from_checkpoint) / FOLDER)
        for place in map(Path, places):
            if place.is_dir() and read_manifest(place).extra == {"token": known["token"]}:
                states = generators.capture()  # the Trainer sets its own, at the right moment
                load(model, optimizer, place)
                generators.restore(states)
                return
        raise CheckpointError(
            f"{known['folder']}: masters and moments of step {state.global_step} are not there. "
            "The checkpoint was moved, or saving was interrupted: move it back, set "
            "TrainingArguments(resume_from_checkpoint=...) to where it is, or resume from an earlier one"
        )


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir).absolute() / f"checkpoint-{state.global_step}"


def _trains_ours(model: nn.Module) -> bool:
    """Whether anything that was built in Init is trained; where only adapters are that were not, state and
    checkpoints are small, ordinary, and the Trainer's own.
    """
    return any(one.requires_grad and engine_of(one) is not None for one in model.parameters())


def _without_moments(_optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {}}


def _optimizer(optimizer: Any) -> OffloadedOptimizer:
    """Return the optimizer within Accelerate's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, OffloadedOptimizer):
        raise UnsupportedError(
            f"the optimizer is {type(inner).__name__}: give Trainer "
            'optimizer_cls_and_kwargs=(infinity.AdamW, {"lr": ...}), or, to those that take no class, '
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
