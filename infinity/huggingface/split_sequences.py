"""A Trainer whose sequences are in parts over ranks: its training batches are split, and evaluation is of
whole ones.

[Note: what the Trainer counts]
The ranks of a sequence are given the same batches, by the sampler that Accelerate has made: it shares them
among sequences in the place of ranks. So steps, epochs, and the batches that a resumed training skips are
those of a training with one rank for each sequence. What the Trainer takes from its loader is split before it
counts labels, so that it counts each once. Its own setting, ParallelismConfig(sp_size=...), is DeepSpeed's:
with it the Trainer imports that package to split batches and to add losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.trainer_utils import has_length

from infinity.errors import ConfigError, UnsupportedError
from infinity.huggingface.running_trainer import made_trainer, running_trainer
from infinity.sequences.loader import SequenceParallelLoader
from infinity.sequences.parallel import SequenceParallel, sequences_of


def split_sequences(model: nn.Module, args: Any) -> None:
    """Let the Trainer that is being made train `model` on sequences in parts, where ranks share them.

    Raises: UnsupportedError for Accelerate's own settings of it.
    """
    trainer: Any = made_trainer()
    # `accelerate launch` may give one by the environment, to the Accelerator alone
    for asked in (args, getattr(trainer, "accelerator", None)):
        _refuse(getattr(asked, "parallelism_config", None))
    sequences = shared_sequences(model)
    if sequences is not None and trainer is not None:
        _SplitTraining(trainer, sequences)


def check_split(model: nn.Module, args: Any, state: Any, loader: Any) -> None:
    """See that the batches of a training that begins are split, where ranks share sequences. args, state: the
    Trainer's, after `state.global_step` steps; loader: that of its training.

    Raises: UnsupportedError where the Trainer did not have its callback when it was made; where it would make
    another loader, which splits nothing, in the place of one that splits.
    """
    trainer = running_trainer()
    if trainer is None or shared_sequences(model) is None:
        return
    if not isinstance(trainer.__dict__.get("get_batch_samples"), _Parts):
        raise UnsupportedError(
            "ranks share a sequence, but the Trainer's batches are not split: give it the callback when it "
            "is made, Trainer(..., callbacks=[infinity.huggingface.TrainerCallback()])"
        )
    if isinstance(loader, SequenceParallelLoader) and not args.ignore_data_skip:
        batches = len(loader) if has_length(loader) else 0
        steps = max(-(-batches // args.gradient_accumulation_steps), 1) if batches else args.max_steps
        if state.global_step % steps:
            raise UnsupportedError(
                f"step {state.global_step} is in the middle of an epoch of {steps} steps, and the Trainer "
                "cannot skip batches of a SequenceParallelLoader. Leave it out of get_train_dataloader (the "
                "callback splits batches), or resume at an epoch's end (save_strategy='epoch'), or with "
                "ignore_data_skip=True"
            )


def shared_sequences(model: nn.Module) -> SequenceParallel | None:
    """Return what divides a model's sequences among several ranks; None where nothing does."""
    try:
        sequences = sequences_of(model)
    except ConfigError:
        return None
    return sequences if sequences.size > 1 else None


def _refuse(asked: Any) -> None:
    """Raises: UnsupportedError for a ParallelismConfig that divides sequences."""
    for name, what in (("sp_size", "DeepSpeed, which splits batches"), ("cp_size", "FSDP")):
        size = getattr(asked, name, None) or 1
        if size > 1:
            raise UnsupportedError(
                f"ParallelismConfig({name}={size}): for that Accelerate needs {what}. Leave it out, and "
                f"build the model with infinity.Config(sequence_parallel={size}): TrainerCallback then "
                "splits the batches"
            )


class _SplitTraining:
    """Replaces three functions of a Trainer, on that one instance; see [Note: what the Trainer counts]."""

    def __init__(self, trainer: Any, sequences: SequenceParallel) -> None:
        self._sequences = sequences
        self._splits = True
        self._train_dataloader = trainer.get_train_dataloader
        trainer.get_train_dataloader = self._of_sequences
        trainer.get_batch_samples = _Parts(trainer.get_batch_samples, self._part)
        trainer.evaluation_loop = _Whole(trainer.evaluation_loop, sequences)

    def _of_sequences(self) -> Any:
        """Return the Trainer's loader, which gives the ranks of a sequence the same batches; one that splits
        them itself as it is.
        """
        loader = self._train_dataloader()
        self._splits = not isinstance(loader, SequenceParallelLoader)
        if self._splits:
            share(loader, self._sequences)
        return loader

    def _part(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return this rank's parts of batches."""
        return iter(SequenceParallelLoader(batches, self._sequences)) if self._splits else batches


class _Parts:
    """Replaces get_batch_samples, which takes a step's micro-batches from the loader and counts labels."""

    def __init__(self, usual: Callable[..., Any], part: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self._usual, self._part = usual, part

    def __call__(self, epoch_iterator: Iterator[Any], *more: Any, **options: Any) -> Any:
        """Take parts."""
        return self._usual(self._part(epoch_iterator), *more, **options)


class _Whole:
    """Replaces evaluation_loop: each rank evaluates batches of its own, whole."""

    def __init__(self, usual: Callable[..., Any], sequences: SequenceParallel) -> None:
        self._usual, self._sequences = usual, sequences

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Evaluate."""
        with self._sequences.whole():
            return self._usual(*args, **options)


def share(loader: Any, sequences: SequenceParallel) -> None:
    """Have a loader of Accelerate share its batches among sequences in the place of ranks.

    Raises: UnsupportedError for another one.
    """
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

    kinds = (BatchSamplerShard, IterableDatasetShard)
    sharers = [getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset")]
    found = [one for one in sharers if isinstance(one, kinds)]
    if not found:
        raise UnsupportedError(
            f"ranks share a sequence, and the Trainer's loader is a {type(loader).__name__} that does not "
            "share its batches by a sampler of Accelerate's, so that the ranks of a sequence cannot be given "
            "the same. Override get_train_dataloader, and return "
            'infinity.SequenceParallelLoader(loader, self.model, batches="in turn")'
        )
    for one in found:
        one.num_processes, one.process_index = sequences.data_ranks, sequences.data_rank
