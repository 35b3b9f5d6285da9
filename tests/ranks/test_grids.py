"""The ranks of a mesh, and parameters that say which part of a weight they are. Ranks are numbers alone."""

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError, UnsupportedError
from infinity.planning.boxes import Box
from infinity.ranks import mesh as meshes
from infinity.ranks.mesh import MeshRanks, data_of_groups

ROWS = [(0, 1), (2, 3)]
"""Those that divide layers, for the ranks 1 and 3 or 0 and 2, which share data."""


class Two:
    """Ranks that are two, of which nothing is asked."""

    size = 2


def marked(shape=(4, 6), **marks):
    one = nn.Parameter(torch.zeros(shape))
    for name, value in marks.items():
        setattr(one, name, value)
    return one


def seen_by(rank, monkeypatch):
    monkeypatch.setattr(meshes.dist, "get_rank", lambda: rank)
    return MeshRanks(data_of_groups((1, 3) if rank % 2 else (0, 2), ROWS, rank), Two())


def test_the_groups_of_an_mpu_are_a_grid():
    found = data_of_groups((1, 3), ROWS, 3)
    assert (found.data, found.beside, found.everyone, found.marked) == ((1, 3), (2, 3), (0, 1, 2, 3), (2, 3))


@pytest.mark.parametrize("rows", [[(0, 1), (2, 3, 4)], [(0, 1), (1, 3)], [(1, 3), (1, 3)]])
def test_groups_that_are_no_grid_are_refused(rows):
    with pytest.raises(ConfigError, match=r"mpu: the ranks \[1, 3\] share data, and divide layers with"):
        data_of_groups((1, 3), rows, 1)


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_a_marked_parameter_is_a_part_of_a_weight(monkeypatch, mark):
    mesh = seen_by(3, monkeypatch)
    one = marked(**{mark: True}, partition_dim=1, partition_stride=1)
    assert mesh.is_cut(one)
    assert mesh.counts(one)
    assert mesh.shape_of(one, "one") == (4, 12)
    assert mesh.box_of(one, "one") == Box((0, 6), (4, 6))


def test_what_is_not_marked_is_a_copy_that_the_first_rank_counts(monkeypatch):
    one = marked(tensor_model_parallel=False, partition_dim=-1)
    counted = []
    for rank in range(4):
        mesh = seen_by(rank, monkeypatch)
        counted.append(mesh.counts(one))
        assert not mesh.is_cut(one)
        assert mesh.box_of(one, "one") == Box((0, 0), mesh.shape_of(one, "one"))
    assert counted == [True, False, True, False]


@pytest.mark.parametrize(
    "marks", [{"partition_dim": 0, "partition_stride": 2}, {"partition_dim": None}, {"partition_dim": 2}]
)
def test_a_part_whose_elements_cannot_be_told_is_refused_in_files(monkeypatch, marks):
    mesh = seen_by(0, monkeypatch)
    with pytest.raises(UnsupportedError, match="one is marked as a part of a weight, with partition_dim="):
        mesh.box_of(marked(tensor_model_parallel=True, **marks), "one")


def test_marks_mean_nothing_without_an_mpu():
    one = marked(tensor_model_parallel=True, partition_dim=0)
    assert not MeshRanks().is_cut(one)
    assert MeshRanks().draws_alike
    assert MeshRanks().shape_of(one, "one") == (4, 6)
