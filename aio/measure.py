"""How fast an engine moves large requests, and at what CPU time: `python -m infinity.aio.measure FOLDER`."""

import argparse
import os
import resource
import sys
import time
from dataclasses import dataclass

from infinity.aio.completion import Completion
from infinity.aio.engine import Engine
from infinity.aio.files import File
from infinity.aio.memory import AlignedMemory
from infinity.aio.probe import KINDS, open_engine


@dataclass(frozen=True, slots=True)
class Measurement:
    """One sequential pass over a file."""

    verb: str
    nbytes: int
    wall_s: float
    cpu_s: float  # user and system, of this whole process

    def __str__(self) -> str:
        gigabytes = self.nbytes / 1e9
        return f"{self.verb} {gigabytes / self.wall_s:.2f} GB/s, {self.cpu_s / gigabytes:.3f} CPU s/GB"


def measure(engine: Engine, file: File, *, write: bool, nbytes: int, request_nbytes: int) -> Measurement:
    """Pass once over the first `nbytes` of a file in order, with eight requests in flight."""
    slots = 8
    memory = AlignedMemory(slots * request_nbytes)
    memory.view[:] = os.urandom(len(memory))
    start = engine.write if write else engine.read
    pending: list[Completion] = []
    cpu_s, wall_s = _cpu_s(), time.perf_counter()
    for i, offset in enumerate(range(0, nbytes, request_nbytes)):
        if len(pending) == slots:
            pending.pop(0).wait()
        place = memory.address + i % slots * request_nbytes
        pending.append(start(file, offset, place, min(request_nbytes, nbytes - offset), owner=memory))
    for completion in pending:
        completion.wait()
    wall_s = time.perf_counter() - wall_s
    return Measurement("write" if write else "read", nbytes, wall_s, _cpu_s() - cpu_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Write a file twice (its blocks are new the first time) and read it, with each kind of engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--mib", type=int, default=2048, help="size of the file (default 2048)")
    parser.add_argument("--request-mib", type=int, default=8, help="size of a request (default 8)")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    nbytes, request_nbytes = options.mib << 20, options.request_mib << 20
    for kind in options.kinds:
        with (
            open_engine(options.folder, kind, depth=options.depth, threads=options.threads) as engine,
            engine.open_nameless(options.folder) as file,
        ):
            file.allocate(0, nbytes)
            for write in (True, True, False):
                result = measure(engine, file, write=write, nbytes=nbytes, request_nbytes=request_nbytes)
                sys.stdout.write(f"{kind:9} {result}\n")


if __name__ == "__main__":
    main()
