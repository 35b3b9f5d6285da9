"""transformers' Trainer as `infinity train` runs it: its arguments, and what it is told of each step.

[Note: what is the Trainer's]
The loop, accumulation, evaluation, the order of the data, what is logged where, and the first batch of a run
that goes on are the Trainer's. The optimizer clips and knows the norm, as the reference recipe does, so that
the Trainer neither looks for gradients nor changes them: --plain has the same bits, and updates in the
backward leave none. Of fp16, which is no type of the reference's, the Trainer clips, and Accelerate scales
the loss; it makes no GradScaler on a CPU, and this does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler

from infinity.checkpoint.resume import durable_of
from infinity.cli.data import IGNORED
from infinity.cli.recording import Recording
from infinity.cli.report import Meter, StepReport
from infinity.cli.schedule import learning_rate
from infinity.cli.settings import TrainSettings
from infinity.cli.task import Task
from infinity.cli.text import Windows
from infinity.engine.engine import engine_of_model
from infinity.engine.stats import stats
from infinity.errors import ConfigError, UnsupportedError
from infinity.huggingface import TrainerCallback, accumulate_by_block, train_durably
from infinity.ranks.group import ALONE

logger = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class Watch:
    """What follows a training."""

    meter: Meter
    recording: Recording
    show: Callable[[StepReport], None]
    """Is given each step's report; what it raises ends the training."""
    begin: Callable[[int], None] = lambda _: None
    """Is called as each step begins, with the number of those that are done."""
    boards: Sequence[Any] = ()
    """Callbacks for what is logged."""


def run_trainer(
    settings: TrainSettings,
    task: Task,
    model: nn.Module,
    optimizer: Any,
    folder: Path,
    watch: Watch,
) -> None:
    """Train, and show each step. folder: of the run.

    Raises: ConfigError where a durable run is there, and was not asked for; what the steps raise.
    """
    if settings.durable and not settings.resume and (found := durable_of(model)).found:
        raise ConfigError(
            f"--durable: {found.folders[0].path} holds a run committed at step {found.found[0].step}. "
            "Continue it with --resume, or name another folder with --nvme."
        )
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step, settings.warmup, settings.steps))
    steps = Steps(settings, model, watch)
    together = _share_a_fetch(settings, model, optimizer)
    if settings.plain:
        callbacks: list[Any] = [_Together()] if together else []
    else:
        callbacks = [TrainerCallback(by_block=together)]
    trainer = _StepTrainer(
        model=model,
        args=_arguments(settings, task, folder),
        task=task,
        steps=steps,
        optimizers=(optimizer, schedule),
        callbacks=[*callbacks, steps, *watch.boards],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if settings.durable:
        train_durably(trainer)
    else:
        trainer.train()


@dataclass
class _Arguments(transformers.TrainingArguments):
    """Arguments of a process that computes on one device, whatever else there is."""

    on: str = "cpu"

    @property
    def device(self) -> torch.device:
        """The device."""
        super().device  # noqa: B018 - what sets up the ranks
        return torch.device(self.on)

    @property
    def n_gpu(self) -> int:
        """Its number."""
        return 0 if self.on == "cpu" else 1


def _arguments(settings: TrainSettings, task: Task, folder: Path) -> _Arguments:
    return _Arguments(
        output_dir=str(folder),
        on=settings.device,
        use_cpu=settings.device == "cpu",
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulate,
        max_grad_norm=settings.max_norm or 0.0 if settings.dtype == "fp16" else 0.0,
        fp16=settings.dtype == "fp16",
        seed=settings.seed % 2**32,  # numpy takes no more
        data_seed=settings.seed,
        dataloader_pin_memory=settings.device != "cpu",
        eval_strategy="no" if task.evaluation is None else "steps",
        eval_steps=settings.eval_every or settings.steps,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _share_a_fetch(settings: TrainSettings, model: nn.Module, optimizer: Any) -> bool:
    """Whether one fetch of the weights serves all micro-batches of a step; says why not, where it was to."""
    if settings.accumulate == 1 or not settings.checkpointing:
        return False
    try:
        accumulate_by_block(model, optimizer).undo()
    except UnsupportedError as error:
        if getattr(optimizer, "update", None) == "backward":
            raise ConfigError(f"--accumulate {settings.accumulate} with --update backward: {error}") from None
        logger.warning("--accumulate %d: %s", settings.accumulate, error)
        return False
    return True


class _Together(transformers.TrainerCallback):
    """What TrainerCallback(by_block=True) does, for a model in memory."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let micro-batches run together."""
        accumulate_by_block(kwargs["model"], kwargs["optimizer"])


class _StepTrainer(transformers.Trainer):
    """A Trainer that tells what a step consists of; see [Note: what is the Trainer's]."""

    def __init__(self, *, task: Task, steps: Steps, args: _Arguments, **given: Any) -> None:
        self._shuffled, self._steps = task.shuffled, steps
        self._learned = 0.0
        if task.evaluation is not None:
            self._learned = sum(task.evaluation["learned"]) / len(task.evaluation)
        self._backward = contextlib.ExitStack()
        super().__init__(args=args, train_dataset=task.data, eval_dataset=task.evaluation, **given)

    def create_accelerator_and_postprocess(self) -> None:
        """Scale the loss of fp16, and clip it; of other types the optimizer does that."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        if self.args.fp16:
            accelerator.native_amp = False  # the weights are fp16: there is nothing to cast
            accelerator.scaler = torch.amp.GradScaler(self.args.device.type)
        else:
            accelerator.clip_grad_norm_ = lambda *_, **__: None

    def training_step(self, model: nn.Module, inputs: Any, *more: Any, **options: Any) -> Tensor:
        """Run forward and backward, as two phases."""
        with contextlib.ExitStack() as self._backward:
            loss: Tensor = super().training_step(model, inputs, *more, **options)
        scaler: Any = self.accelerator.scaler
        if scaler is not None and self.args.max_grad_norm > 0 and self.accelerator.sync_gradients:
            scaler.unscale_(cast("Any", self.optimizer).optimizer)
        self._steps.hear(loss, inputs["labels"].numel())
        return loss

    def compute_loss(self, model: nn.Module, inputs: Any, *more: Any, **options: Any) -> Any:
        """Compute a loss, in training as a phase of its own."""
        if not model.training:
            return super().compute_loss(model, inputs, *more, **options)
        with self._steps.recording.phase("forward"):
            loss = super().compute_loss(model, inputs, *more, **options)
        self._backward.enter_context(self._steps.recording.phase("backward"))
        return loss

    def prediction_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        """Return a loss whose mean over all rows is the mean over all tokens that are learned."""
        inputs = self._prepare_inputs(inputs)
        learned = (inputs["labels"][:, 1:] != IGNORED).sum()
        with torch.no_grad():
            loss: Tensor = self.compute_loss(model, inputs)
        return loss * (learned / len(inputs["labels"]) / self._learned), None, None

    def _get_train_sampler(self, *given: Any) -> Any:
        """Return the Trainer's own, which shuffles, but for rows that were drawn."""
        if self._shuffled:
            return super()._get_train_sampler(*given)
        return SequentialSampler(cast("Windows", self.train_dataset))


class Steps(transformers.TrainerCallback):
    """Reports each step, of what the Trainer says and of what the engine has done."""

    def __init__(
        self,
        settings: TrainSettings,
        model: nn.Module,
        watch: Watch,
    ) -> None:
        """Report the steps of `model` to `watch`."""
        self.recording = watch.recording
        self._model, self._meter, self._show, self._begins = model, watch.meter, watch.show, watch.begin
        self._plain, self._last = settings.plain, settings.steps
        self._ranks = ALONE if settings.plain else engine_of_model(model).ranks
        self._phase = contextlib.ExitStack()
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._to_evaluate: StepReport | None = None

    def hear(self, loss: Tensor, tokens: int) -> None:
        """Hear of a micro-batch: its part of the step's loss, its tokens on this rank."""
        self._losses.append(loss)
        self._tokens += tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the first step."""
        self._begin()
        self._mark()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that a step begins."""
        self._begins(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the phase of the optimizer's step."""
        self._phase.enter_context(self.recording.phase("step"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End that phase; see that the last step is evaluated, whatever its number."""
        self._phase.close()
        if args.eval_strategy != "no" and state.global_step == self._last:
            control.should_evaluate = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report a step, or wait for its evaluation; add its figures to what boards write."""
        if "loss" not in logs:
            return
        norm = logs.get("grad_norm", getattr(kwargs["optimizer"].optimizer, "grad_norm", None))
        step = self._ended(state.global_step, logs["learning_rate"], norm)
        known = {name: one for name, one in asdict(step).items() if name != "step" and one is not None}
        logs.update(known)
        state.log_history.clear()  # log.jsonl has it, in no memory
        if control.should_evaluate:
            self._to_evaluate = step
        else:
            self._tell(step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Report the step that was evaluated."""
        if self._to_evaluate is not None:
            step, self._to_evaluate = self._to_evaluate, None
            self._tell(replace(step, eval_loss=metrics["eval_loss"]))

    def _tell(self, step: StepReport) -> None:
        self._show(step)
        self._begin()

    def _begin(self) -> None:
        """Begin to count for a step; what evaluating and showing take is no step's."""
        self._losses, self._tokens = [], 0
        self._before = None if self._plain else stats(self._model)
        self._io = self._meter.io_nbytes(self._before)
        self._began = time.perf_counter()

    def _mark(self) -> int:
        """Record the memory at the end of a step, and return that of the process."""
        rss_nbytes = self._meter.rss_nbytes()
        now = None if self._plain else stats(self._model)
        self.recording.mark(time.perf_counter(), now, rss_nbytes - self._meter.baseline_nbytes)
        return rss_nbytes

    def _ended(self, number: int, lr: float, norm: float | None) -> StepReport:
        """Return the report of a step that is done. Every rank calls this."""
        ranks, before = self._ranks, self._before
        mine = float(torch.stack(self._losses).sum())
        loss = ranks.totals([mine], "mean loss")[0] / ranks.size
        seconds = time.perf_counter() - self._began
        now = None if self._plain else stats(self._model)
        read, written = self._meter.io_nbytes(now)
        return StepReport(
            step=number,
            loss=loss,
            lr=lr,
            grad_norm=None if norm is None or not math.isfinite(norm) else norm,
            seconds=seconds,
            tokens_per_second=self._tokens * ranks.size / seconds,
            nvme_read_nbytes=read - self._io[0],
            nvme_written_nbytes=written - self._io[1],
            rss_nbytes=self._mark(),
            budget_held_nbytes=0 if now is None else now.budget_held_nbytes,
            stall_s=0.0 if now is None or before is None else now.stall_s - before.stall_s,
        )
