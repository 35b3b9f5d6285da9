"""What disks have room for."""

import os
import shutil
from types import SimpleNamespace

from infinity.storage import full_disk
from infinity.storage.full_disk import room_in


def test_a_folder_has_what_its_disk_has_free(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert 0.5 * free <= room_in([str(tmp_path)]) <= 2 * free


def test_folders_of_one_disk_share_it_and_of_several_the_fullest_decides(monkeypatch):
    disks, free = {"a": 1, "b": 1, "c": 2}, {"a": 100, "b": 100, "c": 30}
    monkeypatch.setattr(os, "stat", lambda folder: SimpleNamespace(st_dev=disks[folder]))
    monkeypatch.setattr(full_disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    assert room_in(["a"]) == 100
    assert room_in(["a", "b"]) == 100
    assert room_in(["a", "c"]) == 60
    assert room_in(["a", "b", "c"]) == 90
