"""What initialize returns: a model, its optimizer and its schedule, with the interface of DeepSpeed's engine.

It decides when an update is due, clips, skips updates whose gradients are not finite, and counts. The model's
hooks and the optimizer do the rest, and also work without it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from infinity.config.loss_scale import LossScale
from infinity.deepspeed import checkpoint as deepspeed_checkpoint
from infinity.deepspeed.backward import Backwards
from infinity.deepspeed.calls import COMPILE, ENGINE
from infinity.deepspeed.launch import Settings, local_rank, rank, ranks
from infinity.deepspeed.monitor import Monitors
from infinity.engine.engine import engine_of, engine_of_model
from infinity.engine.no_sync import no_sync
from infinity.errors import ConfigError, UnsupportedError
from infinity.optim.base import OffloadedOptimizer
from infinity.sequences.random_ltd import RandomLTD
from infinity.sequences.sparse_attention import SparseAttention
from infinity.sequences.warmup import SequenceWarmup

if TYPE_CHECKING:
    from infinity.huggingface.accumulation import HeldBatches

logger = logging.getLogger("infinity")

_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class DeepSpeedEngine(nn.Module):
    """A model, trained as DeepSpeed scripts do it: engine(batch), engine.backward(loss), engine.step().

    Made by infinity.deepspeed.initialize. Attributes that it lacks are looked up on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OffloadedOptimizer | None,
        scheduler: Any,
        settings: Settings,
        loader: Any = None,
        warmup: SequenceWarmup | None = None,
        changes: Sequence[SparseAttention | RandomLTD] = (),
        data: Sequence[int] | None = None,
    ) -> None:
        """Train `model`, built in Init, with `optimizer` and `scheduler`, from `loader`; warmup: what in it
        decides the lengths of sequences; changes: what initialize did to the model, which destroy() undoes;
        data: the ranks of the world with different data, or parts of sequences; None for all.
        """
        super().__init__()
        self.warmup = warmup
        self.random_ltd = next((one for one in changes if isinstance(one, RandomLTD)), None)
        self._changes = list(changes)
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.settings = settings
        self.training_dataloader = loader
        self.device = engine_of_model(model).device.torch_device
        self.local_rank, self.global_rank, self.world_size = local_rank(), rank(), ranks()
        self._data = list(range(self.world_size) if data is None else data)
        self._sequences = len(self._data) // settings.config.sequence_parallel
        """Trained at once: ranks that share a sequence count as one."""
        self.micro_steps = 0
        """Calls of step(), each after one backward."""
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        """Updates skipped because gradients were not finite."""
        self.scaling = LossScale(settings.scaling) if settings.scaling else None
        """The factor on the loss, with fp16."""
        self._norm: float | None = None
        self._applied = False
        self._boundary: bool | None = None
        self._held = self._by_block() if settings.by_block else None
        """What lets the micro-batches of an update share one fetch of the weights."""
        self._unsynced = self._stepping = False
        self._seconds = dict.fromkeys(("forward", "backward", "step"), 0.0)
        self._monitors = Monitors(settings.monitors if self.global_rank == 0 else {})
        self._losses: list[torch.Tensor] = []
        """This update's, for the monitors."""
        self._gradients: Backwards | None = None
        if optimizer is not None:
            engines = {engine: None for one in model.parameters() if (engine := engine_of(one)) is not None}
            applies = optimizer.update == "backward"
            self._gradients = Backwards(
                list(engines), self.settings.batches.steps, self.scaling, applies=applies
            )
            weakref.finalize(self, self._gradients.close).atexit = False

    def _by_block(self) -> HeldBatches | None:
        from infinity.huggingface import accumulate_by_block  # transformers is there for this alone

        if self.optimizer is None:
            return None
        return accumulate_by_block(self.module, self.optimizer, self.is_gradient_accumulation_boundary)

    @property
    def step_counts(self) -> dict[str, int]:
        """Steps and samples so far, as checkpoints keep them."""
        return {name: getattr(self, name) for name in _COUNTS}

    def set_step_counts(self, counts: dict[str, int]) -> None:
        """Go on from the counts of a checkpoint."""
        for name in _COUNTS:
            setattr(self, name, counts[name])

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute on the model.

        Raises: AttributeError saying what to use instead, for an attribute of DeepSpeed's engine.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        if hasattr(self.module, name):
            return getattr(self.module, name)
        if name in ENGINE:
            raise AttributeError(f"DeepSpeedEngine has no {name!r}; instead: {ENGINE[name]}")
        raise AttributeError(
            f"{name!r}: neither the DeepSpeedEngine nor its model, {type(self.module).__name__}, has it"
        )

    # A step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if self.random_ltd is not None:
            self.random_ltd.seek(self.global_steps)
        if self.settings.scaling is not None and self.settings.scaling.casts:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _halved, (args, kwargs))
        with self._timed("forward"):
            return self.module(*args, **kwargs)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> torch.Tensor:
        """Run the backward of loss / gradient_accumulation_steps (of the loss itself without scale_wrt_gas);
        return that quotient, without fp16's scale.

        loss.backward() and output.backward(gradient) may be called instead, with fp16 on scale(loss).
        """
        divisor = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        with self._timed("backward"):
            self._root(loss, divisor).backward(retain_graph=retain_graph)
        return loss / divisor if divisor > 1 else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times fp16's scale. engine.scale(loss).backward() is engine.backward(loss), with
        all arguments of Tensor.backward.

        Raises: ValueError for a tensor that is not a loss.
        """
        return self._root(loss, self.gradient_accumulation_steps())

    def _root(self, loss: torch.Tensor, divisor: int) -> torch.Tensor:
        root = self._trained()[1].root(loss, divisor)
        if self._monitors:
            self._losses.append(loss.detach())
        return root

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the step() after the current backward updates the model."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed_accumulation:
            return self._stepping
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether step() updates the model, instead of counting backwards."""
        if not self.settings.managed_accumulation:
            raise UnsupportedError("with managed_gradient_accumulation=false every step() is a boundary")
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the model if the accumulation is complete; then zero gradients and step the schedule.

        Raises: UnsupportedError inside no_sync(), and for gradients of another engine's backward with
        another loss scale or other accumulation steps than this engine's.
        """
        optimizer, gradients = self._trained()
        if self._unsynced:
            raise UnsupportedError("step() inside no_sync()")
        gradients.check()
        with self._timed("step"):
            self._stepping = True
            self._applied = False
            try:
                updates = self.is_gradient_accumulation_boundary()
                if updates:
                    self._update(optimizer, gradients, lr_kwargs or {})
            finally:
                self._stepping = False
        self.micro_steps += 1
        if updates:
            self._report()

    def _update(
        self, optimizer: OffloadedOptimizer, gradients: Backwards, lr_kwargs: Mapping[str, Any]
    ) -> None:
        self._norm = self._clip(optimizer)
        finite = self._norm is None or math.isfinite(self._norm)
        if self.scaling is not None:
            self.scaling.update(overflow=not finite)
        if self.settings.check_overflow and not finite:
            self.skipped_steps += 1
            logger.warning("step %d skipped: the gradients' norm is %s", self.global_steps, self._norm)
        else:
            optimizer.step()
            self._applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        optimizer.zero_grad()
        if self._losses:  # over the samples before this update, as DeepSpeed writes it
            self._monitors.write(
                {"train_loss": float(sum(self._losses)) / len(self._losses)}, self.global_samples
            )
            self._losses = []
        self.global_steps += 1
        count = gradients.count if self._held is None else self.gradient_accumulation_steps()
        self.global_samples += (self.settings.batches.micro or 0) * count * self._sequences
        gradients.begin_step()

    def _clip(self, optimizer: OffloadedOptimizer) -> float | None:
        """Clip; return the global norm before that, None where updates happen in the backward."""
        if optimizer.update == "backward":
            return None
        parameters = [
            one for group in optimizer.param_groups for one in group["params"] if one.grad is not None
        ]
        if self.scaling is not None and parameters:
            _unscale([one.grad for one in parameters if one.grad is not None], 1 / self.scaling.value)
        largest = self.settings.gradient_clipping
        if largest:
            return float(torch.nn.utils.clip_grad_norm_(parameters, largest))
        return float(torch.nn.utils.get_total_norm([one.grad for one in parameters]))

    def _report(self) -> None:
        every = self.settings.steps_per_print
        if every is not None and self.global_steps % every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.get_mom(),
            )
        if self.settings.breakdown:
            took = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in self._seconds.items())
            logger.info("step %d: %s", self.global_steps, took)
        if self._monitors:
            values = {"lr": self.get_lr()[0]}
            if self.scaling is not None:
                values["loss_scale"] = self.scaling.value
            if self.settings.breakdown:
                values |= {f"elapsed_time_ms_{what}": 1000 * took for what, took in self._seconds.items()}
            self._monitors.write(values, self.global_samples)
        self._seconds = dict.fromkeys(self._seconds, 0.0)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - start

    def _trained(self) -> tuple[OffloadedOptimizer, Backwards]:
        if self.optimizer is None or self._gradients is None:
            raise UnsupportedError(
                'initialize was given no optimizer: name one in the configuration ("optimizer"), or give '
                "initialize(optimizer=...)"
            )
        return self.optimizer, self._gradients

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not reduce gradients among ranks in here; see infinity.no_sync."""
        if self._unsynced:
            raise UnsupportedError("no_sync() inside no_sync()")
        self._unsynced = True
        try:
            with no_sync(self.module):
                yield
        finally:
            self._unsynced = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the model's gradients."""
        self.module.zero_grad(set_to_none=set_to_none)
        if self._gradients is not None:
            self._gradients.forget()

    # Settings that may change

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per update, by changing the accumulation steps.

        Raises: ValueError for a number that is not a multiple of the samples of one backward on all ranks;
        UnsupportedError for several backwards per update where updates happen in the backward.
        """
        batches = self.settings.batches
        at_once = (batches.micro or 0) * self._sequences
        if not at_once or train_batch_size < at_once or train_batch_size % at_once:
            raise ValueError(
                f"train_batch_size={train_batch_size}: expected a multiple of {at_once}, the micro batch of "
                f"{batches.micro} on {self._sequences} ranks"
            )
        steps = train_batch_size // at_once
        early = self.optimizer is not None and self.optimizer.update == "backward"
        if steps > 1 and early and self._held is None:
            raise UnsupportedError(
                f"set_train_batch_size({train_batch_size}): {steps} backwards per update, but this optimizer "
                "updates in the backward. Set gradient_clipping, or give initialize("
                'optimizer=lambda p: infinity.AdamW(p, ..., update="forward")).'
            )
        changed = replace(batches, train=train_batch_size, steps=steps)
        self.settings = replace(self.settings, batches=changed)
        if self._gradients is not None:
            self._gradients.divide_by(steps)
        if self.warmup is not None:
            self.warmup.set_accumulate(steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per backward and rank; the backwards per update stay."""
        batches = self.settings.batches
        train = micro_batch_size * batches.steps * self._sequences
        changed = replace(batches, train=train, micro=micro_batch_size)
        self.settings = replace(self.settings, batches=changed)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Any]) -> None:
        """Set the function of a step, counted from 1, that returns the tokens of a row: of the metric
        "seqlen", whose schedule_type is "custom" in the configuration.

        Raises: ConfigError for other metrics, or a configuration without that.
        """
        function = schedule_func_dict.get("seqlen")
        if self.warmup is None or self.warmup.lengths.schedule != "custom" or function is None:
            raise ConfigError(
                f"set_custom_curriculum_learning_schedule({', '.join(schedule_func_dict)}): the "
                "configuration needs "
                'a metric "seqlen" with the schedule_type "custom", and the dict its function'
            )
        self.warmup.set_function(function)

    def destroy(self) -> None:
        """Drop the optimizer and the schedule, and give the model its own layers and attention. Memory and
        files are freed with the model.
        """
        if self._gradients is not None:
            self._gradients.close()
        if self._held is not None:
            self._held.undo()
        while self._changes:
            self._changes.pop().remove()
        self.optimizer = self.lr_scheduler = self.training_dataloader = self._gradients = None

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        client_sd: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save everything to save_dir/tag, atomically; then write the tag to save_dir/latest.

        tag: None for "global_stepN". client_state: plain values and tensors, which load_checkpoint returns
        (client_sd: its old name).

        Raises: as infinity.save; ValueError for a tag that cannot be a folder's name.
        """
        if exclude_frozen_parameters:
            raise UnsupportedError("exclude_frozen_parameters: checkpoints hold the whole model")
        kept = dict(client_state or client_sd or {})
        deepspeed_checkpoint.save_tagged(self, save_dir, tag, kept, save_latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of save_checkpoint; return its path and client_state, (None, None) where the
        folder has no file `latest`. tag: None for the one in `latest`.

        Raises: as infinity.load.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise UnsupportedError(
                "load_checkpoint loads the whole model: leave load_module_strict and custom_load_fn out"
            )
        whole = load_optimizer_states and not load_module_only
        return deepspeed_checkpoint.load_tagged(
            self, load_dir, tag, optimizer=whole, scheduler=whole and load_lr_scheduler_states
        )

    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the 16-bit weights as one file for torch.load; return False, without a file, unless the
        configuration has stage3_gather_16bit_weights_on_model_save.

        All weights are in memory at once; infinity.save_pretrained streams them.

        Raises: HostMemoryError, with the numbers.
        """
        if exclude_frozen_parameters:
            raise UnsupportedError("exclude_frozen_parameters: the file holds the whole model")
        if not self.settings.gathers_on_save:
            logger.warning(
                "save_16bit_model: not saved, since the configuration has no "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save"
            )
            return False
        deepspeed_checkpoint.save_weights(self.module, save_dir, save_filename)
        return True

    def save_fp16_model(
        self, save_dir: str | PathLike[str], save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Call save_16bit_model, whose old name this is."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state_dict, as plain tensors in memory."""
        state: dict[str, Any] = self.module.state_dict(prefix=prefix)
        if exclude_frozen_parameters:
            frozen = {prefix + name for name, one in self.module.named_parameters() if not one.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return state

    # Settings and counts

    def train_batch_size(self) -> int | None:
        """Return the samples per update, of all ranks."""
        return self.settings.batches.train

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Return the samples per backward and rank."""
        return self.settings.batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the backwards per update."""
        return self.settings.batches.steps

    def gradient_clipping(self) -> float:
        """Return the largest global norm; 0 for no clipping."""
        return self.settings.gradient_clipping

    def get_global_grad_norm(self) -> float | None:
        """Return the global norm of the last update, before clipping; None before the first one, and where
        updates happen in the backward.
        """
        return self._norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of every param group."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Return the betas of every param group, or its momentum; None for optimizers without."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def was_step_applied(self) -> bool:
        """Whether the last step() updated the model."""
        return self._applied

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.settings.precision == "bf16"

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.settings.precision == "fp16"

    def loss_scale(self) -> float:
        """Return the factor on the loss; 1 unless the model computes in fp16."""
        return 1.0 if self.scaling is None else self.scaling.value

    def dynamic_loss_scale(self) -> bool:
        """Whether overflows change the loss scale."""
        return self.scaling is not None and self.scaling.dynamic

    def zero_optimization_stage(self) -> int:
        """Return what the ranks partition, as ZeRO's stage; see Config.stage."""
        return engine_of_model(self.module).config.stage

    def wall_clock_breakdown(self) -> bool:
        """Whether seconds of forward, backward and step are logged."""
        return self.settings.breakdown

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Return samples per update, samples per backward and rank, backwards per update."""
        batches = self.settings.batches
        return batches.train, batches.micro, batches.steps

    def get_type(self) -> list[Any]:
        """Return the "type" of every param group; None for a group without."""
        return [group.get("type") for group in self._groups()]

    def managed_gradient_accumulation(self) -> bool:
        """Whether step() counts backwards; otherwise every step() is an update."""
        return self.settings.managed_accumulation

    def zero_optimization(self) -> bool:
        """Whether the ranks partition anything: always."""
        return True

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the ranks partition gradients, too."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the ranks partition weights, too."""
        return self.zero_optimization_stage() >= 3

    def get_data_parallel_rank(self) -> int:
        """Return this process's number among the ranks with different data, or parts of sequences."""
        return self._data.index(self.global_rank)

    def autotp_size(self) -> int:
        """Return how many ranks divide each layer; 0 for none."""
        size = self.settings.tensor_parallel
        return size if size > 1 else 0

    # Calls without effect

    def empty_partition_cache(self) -> None:
        """Do nothing: prefetched parameters have a budget."""

    def offload_states(self, *_args: Any, **_options: Any) -> None:
        """Do nothing: states are always offloaded."""

    def reload_states(self, *_args: Any, **_options: Any) -> None:
        """Do nothing: states stay offloaded."""

    def allreduce_gradients(self, *_args: Any, **_options: Any) -> None:
        """Do nothing: gradients are summed in the backward, or by the step."""

    def compile(self, *_args: Any, **_options: Any) -> None:
        """Raises: UnsupportedError."""
        raise UnsupportedError(f"engine.compile(): {COMPILE}")


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def _unscale(grads: list[torch.Tensor], inverse: float) -> None:
    """Divide gradients by the loss scale, as GradScaler does; what is not finite stays so."""
    found_inf, factor = torch.zeros(1, device="cpu"), torch.tensor(inverse, device="cpu")
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
