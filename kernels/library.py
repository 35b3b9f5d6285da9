"""The compiled kernels, the instruction set they use and the threads they run on."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import cffi

Pointer: TypeAlias = Any  # cffi's cdata has no type

MAX_THREADS = 1024  # as in pool.c


class UnsupportedIsaError(RuntimeError):
    """The requested instruction set is unknown, or not available in this machine or build."""


def _load(ffi: cffi.FFI) -> Any:
    """Return the functions of kernels.h, as it declares them: cffi refuses calls that do not fit."""
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
    return ffi.dlopen(str(path), os.RTLD_NOW | os.RTLD_NODELETE)


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
    return int(library.infinity_threads())


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
