"""Accelerate's ParallelismConfig(tp_size=..., sp_size=...), the Trainer's `parallelism_config`.

[Note: a keyword of Accelerate's]
With tp_size=N Accelerate makes a mesh, gives the N ranks beside each other the same batches, and finds the
optimizer's parameters again by the addresses of their values, which are not in memory here. The model's own
mesh, that of Init, says already who is beside whom. So the sizes are compared with that mesh when a Trainer
is made, and the Accelerator is left without them: mesh_training.py does what they ask for, once.

On CPUs Accelerate refuses the keyword while the Trainer is made, before any callback is called. Therefore a
TrainerCallback has ParallelismConfig check an Accelerator of CPUs as one of devices: with a tp_size, in a
Trainer that is being made with such a callback, and nowhere else. The rest of its checks are made, as of the
product of the sizes.

With sp_size=N Accelerate wants DeepSpeed, and the Trainer calls it. Where N ranks share each sequence of the
model, the Accelerator is left without the keyword before either happens, on CPUs and devices: the batches are
split by split_sequences.py.

transformers marks a model that from_pretrained(tp_plan="auto") or (distributed_config=...) divides, for which
the Trainer makes a ParallelismConfig itself, and refuses checkpoints. Ours have all that they need, so
the marks are taken off a model of Init, which then is as one of infinity.huggingface.tensor_parallel.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn

from infinity.engine.engine import engine_of, engine_of_model
from infinity.errors import UnsupportedError
from infinity.huggingface.plans import hold_own_heads
from infinity.huggingface.running_trainer import given_callbacks, made_trainer
from infinity.huggingface.split_sequences import compare_sequences
from infinity.tensors import is_distributed

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_CURE = (
    "Build, or load, the model inside infinity.Init(mesh=mesh, data=...), and divide it by "
    'infinity.huggingface.tensor_parallel(model, mesh["tp"])'
)


def admit(callback: type) -> None:
    """Let Trainers that are given a `callback` be made with a tp_size on CPUs, and with an sp_size, too."""
    try:
        from accelerate.parallelism_config import ParallelismConfig
    except ImportError:
        return  # an Accelerate, or none, that has no such keyword
    usual = getattr(ParallelismConfig, "_validate_accelerator", None)
    if usual is None or getattr(usual, "admits", None) is callback:
        return

    @wraps(usual)
    def validated(config: Any, accelerator: Any) -> Any:
        given = any(one is callback or isinstance(one, callback) for one in given_callbacks())
        model: Any = getattr(made_trainer(), "model", None) if given else None
        kept = model is not None and _is_kept(model)
        if kept and (getattr(config, "sp_size", None) or 1) > 1:
            compare_sequences(model, config)
            _take_from(accelerator)
            return None
        if given and config.tp_size > 1:
            if kept:
                take_marks_off(model)
                check_sizes(model, config)
            accelerator = _OnDevices(accelerator)
        return usual(config, accelerator)

    validated.admits = callback  # type: ignore[attr-defined]
    ParallelismConfig._validate_accelerator = validated  # noqa: SLF001 - what refuses CPUs


class _OnDevices:
    """An Accelerator as it is checked, as if its processes, of CPUs too, had a device each."""

    multi_device = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def take_marks_off(model: nn.Module) -> None:
    """Have a model of Init that transformers has divided be as any other one."""
    for one in model.modules():  # the model itself, or that in PEFT's
        size = vars(one).pop("_tp_size", None)
        if size is not None:
            vars(one)["_is_distributed_loading_by_transformers"] = False
            if size > 1:
                hold_own_heads(one, size)


def take_over(model: nn.Module, args: Any) -> None:
    """Compare the sizes that the Trainer being made is given with the model's mesh, and leave its Accelerator
    without them; see [Note: a keyword of Accelerate's]. args: its TrainingArguments.

    Raises: UnsupportedError where they do not fit together.
    """
    take_marks_off(model)
    trainer: Any = made_trainer()
    accelerator: Any = getattr(trainer, "accelerator", None)
    # `accelerate launch` may give one by the environment, to the Accelerator alone
    for asked in (args, accelerator):
        check_sizes(model, getattr(asked, "parallelism_config", None))
    if trainer is None or not engine_of_model(model).stages.mesh.several:
        return
    trainer.is_distributed_loading_by_transformers = False
    if getattr(accelerator, "parallelism_config", None) is not None:
        _take_from(accelerator)


def _take_from(accelerator: Any) -> None:
    accelerator.state.parallelism_config = None
    accelerator.state.device_mesh = None


def check_sizes(model: nn.Module, asked: Any) -> None:
    """See that a ParallelismConfig, or None, says what the mesh of a model does.

    Raises: UnsupportedError with the numbers of both.
    """
    engine = engine_of_model(model)
    mesh = engine.stages.mesh
    divided = mesh.several and (not mesh.draws_alike or any(map(is_distributed, model.parameters())))
    compare(asked, type(model).__name__, mesh.ranks.size if divided else 1, engine.ranks.size)


def compare(asked: Any, kind: str, parts: int, data: int) -> None:
    """Compare a ParallelismConfig, or None, with how a model, a `kind`, is divided. parts: of each layer, one
    for each rank beside this one; data: how many ranks have different data.

    Raises: UnsupportedError where the numbers are not the same.
    """
    replicas, shards, tensor, context, sequence = (getattr(asked, name, None) or 1 for name in _SIZES)
    if tensor == 1 and (shards == 1 or parts == 1):
        return  # which says nothing of ranks beside each other
    if parts == 1:
        raise UnsupportedError(
            f"ParallelismConfig(tp_size={tensor}), but no layer of {kind} is divided, and what each rank "
            f"holds is decided when it is built. {_CURE}"
        )
    if tensor != parts:
        raise UnsupportedError(
            f"ParallelismConfig(tp_size={tensor}), but {parts} ranks have parts of each layer of {kind}, by "
            f"the mesh of its Init. Set tp_size={parts} and dp_shard_size={data}, or give no "
            "ParallelismConfig: the Trainer needs none"
        )
    if replicas * shards != data and context == sequence == 1:  # which are refused by their own names
        raise UnsupportedError(
            f"ParallelismConfig(dp_replicate_size={replicas}, dp_shard_size={shards}), but {data} ranks have "
            f"data of their own, by the mesh of the Init of {kind}. Set dp_shard_size={data}, or give no "
            "ParallelismConfig: the Trainer needs none"
        )


def _is_kept(model: nn.Module) -> bool:
    return any(engine_of(one) is not None for one in model.parameters())
