"""A folder is there whole or not at all. Real folders; faked: a file system that cannot exchange folders."""

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.checkpoint import atomic
from infinity.checkpoint.atomic import Older, new_folder
from infinity.errors import UnsupportedError

ALWAYS = Older("a file", lambda _folder: {"file"}, overwrite=True)
NEVER = Older("a file", lambda _folder: {"file"})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(path, text, older=NEVER):
    with new_folder(path, older) as filling:
        (filling / "file").write_text(text)


def test_a_folder_appears_when_it_is_filled(tmp_path):
    with new_folder(tmp_path / "new", NEVER) as filling:
        (filling / "file").write_text("x")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "x"
    assert names(tmp_path) == ["new"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_nothing_is_left(tmp_path, error):
    with pytest.raises(error), new_folder(tmp_path / "new", NEVER) as filling:
        (filling / "file").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_an_error_leaves_what_was_to_be_replaced(tmp_path):
    fill(tmp_path / "it", "old")
    with pytest.raises(OSError, match="broken"), new_folder(tmp_path / "it", ALWAYS):
        raise OSError("broken")
    assert (tmp_path / "it" / "file").read_text() == "old"
    assert names(tmp_path) == ["it"]


def test_a_folder_is_replaced_only_where_that_is_allowed(tmp_path):
    fill(tmp_path / "it", "old")
    with pytest.raises(FileExistsError, match="a file is there: overwrite=True replaces it"):
        fill(tmp_path / "it", "new")
    assert (tmp_path / "it" / "file").read_text() == "old"
    fill(tmp_path / "it", "new", ALWAYS)
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
            fill(tmp_path / name, "new", ALWAYS)
    assert names(tmp_path / "there") == []


def test_folders_above_are_made(tmp_path):
    fill(tmp_path / "not" / "yet" / "it", "x")
    assert (tmp_path / "not" / "yet" / "it" / "file").read_text() == "x"
    (tmp_path / "text").touch()
    with pytest.raises(NotADirectoryError, match="expected a folder"):
        fill(tmp_path / "text" / "it", "x")


def test_what_is_not_ours_stays_whatever_it_is(tmp_path):
    fill(tmp_path / "it", "old")
    it = tmp_path / "it"
    (it / "notes.txt").write_text("mine")
    (it / "below" / "empty").mkdir(parents=True)
    (it / "below" / "file").write_text("mine, too")
    (it / "link").symlink_to("/nowhere")
    os.mkfifo(it / "pipe")
    fill(it, "new", ALWAYS)
    assert (it / "file").read_text() == "new"
    assert ((it / "notes.txt").read_text(), (it / "below" / "file").read_text()) == ("mine", "mine, too")
    assert (it / "link").readlink() == Path("/nowhere")
    assert (it / "below" / "empty").is_dir()
    assert (it / "pipe").is_fifo()
    assert names(tmp_path) == ["it"]


def test_where_files_have_one_name_each_what_is_not_ours_is_copied(tmp_path, monkeypatch):
    def refused(*_arguments, **_named):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    fill(tmp_path / "it", "old")
    (tmp_path / "it" / "notes.txt").write_text("mine")
    monkeypatch.setattr(atomic.os, "link", refused)
    fill(tmp_path / "it", "new", ALWAYS)
    assert (tmp_path / "it" / "notes.txt").read_text() == "mine"


def test_a_file_of_somebody_elses_is_not_replaced_by_one_of_its_name(tmp_path):
    fill(tmp_path / "it", "old")
    with pytest.raises(FileExistsError, match="file in it is not ours"):
        fill(tmp_path / "it", "new", Older("nothing", lambda _folder: (), overwrite=True))
    assert (tmp_path / "it" / "file").read_text() == "old"
    assert names(tmp_path) == ["it"]


@pytest.mark.parametrize("there", ["one of ours", "something else", "a file", "nothing that can be kept"])
def test_what_would_be_lost_goes_beside_what_may_not_be_replaced(tmp_path, there):
    known = {"one of ours": {"file"}, "nothing that can be kept": set()}.get(there)
    if there == "a file":
        (tmp_path / "it").write_text("old")
    else:
        fill(tmp_path / "it", "old")
    (tmp_path / "it-2").touch()
    older = Older("one of ours", lambda _folder: known, overwrite=there != "one of ours", rescues=True)
    says = "overwrite=True replaces it" if there == "one of ours" else "is never replaced|not replaced"
    with pytest.raises(FileExistsError, match=says) as caught:
        fill(tmp_path / "it", "new", older)
    assert f"everything was saved in {tmp_path / 'it-3'} instead" in str(caught.value)
    assert caught.value.filename2 == str(tmp_path / "it-3")
    assert (tmp_path / "it-3" / "file").read_text() == "new"
    old = tmp_path / "it" if there == "a file" else tmp_path / "it" / "file"
    assert old.read_text() == "old"
    assert names(tmp_path) == ["it", "it-2", "it-3"]


def test_what_a_killed_process_left_goes_with_the_next(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from infinity.checkpoint.atomic import Older, new_folder\n"
        f"with new_folder(Path({str(tmp_path / 'it')!r}), Older('it', lambda _: None)) as filling:\n"
        "    (filling / 'file').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert [name.startswith(".it.saving-") for name in names(tmp_path)] == [True]
    fill(tmp_path / "it", "new")
    assert names(tmp_path) == ["it"]


def test_what_another_process_is_filling_stays(tmp_path):
    with new_folder(tmp_path / "it", NEVER) as filling:
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
    with pytest.raises(UnsupportedError, match="new folder"), new_folder(tmp_path / "it", ALWAYS):
        entered = True
    assert not entered
    rescued = Older("a file", ALWAYS.names, overwrite=True, rescues=True)
    with pytest.raises(FileExistsError, match=r"cannot exchange.*was saved in .*it-2 instead"):
        fill(tmp_path / "it", "new", rescued)
    assert (tmp_path / "it-2" / "file").read_text() == "new"
    assert (tmp_path / "it" / "file").read_text() == "old"
    assert names(tmp_path) == ["it", "it-2"]


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
