"""A folder is there whole or not at all. Real folders; faked: a file system that cannot exchange folders."""

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity import atomic
from infinity.atomic import new_folder
from infinity.errors import UnsupportedError


def always(_folder):
    return True


def never(_folder):
    return False


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(path, text, may_replace=never):
    with new_folder(path, may_replace) as filling:
        (filling / "file").write_text(text)


def test_a_folder_appears_when_it_is_filled(tmp_path):
    with new_folder(tmp_path / "new", never) as filling:
        (filling / "file").write_text("x")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "x"
    assert names(tmp_path) == ["new"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_nothing_is_left(tmp_path, error):
    with pytest.raises(error), new_folder(tmp_path / "new", never) as filling:
        (filling / "file").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_an_error_leaves_what_was_to_be_replaced(tmp_path):
    fill(tmp_path / "it", "old")
    with pytest.raises(OSError, match="broken"), new_folder(tmp_path / "it", always):
        raise OSError("broken")
    assert (tmp_path / "it" / "file").read_text() == "old"
    assert names(tmp_path) == ["it"]


def test_a_folder_is_replaced_only_where_that_is_allowed(tmp_path):
    fill(tmp_path / "it", "old")
    with pytest.raises(FileExistsError, match="not empty"):
        fill(tmp_path / "it", "new")
    assert (tmp_path / "it" / "file").read_text() == "old"
    fill(tmp_path / "it", "new", always)
    assert (tmp_path / "it" / "file").read_text() == "new"
    assert names(tmp_path) == ["it"]


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "it").mkdir()
    fill(tmp_path / "it", "new")
    assert (tmp_path / "it" / "file").read_text() == "new"


def test_files_and_links_are_never_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "dangling"):
        with pytest.raises(FileExistsError):
            fill(tmp_path / name, "new", always)
    assert names(tmp_path / "there") == []


def test_the_folder_above_has_to_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="above"):
        fill(tmp_path / "no" / "it", "x")


def test_what_a_killed_process_left_goes_with_the_next(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from infinity.atomic import new_folder\n"
        f"with new_folder(Path({str(tmp_path / 'it')!r}), lambda _: True) as filling:\n"
        "    (filling / 'file').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert [name.startswith(".it.saving-") for name in names(tmp_path)] == [True]
    fill(tmp_path / "it", "new")
    assert names(tmp_path) == ["it"]


def test_what_another_process_is_filling_stays(tmp_path):
    with new_folder(tmp_path / "it", never) as filling:
        fill(tmp_path / "it", "other")
        assert filling.exists()
        (filling / "file").write_text("last")
        (tmp_path / "it" / "file").unlink()
    assert (tmp_path / "it" / "file").read_text() == "last"


def test_a_file_system_that_cannot_exchange_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    fill(tmp_path / "it", "old")

    class Libc:
        @staticmethod
        def renameat2(*_arguments):
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_rest, **_named: Libc)
    entered = False
    with pytest.raises(UnsupportedError, match="new folder"), new_folder(tmp_path / "it", always):
        entered = True
    assert not entered
    assert (tmp_path / "it" / "file").read_text() == "old"
    assert names(tmp_path) == ["it"]


def test_everything_is_brought_to_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    order = []
    real = os.fsync

    def noted(fd):
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        order.append((name[:10], (tmp_path / "it").exists()))
        real(fd)

    monkeypatch.setattr(atomic.os, "fsync", noted)
    fill(tmp_path / "it", "x")
    assert order == [("file", False), (".it.saving", False), (tmp_path.name[:10], True)]
