"""The compiled kernels, the instruction set they use and the threads they run on."""

# ruff: noqa: D102  (KernelLibrary repeats kernels.h, which says what each function does)

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import cffi

Pointer: TypeAlias = Any  # cffi's cdata has no type

MAX_THREADS = 1024  # as in pool.c


class UnsupportedIsaError(RuntimeError):
    """The requested instruction set is unknown, or not available in this machine or build."""


class KernelLibrary(Protocol):
    """The functions of kernels.h, as cffi shows them: pointers are cdata, sizes are ints."""

    def infinity_checksum(self, n_fields: int, fields: Pointer, after: int) -> None: ...
    def infinity_take(self, n_fields: int, fields: Pointer, source: Pointer) -> None: ...
    def infinity_adamw_bf16(
        self,
        n: int,
        hi: Pointer,
        lo: Pointer,
        m: Pointer,
        v: Pointer,
        grad: Pointer,
        scalars: Pointer,
        n_fields: int,
        fields: Pointer,
    ) -> None: ...
    def infinity_adamw_f32(
        self,
        n: int,
        hi: Pointer,
        lo: Pointer,
        m: Pointer,
        v: Pointer,
        grad: Pointer,
        scalars: Pointer,
        n_fields: int,
        fields: Pointer,
    ) -> None: ...
    def infinity_small_step(
        self,
        n: int,
        what: Pointer,
        grad: Pointer,
        grad_type: int,
        key: int,
        first: int,
        n_fields: int,
        fields: Pointer,
    ) -> None: ...
    def infinity_adamw_half(
        self,
        n: int,
        weight: Pointer,
        master: Pointer,
        m: Pointer,
        v: Pointer,
        grad: Pointer,
        grad_type: int,
        scalars: Pointer,
    ) -> None: ...
    def infinity_adamw_full(
        self,
        n: int,
        weight: Pointer,
        m: Pointer,
        v: Pointer,
        grad: Pointer,
        grad_type: int,
        scalars: Pointer,
    ) -> None: ...
    def infinity_adam(
        self,
        n: int,
        hi: Pointer,
        lo: Pointer,
        m: Pointer,
        v: Pointer,
        grad: Pointer,
        grad_type: int,
        scalars: Pointer,
    ) -> None: ...
    def infinity_sgd(
        self,
        n: int,
        hi: Pointer,
        lo: Pointer,
        m: Pointer,
        grad: Pointer,
        grad_type: int,
        scalars: Pointer,
    ) -> None: ...
    def infinity_adagrad(
        self,
        n: int,
        hi: Pointer,
        lo: Pointer,
        v: Pointer,
        grad: Pointer,
        grad_type: int,
        scalars: Pointer,
    ) -> None: ...
    def infinity_lion(
        self,
        n: int,
        hi: Pointer,
        lo: Pointer,
        m: Pointer,
        grad: Pointer,
        grad_type: int,
        scalars: Pointer,
    ) -> None: ...
    def infinity_narrow(self, n: int, f32: Pointer, bf16: Pointer) -> None: ...
    def infinity_quantize(
        self, n: int, m_f32: Pointer, v_f32: Pointer, m: Pointer, v: Pointer, scale: Pointer
    ) -> None: ...
    def infinity_dequantize(
        self, n: int, m: Pointer, v: Pointer, scale: Pointer, m_f32: Pointer, v_f32: Pointer
    ) -> None: ...
    def infinity_quantize4(
        self, n: int, m_f32: Pointer, v_f32: Pointer, packed: Pointer, scale: Pointer
    ) -> None: ...
    def infinity_dequantize4(
        self, n: int, packed: Pointer, scale: Pointer, m_f32: Pointer, v_f32: Pointer
    ) -> None: ...
    def infinity_sum_squares_bf16(self, n: int, grad: Pointer) -> Pointer: ...
    def infinity_sum_squares_f32(self, n: int, grad: Pointer) -> Pointer: ...
    def infinity_sum_squares_f16(self, n: int, grad: Pointer) -> Pointer: ...
    def infinity_split(self, n: int, f32: Pointer, hi: Pointer, lo: Pointer) -> None: ...
    def infinity_join(self, n: int, hi: Pointer, lo: Pointer, f32: Pointer) -> None: ...
    def infinity_widen_lo(self, n: int, lo8: Pointer, lo: Pointer) -> None: ...
    def infinity_round_lo(
        self, n: int, lo: Pointer, nearest: int, key: int, first: int, lo8: Pointer
    ) -> None: ...
    def infinity_widen(self, n: int, bf16: Pointer, f32: Pointer) -> None: ...
    def infinity_widen_e4m3(
        self,
        first: int,
        n: int,
        blocks: Pointer,
        codes: Pointer,
        scales: Pointer,
        f32: Pointer,
    ) -> None: ...
    def infinity_widen_i8(
        self,
        first: int,
        n: int,
        cols: int,
        factor: float,
        codes: Pointer,
        scales: Pointer,
        f32: Pointer,
    ) -> None: ...
    def infinity_widen_4bit(
        self,
        first: int,
        n: int,
        block: int,
        high_first: int,
        table: Pointer,
        codes: Pointer,
        scales: Pointer,
        f32: Pointer,
    ) -> None: ...
    def infinity_widen_scales(
        self,
        first: int,
        n: int,
        block: int,
        table: Pointer,
        codes: Pointer,
        scales: Pointer,
        offset: float,
        f32: Pointer,
    ) -> None: ...
    def infinity_widen_e8m0(self, n: int, codes: Pointer, f32: Pointer) -> None: ...
    def infinity_encode(
        self, n: int, values: Pointer, type_: int, bits: int, codes: Pointer, scales: Pointer
    ) -> None: ...
    def infinity_transpose(
        self,
        rows: int,
        cols: int,
        width: int,
        source: Pointer,
        source_nbytes: int,
        target: Pointer,
        target_nbytes: int,
    ) -> None: ...
    def infinity_widen_f16(self, n: int, f16: Pointer, f32: Pointer) -> None: ...
    def infinity_narrow_f16(self, n: int, f32: Pointer, f16: Pointer) -> None: ...
    def infinity_accumulate_bf16(self, n: int, acc: Pointer, grad: Pointer) -> None: ...
    def infinity_accumulate_f32(self, n: int, acc: Pointer, grad: Pointer) -> None: ...
    def infinity_accumulate_f16(self, n: int, acc: Pointer, grad: Pointer) -> None: ...
    def infinity_multiplies_bf16(self) -> int: ...
    def infinity_add_product_bf16(
        self,
        k: int,
        m: int,
        n: int,
        left: Pointer,
        left_stride: int,
        left_step: int,
        right: Pointer,
        right_stride: int,
        total: Pointer,
        total_stride: int,
        n_threads: int,
    ) -> int: ...
    def infinity_product_bf16(
        self,
        k: int,
        m: int,
        n: int,
        left: Pointer,
        left_stride: int,
        left_step: int,
        right: Pointer,
        right_stride: int,
        result: Pointer,
        result_stride: int,
        n_threads: int,
    ) -> int: ...
    def infinity_rewrite(self, n: int, new_hi: Pointer, hi: Pointer, lo: Pointer) -> None: ...
    def infinity_copy(self, n_bytes: int, dst: Pointer, src: Pointer) -> None: ...
    def infinity_traffic(self, n: int, n_streams: int, streams: Pointer) -> None: ...
    def infinity_let_sleep(self, more: int) -> int: ...
    def infinity_set_threads(self, n_threads: int) -> None: ...
    def infinity_threads(self) -> int: ...
    def infinity_bind_threads(self, n: int, cpus: Pointer) -> int: ...
    def infinity_set_isa(self, name: Pointer) -> int: ...
    def infinity_isa(self) -> Pointer: ...


def _load(ffi: cffi.FFI) -> KernelLibrary:
    folder = Path(__file__).resolve().parent
    header = (folder / "kernels.h").read_text(encoding="utf-8")
    ffi.cdef("\n".join(line for line in header.splitlines() if not line.startswith("#")))
    path = folder / "_kernels.so"
    if not path.exists():
        message = (
            f"{path} is missing: the C kernels are not built\n"
            "  try: pip install -e . in the repository (it runs the C compiler), or\n"
            "       cc -O3 -fPIC -shared -fvisibility=hidden -ffp-contract=off -fno-tree-vectorize -pthread "
            "kernels/*.c -o kernels/_kernels.so -lm -ldl"
        )
        raise ImportError(message)
    # NODELETE: the pool's threads sleep in this code until the process ends, and cffi closes it earlier.
    return cast("KernelLibrary", ffi.dlopen(str(path), os.RTLD_NOW | os.RTLD_NODELETE))


ffi = cffi.FFI()
library = _load(ffi)


def isa() -> str:
    """Return the instruction set in use: "scalar", "avx2" or "avx512"."""
    name: bytes = ffi.string(library.infinity_isa())
    return name.decode()


def set_isa(name: str | None) -> None:
    """Use one instruction set in all later calls; None takes the best of this machine.

    Raises:
        UnsupportedIsaError: the name is unknown, or this machine or build lacks it. The set in use stays.
    """
    code = library.infinity_set_isa(ffi.NULL if name is None else name.encode())
    if code == 0:
        return
    cause = "is not an instruction set" if code == -1 else "is not available in this machine or this build"
    message = (
        f"{name!r} {cause}\n"
        f"  in use: {isa()}\n"
        "  try: INFINITY_ISA=scalar, avx2 or avx512, or leave it unset to take the best available"
    )
    raise UnsupportedIsaError(message)


def threads() -> int:
    """Return the number of threads of a large call, including the calling one."""
    return library.infinity_threads()


def set_threads(n: int) -> None:
    """Use n threads per large call, including the calling one; with 1 everything runs in the caller.

    Waits for a running call.
    """
    if not 1 <= n <= MAX_THREADS:
        message = f"{n} threads: expected 1 to {MAX_THREADS}"
        raise ValueError(message)
    library.infinity_set_threads(n)


def bind_threads(cpus: Sequence[int]) -> None:
    """Bind the pool's threads to this set of CPUs; empty: to those of the process.

    The calling thread, which works too, keeps its own affinity. Waits for a running call. The choice of a
    process's CPUs is made in infinity.storage.cpu_affinity.

    Raises:
        ValueError: this process may not run on one of the CPUs.
    """
    allowed = os.sched_getaffinity(0)
    refused = sorted(set(cpus) - allowed)
    if refused:
        message = f"CPUs {refused}: this process may run on {sorted(allowed)}\n  try: a subset of those"
        raise ValueError(message)
    if library.infinity_bind_threads(len(cpus), ffi.new("int32_t[]", list(cpus))) != 0:
        message = f"CPUs {sorted(cpus)}: expected numbers below 1024, what the C library's CPU sets hold"
        raise ValueError(message)


set_isa(os.environ.get("INFINITY_ISA") or None)
set_threads(min(len(os.sched_getaffinity(0)), MAX_THREADS))
