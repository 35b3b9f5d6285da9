"""`infinity doctor`: what this machine offers for training, and how to improve it. Leaves no file behind.

It imports neither torch nor transformers, nor numpy, which take seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.markup import escape
from rich.table import Table

from infinity import aio, kernels
from infinity.errors import InfinityError
from infinity.planning.outline import Outline
from infinity.ranks.machine_memory import available_nbytes, total_nbytes
from infinity.ranks.memory_trial import why_not_by_itself
from infinity.ranks.shared_memory import why_not_here
from infinity.sizes import BLOCK, format_size
from infinity.storage import disk_speed as disk
from infinity.storage.nvme import check_folder

_IO_URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_MEANINGS = {
    "0": ("allowed for all users", ""),
    "1": ("allowed for root and one group alone", "sysctl kernel.io_uring_disabled=0"),
    "2": ("forbidden", "sysctl kernel.io_uring_disabled=0"),
}
_RINGS_FREE_SINCE = (5, 12)
"""The first kernel that does not count io_uring's rings as locked memory."""
_FEW_FILES = 1024
_ANOTHER = "name a folder on an NVMe drive: --nvme DIR"
STATE_NBYTES, SPILLED_NBYTES = 12, 6
"""Bytes per parameter on NVMe: hi 2, lo 2, m 4, v 4; gradients beyond the budget, in 16 bits and in fp32."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: the subject, what was found, and how to improve it, if that is needed."""

    subject: str
    found: str
    fix: str = ""
    fatal: bool = False
    """Training cannot run like this."""
    failed: bool = False
    """A measurement that was asked for failed."""
    optional: bool = False
    """Training does not need the fix."""

    @property
    def mark(self) -> tuple[str, str | None]:
        """Return the word that the row begins with, and its colour."""
        if self.fatal or self.failed:
            return "FAIL", "red"
        return ("warn", "yellow") if self.fix and not self.optional else ("ok", None)


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
        """Whether training can run."""
        return not any(finding.fatal for finding in self.findings)

    @property
    def complete(self) -> bool:
        """Whether all measurements succeeded."""
        return not any(finding.failed for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        warnings = sum(finding.mark[0] == "warn" for finding in self.findings)
        verdict = "training can run here" if self.healthy else "training cannot run here"
        if not self.complete:
            verdict += "; not every disk could be measured"
        return verdict + (f", {warnings} warning{'s' * (warnings > 1)}" if warnings else "")

    def table(self) -> Table:
        """The findings, a row each, with the cure on a line of its own; it fits 80 columns."""
        table = Table(
            title=escape(f"infinity doctor, {', '.join(self.folders)}: {self.verdict}"),
            title_justify="left",
            show_header=False,
            box=None,
            pad_edge=False,
        )
        table.add_column(no_wrap=True, min_width=4)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for group in self.groups:
            for finding in group:
                mark, style = finding.mark
                fix = f"\n-> {finding.fix}" if finding.fix else ""
                table.add_row(mark, finding.subject, escape(finding.found + fix), style=style)
        return table


def examine(
    folders: str | Sequence[str], *, measure: bool = False, model: Callable[[], Outline] | None = None
) -> Examination:
    """Examine one folder or several, and the machine.

    measure: measure the disks now, about 2 s each, and update the cache; otherwise show the cache. model:
    returns the model that is to be trained, to compare its needs with space and memory.

    Raises: what `model` raises.
    """
    names = (folders,) if isinstance(folders, str) else tuple(folders)
    outline = None if model is None else model()
    storage = [tuple(_storage(name, outline, measure=measure)) for name in names]
    machine = (*_machine(), *(() if outline is None else (_budget(outline),)))
    return Examination(names, (*storage, (*_shared(names), *_limits()), machine))


# Storage


def _storage(folder: str, outline: Outline | None, *, measure: bool) -> Iterator[Finding]:
    """Examine a folder; nothing more is found about one that cannot be used."""
    try:
        check_folder(folder)
    except InfinityError as error:
        found, _, fix = str(error).partition(". ")
        yield Finding("folder", found, fix or _ANOTHER, fatal=True)
        return
    path = Path(folder).resolve()
    kind = disk.filesystem(path)
    if kind in disk.IN_MEMORY:
        found = f"{path}, {kind}: its files are in memory, so training there saves none"
        yield Finding("folder", found, _ANOTHER)
    else:
        slow = "this is a network: use a local drive" if kind in disk.OVER_NETWORK else ""
        yield Finding("folder", f"{path}, {kind}", slow)
    yield _engine(folder)
    yield _direct(folder)
    yield Finding("alignment", _alignment(folder))
    yield _space(folder)
    if outline is not None:
        yield _room(folder, outline)
    yield _measured_now(folder) if measure else _speed(folder, disk.measured(folder))


def _speed(folder: str, speed: disk.DiskSpeed | None) -> Finding:
    if speed is None:
        fix = f"infinity doctor --measure --nvme {folder}"
        return Finding("speed", "not measured; the first training does it", fix, optional=True)
    return Finding(
        "speed",
        f"read {speed.read / 1e9:.2f}, write {speed.write / 1e9:.2f}, mixed {speed.mixed / 1e9:.2f} GB/s; "
        f"{speed.depth} requests of {format_size(speed.piece_nbytes)} in flight; measured on {speed.date} "
        f"with {speed.engine}",
    )


def _measured_now(folder: str) -> Finding:
    try:
        return _speed(folder, disk.measure(folder))
    except (OSError, ValueError, InfinityError) as error:
        fix = "free space there, or use a filesystem with O_DIRECT"
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
            yield Finding("striping", found, "name one folder per drive: one drive is not faster striped")


def _engine(folder: str) -> Finding:
    asked = os.environ.get("INFINITY_AIO")
    try:
        with aio.open_engine(folder) as engine:
            kind, reason = engine.kind, engine.reason
    except (OSError, ValueError) as error:
        fix = "unset INFINITY_AIO" if asked else _cure(error) or _ANOTHER
        return Finding("I/O engine", str(error).partition("\n")[0], fix, fatal=True)
    if asked:
        return Finding(
            "I/O engine", reason, "" if kind == "io_uring" else "unset INFINITY_AIO to use the best one"
        )
    try:
        with aio.open_engine(folder, aio.KINDS[0]):
            return Finding("I/O engine", reason)
    except aio.EngineUnavailableError as error:
        return Finding("I/O engine", reason, f"for {aio.KINDS[0]}: {_cure(error)}")


def _cure(error: Exception) -> str:
    """Return what an error of the I/O engines advises."""
    return str(error).rpartition("  try: ")[2].strip() if "  try: " in str(error) else ""


def _direct(folder: str) -> Finding:
    """Report whether O_DIRECT works, by the engine that needs nothing else."""
    try:
        with aio.open_engine(folder, "threads"):
            return Finding("O_DIRECT", "works: transfers bypass the page cache")
    except OSError:
        return Finding(
            "O_DIRECT",
            "refused here: transfers go through the page cache",
            "use a filesystem that supports it: ext4, xfs",
        )


def _alignment(folder: str) -> str:
    number = os.stat(folder).st_dev
    found = f"transfers are whole {BLOCK} B blocks"
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for queue in (device / "queue", device / ".." / "queue"):  # a partition has its disk's queue
        try:
            nbytes = (queue / "logical_block_size").read_text().strip()
        except OSError:
            continue
        return f"{found}; the device's blocks have {nbytes} B"
    return found


def _free_nbytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _space(folder: str) -> Finding:
    free = _free_nbytes(folder)
    fits, fewer = _count(free / STATE_NBYTES), _count(free / (STATE_NBYTES + SPILLED_NBYTES))
    return Finding(
        "free space",
        f"{format_size(free)}: room for {fits} parameters, {fewer} if gradients spill",
        "free space there, or name another folder" if free < 4 << 30 else "",
        fatal=free < BLOCK * 256,
    )


def _count(number: float) -> str:
    return f"{number / 1e9:.1f} G" if number >= 1e9 else f"{number / 1e6:.0f} M"


# A model


def _room(folder: str, outline: Outline) -> Finding:
    """Compare a model's state with the free space."""
    free, state = _free_nbytes(folder), STATE_NBYTES * outline.parameters
    most = state + SPILLED_NBYTES * outline.parameters
    found = (
        f"{outline.name}, {_count(outline.parameters)} parameters: {format_size(state)} of state, "
        f"{format_size(most)} if gradients spill"
    )
    if free >= most:
        return Finding("model on NVMe", f"{found}; that fits")
    fix = f"free {format_size(most - free)}, name several folders, or state_dtype='int8' (half the state)"
    return Finding("model on NVMe", f"{found}; {format_size(free)} are free", fix, fatal=free < state)


def _budget(outline: Outline) -> Finding:
    """Compare the least host_memory of a model with the default."""
    from infinity.planning.demand import least_host_nbytes  # imports numpy
    from infinity.planning.setting import Setting

    default = max(1, available_nbytes() // 2)
    least, whole = (least_host_nbytes(outline, Setting(default, nvme=nvme)) for nvme in (True, False))
    found = (
        f"host_memory of at least {format_size(least)} with NVMe, {format_size(whole)} without; the default "
        f"is {format_size(default)}"
    )
    fix = "" if default >= least else f"free memory, or set host_memory to {format_size(least)}"
    return Finding("model in memory", found, fix, fatal=least > total_nbytes()[0])


# Limits


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("memlock limit", "none")
    else:
        locked = _kernel() < _RINGS_FREE_SINCE
        fix = "ulimit -l unlimited" if locked and soft < 8 << 20 else ""
        counts = (
            "io_uring's rings count against it" if locked else "enough; larger buffers are not registered"
        )
        yield Finding("memlock limit", f"{format_size(soft)}: {counts}", fix)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < _FEW_FILES
    found = "none" if files == resource.RLIM_INFINITY else f"{files:,} at once"
    yield Finding("open files limit", found, f"ulimit -n {_FEW_FILES}" if few else "")
    try:
        found, fix = _MEANINGS.get(_IO_URING_DISABLED.read_text().strip(), ("unknown", ""))
    except OSError:
        found, fix = "not there (before Linux 6.6): allowed, unless the container's profile filters it", ""
    yield Finding("io_uring sysctl", found, fix)


def _kernel() -> tuple[int, ...]:
    """Return the numbers of the kernel's version: (6, 1, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", platform.release())[:3])


# The machine


def _machine() -> Iterator[Finding]:
    yield Finding("kernel", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    fast = kernels.isa() != "scalar"
    slow = "" if fast else "unset INFINITY_ISA, or use a machine with AVX2: updates will be slow"
    cores = len(os.sched_getaffinity(0))
    name = next(iter(_cpu("model name")), platform.machine())
    yield Finding(
        "CPU", f"{name}, {cores} cores; kernels: {kernels.isa()}, {kernels.threads()} threads", slow
    )
    memory = psutil.virtual_memory()
    available = available_nbytes()
    found = f"{format_size(memory.total)}, {format_size(available)} available"
    if (limit := total_nbytes()[0]) < memory.total:
        found += f"; this container may use {format_size(limit)}"
    yield Finding("memory", f"{found}; host_memory is {format_size(available // 2)} by default")
    why = why_not_here() or why_not_by_itself()
    shares = f"share no memory here: {why}" if why else "share memory by themselves, where the CPU computes"
    yield Finding("several ranks", shares)
    gpus = _gpus()
    torch = _torch(gpus)
    yield torch
    if not gpus or torch.fix:
        yield from _bf16()
    yield _fio()
    missing = [name for name in ("transformers", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        fix = "pip install 'zero-infinity[train]'"
        yield Finding("infinity train", f"{' and '.join(missing)} not installed", fix, optional=True)


def _cpu(field: str) -> list[str]:
    """Return the values of a field of /proc/cpuinfo, one per CPU."""
    try:
        lines = [line.partition(":") for line in _CPUINFO.read_text().splitlines()]
    except OSError:
        return []
    return [value.strip() for name, _, value in lines if name.strip() == field]


def _bf16() -> Iterator[Finding]:
    """Warn of a CPU whose bf16 matrix products are emulated."""
    flags = set(next(iter(_cpu("flags")), "").split())
    if flags and not flags & {"avx512f", "amx_bf16"}:
        found = "no AVX-512, no AMX: torch's bf16 products take about 20 times as long as fp32"
        yield Finding("bf16 on this CPU", found, 'train with dtype="fp32" (--dtype fp32)')


def _gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs, as the driver tells them."""
    told = [path.read_text() for path in sorted(_GPUS.glob("*/information"))]
    names = [match[1].strip() for text in told if (match := re.search(r"Model:(.*)", text))]
    return names or (["a GPU (nvidia-smi is installed)"] if shutil.which("nvidia-smi") else [])


def _torch(gpus: Sequence[str]) -> Finding:
    """Compare torch's build with the GPUs, without importing it."""
    spec = importlib.util.find_spec("torch")
    try:
        number = version("torch")
    except PackageNotFoundError:
        number = ""
    if spec is None or spec.origin is None or not number:
        return Finding("torch", "not installed", "pip install torch", fatal=True)
    said = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", said, re.MULTILINE)
    here = ", ".join(gpus) or "no NVIDIA GPU"
    if match is None and gpus:
        fix = "install torch for CUDA: pytorch.org/get-started"
        return Finding("torch", f"{number} is for CPUs alone, but this machine has {here}", fix)
    return Finding("torch", f"{number}{f', CUDA {match[1]}' if match else ''}; {here}")


def _fio() -> Finding:
    """Report whether `infinity bench io` can be compared with fio, which training does not need."""
    path = shutil.which("fio")
    use = "for `infinity bench io --peer fio` alone"
    if path is None:
        return Finding("fio", f"not installed; {use}", "apt install fio", optional=True)
    return Finding("fio", f"{path}, {use}")
