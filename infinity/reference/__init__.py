"""The recipe in memory, in plain PyTorch, that everything is compared with."""

from infinity.reference.recipe import (
    ReferenceAdamW,
    adamw_small_step,
    adamw_step,
    canonical_,
    clip_grad_norm_,
    fused,
    prepare,
    root,
    rounded,
    sum_squares,
)

__all__ = [
    "ReferenceAdamW",
    "adamw_small_step",
    "adamw_step",
    "canonical_",
    "clip_grad_norm_",
    "fused",
    "prepare",
    "root",
    "rounded",
    "sum_squares",
]
