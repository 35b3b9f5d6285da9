#!/usr/bin/env python3
"""Set the checkout up and run its tasks: `python3 dev.py TASK`; `python3 dev.py --help` names them.

Needs Python 3.10 or newer, nothing else. Each step prints one line; what is done already is skipped. What the
system lacks is installed by apt-get, as root or by a sudo that asks for no password, or else named. Python's
packages go into .venv, and liburing, where it cannot be installed, into .deps. Once that is set up, nothing
needs the network; nothing ever needs root or, `gpu` apart, a GPU.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # where PYTHONSAFEPATH has left it out
from dev_system import (  # noqa: E402
    DEPS,
    apt_install,
    build_tools,
    install_tools,
    say,
    say_what_is_skipped,
    succeeds,
    unpack_liburing,
)

del sys.path[0]

# What `dev.py demo` tells `infinity`, and what `dev.py gpu` tells Python.
DEMO = ["train", "--preset", "demo", "--host-memory", "512MiB"]
DEMO += ["--sequence", "64", "--steps", "40", "--warmup", "8", "--lr", "2e-4"]  # minutes, even without bf16
GPU = ["-m", "infinity.bench.device.stages"]
GPU_S = 570  # in which all of `dev.py gpu` ends: leases of such machines are for ten minutes
PACKED = ["cffi", "pycparser"]  # what machines with torch and a GPU lack, in wheels for their Python
PACKED_PYTHON = "3.12"
PACKED_NBYTES = 10 << 20  # at most, to be carried

TORCH = "torch==2.13.0"  # what the tests ran on; unpinned, a newer one may bring gigabytes of CUDA libraries
BUILD = ["pip", "setuptools>=77", "wheel"]  # pip, for what users add to .venv
SOURCES = ("pyproject.toml", "setup.py", "dev.py", "dev_system.py")  # what decides how .venv is set up
EXTRAS = {"demo": ["train"], "test": ["train", "test"], "lint": ["train", "test", "lint"], "build": []}
EXTRAS["docs"] = ["docs"]
EXTRAS["gpu"] = EXTRAS["test"]
PIPS = [
    ["pip3"],
    ["pip"],
    ["/usr/bin/pip3"],
]  # where there may be one, beside that of the Python running this
# What must be importable where nothing can be installed; the packages have the same names.
MODULES = ["cffi", "matplotlib", "numpy", "psutil", "rich", "setuptools", "torch", "tqdm", "transformers"]
MODULES += ["xxhash"]
TEST_MODULES = ["hypothesis", "pytest", "pytest_timeout"]


class InstallError(Exception):
    """Something could not be installed; pip has said why, if there is one."""


# the environment
# ---------------


def find_pip(python: Path) -> list[str]:
    """Find a pip that installs into the environment of `python`: one outside, or else one put into it.

    Raises:
        InstallError: there is none.
    """
    for command in ([sys.executable, "-m", "pip"], *PIPS):
        try:
            answer = subprocess.check_output([*command, "--version"], stderr=subprocess.DEVNULL, text=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        version = re.match(r"pip (\d+)\.(\d+)", answer)
        if version and (int(version[1]), int(version[2])) >= (22, 3):  # those that know --python
            return [*command, "--python", str(python)]
    own, ensure = [str(python), "-m", "pip"], [str(python), "-m", "ensurepip"]
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"  # what Debian keeps ensurepip in
    if succeeds([*own, "--version"]) or succeeds(ensure) or (apt_install(package) and succeeds(ensure)):
        return own
    raise InstallError(
        f"no pip (22.3 or newer) here, and no ensurepip (Debian, Ubuntu: apt-get install {package})"
    )


def pip_install(python: Path, *arguments: str, offline: bool = False) -> None:
    """Install into the environment of `python`.

    Raises:
        InstallError: pip failed; what it printed stands above.
    """
    quiet = ["-qq", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    where = ["--no-index", "--find-links", str(DEPS / "wheels")] if offline else []
    command = [*find_pip(python), "install", *quiet, *where, *arguments]
    variables = os.environ | {"PIP_ROOT_USER_ACTION": "ignore"}
    if subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode:
        raise InstallError(f"pip could not install {' '.join(arguments)}")


def try_install(python: Path, *arguments: str, offline: bool = False) -> bool:
    """Install as pip_install does; where that fails, say so and go on."""
    try:
        pip_install(python, *arguments, offline=offline)
    except InstallError as error:
        say(str(error))
        return False
    return True


def make_environment(folder: Path) -> Path:
    """Make a virtual environment, unless a working one is there; its Python."""
    python = folder / "bin/python"
    if not succeeds([str(python), "-c", ""]):
        say(f"making {folder.name} with Python {sys.version.split()[0]}")
        # Without pip: Debian's python3 has no ensurepip, and a pip outside can install into it all the same.
        made = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
        if subprocess.run(made, check=False).returncode:
            raise SystemExit("dev: python3 -m venv failed (Debian, Ubuntu: apt-get install python3-venv)")
    return python


def missing(python: Path, modules: Sequence[str]) -> list[str]:
    """Name the packages to install for these modules to be importable."""
    code = "import sys, importlib.util as u; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"
    found = subprocess.check_output([str(python), "-c", code, *modules], text=True, cwd="/")
    return found.replace("_", "-").split()


def borrow(folder: Path, modules: Sequence[str]) -> Path:
    """Make an environment that sees the packages of the Python running this script, and needs no network.

    What is missing comes from wheels in .deps/wheels, else from the network if there is one after all.
    """
    python = make_environment(folder)
    site_packages = next(folder.glob("lib/python3*/site-packages"))
    places = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    say(f"using the packages of {sys.executable} ({', '.join(places)})")
    links = "".join(f"import site; site.addsitedir({place!r})\n" for place in places)
    (site_packages / "borrowed.pth").write_text(links)
    if (wanted := missing(python, modules)) and (DEPS / "wheels").is_dir():
        say(f"installing {' '.join(wanted)}, missing there, from .deps/wheels")
        try_install(python, *wanted, offline=True)
    if wanted := missing(python, modules):
        say(f"installing {' '.join(wanted)}, missing there")
        try_install(python, "--retries", "0", "--timeout", "10", *wanted)
    if wanted := missing(python, modules):
        version = ".".join(map(str, sys.version_info[:2]))
        raise SystemExit(
            f"dev: still missing: {' '.join(wanted)}. Where there is a network, run\n"
            f"     pip download -d .deps/wheels --only-binary=:all: --python-version {version} "
            f"{' '.join(wanted)}\n     and bring the folder .deps here"
        )
    if not try_install(python, "--no-deps", "--no-build-isolation", "-e", ".", offline=True):
        say("linking infinity into the environment instead")
        (site_packages / "infinity").unlink(missing_ok=True)
        (site_packages / "infinity").symlink_to(ROOT / "infinity")
        command = python.with_name("infinity")
        command.write_text(
            f"#!{python}\nimport sys\nfrom infinity.__main__ import main\n\nsys.exit(main())\n"
        )
        command.chmod(0o755)
    return python


def install(python: Path, extras: list[str]) -> None:
    """Install torch, then the checkout itself, editable, with these extras."""
    say(f"installing {TORCH} (some hundred megabytes, unless it is there already)")
    pip_install(python, *BUILD, TORCH)
    name = f".[{','.join(extras)}]" if extras else "."
    say(f"installing infinity, editable, as {name}")
    pip_install(python, "--no-build-isolation", "-e", name)


def build_c(python: Path) -> None:
    """Build the C libraries again where a source is newer."""
    for name in ("aio", "kernels"):
        library = ROOT / name / f"_{name}.so"
        sources = [ROOT / "setup.py", *(ROOT / name).glob("*.[ch]")]
        if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in sources):
            say("building the C libraries")
            subprocess.run([str(python), "setup.py", "-q", "build_c"], cwd=ROOT, check=True)
            return


def set_up(task: str) -> Path:
    """Bring .venv, and what the system can be given, to what the task needs; the Python of .venv."""
    python = make_environment(ROOT / ".venv")
    stamp = ROOT / ".venv/dev.json"
    sources = b"".join((ROOT / name).read_bytes() for name in SOURCES)
    digest = hashlib.sha256(str(ROOT).encode() + sources).hexdigest()  # a copy elsewhere is set up anew
    done = json.loads(stamp.read_text()) if stamp.exists() else {}
    tasks = {task, *done.get("tasks", [])}
    if done != {"digest": digest, "tasks": sorted(tasks)}:
        build_tools()
        if "test" in tasks:
            install_tools()
        try:
            install(python, sorted({extra for one in tasks for extra in EXTRAS[one]}))
        except InstallError as error:
            if not succeeds([sys.executable, "-c", "import torch"], cwd="/"):
                raise SystemExit(f"dev: {error}") from None
            say(f"{error}: going on with what {sys.executable} has")
            wanted = ["accelerate", *MODULES]  # which `infinity train` needs
            borrow(ROOT / ".venv", wanted + (TEST_MODULES if tasks - {"demo", "build"} else []))
        stamp.write_text(json.dumps({"digest": digest, "tasks": sorted(tasks)}))
    build_c(python)
    return python


# the tasks
# ---------


def environment(python: Path) -> dict[str, str]:
    """Give a task the environment's commands, and keep the repository's root off its sys.path."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PYTHONSAFEPATH": "1", "PATH": path}


def become(python: Path, *command: str) -> NoReturn:
    """Run a command in this process's place: its signals, its exit code."""
    say(f"running {' '.join(command)}")
    os.chdir(ROOT)
    os.execve(command[0], command, environment(python))  # noqa: S606 (no shell is wanted)


def run(python: Path, *command: str, **more: str) -> bool:
    """Run a command of the environment in the repository's root; whether it succeeded."""
    say(f"running {' '.join(command)}")
    variables = environment(python) | more
    return subprocess.run([str(python), *command], cwd=ROOT, env=variables, check=False).returncode == 0


def demo(rest: list[str]) -> NoReturn:
    """Train a model whose state is several times its memory budget."""
    python = set_up("demo")
    become(python, str(python.with_name("infinity")), *DEMO, *rest)


def test(rest: list[str], *, everything: bool) -> NoReturn:
    """Run the tests: all but the slow ones and those for a GPU; with --all, the slow ones too."""
    python = set_up("test")
    say_what_is_skipped()
    kinds = "not gpu" if everything else "not gpu and not slow"
    # A file's tests share what they set up; tests/durations.csv has the order in which the files begin. For a
    # quarter of their time tests wait for disks and processes: one worker more than there are cores uses it.
    parallel = ["-n", str(min((os.cpu_count() or 1) + 1, 4)), "--dist=loadfile", "--no-loadscope-reorder"]
    workers = parallel * (not missing(python, ["xdist"]))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start many interpreters
    become(python, str(python), "-m", "pytest", "-m", kinds, *workers, *rest)


def script(name: str, rest: list[str]) -> NoReturn:
    """Run a program of tests/support."""
    python = set_up("test")
    os.environ["PYTHONPATH"] = str(ROOT / "tests/support")
    become(python, str(python), f"tests/support/{name}.py", *rest)


def faults(rest: list[str]) -> NoReturn:
    """Train with every fault at every request, hundreds of kills and of power cuts; print a table."""
    script("faults", rest)


def soak(rest: list[str]) -> NoReturn:
    """Train, and generate, for long; see that memory, descriptors, threads and files stay as they are."""
    script("soak", rest)


def lines(rest: list[str]) -> NoReturn:
    """Run the tests as `test` does, and say which lines of infinity/ they reach."""
    script("lines", rest)


def lint() -> int:
    """Check format, style, types and the C compiler's warnings."""
    python = set_up("lint")
    checks = (
        run(python, "-m", "ruff", "format", "--check", "."),
        run(python, "-m", "ruff", "check", "."),
        run(python, "-m", "mypy"),
        run(python, "-m", "mypy", "dev.py"),
        run(python, "setup.py", "-q", "build_c", "--into", "build/lint", INFINITY_WERROR="1"),
    )
    say("lint: clean" if all(checks) else "lint: see above")
    return 0 if all(checks) else 1


def docs(rest: list[str]) -> int:
    """Make the site of docs/ in build/docs, with the API reference; `serve` shows it while it is written."""
    python = set_up("docs")
    command = rest or ["build", "--strict"]
    done = run(python, "-m", "mkdocs", *command, NO_MKDOCS_2_WARNING="1")
    say("docs: build/docs/index.html" if done else "docs: see above")
    return 0 if done else 1


def sees_cuda(python: str) -> bool:
    """Tell whether that Python's torch has a CUDA device."""
    return succeeds([python, "-c", "import torch; torch.zeros(1, device='cuda')"], cwd="/")


def gpu(rest: list[str], *, packs: bool = False, sets_up: bool = False) -> int:
    """Run the tests and measurements that need a CUDA device, with whatever torch sees it, in 9:30 minutes.

    packs: bring what is missing there into .deps instead; sets_up: stop before the first stage.
    """
    if packs:
        return pack()
    began = time.monotonic()
    with ends_after(GPU_S, "setting up, so that nothing was measured"):
        python = set_up_gpu(sets_up=sets_up)
    if sets_up:
        say(f"ready: {python}, after {time.monotonic() - began:.0f} s")
        return 0
    left_s = GPU_S - (time.monotonic() - began)
    return 0 if run(python, *GPU, "--seconds", f"{left_s:.0f}", *rest) else 1


def set_up_gpu(*, sets_up: bool) -> Path:
    """Find the torch that sees a CUDA device, or bring one; the Python of the environment that has it.

    sets_up: no device is needed.
    """
    ours = str(ROOT / ".venv/bin/python")
    seen = sees_cuda(ours)
    if not seen and (sets_up or sees_cuda(sys.executable)):
        build_tools(fetch=False)
        python = borrow(ROOT / ".venv-gpu", MODULES + TEST_MODULES)
        build_c(python)
        return python
    if seen or any(Path("/dev").glob("nvidia[0-9]*")):
        return set_up("gpu")
    raise SystemExit("dev: no CUDA device here")


@contextlib.contextmanager
def ends_after(seconds: float, what: str) -> Iterator[None]:
    """End this process where what is done inside the `with` takes longer; a command that runs is killed."""

    def over(_number: int, _frame: object) -> NoReturn:
        raise SystemExit(f"dev: {seconds:.0f} s were not enough for {what}")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pack() -> int:
    """Bring what machines with a GPU and without a network lack into .deps, to be carried there."""
    wheels = DEPS / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    of_python = ["--only-binary=:all:", "--no-deps", "--python-version", PACKED_PYTHON]
    platforms = ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_17_x86_64"]
    command = [*find_pip(Path(sys.executable)), "download", "-qq", "-d", str(wheels), *of_python, *platforms]
    if subprocess.run([*command, *PACKED], cwd=ROOT, check=False).returncode:
        raise SystemExit(f"dev: pip could not download {' '.join(PACKED)} for Python {PACKED_PYTHON}")
    if not (DEPS / "usr/include/liburing.h").exists() and not unpack_liburing():
        raise SystemExit("dev: liburing-dev could not be downloaded (apt-get download, dpkg-deb)")
    for package in DEPS.glob("*.deb"):
        package.unlink()
    nbytes = sum(path.lstat().st_size for path in DEPS.rglob("*") if not path.is_dir())
    if nbytes > PACKED_NBYTES:
        raise SystemExit(f"dev: .deps has {nbytes} bytes; more than {PACKED_NBYTES} are not carried")
    say(f".deps is ready: {nbytes / 1e6:.1f} MB, for Python {PACKED_PYTHON}")
    return 0


def build() -> int:
    """Build the sdist, and from it the wheel, into dist/."""
    python = set_up("build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    if not run(python, "-c", code):
        return 1
    sdist = next((ROOT / "dist").glob("*.tar.gz"))
    wheel = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(ROOT / "dist"), str(sdist)]
    done = subprocess.run([*find_pip(python), *wheel], check=False).returncode
    say(f"dist: {', '.join(sorted(path.name for path in (ROOT / 'dist').iterdir()))}")
    return done


def main() -> int:
    """Read the command line and run one task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = parser.add_subparsers(
        dest="task", required=True, metavar="demo | test | lint | docs | gpu | faults | soak | lines | build"
    )
    for task in (demo, test, lint, docs, gpu, faults, soak, lines, build):
        summary = (task.__doc__ or "").splitlines()[0]
        command = tasks.add_parser(task.__name__, help=summary, description=summary)
        if task is test:
            everything = "the slow ones too; other arguments go to pytest"
            command.add_argument("--all", action="store_true", help=everything)
        if task is gpu:
            carried = (
                f"bring what is missing on such a machine (Python {PACKED_PYTHON}) into .deps, to be carried"
            )
            command.add_argument("--pack", action="store_true", help=carried)
            command.add_argument(
                "--set-up", action="store_true", help="set up alone, with or without a device"
            )
    options, rest = parser.parse_known_args()
    if sys.version_info < (3, 10):  # noqa: UP036 (this script is what finds out)
        raise SystemExit("dev: Python 3.10 or newer, please")
    if options.task == "demo":
        demo(rest)
    if options.task == "test":
        test(rest, everything=options.all)
    if options.task == "gpu":
        return gpu(rest, packs=options.pack, sets_up=options.set_up)
    if options.task in ("docs", "faults", "soak", "lines"):
        return {"docs": docs, "faults": faults, "soak": soak, "lines": lines}[options.task](rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return {"lint": lint, "build": build}[options.task]()


if __name__ == "__main__":
    sys.exit(main())
