"""Extents on a real disk and in memory, and the checks on folders. Nothing is faked."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from infinity import ConfigError, HostMemoryError, aio
from infinity.memory import Arena, Ledger, view
from infinity.nvme import NvmeStore, check_folder
from infinity.store import HostStore

pytestmark = pytest.mark.disk


@pytest.mark.parametrize("kind", ["nvme", "host"])
def test_extents_hold_what_was_written_to_each(folder, kind):
    store = NvmeStore(str(folder), None) if kind == "nvme" else HostStore(Ledger(1 << 24))
    memory = Arena(8192)
    extents = [store.allocate(5000, f"unit {n}") for n in range(6)]
    assert [extent.nbytes for extent in extents] == [8192] * 6
    for number, extent in enumerate(extents):
        view(memory.address, 8192)[:] = bytes([number]) * 8192
        store.write(extent, 0, memory.address, 8192, "unit", memory).wait()
    for number, extent in reversed(list(enumerate(extents))):
        store.read(extent, 4096, memory.address, 4096, "unit", memory).wait()
        assert bytes(view(memory.address, 4096)) == bytes([number]) * 4096
    store.free(extents[2])
    assert store.allocate(8000, "another").nbytes == 8192
    if kind == "nvme":
        store.close()


def test_the_file_has_no_name_and_no_readers_but_its_owner(folder):
    store = NvmeStore(str(folder), None)
    store.allocate(1 << 20, "unit")
    assert list(folder.iterdir()) == []
    status = os.fstat(store._file.fd)
    assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0)
    store.close()


def test_extents_given_back_are_used_again(folder):
    store = NvmeStore(str(folder), None)
    first = store.allocate(1 << 16, "a")
    store.free(first)
    assert store.allocate(1 << 16, "b") == first
    store.close()


def test_host_memory_beyond_the_ledger_is_refused_with_the_numbers():
    store = HostStore(Ledger(1 << 20))
    extent = store.allocate(1 << 19, "layers.0.hi")
    with pytest.raises(HostMemoryError, match=r"layers\.1\.hi: 1\.0 MiB.*512\.0 KiB of 1\.0 MiB"):
        store.allocate(1 << 20, "layers.1.hi")
    store.free(extent)
    store.allocate(1 << 20, "layers.1.hi")


def test_a_missing_folder_and_a_file_are_refused_by_name(folder):
    with pytest.raises(ConfigError, match=r"nowhere.*no such folder"):
        check_folder(str(folder / "nowhere"))
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*is a file"):
        check_folder(str(folder / "file"))


NOT_OURS = """
import os, sys
from infinity import ConfigError, Init
os.setuid(65534)
try:
    Init(nvme=sys.argv[1]).__enter__()
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_one_may_not_write_in_is_refused(folder):
    folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", NOT_OURS, str(folder)], capture_output=True, text=True, check=False
    )
    assert "may not write" in done.stdout or "Permission denied" in done.stdout, done.stderr


def test_a_full_disk_is_named_with_what_was_to_be_stored(folder):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = NvmeStore(str(folder), None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        store.allocate(1 << 19, "layers.0.hi")
        with pytest.raises(aio.StorageFullError) as caught:
            store.allocate(1 << 20, "layers.1.hi")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert "for: layers.1.hi" in str(caught.value)
    store.close()
