"""What dev.py needs of the system: a C compiler, liburing, and the commands that tests call.

What is missing is installed by apt-get where that may be called; else it is said what is done without it.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

DEPS = Path(__file__).resolve().parent / ".deps"

# The commands that tests call beside the compiler: the package of each, and what is skipped for want of it.
TOOLS = {
    "fio": ("fio", "the comparison of the I/O engine with fio"),
    "g++": ("g++", "the simulated device: the order and the bits of what an accelerator does"),
    "losetup": ("mount", "tests on disks of their own: XFS, btrfs, 4 KiB sectors"),
    "mkfs.btrfs": ("btrfs-progs", "the test of a run that reaches its quota"),
    "mkfs.ext4": ("e2fsprogs", "tests on 4 KiB sectors and on a disk that becomes read-only"),
    "mkfs.xfs": ("xfsprogs", "tests of runs and snapshots on XFS"),
    "mount": ("mount", "tests on file systems of their own, full ones among them"),
}
SBIN = "/usr/sbin:/sbin"  # where they are, too, and no user's PATH leads


def say(text: str) -> None:
    """Print the one line of a step."""
    print(f"dev: {text}", flush=True)


def succeeds(command: Sequence[str], **more: object) -> bool:
    """Run a command silently; whether it exists and exits 0."""
    try:
        return subprocess.run(command, capture_output=True, check=False, **more).returncode == 0  # type: ignore[call-overload,no-any-return]
    except OSError:
        return False


def compiler() -> str | None:
    """Find a C compiler, `$CC` before all others."""
    candidates = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((name for name in candidates if name and shutil.which(name.split()[0])), None)


def has_liburing() -> bool:
    """Tell whether setup.py will find a liburing to link."""
    places = ["/usr/include", "/usr/local/include", str(DEPS / "usr/include")]
    if prefix := os.environ.get("LIBURING_PREFIX"):
        places += [prefix, f"{prefix}/include", f"{prefix}/usr/include"]
    return any(Path(place, "liburing.h").exists() for place in places)


@functools.cache
def apt_get() -> list[str]:
    """Return apt-get as it may be called: as root, or by a sudo that asks for no password; else nothing."""
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if not shutil.which("apt-get") or (sudo and not succeeds([*sudo, "true"])):
        return []
    # A machine that has just started may be installing updates by itself: its lock is waited for.
    quick = ["-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=300"]
    return [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-qq", *quick]


@functools.cache
def apt_update() -> bool:
    """Fetch the lists of packages, once; whether that succeeded."""
    return succeeds([*apt_get(), "update"])


def apt_install(*packages: str) -> bool:
    """Try to install system packages; where apt-get may be called and fails, say what it said."""
    if not apt_get():
        return False
    say(f"installing {' '.join(packages)} with apt-get")
    install = [*apt_get(), "install", "--no-install-recommends", *packages]
    if succeeds(install):
        return True
    apt_update()
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        say(f"apt-get: {done.stderr.strip() or done.returncode}")
    return done.returncode == 0


def unpack_liburing() -> bool:
    """Try to put liburing into .deps, which takes no root."""
    DEPS.mkdir(exist_ok=True)
    if not succeeds(["apt-get", "download", "-qq", "liburing-dev"], cwd=DEPS):
        return False
    packages = DEPS.glob("liburing*.deb")
    return all(succeeds(["dpkg-deb", "-x", package.name, "."], cwd=DEPS) for package in packages)


def lacking() -> list[str]:
    """Name the commands of TOOLS that are not here."""
    path = f"{os.environ.get('PATH', os.defpath)}:{SBIN}"
    return [command for command in TOOLS if not shutil.which(command, path=path)]


def install_tools() -> None:
    """Try to install the commands that tests call."""
    packages = sorted({TOOLS[command][0] for command in lacking()})
    if packages and not apt_install(*packages) and len(packages) > 1:
        for package in packages:  # one that cannot be had keeps the others out no longer
            apt_install(package)


def say_what_is_skipped() -> None:
    """Name the commands that are not here, their packages, and what tests are skipped for want of them."""
    for command in lacking():
        package, skipped = TOOLS[command]
        say(f"no {command} here (Debian, Ubuntu: apt-get install {package}): skipped are {skipped}")


def build_tools(*, fetch: bool = True) -> None:
    """See to a C compiler, and to liburing if it can be had. fetch: from elsewhere, if it is not here."""
    if compiler() is None and not (fetch and apt_install("gcc", "libc6-dev") and compiler()):
        raise SystemExit(
            "dev: no C compiler, and none could be installed: the two C libraries cannot be built.\n"
            "     install one (Debian, Ubuntu: apt-get install gcc libc6-dev), or name it in CC"
        )
    os.environ["CC"] = compiler() or ""
    if has_liburing() or (fetch and apt_install("liburing-dev") and has_liburing()):
        say("liburing: found, the io_uring engine is built")
    elif fetch and unpack_liburing():
        say("liburing: unpacked into .deps, the io_uring engine is built")
    else:
        say("liburing: cannot be had here, infinity.aio is built with the thread engine alone")
