"""`infinity doctor`: what this machine offers to training, and what to fix. Leaves no file behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.markup import escape
from rich.table import Table

from infinity import aio, kernels
from infinity.errors import InfinityError
from infinity.ranks.machine_memory import available_nbytes, total_nbytes
from infinity.sizes import BLOCK, format_size
from infinity.storage import disk_speed as disk
from infinity.storage.nvme import check_folder

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_OVER_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"})
_IO_URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
_MEANINGS = {
    "0": ("0: allowed for all", ""),
    "1": (
        "1: for root and one group alone",
        "sysctl kernel.io_uring_disabled=0, or join kernel.io_uring_group",
    ),
    "2": ("2: forbidden", "sysctl kernel.io_uring_disabled=0"),
}
_RINGS_FREE_SINCE = (5, 12)
"""The kernel from which on the rings of io_uring do not count as locked memory."""
STATE_NBYTES, SPILLED_NBYTES = 12, 6
"""Bytes per parameter on NVMe: hi 2, lo 2, m 4, v 4; gradients beyond the budget, in 16 bits and in fp32."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was looked at, what was found, and, where it could be better, how."""

    subject: str
    found: str
    fix: str = ""
    fatal: bool = False
    """Training cannot run like this."""
    failed: bool = False
    """It was to be measured, and could not be."""


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings: a group per folder, one on the machine's limits, one on the machine."""

    folders: tuple[str, ...]
    groups: tuple[tuple[Finding, ...], ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all groups, in order."""
        return tuple(finding for group in self.groups for finding in group)

    @property
    def healthy(self) -> bool:
        """Whether training can run there."""
        return not any(finding.fatal for finding in self.findings)

    @property
    def complete(self) -> bool:
        """Whether all that was to be measured was."""
        return not any(finding.failed for finding in self.findings)

    def table(self) -> Table:
        """The findings, for people."""
        verdict = "training can run here" if self.healthy else "training cannot run here"
        if not self.complete:
            verdict += "; not every disk could be measured"
        table = Table(
            title=escape(f"infinity doctor, {', '.join(self.folders)}: {verdict}"), title_justify="left"
        )
        table.add_column("what", style="bold", no_wrap=True)
        table.add_column("found")
        table.add_column("fix")
        for group in self.groups:
            table.add_section()
            for finding in group:
                style = "red" if finding.fatal or finding.failed else "yellow" if finding.fix else None
                table.add_row(finding.subject, escape(finding.found), escape(finding.fix), style=style)
        return table


def examine(folders: str | Sequence[str], *, measure: bool = False) -> Examination:
    """Look at one folder or several, and at the machine.

    measure: measure the disks now, about 2 s each, and renew the cache; else show what the cache holds.
    """
    names = (folders,) if isinstance(folders, str) else tuple(folders)
    storage = [tuple(_storage(name, measure=measure)) for name in names]
    return Examination(names, (*storage, (*_shared(names), *_limits()), tuple(_machine())))


# Storage


def _storage(folder: str, *, measure: bool) -> Iterator[Finding]:
    try:
        check_folder(folder)
    except InfinityError as error:
        yield Finding("folder", str(error), "name a folder on the NVMe device: --nvme DIR", fatal=True)
        return
    kind = disk.filesystem(Path(folder).resolve())
    yield Finding("folder", f"{Path(folder).resolve()}, {kind}", _advice_on(kind))
    yield _engine(folder)
    yield _direct(folder)
    yield Finding("alignment", _alignment(folder))
    yield _space(folder)
    yield _measured_now(folder) if measure else _speed(disk.measured(folder))


def _speed(speed: disk.DiskSpeed | None) -> Finding:
    if speed is None:
        return Finding(
            "speed", "not measured yet: the first training there will", "infinity doctor --measure"
        )
    return Finding(
        "speed",
        f"read {speed.read / 1e9:.2f}, write {speed.write / 1e9:.2f}, mixed {speed.mixed / 1e9:.2f} GB/s; "
        f"{speed.depth} requests of {format_size(speed.piece_nbytes)} in flight; measured on {speed.date} "
        f"with {speed.engine}",
    )


def _measured_now(folder: str) -> Finding:
    try:
        return _speed(disk.measure(folder))
    except (OSError, ValueError, InfinityError) as error:
        fix = "make room, or use a filesystem with O_DIRECT"
        return Finding("speed", f"not measured: {error}", fix, failed=True)


def _shared(folders: tuple[str, ...]) -> Iterator[Finding]:
    """Name the folders that lie on one filesystem."""
    on: dict[int, list[str]] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            on.setdefault(os.stat(folder).st_dev, []).append(folder)
    for together in on.values():
        if len(together) > 1:
            found = f"{' and '.join(together)} lie on one filesystem"
            yield Finding("striping", found, "name one folder per drive: one drive alone gains nothing")


def _advice_on(kind: str) -> str:
    if kind in _IN_MEMORY:
        return "it lies in memory: state there takes the memory it should save"
    return "it lies on a network: use a local drive" if kind in _OVER_NETWORK else ""


def _engine(folder: str) -> Finding:
    asked = os.environ.get("INFINITY_AIO")
    try:
        with aio.open_engine(folder) as engine:
            kind, reason = engine.kind, engine.reason
    except (OSError, ValueError) as error:
        fix = "unset INFINITY_AIO" if asked else ""
        return Finding("I/O engine", str(error), fix, fatal=True)
    if asked:
        return Finding(
            "I/O engine", reason, "" if kind == "io_uring" else "unset INFINITY_AIO to take the best"
        )
    try:
        with aio.open_engine(folder, aio.KINDS[0]):
            return Finding("I/O engine", reason)
    except aio.EngineUnavailableError as error:
        cure = str(error).rpartition("  try: ")[2].strip()
        return Finding("I/O engine", reason, f"for {aio.KINDS[0]}: {cure}")


def _direct(folder: str) -> Finding:
    """Say whether O_DIRECT works, by the engine that needs nothing else."""
    try:
        with aio.open_engine(folder, "threads"):
            return Finding("O_DIRECT", "works: transfers bypass the page cache")
    except OSError:
        return Finding(
            "O_DIRECT",
            "refused here: transfers go through the page cache",
            "use a filesystem that takes it: ext4, xfs",
        )


def _alignment(folder: str) -> str:
    number = os.stat(folder).st_dev
    found = f"every transfer is whole {BLOCK} B blocks"
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for queue in (device / "queue", device / ".." / "queue"):  # a partition's is its disk's
        try:
            nbytes = (queue / "logical_block_size").read_text().strip()
        except OSError:
            continue
        return f"{found}; the device's are {nbytes} B"
    return found


def _space(folder: str) -> Finding:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    fits, fewer = _count(free / STATE_NBYTES), _count(free / (STATE_NBYTES + SPILLED_NBYTES))
    tight = free < 4 << 30
    return Finding(
        "free space",
        f"{format_size(free)}: room for {fits} parameters, {fewer} if gradients spill",
        "make room, or name another folder" if tight else "",
        fatal=free < BLOCK * 256,
    )


def _count(number: float) -> str:
    return f"{number / 1e9:.1f} G" if number >= 1e9 else f"{number / 1e6:.0f} M"


# Limits


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("memlock limit", "none")
    else:
        locked = _kernel() < _RINGS_FREE_SINCE
        small = locked and soft < 8 << 20
        spared = "enough; host memory larger than this is not registered, which costs some CPU time"
        counts = "io_uring's rings count against it" if locked else spared
        yield Finding(
            "memlock limit", f"{format_size(soft)}: {counts}", "ulimit -l unlimited" if small else ""
        )
    try:
        found, fix = _MEANINGS.get(_IO_URING_DISABLED.read_text().strip(), ("unknown", ""))
    except OSError:
        found, fix = "not there (before Linux 6.6): allowed, unless the container's profile filters it", ""
    yield Finding("io_uring sysctl", found, fix)


def _kernel() -> tuple[int, ...]:
    """Return the kernel's version as far as it is numbers: (6, 1, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", platform.release())[:3])


# The machine


def _machine() -> Iterator[Finding]:
    yield Finding("kernel", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    fast = kernels.isa() != "scalar"
    slow = "" if fast else "unset INFINITY_ISA, or use a machine with AVX2: updates will be slow"
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        "CPU", f"{_processor()}, {cores} cores; kernels: {kernels.isa()}, {kernels.threads()} threads", slow
    )
    memory = psutil.virtual_memory()
    available = available_nbytes()
    found = f"{format_size(memory.total)}, {format_size(available)} available"
    if (limit := total_nbytes()[0]) < memory.total:
        found += f"; this container may use {format_size(limit)}"
    yield Finding("memory", f"{found}; host_memory by default {format_size(available // 2)}")
    yield Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads; {_cuda()}")
    yield _fio()
    missing = [name for name in ("transformers", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            "infinity train", f"lacks {' and '.join(missing)}", "pip install 'zero-infinity[train]'"
        )


def _fio() -> Finding:
    """Say whether `infinity bench io` can be compared with fio."""
    path = shutil.which("fio")
    if path is None:
        return Finding(
            "fio", "not installed: only `infinity bench io --peer fio` needs it", "apt install fio"
        )
    return Finding("fio", f"{path}, for `infinity bench io --peer fio`")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"
