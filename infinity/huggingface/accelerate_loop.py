"""A loop of Accelerate whose sequences are in parts over ranks: ParallelismConfig(sp_size=N).

[Note: what Accelerate does with sp_size]
Accelerate leaves it to DeepSpeed to make groups of ranks and to split batches. Without that plugin an
Accelerator of CPUs refuses the keyword while it is made, before it has seen a model, and one of devices does
not use it. So a loop takes its ParallelismConfig from here, which puts the checks off until a model comes to
`prepare`. One whose sequences ranks share is compared with the keyword, and what the keyword asks for is done
here; for any other one Accelerate's checks are made then, and its own functions called. Where a plugin (of
DeepSpeed, FSDP or Megatron-LM) trains, and under the Trainer, nothing is put off.

[Note: what Accelerate counts]
To Accelerate every process has batches of its own: its loaders share them among processes, a schedule makes a
step for each of them, and of what gather_for_metrics gathers the last batch's surplus is cut off at the end.
Here the ranks of a sequence are given the same batch, by the sampler that Accelerate has made, and count as
one in all three. What ranks of one sequence give to gather_for_metrics has to be the same on all of them, as
a loss is; it is kept once. Values of a rank's own tokens cannot be told from others by their shapes, and are
an error as soon as they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate.parallelism_config
import torch
from torch import nn

from infinity.engine.engine import engine_of
from infinity.engine.further_fetches import tell_of_accumulation
from infinity.errors import UnsupportedError
from infinity.huggingface.running_trainer import made_trainer
from infinity.huggingface.shared_batches import share_batches
from infinity.sequences.loader import SequenceParallelLoader
from infinity.sequences.parallel import SequenceParallel, is_divided, sequences_of
from infinity.tensors import as_bytes

_PLUGINS = frozenset({"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"})
"""Names of Accelerate's types of training in which something else prepares models and loaders."""


class ParallelismConfig(accelerate.parallelism_config.ParallelismConfig):
    """Accelerate's ParallelismConfig, whose sp_size=N works without DeepSpeed, on CPUs too, in a loop that
    trains a model with sequence_parallel=N.

    One import changes in the script::

        from infinity.huggingface import ParallelismConfig  # in the place of accelerate's

        accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    `prepare` gives the ranks of a sequence the same batches, and yields to each its part, as
    infinity.SequenceParallelLoader does; no DistributedDataParallel is put around a model of Init.
    `model(**batch).loss` is the mean over the whole sequence, the same on its ranks: nothing is to be added
    over a group. A schedule's steps, and what `gather_for_metrics` returns, count each sequence once. For a
    model that is not Infinity's, for other sizes, and with the plugins of DeepSpeed and FSDP it is as
    Accelerate's own.

    Raises: UnsupportedError, while the Accelerator is made, for processes that sp_size does not divide; in
    `prepare` for another number than the model's, a loader that comes before its model, and loaders that do
    not share their batches by a sampler (dispatch_batches).
    """

    def _validate_accelerator(self, accelerator: Any) -> None:
        usual = partial(super()._validate_accelerator, accelerator)
        size = getattr(self, "sp_size", None) or 1
        plugged = getattr(accelerator.distributed_type, "name", "") in _PLUGINS
        if size == 1 or plugged or made_trainer() is not None:
            usual()
            return
        if accelerator.num_processes % size:
            raise UnsupportedError(
                f"ParallelismConfig(sp_size={size}), but Accelerate has {accelerator.num_processes} "
                "process(es): as many ranks as share a sequence have to divide them. Start more with "
                f"torchrun, or set sp_size to the model's sequence_parallel, and to 1 without one"
            )
        _SplitLoop(self, accelerator, usual)


def compare(asked: Any, kind: str, parts: int, sequences: int, processes: int) -> None:
    """Compare a ParallelismConfig with the ranks of a model, a `kind`. parts: ranks that share each sequence;
    sequences: how many are trained at once; processes: Accelerate's.

    Raises: UnsupportedError with the numbers of both where they do not fit together.
    """
    if asked.sp_size != parts:
        has = (
            f"{parts} ranks share each sequence of {kind}, by its sequence_parallel={parts}"
            if parts > 1
            else f"each rank has whole sequences of {kind} (sequence_parallel=1)"
        )
        raise UnsupportedError(
            f"ParallelismConfig(sp_size={asked.sp_size}), but {has}. Set sp_size={parts}, or build the model "
            f"with infinity.Config(sequence_parallel={asked.sp_size})"
        )
    if asked.tp_size > 1:
        raise UnsupportedError(
            f"ParallelismConfig(tp_size={asked.tp_size}, sp_size={parts}): layers in parts beside "
            "sequences in parts, in a loop of Accelerate: not done. Leave tp_size out"
        )
    data = asked.dp_replicate_size * asked.dp_shard_size
    if data not in (1, sequences):
        raise UnsupportedError(
            f"ParallelismConfig(dp_replicate_size={asked.dp_replicate_size}, "
            f"dp_shard_size={asked.dp_shard_size}), but {sequences} sequences of {parts} ranks are trained "
            f"at once. Set dp_shard_size={sequences}, or leave both out"
        )
    if parts * sequences != processes:
        raise UnsupportedError(
            f"{kind} is trained by {parts * sequences} ranks, {sequences} sequence(s) of {parts}, and "
            f"Accelerate has {processes} processes. Give Init no process_group and no pipeline_group"
        )


class _SplitLoop:
    """Replaces functions of an Accelerator, on that one instance; see [Note: what Accelerate counts]."""

    def __init__(self, config: ParallelismConfig, accelerator: Any, validate: Callable[[], None]) -> None:
        """Replace those of `accelerator`. validate: makes Accelerate's own checks of `config`."""
        self._config, self._accelerator, self._validate = config, accelerator, validate
        self._usual: dict[str, Any] = {}
        for name in (
            "prepare",
            "prepare_model",
            "prepare_data_loader",
            "prepare_scheduler",
            "gather_for_metrics",
            "skip_first_batches",
        ):
            self._usual[name] = getattr(accelerator, name)
            vars(accelerator)[name] = getattr(self, name)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare the models first, whichever place they have: loaders are split as theirs say."""
        places: list[Any] = device_placement or [None] * len(args)
        if len(places) == len(args):  # else Accelerate's own error
            args = tuple(
                self.prepare_model(one, device_placement=place) if isinstance(one, nn.Module) else one
                for one, place in zip(args, places, strict=True)
            )
        return self._usual["prepare"](*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,  # noqa: FBT001 - the order is Accelerate's
        evaluation_mode: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Compare a model with the keyword; put no DistributedDataParallel around one of Init.

        Raises: UnsupportedError on every rank, with both numbers, where they do not fit together.
        """
        usual = self._usual["prepare_model"]
        engine = next((found for one in model.parameters() if (found := engine_of(one)) is not None), None)
        if any(one is model for one in self._accelerator._models):  # noqa: SLF001 - it has no public name
            return usual(model, device_placement, evaluation_mode or engine is not None)
        if engine is None and not is_divided(model):
            self._validate()
            return usual(model, device_placement, evaluation_mode)
        if engine is None:
            self._compare(model)
            return usual(model, device_placement, evaluation_mode)
        with engine.stages.everyone.together("comparing ParallelismConfig with the model"):
            self._compare(model)
            _check_parameters(model)
        if (steps := self._accelerator.gradient_accumulation_steps) > 1:
            tell_of_accumulation(model, steps, "")
        return usual(model, device_placement, evaluation_mode=True)

    def _compare(self, model: nn.Module) -> None:
        sequences = sequences_of(model) if is_divided(model) else None
        processes = self._accelerator.num_processes
        parts, rows = (1, processes) if sequences is None else (sequences.size, sequences.data_ranks)
        compare(self._config, type(model).__name__, parts, rows, processes)

    def _sequences(self) -> SequenceParallel | None:
        """Return what divides the sequences of the model that was prepared; None where nothing does."""
        models = self._accelerator._models  # noqa: SLF001 - as above
        return next((sequences_of(one) for one in models if is_divided(one)), None)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Give the ranks of a sequence the same batches, and each its part.

        Raises: UnsupportedError for a loader that comes before its model, or does not share its batches by a
        sampler.
        """
        if isinstance(data_loader, SequenceParallelLoader):
            return data_loader
        sequences, size = self._sequences(), self._config.sp_size
        if sequences is None and not self._accelerator._models:  # noqa: SLF001 - as above
            raise UnsupportedError(
                f"ParallelismConfig(sp_size={size}): a loader is prepared before its model, which says which "
                "ranks share a sequence. Give prepare the model with the loader, or before it"
            )
        given = self._usual["prepare_data_loader"](data_loader, *args, **options)
        if sequences is None:
            return given
        if not share_batches(given, sequences.data_ranks, sequences.data_rank):
            self._accelerator._dataloaders.remove(given)  # noqa: SLF001 - as above
            raise UnsupportedError(
                f"ParallelismConfig(sp_size={size}): a {type(given).__name__} does not share its batches by "
                "a sampler of Accelerate's, so that the ranks of a sequence cannot be given the same. Set "
                "DataLoaderConfiguration(dispatch_batches=False), or give prepare a dataset with a length"
            )
        return SequenceParallelLoader(given, sequences)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Have a schedule make a step for each sequence, where Accelerate's makes one for each process."""
        prepared = self._usual["prepare_scheduler"](scheduler)
        if "step" not in vars(prepared):
            vars(prepared)["step"] = _steps_by_sequence(prepared, self._sequences)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip batches of a loader whose batches are split, and split the others.

        Raises: UnsupportedError for a loader whose ranks have batches of their own in turn.
        """
        if not isinstance(dataloader, SequenceParallelLoader):
            return self._usual["skip_first_batches"](dataloader, num_batches)
        if dataloader.batches != "same":
            raise UnsupportedError(
                f"skip_first_batches of SequenceParallelLoader(..., batches={dataloader.batches!r}): its "
                "loader would skip a batch of each rank. Leave it out, prepare splits batches; or use its "
                "state_dict"
            )
        left = self._usual["skip_first_batches"](dataloader.loader, num_batches)
        return SequenceParallelLoader(left, dataloader.sequences)

    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,  # noqa: FBT001, FBT002 - as Accelerate has it
    ) -> Any:
        """Gather tensors of which each rank of a sequence has the same, once for each sequence.

        Raises: UnsupportedError where the ranks of a sequence have others, and for what is no tensor.
        """
        sequences = self._sequences()
        if sequences is None:
            return self._usual["gather_for_metrics"](input_data, use_gather_object)
        _check_tensors(input_data, as_objects=use_gather_object)
        gather = self._accelerator.gather
        place = torch.tensor([sequences.data_rank], device=self._accelerator.device)
        places: list[int] = gather(place).tolist()

        def gathered(values: Any) -> Any:
            from accelerate.utils import recursively_apply

            return recursively_apply(partial(_once_each, places), gather(values))

        before = vars(self._accelerator).get("gather")
        vars(self._accelerator)["gather"] = gathered
        try:
            return self._usual["gather_for_metrics"](input_data)
        finally:
            del vars(self._accelerator)["gather"]
            if before is not None:
                vars(self._accelerator)["gather"] = before


def _check_parameters(model: nn.Module) -> None:
    """See that all that trains was built inside Init.

    Raises: UnsupportedError naming what was not.
    """
    for name, one in model.named_parameters():
        if one.requires_grad and engine_of(one) is None:
            raise UnsupportedError(
                f"{name} was not built inside Init, and trains beside sequences that ranks share: in a loop "
                "of Accelerate nothing would add its gradients over the ranks. Build it inside Init, as "
                "get_peft_model(model, ...) there does"
            )


def _steps_by_sequence(
    prepared: Any, sequences: Callable[[], SequenceParallel | None]
) -> Callable[..., None]:
    """Return a `step` for a schedule that Accelerate has prepared."""
    from accelerate.scheduler import AcceleratedScheduler

    usual = prepared.step
    once = AcceleratedScheduler(prepared.scheduler, prepared.optimizers, split_batches=True)

    def step(*args: Any, **options: Any) -> None:
        found = sequences()
        by_process = prepared.step_with_optimizer and not prepared.split_batches
        if found is None or not by_process or not prepared.gradient_state.sync_gradients:
            usual(*args, **options)
            return
        inner = prepared.scheduler
        for _ in range(found.data_ranks):
            if not hasattr(inner, "total_steps") or inner._step_count <= inner.total_steps:  # noqa: SLF001 - as Accelerate
                once.step(*args, **options)

    return step


def _check_tensors(values: Any, *, as_objects: bool) -> None:
    """Raises: UnsupportedError for values that are to be gathered as objects, or have to be."""
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda one: one, values, error_on_other_type=True)
    except TypeError as error:
        as_objects, what = True, str(error)
    else:
        what = "use_gather_object=True"
    if as_objects:
        raise UnsupportedError(
            f"gather_for_metrics of objects ({what}), where ranks share a sequence: which of them are of one "
            "sequence is not known. Give tensors with one row for each row of the batch, or gather objects "
            "by accelerate.utils.gather_object, from every rank"
        )


def _once_each(places: list[int], gathered: torch.Tensor) -> torch.Tensor:
    """Return the rows of one rank of each sequence. places: the sequence of each rank; gathered: the rows of
    all ranks, [ranks x rows, ...], in their order.

    Raises: UnsupportedError where ranks of a sequence have others.
    """
    rows = gathered.reshape(len(places), len(gathered) // len(places), *gathered.shape[1:])
    firsts = [places.index(place) for place in sorted({*places})]
    for rank, place in enumerate(places):
        first = places.index(place)
        if as_bytes(rows[rank]) != as_bytes(rows[first]):  # in bits: a loss may be NaN
            raise UnsupportedError(
                f"gather_for_metrics: ranks {first} and {rank} share a sequence, and have other values of "
                f"shape {tuple(rows[rank].shape)}: these are of a rank's tokens alone. Give what is the same "
                "on both (the model's loss is), add them up first (sequences.mean), or evaluate inside "
                "`with loader.sequences.whole():`, where both have the whole batch; gather() gathers what "
                "each rank has"
            )
    return rows[firsts].flatten(0, 1)
