"""Programs forked from a test's process end as interpreters of their own end. Nothing is faked."""

import os
import signal
import subprocess
import sys
import time

import pytest

from launches import Program, python, python_of_ranks

ENDS = {
    "nothing": "print('said')",
    "a number": "import sys; print('said'); sys.exit(3)",
    "a text": "import sys; sys.exit('why')",
    "none": "raise SystemExit",
    "an error": "print('said'); raise ValueError('planted')",
    "at its end": "import atexit; atexit.register(print, 'later'); print('said')",
    "arguments": "import sys; print(sys.argv, __name__)",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_as_in_an_interpreter_of_its_own(tmp_path, name):
    command = ["-c", ENDS[name], "one", "2"]
    ended = python(*command, folder=tmp_path)
    own = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (own.returncode, own.stdout)
    assert ended.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_a_module_are_programs_too(tmp_path):
    file = tmp_path / "program.py"
    file.write_text("import sys; print(__name__, __file__, sys.argv)")
    ended = python(file, "x", folder=tmp_path)
    assert ended.stdout == f"__main__ {file} {[str(file), 'x']}\n"
    assert python("-m", "infinity", "--help", folder=tmp_path).stdout.startswith("usage: infinity")


def test_a_program_that_waits_can_be_interrupted_and_killed(tmp_path):
    waits = "print('waiting', flush=True)\nimport time\ntime.sleep(60)"
    for number, code in ((signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)):
        program = Program("-c", waits, folder=tmp_path)
        while not any("waiting" in path.read_text() for path in tmp_path.iterdir()):
            time.sleep(0.01)
        assert not program.over()
        os.kill(program.pid, number)
        ended = program.end()
        assert ended.returncode == code
        assert ("KeyboardInterrupt" in ended.stderr) == (number == signal.SIGINT)
        program.kill()  # it has ended: nothing happens


def test_each_rank_knows_its_number(tmp_path):
    code = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    assert [one.stdout for one in python_of_ranks(2, "-c", code, folder=tmp_path)] == ["0 2\n", "1 2\n"]
