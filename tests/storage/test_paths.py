"""Which folders a rank uses: pure dealing, and what this machine says of a real folder."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from infinity.storage.paths import assign, node_of, of_rank

NODES = st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=8)
HOMES = st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=8)


def test_one_rank_uses_every_folder():
    assert assign([0, 1, None], [0]) == [[0, 1, 2]]


def test_ranks_that_share_one_folder_all_use_it():
    assert assign([0], [0, 0, 1, 1]) == [[0]] * 4


def test_each_rank_gets_the_disks_of_its_own_node():
    assert assign([1, 0, 1, 0], [0, 0, 1, 1]) == [[1], [3], [0], [2]]
    assert assign([1, 0, 1, 0], [0, 1]) == [[1, 3], [0, 2]]


def test_a_folder_that_does_not_go_round_is_everybodys():
    assert assign([0, 0, 0], [0, 0]) == [[0, 2], [1, 2]]


@given(NODES, HOMES)
def test_every_folder_is_used_and_every_rank_has_as_many_as_the_others(nodes, homes):
    dealt = assign(nodes, homes)
    assert {one for mine in dealt for one in mine} >= set(range(min(len(nodes), len(homes))))
    assert len({len(mine) for mine in dealt}) == 1
    if len(nodes) >= len(homes):
        assert {one for mine in dealt for one in mine} == set(range(len(nodes)))
    users = [sum(one in mine for mine in dealt) for one in range(len(nodes))]
    if len(nodes) <= len(homes):
        assert max(users) - min(users) <= 1, "no disk has more ranks than another, but for the rest"


def test_without_folders_nobody_shares(tmp_path):
    assert of_rank([], 0, 4) == ([], 1)
    assert of_rank([str(tmp_path)], 1, 4) == ([str(tmp_path)], 4)


def test_the_node_of_a_disk_is_a_number_or_unknown(tmp_path):
    node = node_of(str(tmp_path))
    assert node is None or 0 <= node < max(1, len(list(Path("/sys/devices/system/node").glob("node*"))))
    assert node_of(str(tmp_path / "missing")) is None
