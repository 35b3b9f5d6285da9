"""The simulated accelerator for Python: `build` compiles it, and `load` makes torch.device("sim") exist.

A process that loads it has an accelerator until it ends: tests load it in processes of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import torch

from infinity.config import settings
from infinity.device.streams import AcceleratorStreams

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build/simdevice"
NEEDS = (2, 13)
"""The first torch in which a PrivateUse1 device may take `parameter.data` from the CPU."""

SPACE_NBYTES = 16 << 30
"""As memory.h has it."""

COUNTS = (
    "kernels",
    "late_kernels",
    "copies",
    "late_copies",
    "host_waits",
    "races",
    "allocated",
    "peak",
    "page_locked_peak",
)


def missing() -> str:
    """Why the device cannot be built here; empty if it can."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < NEEDS:
        return f"the simulated device needs torch {'.'.join(map(str, NEEDS))}; this is {torch.__version__}"
    if shutil.which("g++") is None:
        return "the simulated device needs a C++ compiler, and there is no g++"
    if not Path(torch.__file__).parent.joinpath("include/ATen/ATen.h").exists():
        return "the simulated device needs torch's C++ headers, and this torch has none"
    return ""


def build() -> Path:
    """Compile the device, once for each source and torch, and return the library.

    Raises: subprocess.CalledProcessError where it does not compile.
    """
    home = Path(torch.__file__).parent
    sources = [HERE / "device.cpp", *sorted(HERE.glob("*.h"))]
    content = b"".join(source.read_bytes() for source in sources) + torch.__version__.encode()
    library = BUILD / f"libsim-{hashlib.sha256(content).hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(".tmp")
            include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
            link = [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
            flags = ["-std=c++20", "-O1", "-shared", "-fPIC"]
            subprocess.run(["g++", *flags, *include, sources[0], "-o", made, *link], check=True)  # noqa: S607
            made.rename(library)
    return library


class Simulator:
    """What tests say to the loaded device, and ask of it."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.sim_lock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._library.sim_unlock.argtypes = [ctypes.c_void_p]
        self._library.sim_text.restype = ctypes.c_char_p
        self._library.sim_waits_of.argtypes = [ctypes.c_long]
        self._library.sim_waits_of.restype = ctypes.c_long

    def delay(self, copy_us: int = 0, kernel_us: int = 0, jitter: int = 0, event_us: int = 0) -> None:
        """Let late copies and kernels take so long; with `jitter`, a seed, 0 to twice as long. event_us: by
        which the host sees every event later than the work before it is over.
        """
        self._library.sim_delay(copy_us, kernel_us, jitter, event_us)

    def strict(self, *, raises: bool) -> None:
        """Whether a race raises where it is queued; else it happens, and `failure` tells of it."""
        self._library.sim_strict(int(raises))

    def restart(self) -> None:
        """Forget failures, counts and the peak."""
        self._library.sim_restart()

    def counts(self) -> dict[str, int]:
        """Kernels, copies, how many of them were late, host waits, races; bytes allocated now and at most;
        bytes of host memory that were page-locked at most.
        """
        values = (ctypes.c_long * len(COUNTS))()
        self._library.sim_counts(values)
        return dict(zip(COUNTS, values, strict=True))

    def waits_of(self, thread: int) -> int:
        """How often a thread of the host, by threading.get_native_id(), has waited for the device."""
        return int(self._library.sim_waits_of(thread))

    def failure(self) -> str:
        """The first race or error on a stream; empty if none. Kept: finalizers swallow errors."""
        return str(self._library.sim_text(0).decode())

    def waited_for(self) -> str:
        """The operations that made the host wait."""
        return str(self._library.sim_text(1).decode())

    def lock(self, address: int, nbytes: int) -> None:
        """Page-lock host memory."""
        self._library.sim_lock(address, nbytes)

    def unlock(self, address: int) -> None:
        """Undo `lock`."""
        self._library.sim_unlock(address)


class SimStreams(AcceleratorStreams):
    """The engine's streams on the simulated device: all but page-locking is torch.accelerator's."""

    simulator: Simulator

    def lock(self, address: int, nbytes: int) -> str:
        self.simulator.lock(address, nbytes)
        return ""

    def unlock(self, address: int) -> None:
        self.simulator.unlock(address)


def _module() -> Any:
    module: Any = types.ModuleType("torch.sim")
    module.device = lambda device: contextlib.nullcontext()  # there is one
    module.set_device = lambda device: None
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.mem_get_info = lambda device=None: (
        SPACE_NBYTES - SimStreams.simulator.counts()["allocated"],
        SPACE_NBYTES,
    )
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def load() -> Simulator:
    """Load the device and let Config(device="sim") name it. Once in a process, before any backward."""
    simulator = SimStreams.simulator = Simulator(build())
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    settings.ACCELERATORS["sim"] = f"{__name__}:{SimStreams.__name__}"
    os.environ.pop("INFINITY_DEVICE", None)
    return simulator
