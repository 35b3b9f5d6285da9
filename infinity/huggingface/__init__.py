"""Support for Hugging Face's Trainer and Accelerate."""

from typing import TYPE_CHECKING, Any

from infinity.huggingface.accumulation import accumulate_by_block
from infinity.huggingface.durable_training import train_durably
from infinity.huggingface.plans import tensor_parallel
from infinity.huggingface.trainer import TrainerCallback

if TYPE_CHECKING:
    from infinity.huggingface.accelerate_loop import ParallelismConfig

__all__ = ["ParallelismConfig", "TrainerCallback", "accumulate_by_block", "tensor_parallel", "train_durably"]


def __getattr__(name: str) -> Any:
    """Import ParallelismConfig when it is first used: the rest needs no Accelerate.

    Raises: AttributeError for other names.
    """
    if name == "ParallelismConfig":
        from infinity.huggingface.accelerate_loop import ParallelismConfig

        return ParallelismConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
