"""The speed of the CPU kernels beside the memory bandwidth measured in the same run.

    python -m infinity.bench.kernels [--numel 33554432] [--repeats 15] [--threads 1 2]

Each row is timed in turn, `repeats` times over after one warm-up round; the best counts, the call that other
users of the machine disturbed least, for the bound as for the rest. GB/s are bytes read and written, by
formula. The bound is the bandwidth of `traffic`: adamw's streams, through the same pool, with one integer
addition per 8 bytes. A row with fewer streams or fewer writes can exceed it; one whose stores go through the
caches first reads what it overwrites (split, join, widen), which the formula does not count.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinity import kernels
from infinity.kernels.library import ffi, library

TRAFFIC = "traffic (bound)"
SETTLE_S = 0.02  # torch's OpenMP threads spin after their work and would slow whatever comes next
# A bf16 weight stored beside its fp32 master, with a bf16 gradient: master, m, v and gradient are read;
# master, m, v and weight are written. The split master needs no second copy of the weight's upper half: 26.
BESIDE_BYTES = 28


@dataclass(frozen=True, slots=True)
class Row:
    """One operation: what it is called, bytes moved per parameter, and the call."""

    name: str
    bytes_per_parameter: float
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Fields:
    """A record and its gradient, and room for casts, all of the same number of elements."""

    hi: torch.Tensor
    lo: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    f32: torch.Tensor

    @classmethod
    def of(cls, numel: int) -> "Fields":
        """Make a record of ordinary values: denormals would measure something else."""
        fields = cls(
            hi=torch.empty(numel, dtype=torch.int16),
            lo=torch.empty(numel, dtype=torch.int16),
            m=torch.zeros(numel),
            v=torch.zeros(numel),
            grad=(torch.randn(numel) * 1e-2).bfloat16(),
            f32=torch.randn(numel) * 2e-2,
        )
        kernels.split(numel, fields.f32.data_ptr(), fields.hi.data_ptr(), fields.lo.data_ptr())
        return fields


def kernel_rows(fields: Fields, spare: Fields) -> list[Row]:
    """List the kernels over one record; `spare` is what traffic may scribble on."""
    n = fields.f32.numel()
    hi, lo, m, v, grad, f32 = (
        tensor.data_ptr() for tensor in (fields.hi, fields.lo, fields.m, fields.v, fields.grad, fields.f32)
    )
    scalars = kernels.AdamWScalars(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=10)
    pointers = [
        ffi.cast(kind, tensor.data_ptr())
        for kind, tensor in (
            ("uint16_t *", spare.hi),
            ("int16_t *", spare.lo),
            ("float *", spare.m),
            ("float *", spare.v),
            ("uint16_t *", spare.grad),
        )
    ]
    acc = spare.f32.data_ptr()
    return [
        Row(TRAFFIC, 26, lambda: library.infinity_traffic(n, *pointers)),
        Row("copy", 8, lambda: kernels.copy(4 * n, acc, f32)),
        Row("adamw, bf16 gradient", 26, lambda: kernels.adamw(n, hi, lo, m, v, grad, "bf16", scalars)),
        Row("adamw, fp32 gradient", 28, lambda: kernels.adamw(n, hi, lo, m, v, f32, "f32", scalars)),
        Row("sum_squares, bf16", 2, lambda: kernels.sum_squares(n, grad, "bf16")),
        Row("sum_squares, fp32", 4, lambda: kernels.sum_squares(n, f32, "f32")),
        Row("accumulate, bf16", 10, lambda: kernels.accumulate(n, acc, grad)),
        Row("split", 8, lambda: kernels.split(n, f32, spare.hi.data_ptr(), spare.lo.data_ptr())),
        Row("join", 8, lambda: kernels.join(n, hi, lo, acc)),
        Row("widen", 6, lambda: kernels.widen(n, grad, acc)),
    ]


def torch_row(numel: int) -> Row:
    """Make torch's fastest: the fused AdamW on fp32 weights and gradients."""
    parameter = torch.nn.Parameter(torch.randn(numel) * 2e-2)
    parameter.grad = torch.randn(numel) * 1e-2
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.1, fused=True)
    return Row("torch fused AdamW, all fp32", 28, optimizer.step)


def best(rows: list[Row], repeats: int) -> dict[str, float]:
    """Return the least seconds of each row, timed in turn."""
    seconds: dict[str, list[float]] = {row.name: [] for row in rows}
    for repeat in range(repeats + 1):
        for row in rows:
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            row.call()
            if repeat > 0:
                seconds[row.name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in seconds.items()}


def report(rows: list[Row], numel: int, threads: int, repeats: int) -> str:
    """Time the rows on so many threads; return the table."""
    kernels.set_threads(threads)
    torch.set_num_threads(threads)
    seconds = best(rows, repeats)
    bound = 26 * numel / seconds[TRAFFIC] / 1e9
    lines = [
        f"{threads} thread{'s' * (threads > 1)}",
        "| operation | Mparam/s | GB/s | of bound |",
        "|---|--:|--:|--:|",
    ]
    for row in rows:
        rate = numel / seconds[row.name]
        bandwidth = row.bytes_per_parameter * rate / 1e9
        lines.append(f"| {row.name} | {rate / 1e6:.0f} | {bandwidth:.1f} | {bandwidth / bound:.2f} |")
    beside = bound * 1e9 / BESIDE_BYTES
    lines.append(
        f"| bf16 weight beside an fp32 master, {BESIDE_BYTES} B at the bound (formula) "
        f"| {beside / 1e6:.0f} | {bound:.1f} | 1.00 |"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m infinity.bench.kernels")
    parser.add_argument(
        "--numel", type=int, default=1 << 25, help="parameters: 14 B each must exceed the caches"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    options = parser.parse_args(arguments)
    # Kept by name: the rows hold addresses only.
    fields, spare = Fields.of(options.numel), Fields.of(options.numel)
    rows = [*kernel_rows(fields, spare), torch_row(options.numel)]
    sys.stdout.write(
        f"{platform.platform()} · torch {torch.__version__} · {kernels.isa()} · {options.numel} parameters\n"
    )
    for threads in options.threads:
        sys.stdout.write("\n" + report(rows, options.numel, threads, options.repeats) + "\n")


if __name__ == "__main__":
    main()
