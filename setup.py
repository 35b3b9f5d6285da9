"""Build the C libraries of infinity.aio and infinity.kernels; all else is declared in pyproject.toml.

Both are plain shared libraries, without Python's API, loaded through cffi: hence one py3-none wheel for every
Python. `$CC`, `$CFLAGS` and `$LIBURING_PREFIX` are honoured; `INFINITY_WERROR=1` makes warnings errors.
"""

import email
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COMMON = ["-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wconversion", "-pthread"]
# No FMA, no vectoriser: the scalar kernel stays scalar, and all kernels give the same bits (see kernels/).
KERNELS = ["-O3", "-ffp-contract=off", "-fno-tree-vectorize", *COMMON]
AIO = ["-O2", *COMMON]
# What the wheel may need of a machine: what every glibc brings. liburing is linked statically.
GLIBC = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
GLIBC |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def compiler() -> list[str]:
    """Name the C compiler and what is said to it every time."""
    werror = ["-Werror"] if os.environ.get("INFINITY_WERROR") == "1" else []
    return [*shlex.split(os.environ.get("CC") or "cc"), *shlex.split(os.environ.get("CFLAGS", "")), *werror]


def liburing() -> tuple[list[str], list[str]] | None:
    """Find a static liburing; its (compile, link) flags, or None where there is none that links."""
    found = [([], ["-l:liburing.a"])]  # where the compiler looks by itself
    for prefix in filter(None, (os.environ.get("LIBURING_PREFIX"), ROOT / ".deps")):
        headers = [header.parent for header in sorted(Path(prefix).glob("**/liburing.h"))]
        archives = sorted(Path(prefix).glob("**/liburing.a"))
        if headers and archives:
            found.append(([f"-I{headers[0]}"], [str(archives[0])]))
    if os.environ.get("LIBURING_PREFIX"):
        found.reverse()  # asked for by name: looked at first
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch, "probe.c")
        probe.write_text("#include <liburing.h>\nint probe(void) { return io_uring_queue_init(1, 0, 0); }\n")
        for flags, link in found:
            command = [*compiler(), *COMMON, *flags, str(probe), "-o", f"{scratch}/probe.so", *link]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return flags, link
    return None


def build(name: str, into: Path) -> None:
    """Compile infinity/<name>/*.c into one library `_<name>.so` in the folder `into`."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "infinity" / name).glob("*.c"))
    if not sources:
        raise SystemExit(f"infinity/{name} holds no C source: is infinity/{name} still the link it was?")
    flags, link, note = KERNELS, ["-lm", "-ldl"], ""
    if name == "aio":
        ring = liburing()
        note = " with io_uring" if ring else " without io_uring (no static liburing found): the thread engine"
        flags, link = (
            ([*AIO, "-DHAVE_LIBURING", *ring[0]], [*ring[1], "-Wl,--exclude-libs,ALL"]) if ring else (AIO, [])
        )
    into.mkdir(parents=True, exist_ok=True)
    library = into / f"_{name}.so"
    unfinished = library.with_name(f"{library.name}.{os.getpid()}")  # a running process keeps the old one
    try:
        subprocess.run([*compiler(), *flags, *sources, "-o", str(unfinished), *link], cwd=ROOT, check=True)
        unfinished.replace(library)
    except FileNotFoundError:
        raise SystemExit("infinity needs a C compiler to build: install gcc, or set CC") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"infinity/{name} did not compile: {shlex.join(error.cmd)}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"built {library}{note}", flush=True)


def page(remote: str) -> str | None:
    """Turn a git remote's address into its page's, by https; None for a path or a host that is not public."""
    short = re.fullmatch(r"(?:[^@/]+@)?([\w.-]+):(?!/)(.+)", remote)  # git@host:path
    try:
        address = urlsplit(f"ssh://{short[1]}/{short[2]}" if short else remote)
    except ValueError:
        return None
    host, path = address.hostname or "", address.path.strip("/").removesuffix(".git")
    public = re.fullmatch(r"([\w-]+\.)+[a-z][\w-]*[a-z]", host)  # a name with a dot, no number
    if address.scheme not in {"http", "https", "ssh"} or not public or not path or "@" in path:
        return None
    return f"https://{host}/{path}"  # without a user, a password or a port of ssh


def urls() -> dict[str, str]:
    """Find the project's addresses: those of the remote that this is a clone of, or what the sdist says."""
    said = ROOT / "PKG-INFO"
    if said.exists():
        lines = email.message_from_string(said.read_text(encoding="utf-8")).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    origin = ""
    if (ROOT / ".git").exists() and shutil.which("git"):
        asked = ["git", "remote", "get-url", "origin"]
        origin = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    repository = page(origin.strip())
    if repository is None:
        print("no project URLs: git's remote `origin` is not at a public host, or there is none", flush=True)
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/HEAD/docs",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class BuildC(Command):
    """`python setup.py build_c [--into FOLDER]`: the libraries alone, in the source folders by default."""

    user_options: ClassVar = [("into=", None, "folder that stands for infinity/")]

    def initialize_options(self) -> None:
        """Build into the checkout."""
        self.into = str(ROOT / "infinity")

    def finalize_options(self) -> None:
        """Take the options as they are."""

    def run(self) -> None:
        """Build both."""
        for name in ("aio", "kernels"):
            build(name, Path(self.into).absolute() / name)


class BuildPy(build_py):
    """Python files, then the libraries beside them: in the checkout itself for an editable install."""

    def run(self) -> None:
        """Copy, then compile."""
        super().run()
        base = ROOT if self.editable_mode else Path(self.build_lib)
        for name in ("aio", "kernels"):
            build(name, base.absolute() / "infinity" / name)


def glibc(libraries: list[Path]) -> tuple[int, int]:
    """Find the oldest glibc that the libraries run on; (0, 0) where they need more than what glibc brings."""
    versions = [(2, 17)]  # of the oldest manylinux whose tag says the version
    for library in libraries:
        said = subprocess.run(["readelf", "-dV", library], capture_output=True, text=True, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", said))
        if not needed <= GLIBC:
            print(
                f"{library.name} needs {', '.join(needed - GLIBC)}: the wheel is for this machine", flush=True
            )
            return 0, 0
        versions += [(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", said)]
    return max(versions)


class Wheel(bdist_wheel):
    """Any Python 3, any Linux of this architecture whose glibc is new enough (PEP 600)."""

    def get_tag(self) -> tuple[str, str, str]:
        """Replace the tag of the Python that happened to build it."""
        platform = super().get_tag()[2]
        libraries = sorted(Path(self.bdist_dir).glob("**/*.so"))
        if libraries and platform.startswith("linux_") and shutil.which("readelf"):
            major, minor = glibc(libraries)
            if major:
                platform = platform.replace("linux", f"manylinux_{major}_{minor}", 1)
        return "py3", "none", platform


class Binary(Distribution):
    """A distribution that holds machine code, though no extension module."""

    def has_ext_modules(self) -> bool:
        """Make the wheel a platform wheel."""
        return True


if __name__ == "__main__":  # of every build, too
    commands = {"bdist_wheel": Wheel, "build_c": BuildC, "build_py": BuildPy}
    setup(cmdclass=commands, distclass=Binary, project_urls=urls())
