"""File systems for a test: images, tmpfs, overlay, mounted by root in the folder of the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time

import pytest

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
# What mount and losetup say where a container forbids them, or where the kernel lacks a file system.
NOT_HERE = (
    "permission denied",
    "Operation not permitted",
    "unknown filesystem type",
    "cannot find an unused loop",
)
# What losetup says where another process has taken a device in between.
A_MOMENT_LATER = ("Resource temporarily unavailable", "Device or resource busy")


def run(command, *arguments):
    """Run a command of the system; what it printed. Where it is missing or forbidden, skip the test."""
    path = shutil.which(command, path=PATH)
    if path is None:
        pytest.skip(f"needs {command}")
    for _ in range(50):
        done = subprocess.run([path, *map(str, arguments)], check=False, capture_output=True, text=True)
        if not (done.returncode and any(words in done.stderr for words in A_MOMENT_LATER)):
            break
        time.sleep(0.1)
    if any(words in done.stderr for words in NOT_HERE):
        pytest.skip(f"not possible here: {command}: {done.stderr.splitlines()[0]}")
    if done.returncode:
        raise OSError(f"{command} {' '.join(map(str, arguments))}: {done.stderr}")
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(place, *options):
    """Mount something on a folder."""
    place.mkdir(exist_ok=True)
    run("mount", *options, place)
    try:
        place.chmod(0o700)
        yield place
    finally:
        run("umount", "-l", place)


@contextlib.contextmanager
def device(folder, nbytes, sector=512):
    """A block device with sectors of this size, kept in a file of `folder`."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(nbytes)
    name = run("losetup", "--sector-size", sector, "--find", "--show", image)
    try:
        yield name
    finally:
        run("losetup", "--detach", name)


@contextlib.contextmanager
def ground(kind, folder):
    """A folder on a file system of this kind."""
    place = folder / "place"
    with contextlib.ExitStack() as made:
        if kind == "tmpfs":
            yield made.enter_context(mounted(place, "-t", "tmpfs", "-o", "size=64m", "tmpfs"))
        elif kind == "overlay":
            parts = {name: folder / name for name in ("lowerdir", "upperdir", "workdir")}
            for part in parts.values():
                part.mkdir()
            options = ",".join(f"{name}={part}" for name, part in parts.items())
            yield made.enter_context(mounted(place, "-t", "overlay", "-o", options, "overlay"))
        elif kind == "4 KiB sectors":
            name = made.enter_context(device(folder, 64 << 20, sector=4096))
            run("mkfs.ext4", "-q", name)
            yield made.enter_context(mounted(place, name))
        else:
            name = made.enter_context(device(folder, 320 << 20))
            run(f"mkfs.{kind}", "-q", name)
            yield made.enter_context(mounted(place, name))
