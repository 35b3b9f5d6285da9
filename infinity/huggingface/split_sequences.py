"""A Trainer whose sequences are in parts over ranks: its training batches are split, and evaluation is of
whole ones.

[Note: what the Trainer counts]
The ranks of a sequence are given the same batches, by the sampler that Accelerate has made: it shares them
among sequences in the place of ranks. So steps, epochs, and the batches that a resumed training skips are
those of a training with one rank for each sequence. What the Trainer takes from its loader is split before it
counts labels, so that it counts each once. With its own setting, ParallelismConfig(sp_size=...), the Trainer
would import DeepSpeed to split batches and to add losses: it is compared with the model, and then taken from
the Trainer's Accelerator; see parallelism.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.trainer_utils import has_length

from infinity.errors import UnsupportedError
from infinity.huggingface.running_trainer import made_trainer, other_losses, running_trainer
from infinity.huggingface.shared_batches import share_batches
from infinity.sequences.loader import SequenceParallelLoader
from infinity.sequences.parallel import SequenceParallel, is_divided, sequences_of


def split_sequences(model: nn.Module, args: Any) -> None:
    """Let the Trainer that is being made train `model` on sequences in parts, where ranks share them.

    Raises: UnsupportedError for settings of Accelerate's that say otherwise, and for losses of a rank's
    logits alone.
    """
    trainer: Any = made_trainer()
    # `accelerate launch` may give one by the environment, to the Accelerator alone
    for asked in (args, getattr(trainer, "accelerator", None)):
        compare_sequences(model, getattr(asked, "parallelism_config", None))
    if trainer is not None and _shares(model):
        check_losses(args, trainer)
        _SplitTraining(trainer)


def check_split(model: nn.Module, args: Any, state: Any, loader: Any) -> None:
    """See that the batches of a training that begins are split, where ranks share sequences. args, state: the
    Trainer's, after `state.global_step` steps; loader: that of its training.

    Raises: UnsupportedError where the Trainer did not have its callback when it was made; where it would make
    another loader, which splits nothing, in the place of one that splits.
    """
    trainer = running_trainer()
    if trainer is None or not _shares(model):
        return
    taking = trainer.__dict__.get("get_batch_samples")
    if not isinstance(getattr(taking, "__self__", None), _SplitTraining):
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


def check_losses(args: Any, trainer: Any) -> None:
    """See that the model makes the loss: others would get a rank's labels, unshifted.

    Raises: UnsupportedError naming what makes another one.
    """
    for name in other_losses(args, trainer):
        raise UnsupportedError(
            f"{name}, where ranks share a sequence: the Trainer makes it of a rank's tokens alone, "
            "without the label that the last of them has on the next rank. Leave it out; or override "
            "compute_loss, with the batch's shift_labels, and infinity's sequences.mean(sum, count)"
        )


def _shares(model: nn.Module) -> bool:
    """Whether several ranks share the sequences of a model."""
    return is_divided(model) and sequences_of(model).size > 1


def compare_sequences(model: nn.Module, asked: Any) -> None:
    """Compare a ParallelismConfig, or None, with the ranks that share each sequence of a model.

    Raises: UnsupportedError with the numbers of both where it says something else.
    """
    ranks = sequences_of(model).size if is_divided(model) else 1
    for name, what in (("sp_size", "DeepSpeed, which splits batches"), ("cp_size", "FSDP")):
        size = getattr(asked, name, None) or 1
        if size > 1 and (ranks == 1 or name == "cp_size"):
            raise UnsupportedError(
                f"ParallelismConfig({name}={size}): for that Accelerate needs {what}. Leave it out, and "
                f"build the model with infinity.Config(sequence_parallel={size}): TrainerCallback then "
                "splits the batches"
            )
        if size not in (1, ranks):
            raise UnsupportedError(
                f"ParallelismConfig({name}={size}), but {ranks} ranks share each sequence of "
                f"{type(model).__name__}, by its Config(sequence_parallel={ranks}). Set {name}={ranks}, or "
                "give no ParallelismConfig: the Trainer needs none"
            )


class _SplitTraining:
    """Replaces three functions of a Trainer, on that one instance; see [Note: what the Trainer counts]."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._usual = (trainer.get_train_dataloader, trainer.get_batch_samples, trainer.evaluation_loop)
        self._splits = True
        trainer.get_train_dataloader = self._train_dataloader
        trainer.get_batch_samples = self._batch_samples
        trainer.evaluation_loop = self._evaluation_loop

    @property
    def _sequences(self) -> SequenceParallel:
        return sequences_of(self._trainer.model)  # which model_init may have built anew

    def _train_dataloader(self) -> Any:
        """Return the Trainer's loader, which gives the ranks of a sequence the same batches; one that splits
        them itself as it is.
        """
        loader = self._usual[0]()
        self._splits = not isinstance(loader, SequenceParallelLoader)
        if self._splits:
            share(loader, self._sequences)
        return loader

    def _batch_samples(self, epoch_iterator: Iterator[Any], *more: Any, **options: Any) -> Any:
        """Take this rank's parts of a step's micro-batches, of which the Trainer counts the labels."""
        if self._splits:
            epoch_iterator = iter(SequenceParallelLoader(epoch_iterator, self._sequences))
        return self._usual[1](epoch_iterator, *more, **options)

    def _evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate, or predict: each rank batches of its own, whole."""
        with self._sequences.whole():
            return self._usual[2](*args, **options)


def share(loader: Any, sequences: SequenceParallel) -> None:
    """Have a loader of Accelerate share its batches among sequences in the place of ranks.

    Raises: UnsupportedError for another one.
    """
    if not share_batches(loader, sequences.data_ranks, sequences.data_rank):
        raise UnsupportedError(
            f"ranks share a sequence, and the Trainer's loader is a {type(loader).__name__} that does not "
            "share its batches by a sampler of Accelerate's, so that the ranks of a sequence cannot be given "
            "the same. Override get_train_dataloader, and return "
            'infinity.SequenceParallelLoader(loader, self.model, batches="in turn")'
        )
