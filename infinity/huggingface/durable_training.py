"""`train_durably`: a Trainer trains a durable run, and goes on after its last committed step.

[Note: how a Trainer goes on]
A commit has all of a step, but the number of steps that the Trainer counts by, which is tracked as
"position". The Trainer hears of it as of any step that is done, by a checkpoint: one that holds its state
alone, where it does not look for weights. From there it counts, logs and draws its batches. TrainerCallback
restores the commit when the training begins: behind accelerate's prepare, which would read all moments.
The Trainer then skips batches, for which it makes an iterator, and that draws from the generators. Where it
would read a checkpoint's generators behind that, it is given those of the commit. An evaluation draws, too,
after the step: where no forward followed, they are those that were tracked with the position.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import transformers
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from infinity.checkpoint import generators
from infinity.checkpoint.resume import commit, durable_of, resume
from infinity.durable.committer import Durable
from infinity.errors import ConfigError
from infinity.optim.base import OffloadedOptimizer
from infinity.storage.manifest import CheckpointError
from infinity.units.tracking import Stateful

_POSITION = "position"
_DRAWN = "generators"
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


def train_durably(trainer: transformers.Trainer) -> Any:
    """Train as `trainer.train()` does, from the last committed step of the model's durable run on; commit the
    last step.

    trainer: of a model that was built in Init with Config(durable=...), with an optimizer of Infinity and a
    TrainerCallback. The same program serves for every start: in a new folder the training begins. Weights,
    moments, schedule, generators and the position in the data are those of a training that never stopped.
    All ranks call this.

    Returns: what `train` returns; None where `max_steps` are done, and the run is restored alone.

    Raises: ConfigError for a model without `durable`; what infinity.resume and `train` raise.
    """
    model, args = cast("Any", trainer.model), trainer.args
    _check_begun(durable_of(model))
    done = steps_done(durable_of(model))
    if not done:
        output = trainer.train()
    elif 0 < args.max_steps <= done:
        trainer.create_optimizer_and_scheduler(args.max_steps)
        state = transformers.TrainerState(global_step=done)
        optimizer = cast("OffloadedOptimizer", trainer.optimizer)
        begin(model, optimizer, trainer.lr_scheduler, state, trainer.accelerator.scaler)
        return None
    else:
        output = _go_on(trainer, done)
    commit(model)
    return output


def steps_done(durable: Durable) -> int:
    """Return the number of steps that a Trainer has made, those that GradScaler skipped too, as the last
    commit says; 0 without one.
    """
    if not durable.found:
        return 0
    said = durable.found[0].said.get("tracked", {}).get(_POSITION)
    return int(said["global_step"]) if isinstance(said, Mapping) else durable.found[0].step


def begin(
    model: nn.Module, optimizer: OffloadedOptimizer, scheduler: Any, state: Any, scaler: Any = None
) -> None:
    """Begin to commit the steps of a Trainer, or restore the last commit.

    state: the TrainerState, which already counts the steps that are done. scaler: of a scaled loss.

    Raises: ConfigError where the run has made other steps than the Trainer believes; CheckpointError where
    no Trainer has begun it; what infinity.resume raises.
    """
    durable = durable_of(model)
    done = steps_done(durable)
    _check_begun(durable)
    if durable.found and done != state.global_step:
        raise ConfigError(
            f"{durable.folders[0].path} holds a run committed at step {done}, and the Trainer begins at step "
            f"{state.global_step}. infinity.huggingface.train_durably(trainer) goes on with it; "
            "infinity.wipe(folder) removes it."
        )
    others = {"scheduler": scheduler, "scaler": scaler}
    tracked: dict[str, Stateful] = {name: one for name, one in others.items() if one is not None}
    optimizer.track(**{_POSITION: _Position(state)}, **tracked)
    resume(model, optimizer)


def _check_begun(durable: Durable) -> None:
    """Raises: CheckpointError for a run that no Trainer has begun."""
    if durable.found and _POSITION not in durable.found[0].said.get("tracked", {}):
        raise CheckpointError(
            f"the run in {durable.folders[0].path}, committed at step {durable.found[0].step}, was not begun "
            "by a Trainer, but by a loop of its own (until it ran by the Trainer, infinity train had one), "
            "and does not say how far its data was read. Nothing was changed: go on with the program, and "
            "the version of Infinity, that began it, or begin a run in another folder."
        )


class _Position:
    """The step that a Trainer has come to, and its best one before, as a tracked object."""

    def __init__(self, state: Any) -> None:
        """state: the TrainerState."""
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, which of them evaluated best, and the generators."""
        said = {name: getattr(self._state, name) for name in ("global_step", *_BEST)}
        return said | {_DRAWN: json.dumps(generators.capture())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Compare the number, since the Trainer knows it; set the rest.

        Raises: CheckpointError.
        """
        if state_dict["global_step"] != self._state.global_step:
            raise CheckpointError(
                f"the commit is of step {state_dict['global_step']}, the Trainer's state of step "
                f"{self._state.global_step}"
            )
        vars(self._state).update({name: state_dict[name] for name in _BEST})


def _go_on(trainer: Any, done: int) -> Any:
    """Train from step `done` on; see [Note: how a Trainer goes on]."""
    args, said = trainer.args, durable_of(trainer.model).found[0].said
    drawn = said["rng"] if said["rng_forward"] else json.loads(said["tracked"][_POSITION][_DRAWN])
    exported: list[Any] = [*trainer.callback_handler.callbacks, trainer.control]
    state: Any = transformers.TrainerState(
        global_step=done,
        train_batch_size=args.train_batch_size,
        stateful_callbacks=cast("Any", [one for one in exported if isinstance(one, ExportableState)]),
    )
    state.compute_steps(args, args.max_steps)
    with tempfile.TemporaryDirectory(prefix="infinity-") as folder:
        state.save_to_json(str(Path(folder, TRAINER_STATE_NAME)))
        trainer._load_from_checkpoint = _nothing  # noqa: SLF001 - it has no public name, and no option
        trainer._load_rng_state = lambda _: generators.restore(drawn)  # noqa: SLF001 - the same
        try:
            return trainer.train(resume_from_checkpoint=folder)
        finally:
            del trainer._load_from_checkpoint, trainer._load_rng_state  # noqa: SLF001 - the same


def _nothing(*_: Any) -> None:
    pass
