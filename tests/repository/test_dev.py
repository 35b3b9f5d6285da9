"""What dev.py does on machines that lack things. Faked: the machine, a PATH with its own apt-get and sudo."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from places import ROOT

BESIDE = {"umount", "cc"}  # umount comes with mount; and without a C compiler dev.py stops
APT_GET = """
import shutil, sys
from pathlib import Path
place, words = Path({place!r}), sys.argv[1:]
with (place / "calls").open("a") as calls:
    print(*words[words.index("-qq") :], file=calls)
if "update" in words:
    (place / "lists").touch()
    sys.exit()
for package in words[words.index("--no-install-recommends") + 1 :]:
    if not ((place / "lists").exists() and (place / "mirror" / package).exists()):
        sys.exit(f"E: Unable to locate package {{package}}")
for package in words[words.index("--no-install-recommends") + 1 :]:
    shutil.copytree(place / "mirror" / package, place / "bin", dirs_exist_ok=True)
"""


PIP = """
import sys
import time
from pathlib import Path
words = sys.argv[1:]
Path({asked!r}).write_text(" ".join(words))
for package in words[-2:]:
    Path(words[words.index("-d") + 1], package + ".whl").write_bytes(bytes({nbytes}))
"""


def program(folder, name, script, shell="/bin/sh"):
    """Put a command into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!{shell}\n{script}\n")
    (folder / name).chmod(0o755)


def load(name):
    """Import a script of the repository's root, which is not on sys.path, anew."""
    sys.modules.pop("dev_system", None)
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """A machine where root works, without a command; its apt-get has a mirror, and no lists of it yet."""

    def __init__(self, place, packages):
        self.place, self.bin = place, place / "bin"
        program(self.bin, "apt-get", APT_GET.format(place=str(place)), sys.executable)
        program(self.bin, "env", 'exec /usr/bin/env "$@"')
        for command, package in packages:
            program(place / "mirror" / package, command, "")

    @property
    def installed(self):
        """What apt-get was asked to install and could."""
        calls = (self.place / "calls").read_text().splitlines()
        return [call.split("--no-install-recommends ")[1] for call in calls if "install" in call]


@pytest.fixture
def system(tmp_path, monkeypatch):
    system = load("dev_system")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(system, "SBIN", str(tmp_path / "sbin"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return system


@pytest.fixture
def machine(system, tmp_path):
    return Machine(tmp_path, [(command, package) for command, (package, _) in system.TOOLS.items()])


def test_what_tests_call_is_installed_where_root_works(system, machine, capsys):
    assert system.lacking() == list(system.TOOLS)
    system.install_tools()
    assert system.lacking() == []
    assert set(machine.installed) == {"btrfs-progs e2fsprogs fio g++ mount xfsprogs"}
    system.say_what_is_skipped()
    assert capsys.readouterr().out == f"dev: installing {machine.installed[0]} with apt-get\n"


def test_a_user_whose_sudo_asks_for_no_password_gets_it_too(system, machine, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    program(machine.bin, "sudo", 'test "$1" = -n && shift && exec "$@"')
    program(machine.bin, "true", "")
    system.install_tools()
    assert system.lacking() == []


def test_a_package_that_cannot_be_had_keeps_no_other_out_and_what_is_skipped_is_said(system, machine, capsys):
    (machine.place / "mirror/btrfs-progs").rename(machine.place / "gone")
    system.install_tools()
    assert system.lacking() == ["mkfs.btrfs"]
    assert "dev: apt-get: E: Unable to locate package btrfs-progs\n" in capsys.readouterr().out
    system.say_what_is_skipped()
    (line,) = capsys.readouterr().out.splitlines()
    assert "no mkfs.btrfs" in line
    assert "apt-get install btrfs-progs" in line
    assert "quota" in line


def test_where_nothing_may_be_installed_every_command_is_named_and_nothing_is_tried(
    system, machine, monkeypatch, capsys
):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    system.install_tools()
    assert not (machine.place / "calls").exists()
    system.say_what_is_skipped()
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r"no (\S+) here", line)[1] for line in lines] == list(system.TOOLS)


def called_commands(path):
    """Yield the system's commands that a test file names: to mounts.run, to subprocess, to shutil.which."""
    tree = ast.parse(path.read_text())
    of_mounts = path.name == "mounts.py" or any(
        isinstance(node, ast.ImportFrom)
        and node.module == "mounts"
        and "run" in {one.name for one in node.names}
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0]
        if isinstance(first, ast.List) and name in {"run", "Popen", "check_output"} and first.elts:
            first = first.elts[0]
        elif name != "which" and not (name == "run" and of_mounts):
            continue
        if isinstance(first, ast.Constant) and re.match(r"[a-z]", str(first.value)):
            yield first.value


def test_every_command_that_tests_call_is_one_that_is_installed(system):
    called = {one for path in (ROOT / "tests").rglob("*.py") for one in called_commands(path)}
    assert {"mkfs.ext4", "losetup", "fio", "cc", "btrfs"} <= called
    of_btrfs = {"btrfs"}  # in the package of mkfs.btrfs
    assert called - set(system.TOOLS) - BESIDE - of_btrfs == set()


def test_a_python_without_pip_gets_one_into_the_environment(tmp_path, machine, monkeypatch):
    """As on Debian, whose python3 has neither pip nor ensurepip until it gets its package."""
    dev = load("dev")
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
    program(machine.place / "mirror" / package, "with-ensurepip", "")
    program(tmp_path, "python3", "exit 1")
    there = f"{tmp_path}/pip"
    ensure = f"test -e {machine.bin}/with-ensurepip && echo >{there}"
    program(tmp_path, "python", f'case "$*" in *ensurepip) {ensure} ;; *) test -e {there} ;; esac')
    monkeypatch.setattr(dev, "PIPS", [])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert dev.find_pip(tmp_path / "python") == [str(tmp_path / "python"), "-m", "pip"]
    assert set(machine.installed) == {package}


def test_without_any_pip_the_package_that_brings_one_is_named(tmp_path, system, monkeypatch):
    dev = load("dev")
    program(tmp_path, "python", "exit 1")
    monkeypatch.setattr(dev, "PIPS", [])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(dev.InstallError, match=r"apt-get install python3\.\d+-venv"):
        dev.find_pip(tmp_path / "python")


def test_a_pip_outside_serves_unless_it_is_too_old_to(tmp_path, system, monkeypatch):
    dev = load("dev")
    program(tmp_path, "python", "echo pip 22.2 from there")
    program(tmp_path / "bin", "pip3", "echo pip 22.3.1 from here")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert dev.find_pip(tmp_path / "env") == ["pip3", "--python", str(tmp_path / "env")]
    monkeypatch.setattr(dev, "PIPS", [])
    assert dev.find_pip(tmp_path / "python") == [str(tmp_path / "python"), "-m", "pip"]


def test_users_find_pip_in_the_environment(tmp_path, monkeypatch):
    dev = load("dev")
    asked = []
    monkeypatch.setattr(dev, "pip_install", lambda python, *arguments: asked.extend(arguments))
    dev.install(tmp_path / "python", ["train"])
    assert "pip" in asked
    assert ".[train]" in asked


def test_every_task_is_named_in_the_help_and_has_its_extras(capsys, monkeypatch):
    dev = load("dev")
    monkeypatch.setattr(sys, "argv", ["dev.py", "--help"])
    with pytest.raises(SystemExit):
        dev.main()
    shown = capsys.readouterr().out
    pyproject = (ROOT / "pyproject.toml").read_text()
    extras = set(
        re.findall(r"^(\w+) = \[", pyproject.split("[project.optional-dependencies]")[1], re.MULTILINE)
    )
    assert all(f"    {task} " in shown for task in dev.EXTRAS)
    assert {extra for some in dev.EXTRAS.values() for extra in some} <= extras


def test_the_docs_are_made_by_mkdocs_with_warnings_as_errors(tmp_path, monkeypatch):
    dev = load("dev")
    said = []
    monkeypatch.setattr(dev, "set_up", lambda task: tmp_path / task)
    monkeypatch.setattr(
        dev, "run", lambda python, *command, **_: said.append((python.name, *command)) or True
    )
    assert dev.docs([]) == 0
    assert said == [("docs", "-m", "mkdocs", "build", "--strict")]


# A machine with a GPU and without a network


def packing(tmp_path, monkeypatch, wheel_nbytes):
    """dev.py with a pip that brings wheels of so many bytes, and an apt-get that brings liburing."""
    dev = load("dev")
    deps = tmp_path / ".deps"
    monkeypatch.setattr(dev, "DEPS", deps)
    program(tmp_path, "pip", PIP.format(asked=str(tmp_path / "asked"), nbytes=wheel_nbytes), sys.executable)
    monkeypatch.setattr(dev, "find_pip", lambda python: [str(tmp_path / "pip")])

    def unpack():
        (deps / "usr/include").mkdir(parents=True)
        (deps / "usr/include/liburing.h").touch()
        (deps / "liburing-dev.deb").write_bytes(b"deb")
        return True

    monkeypatch.setattr(dev, "unpack_liburing", unpack)
    return dev


def test_what_a_machine_with_a_gpu_lacks_is_packed_for_its_python(tmp_path, monkeypatch, capsys):
    dev = packing(tmp_path, monkeypatch, 1000)
    assert dev.gpu([], packs=True) == 0
    assert sorted(path.name for path in dev.DEPS.rglob("*.*")) == ["cffi.whl", "liburing.h", "pycparser.whl"]
    asked = (tmp_path / "asked").read_text()
    assert "--python-version 3.12" in asked
    assert "--only-binary=:all:" in asked
    assert "for Python 3.12" in capsys.readouterr().out


def test_more_than_can_be_carried_is_refused(tmp_path, monkeypatch):
    dev = packing(tmp_path, monkeypatch, 6 << 20)
    with pytest.raises(SystemExit, match=f"more than {10 << 20} are not carried"):
        dev.gpu([], packs=True)


def test_the_stages_get_what_setting_up_has_left_of_the_time(tmp_path, monkeypatch):
    dev = load("dev")
    commands = []
    monkeypatch.setattr(dev, "sees_cuda", lambda python: True)
    monkeypatch.setattr(dev, "set_up", lambda task: tmp_path)
    monkeypatch.setattr(dev.Path, "glob", lambda *_: iter([tmp_path]))
    monkeypatch.setattr(dev, "run", lambda python, *command: commands.append(command) or True)
    seconds = iter([100.0, 160.0])
    monkeypatch.setattr(dev.time, "monotonic", lambda: next(seconds))
    assert dev.gpu(["--only", "facts"]) == 0
    assert commands == [("-m", "infinity.bench.device.stages", "--seconds", "510", "--only", "facts")]


def test_setting_up_that_takes_all_of_the_time_ends_and_says_so(monkeypatch):
    dev = load("dev")
    monkeypatch.setattr(dev, "GPU_S", 0.2)
    monkeypatch.setattr(dev, "sees_cuda", lambda python: time.sleep(60))
    began = time.monotonic()
    with pytest.raises(SystemExit, match="were not enough for setting up"):
        dev.gpu([])
    assert time.monotonic() - began < 30


def test_without_a_device_that_is_said(monkeypatch):
    dev = load("dev")
    monkeypatch.setattr(dev, "sees_cuda", lambda python: False)
    monkeypatch.setattr(dev.Path, "glob", lambda *_: iter(()))
    with pytest.raises(SystemExit, match="no CUDA device here"):
        dev.gpu([])


@pytest.mark.slow
def test_a_folder_without_network_is_set_up_up_to_the_device(tmp_path):
    parts = ["aio", "bench", "infinity", "kernels", "tiling", "dev.py", "dev_system.py", "setup.py"]
    for name in (*parts, "pyproject.toml", "README.md"):
        if (ROOT / name).is_dir():
            built = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=built)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    nowhere = {"PIP_NO_INDEX": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, "dev.py", "gpu", "--set-up"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | nowhere,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dev: ready: " in done.stdout
    python = tmp_path / ".venv-gpu/bin/python"
    code = "import infinity.bench.device.stages as one; print(one.__file__)"
    found = subprocess.check_output([python, "-c", code], cwd=tmp_path.parent, text=True)
    assert found.startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("https://example.org/team/infinity.git", "https://example.org/team/infinity"),
        ("https://user:token@example.org/team/infinity/", "https://example.org/team/infinity"),
        ("http://git.example.org/infinity", "https://git.example.org/infinity"),
        ("git@example.org:team/infinity.git", "https://example.org/team/infinity"),
        ("ssh://git@example.org:2222/team/infinity.git", "https://example.org/team/infinity"),
        ("/srv/git/infinity.git", None),
        ("../infinity", None),
        ("file:///srv/git.d/infinity", None),
        ("https://localhost/infinity", None),
        ("https://127.0.0.1:8080/infinity", None),
        ("git@server:infinity.git", None),
        ("https://example.org/", None),
        ("https://user.name:1/secret@example.org/infinity", None),
        ("https://[example.org/infinity", None),
        ("", None),
    ],
)
def test_the_project_has_the_page_of_a_public_remote_without_what_was_secret_in_its_address(remote, page):
    assert load("setup").page(remote) == page


def test_the_urls_are_those_of_the_remote_or_of_the_sdist_and_without_one_that_is_said(
    tmp_path, monkeypatch, capsys
):
    setup = load("setup")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    assert setup.urls() == {}
    assert capsys.readouterr().out.startswith("no project URLs: ")
    (tmp_path / ".git").mkdir()
    program(
        tmp_path / "bin",
        "git",
        '[ "$*" = "remote get-url origin" ] && echo git@example.org:team/infinity.git',
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = setup.urls()
    assert found["Repository"] == "https://example.org/team/infinity"
    assert set(found) == {"Repository", "Documentation", "Changelog", "Issues"}
    for address in (found["Documentation"], found["Changelog"]):
        assert (ROOT / address.partition("/HEAD/")[2]).exists()
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nProject-URL: Issues, https://example.org/i\n")
    assert setup.urls() == {"Issues": "https://example.org/i"}
