"""Extents on a real disk, and the checks on folders. A full disk is faked by a limit on file sizes, a hanging
one by `held`; the disk's speed by an entry in the cache.
"""

import errno
import os
import resource

import pytest

from infinity import ConfigError, aio
from infinity.aio import faults
from infinity.storage import disk_speed as disk
from infinity.storage.memory import Arena, view
from infinity.storage.nvme import NvmeStore, check_folder
from infinity.storage.store import Request
from launches import python

pytestmark = pytest.mark.disk


def test_extents_hold_what_was_written_to_each(folder):
    store, memory = NvmeStore(str(folder), None), Arena(8192)
    extents = [store.allocate(5000, f"unit {n}") for n in range(6)]
    assert [extent.nbytes for extent in extents] == [8192] * 6
    for number, extent in enumerate(extents):
        view(memory.address, 8192)[:] = bytes([number]) * 8192
        store.write(Request(extent, 0, memory.address, 8192, "unit", memory)).wait()
    for number, extent in reversed(list(enumerate(extents))):
        store.read(Request(extent, 4096, memory.address, 4096, "unit", memory)).wait()
        assert bytes(view(memory.address, 4096)) == bytes([number]) * 4096
    store.close()


def test_reads_somebody_waits_for_go_first_and_writes_nobody_waits_for_last(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    disk._keep(str(folder), disk.DiskSpeed(1.0, 1.0, 1.0, 1, 1 << 20, "threads", "2026-05-01"))
    store, memory = NvmeStore(str(folder), "threads"), Arena(4096)
    extent = store.allocate(4096, "unit")
    request = Request(extent, 0, memory.address, 4096, "unit", memory)
    urgent = request._replace(urgent=True)
    store.write(request).wait()
    with faults.held(store.engine):
        begun = {
            "write-behind": store.write(request),
            "prefetch": store.read(request),
            "urgent write": store.write(urgent),
            "demand": store.read(urgent),
        }
    store.close()
    order = sorted(begun, key=lambda name: begun[name].ended_s)
    assert order == ["urgent write", "demand", "prefetch", "write-behind"]


@pytest.mark.parametrize("kind", ["io_uring", "threads"])
def test_the_engine_keeps_in_flight_what_the_disk_likes(folder, monkeypatch, tmp_path, kind):
    assert NvmeStore(str(folder), "threads").engine.depth == 8
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    disk._keep(str(folder), disk.DiskSpeed(1.0, 1.0, 1.0, 5, 1 << 18, kind, "2026-05-01"))
    try:
        store = NvmeStore(str(folder), kind)
    except aio.EngineUnavailableError as error:
        pytest.skip(str(error))
    assert (store.kind, store.engine.depth, store.engine.piece_nbytes) == (kind, 5, 1 << 18)
    assert store.folders == (str(folder),)
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


def test_a_missing_folder_and_a_file_are_refused_by_name(folder):
    with pytest.raises(ConfigError, match=r"nowhere.*no such folder"):
        check_folder(str(folder / "nowhere"))
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*is a file"):
        check_folder(str(folder / "file"))


def test_a_folder_of_the_kernels_is_refused_by_its_file_system():
    with pytest.raises(
        ConfigError, match=r"nvme='/proc' is the kernel's \(proc\): .* Name a folder on an NVMe"
    ):
        check_folder("/proc")


@pytest.mark.parametrize(("kind", "why"), [("nfs4", "wait for the network"), ("tmpfs", "in host memory")])
def test_a_folder_on_no_drive_of_this_machine_is_told_with_its_file_system(
    folder, monkeypatch, caplog, kind, why
):
    monkeypatch.setattr("infinity.storage.nvme.filesystem", lambda _: kind)
    NvmeStore(str(folder), "threads").close()
    (said,) = [one.message for one in caplog.records if f"is on {kind}: " in one.message]
    assert said.startswith(f"nvme={str(folder)!r}")
    assert why in said


def test_a_tilde_that_no_shell_has_replaced_is_told_with_what_it_stands_for(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    with pytest.raises(ConfigError, match="~ stands for a home only in a shell: write '/home/somebody/x'"):
        check_folder("~/x")


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
def test_a_folder_one_may_not_write_in_is_refused(folder, tmp_path):
    folder.chmod(0o755)
    done = python("-c", NOT_OURS, folder, folder=tmp_path)
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
