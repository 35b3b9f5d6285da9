"""Gradient accumulation with one fetch per step: micro-batches wait for the step's last, and run with it.

[Note: held micro-batches]
A loop that accumulates runs the whole model once for each micro-batch, and so fetches every weight, and
stores every gradient, as often. Here a micro-batch that is not the step's last is only remembered: its
forward returns a loss of 0. The last one's forward runs all of them, block by block, each block over one
micro-batch after the other (tile_batch_), and the loss without logits (tile_loss_). It returns the sum of
their losses, so that one backward gives the gradients of all. Which micro-batch is the last is Accelerate's
word (`GradientState.sync_gradients`), which its own loops and the Trainer's set before each forward.

Sums of gradients are made in fp32 and rounded once. Dropout draws its numbers block by block. Shorter
micro-batches are padded to the longest of the step. Beside one micro-batch within one block, memory holds the
inputs of every block for all of them: offload_activations moves these out.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from infinity import tiling
from infinity.engine.engine import engine_of
from infinity.errors import UnsupportedError

logger = logging.getLogger("infinity")

Batch = dict[str, Any]
"""The arguments of a model's forward, by name."""
_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": -100, "shift_labels": -100, "token_type_ids": 0}
"""What a shorter row is filled with, by argument: positions that no token attends to and no loss counts."""


def accumulate_by_block(
    model: nn.Module, optimizer: torch.optim.Optimizer, is_last: Callable[[], bool] | None = None
) -> HeldBatches:
    """Let the micro-batches of a step share one fetch of the weights, in place; `undo` of what this returns
    undoes it. See [Note: held micro-batches].

    model: a causal language model of transformers, or PEFT's over one, on one rank. Its forward is called
    with `labels`, and only the sum of a step's losses has a meaning: those of all micro-batches but the last
    are 0, without logits. A loop that weights losses one by one, or looks at logits, cannot use this. Each
    block is recomputed in the backward; gradient checkpointing, which does the same, is switched off.
    is_last: says in a forward whether it is the step's last; None asks Accelerate. For
    infinity.deepspeed's engines: `accumulate_by_block(engine.module, engine.optimizer,
    engine.is_gradient_accumulation_boundary)`. For the Trainer: TrainerCallback(by_block=True).

    Raises: UnsupportedError for a model whose blocks or whose loss are not known, or one that returns what
    each layer records.
    """
    return HeldBatches(model, optimizer, is_last or _accelerate_steps)


class HeldBatches:
    """Replaces a model's forward, on that one instance."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, is_last: Callable[[], bool]
    ) -> None:
        """Cut the model's blocks and its loss; see accumulate_by_block."""
        before = model.__dict__.get("forward")
        if isinstance(before, HeldBatches):  # a training that an error ended
            before.undo()
        self._model, self._forward, self._is_last = model, model.forward, is_last
        self._inner = _base_of(model)
        _check(self._inner)
        self.__signature__ = inspect.signature(model.forward)  # generate() and the Trainer look at it
        self._names = list(inspect.signature(type(self._inner).forward).parameters)[1:]
        self._held: list[Batch] = []
        self._said = False
        self._cache = getattr(self._inner.config, "use_cache", None)
        self._checkpointed = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False)]
        for module in self._checkpointed:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        self._micro_batch = 0
        inner: Any = getattr(optimizer, "optimizer", optimizer)  # inside the wrapper of Accelerate
        self._optimizer = inner
        self._hook = inner.register_step_pre_hook(self._before_step)
        try:
            self._cut_into(1)
            tiling.tile_loss_(self._inner)
        except ValueError as error:
            self.undo()
            raise UnsupportedError(f"{error}. Its micro-batches cannot share one fetch") from None
        model.forward = self

    def undo(self) -> None:
        """Give the model back as it was."""
        self._hook.remove()
        if self._model.__dict__.get("forward") is self:
            self._model.forward = self._forward
        tiling.untile_(tiling.untile_loss_(self._inner))
        if self._cache is not None:
            self._inner.config.use_cache = self._cache
        for module in self._checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        self._held.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the step's loss for its last micro-batch, and 0 for the others."""
        batch = dict(zip(self._names, args, strict=False)) | kwargs
        if not (self._model.training and torch.is_grad_enabled()) or batch.get("labels") is None:
            return self._forward(*args, **kwargs)
        # Copies: a loop may fill one buffer again and again.
        self._held.append({name: _copy(value) for name, value in batch.items()})
        if not self._is_last():
            nothing = torch.zeros((), device=batch["labels"].device, requires_grad=True)
            return CausalLMOutput(loss=nothing.clone())  # loops scale it in place
        held, self._held = self._held, []
        self._cut_into(len(held[0]["labels"]))
        merged = together(held)
        if merged is not None:
            try:
                return self._forward(**merged)
            except tiling.LogitsUsedError as error:
                self.undo()
                if getattr(self._optimizer, "update", None) == "backward":
                    raise
                self._say(len(held), str(error))
        else:
            self._say(
                len(held),
                f"their arguments {sorted(held[0])} differ in more than in length, or each loss is the mean "
                "over another number of labels. Give the model batches of equal shape, or num_items_in_batch",
            )
        return CausalLMOutput(loss=sum(self._forward(**one).loss for one in held))

    def _cut_into(self, micro_batch: int) -> None:
        if micro_batch != self._micro_batch:
            tiling.tile_batch_(self._inner, micro_batch)
            self._micro_batch = micro_batch

    def _say(self, count: int, why: str) -> None:
        if not self._said:
            self._said = True
            logger.warning("the %d micro-batches of a step fetch the weights once each: %s", count, why)

    def _before_step(self, *_: Any) -> None:
        """Raises: UnsupportedError where the optimizer would leave held micro-batches out."""
        if self._held:
            raise UnsupportedError(
                f"optimizer.step() while {len(self._held)} micro-batches are held for the step's last one, "
                "which did not come: step where Accelerate's sync_gradients is true, as "
                "accelerator.accumulate(model) does"
            )


def _check(model: Any) -> None:
    config, ranks = model.config, _ranks_of(model)
    if ranks > 1:
        raise UnsupportedError(
            f"{ranks} ranks: micro-batches share a fetch on one rank alone, since each rank would decide by "
            "its own batches whether they can. Let each micro-batch fetch the weights"
        )
    text = getattr(config, "get_text_config", lambda: config)()
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    if config.is_encoder_decoder or text is not config or "self.loss_function(" not in source:
        raise UnsupportedError(
            f"{type(model).__name__} is no plain causal language model, whose loss is transformers' "
            "loss_function: its micro-batches cannot share one fetch"
        )
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise UnsupportedError(
                f"{type(model).__name__} with {name}=True: what each layer returns for a micro-batch cannot "
                f"be put together. Set config.{name} = False, or let each micro-batch fetch the weights"
            )


def _ranks_of(model: nn.Module) -> int:
    """Return the number of ranks that a model is on; 1 for one outside of Init."""
    engines = {engine for one in model.parameters() if (engine := engine_of(one)) is not None}
    return max((engine.ranks.size for engine in engines), default=1)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and not value.requires_grad else value


def _base_of(model: Any) -> Any:
    """Return the model of transformers inside PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _accelerate_steps() -> bool:
    """Whether a step of the optimizer follows, by Accelerate's word."""
    from accelerate.state import GradientState

    return bool(GradientState().sync_gradients)


def together(batches: Sequence[Batch]) -> Batch | None:
    """Return micro-batches as one, whose loss is the sum of theirs; None where there is no such batch.

    Rows that are shorter than the longest are padded behind their end. Rows that are padded before their
    beginning have other positions in a longer batch, so that these have to be of one length.
    """
    if any(one.keys() != batches[0].keys() for one in batches):
        return None
    if batches[0].get("num_items_in_batch") is None:
        counts = {_learned(one) for one in batches}
        if len(counts) > 1:
            return None
        batches = [{**one, "num_items_in_batch": counts.copy().pop()} for one in batches]
    left = any(_is_padded_on_the_left(one.get("attention_mask")) for one in batches)
    merged = {}
    for name in batches[0]:
        values = [one[name] for one in batches]
        rows = [isinstance(one[name], torch.Tensor) and one[name].dim() > 0 for one in batches]
        if all(rows) and all(len(one[name]) == len(one["labels"]) for one in batches):
            joined = None if left and len({one.shape[1:] for one in values}) > 1 else _join(name, values)
            if joined is None:
                return None
            merged[name] = joined
        elif all(_same(values[0], one) for one in values):
            merged[name] = values[0]
        else:
            return None
    return merged


def _learned(batch: Batch) -> int:
    labels = batch["labels"][..., 1:] if batch.get("shift_labels") is None else batch["shift_labels"]
    return int((labels != -100).sum())


def _is_padded_on_the_left(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.dim() == 2 and not bool(mask[:, 0].all())


def _join(name: str, values: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if len({one.shape[1:] for one in values}) == 1:
        return torch.cat(list(values))
    if name not in _PADDING or any(one.dim() != 2 for one in values):
        return None
    longest = max(one.shape[1] for one in values)
    return torch.cat([F.pad(one, (0, longest - one.shape[1]), value=_PADDING[name]) for one in values])


def _same(first: Any, other: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(first, other)
        )
    return bool(first == other)
