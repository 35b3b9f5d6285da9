"""Contestants of measurements: forked from the test's process, or each in an interpreter of its own."""

import tempfile

import pytest

from infinity.bench.engine.runs import OWN, Environment
from launches import python


class Forked(Environment):
    """Runs contestants in forks of this process, which has imported torch and transformers already."""

    def run(self, arguments, keep=()):
        """Run Python; return its exit code and output. keep: a fork inherits every descriptor."""
        with tempfile.TemporaryDirectory() as place:
            ended = python(*arguments, folder=place, **self.variables)
        return ended.returncode, ended.stdout + ended.stderr


BOTH = [
    pytest.param(Forked(OWN.python), id="forked"),
    pytest.param(OWN, id="its own interpreter", marks=pytest.mark.slow),
]
"""Parameters of a test that runs contestants: the second is what measurements do, and takes longer."""
