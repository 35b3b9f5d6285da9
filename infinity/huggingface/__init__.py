"""Support for Hugging Face's Trainer and Accelerate."""

from infinity.huggingface.accumulation import accumulate_by_block
from infinity.huggingface.durable_training import train_durably
from infinity.huggingface.plans import tensor_parallel
from infinity.huggingface.trainer import TrainerCallback

__all__ = ["TrainerCallback", "accumulate_by_block", "tensor_parallel", "train_durably"]
