"""Which commits of several ranks count. Trusted: what is a commit. Faked: the ranks, which are threads."""

from dataclasses import replace

import pytest

from infinity import ConfigError
from infinity.durable.recovery import in_common
from infinity.storage.manifest import CheckpointError
from samples import COMMIT
from thread_ranks import on_ranks


def commits(rank, *steps, **changes):
    return tuple(
        replace(COMMIT, rank=rank, ranks=2, step=step, sequence=step, **changes) for step in reversed(steps)
    )


def steps(*of_ranks):
    """Return the steps from which each rank may go on, where these are its commits."""
    return on_ranks(len(of_ranks), lambda group: [one.step for one in in_common(of_ranks[group.rank], group)])


def test_a_rank_that_is_ahead_goes_back_to_the_last_step_that_all_have():
    assert steps(commits(0, 3, 4), commits(1, 4, 5)) == [[4], [4]]
    assert steps(commits(0, 3, 4), commits(1, 3, 4)) == [[4, 3], [4, 3]]


def test_a_run_that_only_some_ranks_have_begun_begins_anew():
    assert steps(commits(0, 1), ()) == [[], []]


def test_ranks_without_a_step_in_common_are_refused_with_what_each_has():
    with pytest.raises(CheckpointError, match=r"no step in common: rank 0: step 4, step 3; rank 1: none"):
        steps(commits(0, 3, 4), ())


@pytest.mark.parametrize("other", [commits(0, 4), commits(1, 4, run="aa")])
def test_folders_of_another_rank_or_run_are_refused(other):
    with pytest.raises(ConfigError, match="do not fit together"):
        steps(commits(0, 4), other)
