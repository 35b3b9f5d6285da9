"""The wheel as a stranger gets it. Trusted: pip, venv and setuptools. Nothing is faked.

The wheel is built from the sdist, and the sdist from a copy of the checkout. It is installed into a fresh
environment, torch being borrowed from this one, beside transformers and Hugging Face's `kernels`, which a
top-level package of that name would break.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from places import ROOT

pytestmark = pytest.mark.slow

LEFT_BEHIND = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__")


def load_dev() -> ModuleType:
    """Import dev.py, which knows where pip is."""
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command away from the checkout; what it printed."""
    variables = {
        key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONSAFEPATH"}
    }
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, links and all, as a clone has them."""
    folder = tmp_path_factory.mktemp("copy") / "checkout"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_BEHIND)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    """The sdist of a copy of the checkout."""
    run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_sdist('dist')", cwd=checkout)
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist, by its own setup.py."""
    folder = tmp_path_factory.mktemp("wheel")
    run("tar", "-xf", sdist, cwd=folder)
    (source,) = folder.iterdir()
    run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_wheel('dist')", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def environment(folder: Path, what: Path, *how: str) -> Path:
    """The Python of a fresh environment with `what` installed, and this one's other packages in sight."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    (site_packages,) = (folder / "venv/lib").glob("python*/site-packages")
    # A plain path: the .pth files in it are not followed, and so our editable install stays out of sight.
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = load_dev().find_pip(python)
    run(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", *how, what, cwd=folder)
    return python


@pytest.fixture(scope="module")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel in it."""
    return environment(tmp_path_factory.mktemp("stranger"), wheel)


def test_the_wheel_is_for_every_python_and_every_new_enough_glibc(wheel: Path) -> None:
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("zero_infinity", "0.1.0", "py3", "none")
    machine = sysconfig.get_platform().split("-")[-1]
    glibc = re.fullmatch(rf"manylinux_2_(\d+)_{machine}", platform)
    assert glibc is not None, f"{platform}: the libraries need more than glibc"
    assert 17 <= int(glibc[1]) <= int(os.confstr("CS_GNU_LIBC_VERSION").split(".")[1])


def test_the_wheel_holds_infinity_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"infinity", "zero_infinity-0.1.0.dist-info"}
    assert "infinity/py.typed" in names
    python = [*ROOT.glob("infinity/*.py"), *ROOT.glob("infinity/*/*.py")]
    assert {str(path.relative_to(ROOT)) for path in python} <= set(names)
    compiled = {name for name in names if name.endswith((".so", ".h", ".c", ".cu"))}
    assert compiled == {
        *("infinity/aio/_aio.so", "infinity/aio/aio.h"),
        *("infinity/kernels/_kernels.so", "infinity/kernels/kernels.h", "infinity/kernels/adamw.cu"),
    }


def test_the_wheel_imports_away_from_the_checkout(stranger: Path, tmp_path: Path) -> None:
    code = "import infinity, infinity.aio, infinity.kernels; print(infinity.__file__)"
    where = Path(run(stranger, "-c", code, cwd=tmp_path).strip())
    assert where.is_relative_to(stranger.parents[1])


def test_a_clone_is_installed_by_pip(checkout: Path, tmp_path: Path) -> None:
    python = environment(tmp_path, checkout, "--no-build-isolation")
    code = "import infinity, infinity.aio, infinity.kernels; print(infinity.__file__)"
    assert Path(run(python, "-c", code, cwd=tmp_path).strip()).is_relative_to(tmp_path / "venv")


def test_what_pip_shows_has_every_extra_and_the_readme(wheel: Path) -> None:
    (name,) = (one for one in zipfile.ZipFile(wheel).namelist() if one.endswith("/METADATA"))
    shown = zipfile.ZipFile(wheel).read(name).decode()
    extras = set(re.findall(r"^Provides-Extra: (.+)$", shown, re.MULTILINE))
    user = {"bench", "caches", "completion", "finetune", "hf", "notebook", "train"}
    assert extras == user | {"docs", "lint", "test"}
    assert "# Infinity" in shown
    assert "Project-URL" not in shown, "a copy of the checkout has no remote"


def test_the_command_is_installed(stranger: Path, tmp_path: Path) -> None:
    assert "doctor" in run(stranger.with_name("infinity"), "--help", cwd=tmp_path)


def test_transformers_and_the_other_kernels_still_work_beside_it(stranger: Path, tmp_path: Path) -> None:
    pip = load_dev().find_pip(stranger)
    got = subprocess.run([*pip, "install", "-q", "kernels"], capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"Hugging Face's kernels cannot be had here: {got.stderr.strip().splitlines()[-1]}")
    code = (
        "import infinity.kernels, kernels\n"
        "from transformers import LlamaForCausalLM\n"
        "print(kernels.__file__, kernels.get_kernel.__name__, infinity.kernels.__file__)"
    )
    theirs, verb, ours = run(stranger, "-W", "ignore", "-c", code, cwd=tmp_path).split()
    assert Path(theirs).parent.parent == Path(ours).parent.parent.parent
    assert verb == "get_kernel"
