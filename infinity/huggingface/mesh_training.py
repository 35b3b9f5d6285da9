"""A Trainer of a model whose weights are divided over a mesh (DTensors).

[Note: ranks that count as one]
To the Trainer every process has batches of its own. Here the ranks beside each other, which have parts of the
same weights, are given the same batches, by the sampler that Accelerate has made: it shares them among the
ranks that have different data. So steps, epochs, learning rates and the labels that a loss is divided by are
those of a training with one rank in the place of each row. What an evaluation gathers from all ranks is kept
from one of each row. Weights of a checkpoint are loaded from the files of infinity.save, by all ranks, and
not from the whole tensors that the Trainer reads.

What ParallelismConfig(tp_size=...) asks of Accelerate is done here in its place: see parallelism.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint import generators
from infinity.checkpoint.save_load import load
from infinity.engine.engine import Engine, engine_of, engine_of_model
from infinity.errors import UnsupportedError
from infinity.huggingface.running_trainer import made_trainer, running_trainer
from infinity.huggingface.shared_batches import share_batches
from infinity.huggingface.trainer_setup import FOLDER


def train_on_mesh(model: nn.Module, args: Any) -> None:
    """Let the Trainer that is being made train `model`, where its weights are divided over a mesh.

    Raises: UnsupportedError for settings that do not go with a mesh, and for parameters outside of it.
    """
    trainer: Any = made_trainer()
    if not _is_divided(model):
        return
    _check_arguments(args)
    trained = ((name, one) for name, one in model.named_parameters() if one.requires_grad)
    ordinary = [name for name, one in trained if engine_of(one) is None]
    if ordinary or engine_of_model(model).config.sequence_parallel > 1:
        what = f"{ordinary[0]}, which was not built inside Init," if ordinary else "sequence_parallel"
        raise UnsupportedError(
            f"the Trainer does not train {what} with weights that are divided over a mesh. Build all that is "
            "trained inside Init, and give each rank whole sequences; or write a loop: examples/mesh.py"
        )
    if trainer is not None:
        _MeshTraining(trainer)


def _check_arguments(args: Any) -> None:
    """Check that the settings of a Trainer suit ranks some of which are given the same batches.

    Raises: UnsupportedError.
    """
    strategy = getattr(args, "train_sampling_strategy", None)
    tokens = getattr(args, "include_num_input_tokens_seen", "no")
    best = args.save_only_model and args.load_best_model_at_end
    apart = not getattr(args, "average_tokens_across_devices", True)
    for given, wanted, why in (
        (
            "eval_use_gather_object=True",
            args.eval_use_gather_object,
            "gathered objects cannot be reduced to one for each batch",
        ),
        (
            "save_only_model=True",
            best,
            "with load_best_model_at_end the weights are loaded from the files of infinity.save",
        ),
        (
            "average_tokens_across_devices=False",
            apart,
            "the Trainer divides a rank's tokens by the ranks with the same batch: the loss is too large",
        ),
        (
            'train_sampling_strategy="batch_rebalance"',
            strategy == "batch_rebalance",
            "its sampler gives each rank batches of its own",
        ),
        (
            f"include_num_input_tokens_seen={tokens!r}",
            tokens not in ("no", False),
            "the Trainer would count a batch once for each rank that has it",
        ),
    ):
        if wanted:
            raise UnsupportedError(
                f"TrainingArguments({given}) with weights that are divided over a mesh: {why}; leave it out"
            )


def check_on_mesh(model: nn.Module) -> None:
    """Check, where the model is on a mesh, that the Trainer whose training begins was made for one.

    Raises: UnsupportedError where the Trainer did not have its callback when it was made.
    """
    trainer = running_trainer()
    if trainer is None or not _is_divided(model):
        return
    taking = trainer.__dict__.get("get_train_dataloader")
    if not isinstance(getattr(taking, "__self__", None), _MeshTraining):
        raise UnsupportedError(
            "ranks have parts of the same weights, but the Trainer gives each of them other batches: give it "
            "the callback when it is made, Trainer(..., callbacks=[infinity.huggingface.TrainerCallback()])"
        )


def _is_divided(model: nn.Module) -> bool:
    return engine_of_model(model).stages.mesh.several


class _MeshTraining:
    """Replaces functions of a Trainer, on that one instance; see [Note: ranks that count as one]."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._usual = trainer.get_train_dataloader, trainer.evaluation_loop
        self._count_items = trainer._get_num_items_in_batch  # noqa: SLF001 - as below
        trainer._get_num_items_in_batch = self._items_in_batch  # noqa: SLF001
        trainer.get_train_dataloader = self._train_dataloader
        trainer.evaluation_loop = self._evaluation_loop
        trainer.get_tp_size = self._tensor_size
        trainer._load_from_checkpoint = self._load_checkpoint  # noqa: SLF001 - it has no public way
        trainer._load_best_model = self._load_best  # noqa: SLF001

    @property
    def _engine(self) -> Engine:
        return engine_of_model(self._trainer.model)  # which model_init may have built anew

    def _tensor_size(self) -> int:
        """Return how many ranks have each batch."""
        return self._engine.stages.mesh.ranks.size

    def _share(self, loader: Any) -> Any:
        """Give the ranks beside each other the same batches. Raises: UnsupportedError."""
        data = self._engine.ranks
        if not share_batches(loader, data.size, data.rank):
            raise UnsupportedError(
                f"ranks have parts of the same weights, and the Trainer's {type(loader).__name__} does not "
                "share its batches by a sampler of Accelerate's, so that these ranks cannot be given the "
                "same. Give the Trainer a dataset with a length, or "
                'TrainingArguments(accelerator_config={"dispatch_batches": False})'
            )
        return loader

    def _train_dataloader(self) -> Any:
        return self._share(self._usual[0]())

    def _evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        """Evaluate, or predict."""
        accelerator = self._trainer.accelerator
        gather, members, ranks = accelerator.gather, self._engine.ranks.members, accelerator.num_processes

        def of_data(whole: torch.Tensor) -> torch.Tensor:
            rows = whole.reshape(ranks, -1, *whole.shape[1:])
            return rows[members].flatten(0, 1)

        def gathered(values: Any) -> Any:
            from accelerate.utils import recursively_apply

            return recursively_apply(of_data, gather(values))

        vars(accelerator)["gather"] = gathered
        try:
            return self._usual[1](self._share(dataloader), *args, **options)
        finally:
            del vars(accelerator)["gather"]

    def _items_in_batch(self, *batches: Any) -> Any:
        """Return the labels that a loss is divided by, which the Trainer gathers from all ranks, and divides
        by those beside each other: in an evaluation, too.
        """
        members = vars(self._trainer.accelerator)
        replaced = members.pop("gather", None)
        try:
            return self._count_items(*batches)
        finally:
            if replaced is not None:
                members["gather"] = replaced

    def _load_checkpoint(self, resume_from_checkpoint: str, *_more: Any, **_options: Any) -> None:
        """Load the weights of a checkpoint of the Trainer."""
        place = Path(resume_from_checkpoint) / FOLDER
        if not place.is_dir():
            raise UnsupportedError(
                f"{resume_from_checkpoint} has no folder {FOLDER!r}, from which weights that are divided "
                "over a mesh are loaded: it was saved with save_only_model, or without the TrainerCallback. "
                "Load its weights by from_pretrained, inside Init, and begin anew"
            )
        states = generators.capture()  # which the Trainer restores itself
        load(self._trainer.model, None, place)
        generators.restore(states)

    def _load_best(self) -> None:
        """Load the weights of the best checkpoint."""
        self._load_checkpoint(self._trainer.state.best_model_checkpoint)
