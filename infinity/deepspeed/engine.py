"""What initialize returns: a model, its optimizer and its schedule, driven as DeepSpeed's engine is.

It decides when a step is due, clips, leaves steps out whose gradients are not finite, and counts. All else is
the model's hooks and the optimizer, which work without it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from infinity.deepspeed import checkpoint as deepspeed_checkpoint
from infinity.deepspeed.answers import Answers
from infinity.deepspeed.backward import Backwards
from infinity.deepspeed.calls import ENGINE
from infinity.deepspeed.launch import Settings, local_rank, rank, ranks
from infinity.engine.engine import engine_of, engine_of_model
from infinity.engine.no_sync import no_sync
from infinity.errors import UnsupportedError
from infinity.optim.base import OffloadedOptimizer

logger = logging.getLogger("infinity")


class DeepSpeedEngine(Answers):
    """A model, trained as DeepSpeed scripts do it: engine(batch), engine.backward(loss), engine.step().

    Made by infinity.deepspeed.initialize. Attributes of the model may be asked of the engine.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OffloadedOptimizer | None,
        scheduler: Any,
        settings: Settings,
        loader: DataLoader[Any] | None = None,
    ) -> None:
        """Drive `model`, built in Init, with `optimizer` and `scheduler`."""
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.settings = settings
        self.training_dataloader = loader
        self.device = engine_of_model(model).device.torch_device
        self.local_rank, self.global_rank, self.world_size = local_rank(), rank(), ranks()
        self.micro_steps = 0
        """Backwards that step() has seen."""
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        """Steps left out because gradients were not finite."""
        self.scaling = settings.scaling.begin() if settings.scaling else None
        """What the loss is multiplied by, with fp16."""
        self._norm: float | None = None
        self._applied = False
        self._boundary: bool | None = None
        self._unsynced = self._stepping = False
        self._seconds = dict.fromkeys(("forward", "backward", "step"), 0.0)
        self._gradients: Backwards | None = None
        if optimizer is not None:
            engines = {engine: None for one in model.parameters() if (engine := engine_of(one)) is not None}
            applies = optimizer.update == "backward"
            self._gradients = Backwards(
                list(engines), self.settings.batches.steps, self.scaling, applies=applies
            )
            weakref.finalize(self, self._gradients.close).atexit = False

    def __getattr__(self, name: str) -> Any:
        """Ask the model for what the engine does not have.

        Raises: AttributeError saying what to do instead, where DeepSpeed's engine has it.
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
        """Run the backward of loss / gradient_accumulation_steps (of loss itself without scale_wrt_gas);
        return what was differentiated, but for the scale that fp16 needs.

        loss.backward() and output.backward(gradient) may be called instead, in fp16 of scale(loss).
        """
        divisor = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        with self._timed("backward"):
            self._trained()[1].root(loss, divisor).backward(retain_graph=retain_graph)
        return loss / divisor if divisor > 1 else loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss as fp16 needs it. engine.scale(loss).backward() is engine.backward(loss), with
        all that Tensor.backward takes.

        Raises: ValueError for what is no loss.
        """
        return self._trained()[1].root(loss, self.gradient_accumulation_steps())

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the step() after the current backward updates the model."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed_accumulation:
            return self._stepping
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say from now on whether step() updates the model, instead of counting."""
        if not self.settings.managed_accumulation:
            raise UnsupportedError("with managed_gradient_accumulation=false every step() is a boundary")
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the model, where the accumulation is complete; then zero gradients and step the schedule.

        Raises: UnsupportedError within no_sync(), and for gradients of another engine's backward, made with
        other settings than this engine's.
        """
        optimizer, gradients = self._trained()
        if self._unsynced:
            raise UnsupportedError("step() inside no_sync()")
        gradients.check()
        with self._timed("step"):
            self._stepping = True
            self._applied = False
            try:
                if self.is_gradient_accumulation_boundary():
                    self._update(optimizer, gradients, lr_kwargs or {})
            finally:
                self._stepping = False
        self.micro_steps += 1

    def _update(
        self, optimizer: OffloadedOptimizer, gradients: Backwards, lr_kwargs: Mapping[str, Any]
    ) -> None:
        self._norm = self._clip(optimizer)
        finite = self._norm is None or math.isfinite(self._norm)
        if self.scaling is not None:
            self.scaling.update(overflow=not finite)
        if self.settings.check_overflow and not finite:
            self.skipped_steps += 1
            logger.warning("step %d left out: the gradients' norm is %s", self.global_steps, self._norm)
        else:
            optimizer.step()
            self._applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        optimizer.zero_grad()
        self.global_steps += 1
        self.global_samples += (self.settings.batches.micro or 0) * gradients.count * self.world_size
        gradients.begin_step()
        self._report()

    def _clip(self, optimizer: OffloadedOptimizer) -> float | None:
        """Return the global norm before clipping; None where updates happen in the backward."""
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
        """Backwards in here are not reduced among ranks; see infinity.no_sync. step() is refused."""
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

    # What it can be told

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per update, by other accumulation steps.

        Raises: ValueError for no multiple of the samples of one backward on all ranks; UnsupportedError where
        updates happen in the backward, which there has to be one of.
        """
        batches = self.settings.batches
        at_once = (batches.micro or 0) * self.world_size
        if not at_once or train_batch_size < at_once or train_batch_size % at_once:
            raise ValueError(
                f"train_batch_size={train_batch_size}: expected a multiple of {at_once}, the micro batch of "
                f"{batches.micro} on {self.world_size} ranks"
            )
        steps = train_batch_size // at_once
        if steps > 1 and self.optimizer is not None and self.optimizer.update == "backward":
            raise UnsupportedError(
                f"set_train_batch_size({train_batch_size}): {steps} backwards per update, but this optimizer "
                "updates in the backward. Begin with gradient_clipping, or give initialize("
                'optimizer=lambda p: infinity.AdamW(p, ..., update="forward")).'
            )
        changed = replace(batches, train=train_batch_size, steps=steps)
        self.settings = replace(self.settings, batches=changed)
        if self._gradients is not None:
            self._gradients.divide_by(steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per backward and rank; as many backwards per update as before."""
        batches = self.settings.batches
        train = micro_batch_size * batches.steps * self.world_size
        changed = replace(batches, train=train, micro=micro_batch_size)
        self.settings = replace(self.settings, batches=changed)

    def destroy(self) -> None:
        """Let go of the optimizer and the schedule; the model stays as it is. Memory and files go with it."""
        if self._gradients is not None:
            self._gradients.close()
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
        """Save everything to save_dir/tag, as a whole or not at all; then name it in save_dir/latest.

        tag: None for "global_stepN". client_state: plain values and tensors, which load_checkpoint returns
        (client_sd: the same, as DeepSpeed's first page writes it).

        Raises: as infinity.save; ValueError for a tag that is no name of a folder.
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
        """Load what save_checkpoint has saved; return its path and client_state, (None, None) for a folder
        that names no `latest`. tag: None for the one that `latest` names.

        Raises: as infinity.load.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise UnsupportedError("load_checkpoint loads everything, or names what does not fit")
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
        """Save the 16-bit weights as one file for torch.load; False, and no file, unless the configuration
        has stage3_gather_16bit_weights_on_model_save. They are in memory at once: save_pretrained streams.

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
        """As save_16bit_model, by its first name."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state_dict: plain tensors in memory."""
        state: dict[str, Any] = self.module.state_dict(prefix=prefix)
        if exclude_frozen_parameters:
            frozen = {prefix + name for name, one in self.module.named_parameters() if not one.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        return state


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def _unscale(grads: list[torch.Tensor], inverse: float) -> None:
    """Multiply gradients by the inverse of the loss scale, as GradScaler does; the norm then tells of
    overflows.
    """
    found_inf, factor = torch.zeros(1), torch.tensor(inverse)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
