"""The kernel for CUDA devices, compiled for the CPU: its bits are those of the CPU's kernels. Trusted: these
kernels, and that CUDA's intrinsics round as they are documented to. On a GPU the same steps are tried in
tests/units/test_fused_updates.py.
"""

import os
import shlex
import subprocess
from pathlib import Path

import cffi
import pytest
import torch

import infinity.kernels
from infinity.kernels.operations import rounded
from infinity.records.update_rules import ADAM, ADAMW, UpdateSpan
from infinity.records.weights import KERNEL_DTYPE
from steps_of_records import ADAMS, NUMEL, fields, randoms, same_bits

SOURCE = Path(infinity.kernels.__file__).parent / "adamw.cu"
AS_CPU = """
#include <math.h>
#include <string.h>
#define __global__
#define __device__
struct axis { unsigned x; };
static struct axis gridDim = {3}, blockDim = {8}, blockIdx, threadIdx;
static float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
static int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
#include SOURCE
void every_thread(unsigned long long n, void *hi, short *lo, float *m, float *v, const void *grad, int kind,
                  const struct infinity_adamw *s, int is_adam) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            infinity_adamw_device(n, hi, lo, m, v, grad, kind, *s, is_adam);
}
unsigned long long size(void) { return sizeof(struct infinity_adamw); }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cpu.c").write_text(AS_CPU)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    flags = ["-shared", "-fPIC", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    made = [
        *compiler,
        *flags,
        f'-DSOURCE="{SOURCE}"',
        str(folder / "cpu.c"),
        "-o",
        str(folder / "cpu.so"),
        "-lm",
    ]
    subprocess.run(made, check=True)
    ffi = cffi.FFI()
    pointers = ", ".join(5 * ["void *"])
    ffi.cdef(f"void every_thread(unsigned long long, {pointers}, int, const void *, int);")
    ffi.cdef("unsigned long long size(void);")
    return ffi, ffi.dlopen(str(folder / "cpu.so"))


def test_its_scalars_are_laid_out_as_those_of_the_kernels(compiled):
    assert compiled[1].size() == infinity.kernels.library.ffi.sizeof("struct infinity_adamw")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("gradient", ["bf16", "fp32", "zeros"])
@pytest.mark.parametrize("scalars", ADAMS)
@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=["AdamW", "Adam"])
def test_every_thread_has_the_bits_of_the_kernels(compiled, rule, scalars, gradient, dtype):
    ffi, library = compiled
    grads = {"bf16": randoms(4).bfloat16(), "fp32": randoms(4), "zeros": torch.zeros(NUMEL)}
    grad = grads[gradient]
    ours, theirs = fields(dtype, rule), fields(dtype, rule)
    addresses = {name: one.data_ptr() for name, one in theirs.items()}
    rule.kernels[dtype, "fp32"](
        UpdateSpan(NUMEL, addresses, grad.data_ptr(), KERNEL_DTYPE[grad.dtype]), scalars
    )
    at = [ffi.cast("void *", ours[name].data_ptr() if name in ours else 0) for name in ("hi", "lo", "m", "v")]
    kind = {"bf16": 1, "fp32": 2, "zeros": 0}[gradient]
    given = ffi.cast("void *", grad.data_ptr() if kind else 0)
    library.every_thread(NUMEL, *at, given, kind, ffi.cast("void *", rounded(scalars)), int(rule is ADAM))
    same_bits(ours, theirs)
