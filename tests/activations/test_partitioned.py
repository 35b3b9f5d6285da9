"""Activations divided among ranks that hold copies. Trusted: torch. Faked: the other ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity.activations.partitioned import PartitionedBoundaries
from infinity.errors import ConfigError, RanksError


class Copies:
    """Ranks that hold what this one holds, or, at a comparison, something else."""

    def __init__(self, rank, size, *, copies=True):
        self.rank, self.size, self.copies = rank, size, copies

    def channel(self):
        return self

    def same(self, digest, what):
        return self.copies


def parts_of(size):
    return [PartitionedBoundaries(Copies(rank, size), torch.device("cpu"), None) for rank in range(size)]


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
    parts = PartitionedBoundaries(Copies(0, 2, copies=False), torch.device("cpu"), None)
    with pytest.raises(RanksError, match=r"\(64, 64\), is not the same on the 2 ranks .*tensor-par"):
        parts.save(torch.ones(64, 64))


def test_the_ranks_beside_are_those_of_a_mesh_alone():
    with pytest.raises(ConfigError, match=r"partition_activations=True\) takes the ranks of a mesh"):
        infinity.Init(partition_activations=True)
