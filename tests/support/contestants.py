"""Contestants of measurements: forked from the test's process, or each in an interpreter of its own."""

import contextlib
import json
import os
import tempfile

import pytest

from infinity.bench.engine import contestant
from infinity.bench.engine.runs import OWN, Environment
from launches import Program, python


class Forked(Environment):
    """Runs contestants in forks of this process, which has imported torch and transformers already."""

    def run(self, arguments, keep=()):
        """Run Python; return its exit code and output, what tells its result last.

        keep: a fork inherits every descriptor.
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


class ForkedRank(Program):
    """A rank of a contestant, as infinity.bench.ranks.launch watches it."""

    returncode = None

    def poll(self):
        """Return its exit code; None as long as it runs."""
        if self.over():
            self.returncode = os.waitstatus_to_exitcode(self._child.status)
        return self.returncode


@contextlib.contextmanager
def forked_ranks(_environment, spec, group, outs, _said):
    """Start the ranks of a contestant as infinity.bench.ranks.launch does, but in forks of this process."""
    with tempfile.TemporaryDirectory() as place:
        ranks = [
            ForkedRank(
                contestant.__file__,
                json.dumps({**spec, "out": f"/proc/self/fd/{out.fileno()}"}),
                folder=place,
                **group,
                RANK=number,
                LOCAL_RANK=number,
            )
            for number, out in enumerate(outs)
        ]
        try:
            yield ranks
        finally:
            for one in ranks:
                one.kill()
