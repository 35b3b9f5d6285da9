"""What a DeepSpeedEngine can be asked: batch sizes, precision, rates, counts."""

from __future__ import annotations

from typing import Any

from torch import nn

from infinity.config.loss_scale import LossScale
from infinity.deepspeed.calls import COMPILE
from infinity.deepspeed.launch import Settings
from infinity.engine.engine import engine_of_model
from infinity.errors import UnsupportedError
from infinity.optim.base import OffloadedOptimizer


class Answers(nn.Module):
    """The questions that DeepSpeed's engine answers; the engine has the facts."""

    module: nn.Module
    optimizer: OffloadedOptimizer | None
    settings: Settings
    scaling: LossScale | None
    global_rank: int
    _norm: float | None
    _applied: bool

    def train_batch_size(self) -> int | None:
        """Samples per update, of all ranks."""
        return self.settings.batches.train

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples per backward and rank."""
        return self.settings.batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Backwards per update."""
        return self.settings.batches.steps

    def gradient_clipping(self) -> float:
        """The largest global norm; 0 for no clipping."""
        return self.settings.gradient_clipping

    def get_global_grad_norm(self) -> float | None:
        """The global norm, before clipping, at the last update; None before it, and with updates in the
        backward.
        """
        return self._norm

    def get_lr(self) -> list[float]:
        """The learning rate of every param group."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """The betas of every param group, or its momentum; None of an optimizer that has neither."""
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
        """What the loss is multiplied by now; 1 but with fp16."""
        return 1.0 if self.scaling is None else self.scaling.value

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self.scaling is not None and self.scaling.dynamic

    def zero_optimization_stage(self) -> int:
        """What ranks divide, as ZeRO counts; see Config.stage."""
        return engine_of_model(self.module).config.stage

    def wall_clock_breakdown(self) -> bool:
        """Whether seconds of forward, backward and step are logged."""
        return self.settings.breakdown

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Samples per update, samples per backward and rank, backwards per update."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def get_type(self) -> list[Any]:
        """The kind of every param group, None as DeepSpeed has it for groups that name none."""
        return [group.get("type") for group in self._groups()]

    def managed_gradient_accumulation(self) -> bool:
        """Whether step() counts backwards; else each is an update."""
        return self.settings.managed_accumulation

    def zero_optimization(self) -> bool:
        """Whether ranks divide anything: always."""
        return True

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether ranks divide gradients, too."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether ranks divide weights, too."""
        return self.zero_optimization_stage() >= 3

    def get_data_parallel_rank(self) -> int:
        """This rank."""
        return self.global_rank

    # What changes nothing here

    def empty_partition_cache(self) -> None:
        """Change nothing: what is fetched ahead of its use has a budget."""

    def offload_states(self, *_args: Any, **_options: Any) -> None:
        """Change nothing: states are offloaded."""

    def reload_states(self, *_args: Any, **_options: Any) -> None:
        """Change nothing: states stay offloaded."""

    def allreduce_gradients(self, *_args: Any, **_options: Any) -> None:
        """Change nothing: the backward has the ranks sum gradients, or the step does."""

    def compile(self, *_args: Any, **_options: Any) -> None:
        """Raises: UnsupportedError."""
        raise UnsupportedError(f"engine.compile(): {COMPILE}")
