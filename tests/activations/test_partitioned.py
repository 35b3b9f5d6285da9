"""Activations divided among ranks that hold copies. Trusted: torch. Faked: the other ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity.activations.partitioned import CopyHolders, PartitionedBoundaries
from infinity.config.settings import Config
from infinity.engine.init import _copies_of
from infinity.errors import ConfigError, RanksError
from infinity.ranks.mesh import DataOfMesh
from infinity.ranks.places import Names


class CopyRanks:
    """Ranks that hold what this one holds, or, at a comparison or a gathering, something else."""

    def __init__(self, rank, size, *, copies=True):
        self.rank, self.size, self.copies, self.compared = rank, size, copies, 0
        self.names = Names(range(size), rank)

    def channel(self):
        return self

    def agree(self, what):
        pass

    def same(self, digest, what):
        self.compared += 1
        return self.copies

    def integers(self, values, what):
        name, seen = values
        return [[name, seen if rank == self.rank or self.copies else 7] for rank in range(self.size)]

    def gather(self, whole, part, what):
        whole.copy_(part.repeat(self.size))


def parts_of(size):
    return [PartitionedBoundaries(CopyRanks(rank, size), torch.device("cpu"), None) for rank in range(size)]


@given(
    numel=st.integers(1, 5000),
    size=st.integers(2, 7),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_the_parts_of_all_ranks_one_behind_the_other_are_the_whole(numel, size, dtype):
    whole = torch.arange(numel).remainder(113).to(dtype)
    parts = [one.part_of(whole) for one in parts_of(size)]
    assert len({part.numel() for part in parts}) == 1
    assert parts[0].numel() < numel / size + 2
    assert parts[0].nbytes % 2 == 0
    joined = torch.cat([part.view(torch.uint8) for part in parts])
    assert torch.equal(joined[: whole.nbytes], whole.view(torch.uint8))


def test_a_part_is_a_copy_and_the_whole_may_be_changed():
    whole = torch.ones(8)
    part = parts_of(2)[1].part_of(whole)
    whole.zero_()
    assert part.tolist() == [1] * 4


def test_ranks_that_hold_no_copies_are_told_before_anything_is_divided():
    parts = PartitionedBoundaries(CopyRanks(0, 2, copies=False), torch.device("cpu"), None)
    with pytest.raises(RanksError, match=r"\(64, 64\), is not the same on the 2 ranks .*tensor-par"):
        parts.save(torch.ones(64, 64))


def test_the_ranks_beside_are_those_of_a_mesh_alone():
    with pytest.raises(ConfigError, match=r"partition_activations=True\) takes the ranks of a mesh"):
        infinity.Init(partition_activations=True)


def of_mesh(ranks):
    return PartitionedBoundaries(ranks, torch.device("cpu"), None, CopyHolders(asked=False))


def boundary(numel=4096):
    return torch.ones(numel, requires_grad=True)


def test_ranks_of_a_mesh_are_seen_to_hold_copies_until_the_first_backward():
    ranks = CopyRanks(0, 2)
    parts = of_mesh(ranks)
    first, second = parts.save(boundary()), parts.save(boundary())
    assert (ranks.compared, first.nbytes, parts.saved) == (2, 2048 * 4, 2)
    assert torch.equal(second.take(), torch.ones(4096))
    parts.save(boundary())
    assert ranks.compared == 2, "the digest of each goes with its part from here on"


@pytest.mark.parametrize("before", [0, 1])
def test_where_they_do_not_all_stays_whole_from_there_on(before):
    ranks = CopyRanks(0, 2)
    parts = of_mesh(ranks)
    for _ in range(before):
        parts.save(boundary())
    ranks.copies, own = False, boundary()
    assert parts.save(own) is own
    assert not parts.takes(own)
    assert (parts.saved, ranks.compared) == (before, before + 1)


def test_inputs_too_small_to_be_divided_are_compared_as_well():
    """Where ranks have parts of a sequence, one of them may have less than the others."""
    ranks, own = CopyRanks(0, 2), boundary(8)
    parts = of_mesh(ranks)
    assert parts.save(own) is own
    assert (parts.saved, ranks.compared) == (0, 1)


@pytest.mark.parametrize("asked", [False, True])
def test_inputs_that_differ_between_ranks_later_are_an_error_before_anything_is_computed_again(asked):
    ranks = CopyRanks(1, 3)
    parts = PartitionedBoundaries(ranks, torch.device("cpu"), None, CopyHolders(asked=asked))
    kept = parts.save(boundary())
    ranks.copies = False
    with pytest.raises(RanksError, match=r"rank 0, 2: digest 0*7; rank 1: digest .*again from a patchwork"):
        kept.take()


def test_ranks_that_gather_different_inputs_are_told():
    ranks = CopyRanks(0, 2)
    kept = of_mesh(ranks).save(boundary())
    ranks.integers = lambda values, what: [values, [values[0] + 1, values[1]]]
    ranks.agree = pytest.fail  # which raises what each of them does
    with pytest.raises(pytest.fail.Exception, match="gathering activation 1"):
        kept.take()


def test_only_a_mesh_divides_by_itself_and_no_budget_of_activations_does():
    mesh = DataOfMesh(("tp",), ((0, 1),), (0,), (0, 1), (0, 1))
    assert _copies_of(mesh, None, Config()) == CopyHolders(asked=False)
    assert _copies_of(mesh, True, Config()) == CopyHolders()
    assert _copies_of(mesh, False, Config()) is None
    assert _copies_of(mesh, None, Config(activation_memory="1GiB")) is None
    assert _copies_of(None, None, Config()) is None
