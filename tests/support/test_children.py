"""What a test's forked children tell it. Faked: a `mount` that is forbidden. The processes are real."""

import ast
import os
import signal

import pytest

import mounts
from children import Child, ended
from places import ROOT

SCRIPTS = {"killed_save_run.py"}  # processes of their own, in which no test runs


def test_a_skip_in_a_child_skips_the_test_with_its_reason():
    with pytest.raises(pytest.skip.Exception, match=r"^no such disk here$"):
        ended(lambda say: pytest.skip("no such disk here"))


def test_a_command_that_is_missing_in_a_child_skips_the_test_by_its_name(monkeypatch):
    def work(say):
        say(begun=True)
        mounts.run("mkfs.btrfs", "-q", "/dev/null")

    monkeypatch.setattr(mounts, "PATH", "")
    with pytest.raises(pytest.skip.Exception, match=r"needs mkfs\.btrfs"):
        ended(work)


def test_a_skip_in_a_child_of_a_child_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="deep down"):
        ended(lambda say: ended(lambda say: pytest.skip("deep down")))


def test_where_mounting_is_forbidden_a_test_is_skipped_and_says_so(tmp_path, monkeypatch):
    mount = tmp_path / "mount"
    mount.write_text("#!/bin/sh\necho mount: $5: permission denied. >&2\nexit 32\n")
    mount.chmod(0o755)
    monkeypatch.setattr(mounts, "PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"not possible here: mount: .*permission denied"):
        ended(lambda say: mounts.mounted(tmp_path / "place", "-t", "tmpfs", "tmpfs").__enter__())


def test_what_a_child_did_not_come_to_say_is_told_with_what_it_said():
    def work(say):
        say(begun=1)
        raise OSError("the disk is gone")

    said = ended(work)
    assert said["begun"] == 1
    with pytest.raises(AssertionError, match=r"'refused'.*OSError: the disk is gone"):
        said["refused"]
    assert said.get("refused") is None


def test_a_child_that_hangs_is_ended():
    said = ended(lambda say: signal.pause(), limit_s=0.1)
    assert said["hang"]


def test_a_childs_end_is_its_exit_status():
    child = Child(lambda say: os.kill(os.getpid(), signal.SIGKILL))
    while not child.over():
        pass
    assert os.waitstatus_to_exitcode(child.status) == -signal.SIGKILL


def test_tests_fork_by_this_alone():
    forking = {
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"fork", "forkpty"}
    }
    assert forking - SCRIPTS == {"children.py"}
