"""Contestants of measurements: forked from the test's process, or each in an interpreter of its own."""

import tempfile

import pytest

from infinity.bench.engine.runs import OWN, Environment
from launches import python


class Forked(Environment):
    """Runs contestants in forks of this process, which has imported torch and transformers already."""

    def run(self, arguments, keep=()):
        """Run Python; return its exit code and output, what tells its result last. keep: a fork inherits every
        descriptor.
        """
        with tempfile.TemporaryDirectory() as place:
            ended = python(*arguments, folder=place, **self.variables)
        printed = [ended.stdout, ended.stderr] if ended.returncode else [ended.stderr, ended.stdout]
        return ended.returncode, "".join(printed)


FORKED = [pytest.param(Forked(OWN.python), id="forked")]
"""Parameters of a test whose contestants are run by an interpreter of their own in another test."""
BOTH = [
    *FORKED,
    pytest.param(OWN, id="its own interpreter", marks=pytest.mark.slow),
]
"""Parameters of a test that runs contestants: the second is what measurements do, and takes longer."""
