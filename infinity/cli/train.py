"""`infinity train`: a preset on the bytes of a text, or a model of transformers on data, by their Trainer.

It is set up as users set it up: Init around the model, AdamW, a scheduler of torch, and the callback. With
`plain`, the same Trainer has the model in memory, and infinity.reference's optimizer: losses are
bit-identical for the same number of torch threads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from infinity import reference
from infinity.checkpoint.export import save_pretrained
from infinity.checkpoint.resume import durable_of
from infinity.cli.boards import boards
from infinity.cli.data import NEEDED
from infinity.cli.interrupted import Interrupted, interruptible
from infinity.cli.presets import recompute_blocks
from infinity.cli.recording import Recording
from infinity.cli.report import RECENT, Meter, Progress, Run, StepLog, StepReport, plot_run, state_nbytes
from infinity.cli.run_folder import LOG, PICTURE, check_room, errors_named, folder_beside, run_folder
from infinity.cli.settings import PASSED_ON, TrainSettings
from infinity.cli.task import Task, task_of
from infinity.config.settings import Config
from infinity.engine.engine import Engine, engine_of_model
from infinity.engine.init import Init
from infinity.engine.stats import stats
from infinity.errors import ConfigError, InfinityError
from infinity.optim.base import Speculate
from infinity.optim.optimizers import AdamW
from infinity.planning.layout import RecordSchema
from infinity.records.weights import WEIGHTS
from infinity.sizes import format_size
from infinity.storage.disk_speed import DiskSpeed, measured


class DivergedError(InfinityError, ArithmeticError):
    """The loss is not finite, and further steps cannot change that."""


def train(settings: TrainSettings, console: Console) -> None:
    """Train, show progress on `console`, and write log and picture to the run's folder.

    Raises: Interrupted after a signal, once everything is closed and reported; InfinityError; OSError.
    """
    for needed in ("transformers", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            cure = "pip install 'zero-infinity[train]'" if settings.model is None else NEEDED
            raise ConfigError(f"infinity train needs {needed}: {cure}")
    rank, ranks = (int(os.environ.get(name, usual)) for name, usual in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if ranks > 1 and settings.plain:
        raise ConfigError("--plain trains in one process: start without torchrun, or without --plain.")
    recording = Recording(None, None) if rank else Recording(settings.timeline, settings.report)
    with interruptible() as check:
        with contextlib.nullcontext() if rank else _told_before_a_step(console, check):
            task = task_of(settings, ranks)
            opened = [] if rank else boards(settings)
            from transformers import LlamaForCausalLM  # noqa: F401 (its imports' memory is not training's)

            from infinity.cli import trainer  # noqa: F401 (nor is that of these)

        meter = Meter()
        if rank:
            _train_beside(settings, task, folder_beside(settings.out), meter, recording, check)
            return
        with run_folder(settings.out) as folder:
            _train(settings, console, task, opened, folder, meter, recording, check)


def _train_beside(
    settings: TrainSettings,
    task: Task,
    folder: Path,
    meter: Meter,
    recording: Recording,
    check: Callable[[], None],
) -> None:
    """Train as a rank other than 0, which shows and logs the run."""
    from infinity.cli.trainer import Watch, run_trainer

    model, optimizer = build(settings, task, folder)
    run = Run(task.name, 1)
    engine = engine_of_model(model)
    try:
        complete = _is_complete(settings, model)

        def show(step: StepReport) -> None:
            run.steps.append(step)
            check()
            _check_finite(step)

        watch = Watch(meter, recording, show)
        run_trainer(settings, task, model, optimizer, folder, watch)
        _figures(engine, run, meter)
        if settings.save is not None and not complete:
            save_pretrained(model, settings.save)
    finally:
        with contextlib.suppress(InfinityError, OSError):
            engine.close()


def _figures(engine: Engine, run: Run, meter: Meter) -> list[dict[str, float]]:
    """Return the figures of each of several ranks, [] for one rank. Every rank calls this."""
    if engine.ranks.size == 1:
        return []
    mine = json.dumps(run.figures(meter.peak_nbytes())).encode()
    return [json.loads(said) for said in engine.ranks.each(mine, "closing figures")]


def _train(
    settings: TrainSettings,
    console: Console,
    task: Task,
    opened: Sequence[Any],
    folder: Path,
    meter: Meter,
    recording: Recording,
    check: Callable[[], None],
) -> None:
    """Build and train, and report the run, however it ends. opened: callbacks of boards."""
    from infinity.cli.trainer import Watch, run_trainer

    with _told_before_a_step(console, check):
        model, optimizer = build(settings, task, folder)
        schema = RecordSchema(settings.state_dtype, settings.dtype, master_dtype=settings.master_dtype)
        run = _run_of(model, task, schema, meter)
        log, begun = StepLog(folder / LOG, settings.log_every), None
    try:
        complete = _is_complete(settings, model)
        if not settings.plain:
            run.begin(stats(model), disk_speed(_folders(settings, folder), settings.aio))
            recording.start(engine_of_model(model))
        if settings.save is not None and not complete:
            of_weights = 4 * run.parameters if settings.lora else schema.width * run.all_parameters
            check_room(settings.save, of_weights)
        _introduce(console, settings, run, task, folder)
        if settings.resume:
            said = _start_of(model, settings.steps)
            console.print(said, markup=False, highlight=False, soft_wrap=True)
            begun = _done(model) or None
        budget = None if run.before is None else run.before.budget_nbytes
        with closing(Progress(settings.steps, budget, meter.baseline_nbytes, begun or 0)) as progress:

            def begin(done: int) -> None:
                nonlocal begun
                begun = done

            def show(step: StepReport) -> None:
                run.steps.append(step)
                with errors_named(folder / LOG):
                    log.write(step)
                progress.show(step, run.bound(RECENT))
                check()
                _check_finite(step)

            watch = Watch(meter, recording, show, begin, opened)
            run_trainer(settings, task, model, optimizer, folder, watch)
        if not settings.plain:
            run.hear(_figures(engine_of_model(model), run, meter))
            run.predict(engine_of_model(model), stats(model))
        _save(settings, console, task, model, complete=complete)
    except Interrupted:
        console.print(_stopped(settings, run, begun), markup=False, highlight=False, soft_wrap=True)
        raise
    finally:
        with contextlib.suppress(OSError):  # each line was flushed when it was written
            log.close()
        run.end(meter.peak_nbytes(), None if settings.plain or run.after is not None else stats(model))
        if not settings.plain:
            with contextlib.suppress(InfinityError, OSError):  # the step has raised the cause
                engine_of_model(model).close()
        _conclude(console, settings, task, run, folder, recording)


def _run_of(model: nn.Module, task: Task, schema: RecordSchema, meter: Meter) -> Run:
    """Return a run of no steps yet."""
    counts = dict.fromkeys((True, False), 0)
    for parameter in model.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    return Run(
        task.name,
        counts[True],
        state_nbytes(schema),
        frozen=counts[False],
        frozen_nbytes=state_nbytes(schema, ("hi", "lo")),
        baseline_nbytes=meter.baseline_nbytes,
        counts_io=meter.counts_io,
    )


def _folders(settings: TrainSettings, folder: Path) -> list[str]:
    """Return the folders of the NVMe tier; none without it."""
    return [] if settings.in_host_memory else list(settings.nvme or [str(folder)])


def disk_speed(folders: Sequence[str], engine: str | None) -> DiskSpeed | None:
    """Return the speed of several folders together, each filesystem once; None if one is unmeasured."""
    apart = {os.stat(folder).st_dev: folder for folder in folders}
    speeds = [measured(folder, engine) for folder in apart.values()]
    known = [speed for speed in speeds if speed is not None and min(speed.read, speed.write, speed.mixed) > 0]
    if not known or len(known) < len(speeds):
        return None
    rates = {name: sum(getattr(speed, name) for speed in known) for name in ("read", "write", "mixed")}
    return replace(known[0], **rates)


def _check_finite(step: StepReport) -> None:
    if not math.isfinite(step.loss):
        raise DivergedError(
            f"the loss of step {step.step} is {step.loss}. Likely cause: too high a learning rate; try a "
            "smaller --lr, a longer --warmup or --max-norm 1"
        )


def _check_device(name: str) -> None:
    device = torch.device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} sees {count} CUDA devices; try --device cpu"
        )


def build(settings: TrainSettings, task: Task, folder: Path) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer: offloaded, or, if plain, in memory."""
    torch.manual_seed(settings.seed)
    rates: dict[str, Any] = {name: getattr(settings, name) for name in ("lr", "weight_decay", "max_norm")}
    if settings.dtype == "fp16":
        rates["max_norm"] = None  # the Trainer clips, behind the scaler
    model: Any
    optimizer: Any
    default = TrainSettings()
    others: dict[str, Any] = {
        name: getattr(settings, name)
        for name in PASSED_ON
        if getattr(settings, name) != getattr(default, name)
    }
    config = Config(
        nvme=_folders(settings, folder) or None,
        host_memory=settings.host_memory,
        device=settings.device,
        aio=settings.aio,
        dtype=settings.dtype,
        offload_activations=settings.offload_activations,
        activation_memory=settings.activation_memory,
        durable=f"every {settings.durable} steps" if settings.durable else False,
        **others,
    )
    _check_device(settings.device)
    if settings.plain:
        whole = task.build().to(settings.device)
        model = reference.prepare(whole, WEIGHTS[settings.dtype].dtype)
        stored = {name: others[name] for name in ("state_dtype", "master_dtype") if name in others}
        optimizer = reference.ReferenceAdamW(model.parameters(), **rates, **stored)
    else:
        with Init(config):
            model = task.build()
        model.to(settings.device)  # its buffers
        trained = [one for one in model.parameters() if one.requires_grad]
        ahead: Speculate = False if settings.speculate is False else "auto"
        optimizer = AdamW(trained, update=settings.updates_in, speculate=ahead, **rates)
    model.train()
    if settings.checkpointing and settings.activation_memory is None:
        recompute_blocks(model)
    return model, optimizer


# Durable runs


def _start_of(model: nn.Module, steps: int) -> str:
    """Return a line that says where a run that is resumed starts, of `steps` in all; call it before that."""
    durable = durable_of(model)
    path = durable.folders[0].path
    if done := _done(model):
        left = "" if done < steps else f": nothing is left to train, as --steps asks for {steps} in all"
        return f"--resume: continues after step {done}, committed in {path}{left}"
    return f"--resume: {path} holds no committed step; a new run begins there"


def _done(model: nn.Module) -> int:
    """Return the steps that the durable run in the model's folder has committed."""
    from infinity.huggingface.durable_training import steps_done

    return steps_done(durable_of(model))


def _save(settings: TrainSettings, console: Console, task: Task, model: nn.Module, *, complete: bool) -> None:
    """Write the weights and the tokenizer, if that was asked for; complete: see `_is_complete`."""
    if complete:
        said = f"--save {settings.save} is there, and was left as it is"
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    elif settings.save is not None:
        save_pretrained(model, settings.save)
        task.save_tokenizer(Path(settings.save))


def _is_complete(settings: TrainSettings, model: nn.Module) -> bool:
    """Tell whether a run that is resumed has made all its steps, and --save is there.

    Raises: ConfigError where --save is there, and the run has steps to make.
    """
    if not settings.resume or settings.save is None or not Path(settings.save).exists():
        return False
    if (done := _done(model)) < settings.steps:
        raise ConfigError(
            f"--save {settings.save} exists, and is never overwritten, and the run is to go on after step "
            f"{done} of {settings.steps}. Name a new folder."
        )
    return True


@contextlib.contextmanager
def _told_before_a_step(console: Console, check: Callable[[], None]) -> Iterator[None]:
    """Say of a signal that came before there was anything to report."""
    try:
        try:
            yield
        except Exception:
            check()  # imports make errors of their own of a signal that comes within them
            raise
    except Interrupted:
        console.print(_BEFORE, markup=False, highlight=False)
        raise


_BEFORE = "stopped by a signal before a step began"


def _stopped(settings: TrainSettings, run: Run, begun: int | None) -> str:
    """Say what an interrupted run has done, what it has not, and how to go on.

    begun: the number of steps that were done as the last one began, if one did.
    """
    last = run.steps[-1].step if run.steps else begun
    lines = [_BEFORE if last is None else f"stopped by a signal after step {last} of {settings.steps}"]
    if settings.save is not None:
        lines.append(f"not saved: {settings.save} is written after the last step")
    if settings.durable:
        lines.append("the same command with --resume goes on from the last committed step")
    return "\n".join(lines)


# What is shown


def _introduce(console: Console, settings: TrainSettings, run: Run, task: Task, folder: Path) -> None:
    where = "in memory, the reference recipe"
    if run.before is not None:
        folders = _folders(settings, folder)
        tier = f"NVMe {', '.join(folders)}" if folders else "host memory alone"
        where = f"{tier} ({run.before.io_engine}), host_memory {format_size(run.before.budget_nbytes)}"
    trained = f" ({run.parameters / 1e6:,.1f} M trained)" if run.frozen else ""
    batches = f"{settings.accumulate} x {settings.batch}"
    console.print(
        f"{run.name}: {run.all_parameters / 1e6:,.1f} M parameters{trained}, "
        f"{format_size(run.whole_state_nbytes)} of state; {where}\n"
        f"{task.about}; {settings.steps} steps of {batches} x {settings.sequence} {task.unit}s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _conclude(
    console: Console, settings: TrainSettings, task: Task, run: Run, folder: Path, recording: Recording
) -> None:
    saved = [f"saved: {settings.save}"] if settings.save and Path(settings.save).exists() else []
    if not run.steps:
        console.print("\n".join(saved), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(run.table())
    how = "in memory" if run.after is None else f"host_memory {format_size(run.after.budget_nbytes)}"
    title = f"{task.name}: {run.all_parameters / 1e6:,.1f} M parameters, {how}"
    with errors_named(folder / PICTURE):
        missing = plot_run(folder / PICTURE, run, title, task.unit)
    written = [*saved, f"log: {folder / LOG}", missing or f"loss, speed, memory: {folder / PICTURE}"]
    written += recording.write(f"{title}; {run.bound() or ''}", run.rows())
    console.print("\n".join(written), markup=False, highlight=False, soft_wrap=True)
