"""Measurements that never took place, for tests of what is concluded from them."""

from dataclasses import replace

from infinity.bench.aio.fio import Bandwidth
from infinity.bench.engine.floor import Round, Speeds
from infinity.bench.engine.runs import Measured
from infinity.bench.planning.cores import Cores

RUN = Measured(
    parameters=1000,
    seconds=1.0,
    forward_s=0.2,
    backward_s=0.3,
    step_s=0.5,
    read_per_parameter=14.0,
    written_per_parameter=12.0,
    device_per_parameter=30.0,
    peak_nbytes=1 << 20,
    build_peak_nbytes=1 << 10,
    train_peak_nbytes=1 << 20,
    baseline_nbytes=0,
    build_s=0.0,
    loss=9.0,
    all_seconds=[],
    all_losses=[],
    load=0.0,
    engine={"budget_nbytes": 4096, "nvme_nbytes": 12000, "host_nbytes": 0, "io_engine": "threads"},
    versions={},
)
DISK = Bandwidth(read=2000.0, write=3000.0, mixed=1600.0)
SPEEDS = Speeds(fio=DISK, own=Bandwidth(read=4000.0, write=4000.0, mixed=3250.0))
CORES = Cores(update=1e9, checked=1e10, copied=1e10, shared=True, computing=0.4, working=0.5)


def a_round(compute_s: float = 5.0, **changes: object) -> Round:
    """Return a run of 1000 parameters with 14 + 12 bytes each, on a disk of 2000, 3000, 1600 B/s by fio."""
    return Round(replace(RUN, **changes), compute_s, before=SPEEDS, after=SPEEDS, cores=CORES)
