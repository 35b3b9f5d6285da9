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

Of several ranks each holds its own. They fetch together, so that before a step's last forward they tell each
other what they hold: where it is not the same number of micro-batches of the same number of rows, or those of
one rank are no batch, all of them run them one after the other.
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
from infinity.engine.engine import Engine, engine_of
from infinity.errors import UnsupportedError
from infinity.huggingface.held_logits import HeldLogits
from infinity.sequences.parallel import is_divided

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

    model: a causal language model of transformers, or PEFT's over one. Its forward is called
    with `labels`, and only the sum of a step's losses has a meaning: those of all micro-batches but the last
    are 0. A loop that weights losses one by one cannot use this; one that uses logits gets an
    UnsupportedError. `zero_grad()` of the optimizer or the model forgets the micro-batches that are held, as
    it does their gradients elsewhere. Forwards with gradients, but without labels or in eval mode, share
    nothing; the log says so once. Each block is recomputed in the backward; gradient checkpointing, which
    does the same, is switched off.
    is_last: says in a forward whether it is the step's last; None asks Accelerate. For
    infinity.deepspeed's engines: `accumulate_by_block(engine.module, engine.optimizer,
    engine.is_gradient_accumulation_boundary)`. For the Trainer: TrainerCallback(by_block=True).

    Raises: UnsupportedError for a model whose blocks or whose loss are not known, one that folds heads into
    the batch (Bloom), PEFT's prefix tuning, one that returns what each layer records, one whose sequences
    ranks share, or whose weights are divided over a mesh.
    """
    return HeldBatches(model, optimizer, is_last or accelerate_steps)


class HeldBatches:
    """Replaces a model's forward, on that one instance."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        is_last: Callable[[], bool],
        lasts: Callable[[], bool] = lambda: True,
    ) -> None:
        """Cut the model's blocks and its loss; see accumulate_by_block. lasts: asked in each forward whether
        the training still runs; the first answer that is false undoes all.
        """
        release(model)  # from a training that an error ended
        self._model, self._forward, self._is_last, self._lasts = model, model.forward, is_last, lasts
        self._inner = _base_of(model)
        _check(model, self._inner)
        self._engines_of_ranks = [one for one in _engines_of(self._inner) if one.ranks.size > 1]
        self.__signature__ = inspect.signature(model.forward)  # generate() and the Trainer look at it
        self._names = list(inspect.signature(type(self._inner).forward).parameters)[1:]
        self._held: list[Batch] = []
        self._said: set[str] = set()
        self._over = False
        self._cache = getattr(self._inner.config, "use_cache", None)
        self._checkpointed = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False)]
        for module in self._checkpointed:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        self._micro_batch = 0
        inner: Any = getattr(optimizer, "optimizer", optimizer)  # inside the wrapper of Accelerate
        self._optimizer = inner
        self._hook = inner.register_step_pre_hook(self._before_step)
        self._zeroed = [_Zeroed(one, self._held) for one in (model, inner)]
        try:
            self._cut_into(1)
            tiling.tile_loss_(self._inner)
        except ValueError as error:
            self.undo()
            raise UnsupportedError(f"{error}. Its micro-batches cannot share one fetch") from None
        model.forward = self

    def undo(self) -> None:
        """Give the model back as it was; a second call does nothing."""
        if self._over:
            return
        self._over = True
        self._hook.remove()
        for one in self._zeroed:
            one.undo()
        if self._model.__dict__.get("forward") is self:
            self._model.forward = self._forward
        tiling.untile_(tiling.untile_loss_(self._inner))
        if self._cache is not None:
            self._inner.config.use_cache = self._cache
        for module in self._checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        self._held.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the step's loss for its last micro-batch, and 0 for the others.

        Raises: UnsupportedError for arguments that ask for what each layer records.
        """
        if not self._lasts():
            self.undo()
        batch = dict(zip(self._names, args, strict=False)) | kwargs
        if self._over or not self._holds(batch):
            return self._forward(*args, **kwargs)
        _check_recorded(type(self._inner).__name__, batch.get, "arguments of its forward")
        if batch.get("use_cache"):
            batch["use_cache"] = False  # a cache serves later forwards alone, and a step has none
        # Copies: a loop may fill one buffer again and again.
        self._held.append({name: _copy(value) for name, value in batch.items()})
        if not self._is_last():
            nothing = torch.zeros((), device=batch["labels"].device, requires_grad=True)
            return _output(nothing.clone(), batch)  # loops scale it in place
        held = list(self._held)
        try:
            output = self._together(held)
        except BaseException:
            # What is held stays; its gradients are not there, and a step that would leave it out is refused.
            self._held[:] = [] if self._over else held[:-1]
            raise
        self._held.clear()
        return output

    def _holds(self, batch: Batch) -> bool:
        """Whether a forward is a micro-batch of a step; says once why one with gradients is none."""
        if not torch.is_grad_enabled():
            return False
        if not self._model.training:
            self._say(
                0, "the model is called in eval mode, which by_block leaves as it is. Call model.train()"
            )
            return False
        if batch.get("labels") is None:
            self._say(
                0,
                "the model is called without labels, so that its loss is made elsewhere, of logits. Pass "
                "labels, and use the loss that the model returns, or leave by_block out",
            )
            return False
        return True

    def _together(self, held: list[Batch]) -> Any:
        """Run the micro-batches of a step in one forward, or, where there is none, one after the other."""
        self._cut_into(len(held[0]["labels"]))
        merged = together(held)
        if not self._all_can(held, merged is not None):
            merged = None
        if merged is not None:
            try:
                output = self._forward(**merged)
            except tiling.LogitsUsedError as error:
                self.undo()
                early = getattr(self._optimizer, "update", None) in ("backward", "auto")
                if early or self._engines_of_ranks:
                    raise
                self._say(len(held), str(error))
            else:
                return output if len(held) == 1 else _output(output[0], merged)
        else:
            self._say(
                len(held),
                f"their arguments {sorted(held[0])} differ in more than in length, or each loss is the mean "
                "over another number of labels, here or on another rank. Give the model batches of equal "
                "shape, or num_items_in_batch",
            )
        losses = [self._forward(**one)[0] for one in held]
        return _output(sum(losses), held[-1])

    def _all_can(self, held: list[Batch], here: bool) -> bool:  # noqa: FBT001
        """Whether the micro-batches of every rank are a batch, of as many rows and micro-batches as these."""
        mine = [int(here), len(held), len(held[0]["labels"])]
        said = [row for one in self._engines_of_ranks for row in one.ranks.of_all(mine, "micro-batches held")]
        return here and all(row == mine for row in said)

    def _cut_into(self, micro_batch: int) -> None:
        if micro_batch != self._micro_batch:
            tiling.tile_batch_(self._inner, micro_batch)
            self._micro_batch = micro_batch

    def _say(self, count: int, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            number = f"{count} " if count else ""
            logger.warning("the %smicro-batches of a step fetch the weights once each: %s", number, why)

    def _before_step(self, *_: Any) -> None:
        """Raises: UnsupportedError where the optimizer would leave held micro-batches out."""
        if self._held:
            raise UnsupportedError(
                f"optimizer.step() while {len(self._held)} micro-batches are held for the step's last one, "
                "which did not come: step where Accelerate's sync_gradients is true, as "
                "accelerator.accumulate(model) does"
            )


class _Zeroed:
    """Replaces the zero_grad of a model or an optimizer: what is held goes with the gradients."""

    def __init__(self, owner: Any, held: list[Batch]) -> None:
        self._owner, self._held = owner, held
        self._before = owner.__dict__.get("zero_grad")
        self._zero_grad = owner.zero_grad
        owner.zero_grad = self

    def undo(self) -> None:
        """Give the owner its own back, unless another one took the place of this."""
        if self._owner.__dict__.get("zero_grad") is not self:
            return
        del self._owner.zero_grad
        if self._before is not None:
            self._owner.zero_grad = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Forget the micro-batches that are held, and the gradients."""
        self._held.clear()
        self._zero_grad(*args, **kwargs)


def release(model: nn.Module) -> None:
    """Undo accumulate_by_block on a model, where it is in force."""
    before = model.__dict__.get("forward")
    if isinstance(before, HeldBatches):
        before.undo()


def _output(loss: Any, batch: Batch) -> Any:
    """Return a loss as the model's forward does, with logits that cannot be used."""
    output = CausalLMOutput(loss=loss, logits=HeldLogits())  # type: ignore[arg-type]
    return output.to_tuple() if batch.get("return_dict") is False else output


_FOLDED = ("bloom",)
"""Types of models whose blocks are given a table with one row for each head of each sequence."""
_CACHED = ("PREFIX_TUNING", "CARTRIDGE", "CPT")
"""PEFT's methods that give the model a cache, or a loss of their own made of logits."""


def _check(model: Any, base: Any) -> None:
    """model: what is trained; base: the model of transformers in it, or the same.

    Raises: UnsupportedError.
    """
    config, kind = base.config, type(base).__name__
    if is_divided(model) or any(one.stages.mesh.several for one in _engines_of(base)):
        raise UnsupportedError(
            f"{kind} is divided among ranks by its sequences, or over a mesh by its weights: micro-batches "
            "share a fetch on ranks that have batches of their own alone. Let each fetch the weights"
        )
    text = getattr(config, "get_text_config", lambda: config)()
    source = inspect.getsource(inspect.unwrap(type(base).forward))
    if config.is_encoder_decoder or text is not config or "self.loss_function(" not in source:
        raise UnsupportedError(
            f"{kind} is no plain causal language model, whose loss is transformers' "
            "loss_function: its micro-batches cannot share one fetch"
        )
    if config.model_type in _FOLDED:
        raise UnsupportedError(
            f"{kind} gives its blocks an alibi table with a row for each head of each sequence, which cannot "
            "be cut by sequences: its micro-batches cannot share one fetch. Let each fetch the weights"
        )
    peft = getattr(model, "active_peft_config", None)
    method = getattr(getattr(peft, "peft_type", None), "value", None)
    if method in _CACHED:
        raise UnsupportedError(
            f"PEFT's {method} gives the model a cache, or makes a loss of its logits, and micro-batches "
            "that share one fetch have neither. Use LoRA or prompt tuning, or let each fetch the weights"
        )
    _check_recorded(kind, lambda name: getattr(config, name, False), "its config")


def _check_recorded(kind: str, given: Callable[[str], Any], where: str) -> None:
    """Raises: UnsupportedError where what each layer records is asked for."""
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if given(name):
            raise UnsupportedError(
                f"{kind} with {name}=True in {where}: what each layer returns for a micro-batch cannot "
                f"be put together. Set it to False, or let each micro-batch fetch the weights"
            )


def _engines_of(model: nn.Module) -> list[Engine]:
    """Return the engines of a model's parameters, in their order; none for one outside of Init."""
    found = {engine: None for one in model.parameters() if (engine := engine_of(one)) is not None}
    return list(found)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and not value.requires_grad else value


def _base_of(model: Any) -> Any:
    """Return the model of transformers inside PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def accelerate_steps() -> bool:
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
