"""SIMD CPU kernels over raw memory: the optimizer step, the split master, the norm, casts and copies.

Addresses are ints (`tensor.data_ptr()`), `n` counts elements. Every call releases the GIL, may run on several
Python threads at once and gives the same bits whatever the instruction set, the alignment and the number of
threads. The caller keeps the memory alive, and nobody else writes to it, until the call returns.
`kernels.h` states what each operation computes, in which order.
"""

from infinity.kernels.checksums import STRETCH_NUMEL, Checksums, Field
from infinity.kernels.library import UnsupportedIsaError, bind_threads, isa, set_isa, set_threads, threads
from infinity.kernels.operations import (
    MOST_ROWS,
    STATE_BLOCK,
    AnyGradientDtype,
    GradientDtype,
    Rows,
    accumulate,
    accumulate_f16,
    accumulate_f32,
    adamw,
    adamw_bf16,
    adamw_int8,
    add_product_bf16,
    copy,
    dequantize,
    join,
    multiplies_bf16,
    narrow,
    narrow_f16,
    product_bf16,
    quantize,
    rewrite,
    split,
    sum_squares,
    widen,
    widen_f16,
)
from infinity.kernels.recipes import adagrad, adam, adamw_fp16, adamw_fp32, lion, sgd
from infinity.kernels.scalars import AdagradScalars, AdamWScalars, LionScalars, SGDScalars, state_key

__all__ = [
    "MOST_ROWS",
    "STATE_BLOCK",
    "STRETCH_NUMEL",
    "AdagradScalars",
    "AdamWScalars",
    "AnyGradientDtype",
    "Checksums",
    "Field",
    "GradientDtype",
    "LionScalars",
    "Rows",
    "SGDScalars",
    "UnsupportedIsaError",
    "accumulate",
    "accumulate_f16",
    "accumulate_f32",
    "adagrad",
    "adam",
    "adamw",
    "adamw_bf16",
    "adamw_fp16",
    "adamw_fp32",
    "adamw_int8",
    "add_product_bf16",
    "bind_threads",
    "copy",
    "dequantize",
    "isa",
    "join",
    "lion",
    "multiplies_bf16",
    "narrow",
    "narrow_f16",
    "product_bf16",
    "quantize",
    "rewrite",
    "set_isa",
    "set_threads",
    "sgd",
    "split",
    "state_key",
    "sum_squares",
    "threads",
    "widen",
    "widen_f16",
]
