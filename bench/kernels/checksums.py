"""Speed of checksums for records: xxh3 of the xxhash package beside crc32c with the CPU's own instruction.

    python -m infinity.bench.kernels.checksums [--json FILE]

crc32c is compiled here, in a temporary folder: as one chain of the instruction, whose latency limits it, and
as three chains over thirds of the bytes, the fastest way (combining the three into one costs a little more).
zlib's crc32 is the one in Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cffi
import torch
import xxhash
from rich.console import Console

from infinity.bench.findings import Column, Findings, add_outputs, asked, check_outputs, gb_per_s, report
from infinity.bench.planning.cores import best
from infinity.errors import ConfigError

SIZES = (16 << 10, 1 << 20, 64 << 20)
"""Bytes that fit a core's caches, of a tile's field, and more than the caches hold."""
_DECLARED = """
uint32_t crc32c_one(const uint8_t *bytes, size_t nbytes);
uint32_t crc32c_three(const uint8_t *bytes, size_t nbytes);
"""
_SOURCE = """
#include <nmmintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
static uint64_t word(const uint8_t *at) { uint64_t value; memcpy(&value, at, 8); return value; }
uint32_t crc32c_one(const uint8_t *bytes, size_t nbytes) {
    uint64_t crc = ~0u;
    for (size_t i = 0; i < nbytes; i += 8) crc = _mm_crc32_u64(crc, word(bytes + i));
    return ~(uint32_t)crc;
}
uint32_t crc32c_three(const uint8_t *bytes, size_t nbytes) {
    uint64_t a = ~0u, b = 0, c = 0;
    size_t third = nbytes / 24 * 8;
    for (size_t i = 0; i < third; i += 8) {
        a = _mm_crc32_u64(a, word(bytes + i));
        b = _mm_crc32_u64(b, word(bytes + third + i));
        c = _mm_crc32_u64(c, word(bytes + 2 * third + i));
    }
    return (uint32_t)(a ^ b ^ c);
}
"""


def compiled(folder: str) -> tuple[cffi.FFI, Any]:
    """Compile crc32c with SSE 4.2, without Python's headers; return cffi's interface and the library.

    Raises: ConfigError without a C compiler, or on another kind of CPU.
    """
    ffi = cffi.FFI()
    ffi.cdef(_DECLARED)
    source, library = Path(folder, "crc32c.c"), Path(folder, "crc32c.so")
    source.write_text(_SOURCE)
    compiler = os.environ.get("CC", "cc").split()
    command = [*compiler, "-O3", "-msse4.2", "-shared", "-fPIC", str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 (our own source)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", None) or error
        raise ConfigError(
            f"crc32c cannot be compiled: a C compiler and an x86-64 CPU are needed ({told})"
        ) from error
    return ffi, ffi.dlopen(str(library))


def contestants(
    ffi: cffi.FFI, library: Any, content: memoryview
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name, call) of each checksum of `content`."""
    at = ffi.cast("uint8_t *", ffi.from_buffer(content))
    yield "xxh3, 64 bits", lambda: xxhash.xxh3_64_intdigest(content)
    yield "crc32c, three chains", lambda: library.crc32c_three(at, content.nbytes)
    yield "crc32c, one chain", lambda: library.crc32c_one(at, content.nbytes)
    yield "crc32 of zlib", lambda: zlib.crc32(content)


def measured(rounds: int) -> list[dict[str, Any]]:
    """Time all checksums on all sizes: the best of some rounds, as other processes only slow them down."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="infinity-bench-") as folder:
        ffi, library = compiled(folder)
        for nbytes in SIZES:
            content = torch.randint(-128, 127, (nbytes,), dtype=torch.int8).numpy().data
            for name, call in contestants(ffi, library, content):
                repeats = rounds * max(1, (1 << 24) // nbytes)
                rows.append({"checksum": name, "nbytes": nbytes, "bytes_per_s": nbytes / best(call, repeats)})
    return rows


def main() -> int:
    """Measure on one core, report."""
    parser = argparse.ArgumentParser(prog="python -m infinity.bench.kernels.checksums", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="of which the best counts (20)")
    add_outputs(parser, plots=False)
    options = parser.parse_args()
    check_outputs(options)
    columns = (
        Column("checksum", "checksum"),
        Column("nbytes", "bytes", "{:,}".format),
        Column("bytes_per_s", "one core", gb_per_s),
    )
    findings = Findings("Checksums of records", measured(options.rounds), columns, options=asked(options))
    report(findings, options, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
