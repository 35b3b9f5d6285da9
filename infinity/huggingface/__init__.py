"""Support for Hugging Face's Trainer and Accelerate."""

from infinity.huggingface.trainer import TrainerCallback

__all__ = ["TrainerCallback"]
