"""Which ranks keep second parts of weights together. Faked: the other ranks, and their machines."""

import logging
import types

import pytest

from infinity import ConfigError
from infinity.engine.secondary_ranks import neighbours_of

HOST, OTHER = (types.SimpleNamespace(is_host=is_host) for is_host in (True, False))


class Some:
    device = "cuda:1"

    def __init__(self, machines, sizes=None):
        self.size, self.machines, self.sizes = len(machines), machines, sizes

    def of_all(self, values, _what):
        sizes = self.sizes or [values[0]] * self.size
        return [list(pair) for pair in zip(sizes, self.machines, strict=True)]


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "infinity")
    return lambda: [one.message for one in caplog.records]


@pytest.mark.parametrize(
    ("given", "machines", "expected"),
    [
        ("machine", [1, 1, 2, 2], 2),
        (2, [1, 1, 2, 2], 2),
        (2, [1, 1, 1, 1], 2),
        ("machine", [1, 1, 1, 2, 2, 2], 3),
    ],
)
def test_neighbours_of_one_machine_keep_second_parts_together(given, machines, expected, said):
    assert neighbours_of(given, Some(machines), HOST) == expected
    assert said() == []


@pytest.mark.parametrize(
    ("given", "machines", "why"),
    [
        (2, [1], "there is one rank, which has all of the weights"),
        (1, [1, 1, 2, 2], "each rank would keep all of the weights"),
        ("machine", [1, 2, 3], "each rank would keep all of the weights"),
        (4, [1, 1, 1, 1], "all ranks keep parts together anyway"),
        ("machine", [1, 1], "all ranks keep parts together anyway"),
    ],
)
def test_where_there_is_nothing_to_gain_that_is_said_and_nothing_done(given, machines, why, said):
    assert neighbours_of(given, Some(machines), HOST) == 0
    (message,) = said()
    assert message.startswith(f"secondary_shard={given!r}: {why}")


@pytest.mark.parametrize(
    ("given", "ranks", "why"),
    [
        (3, Some([1, 1, 2, 2]), "3 does not divide the 4 ranks, .*: 2 would"),
        (5, Some([1, 1, 1]), "5 does not divide the 3 ranks, .*: none would"),
        (2, Some([1, 2, 1, 2]), "ranks 0 to 1 are on several machines"),
        ("machine", Some([1, 1, 1, 2]), r"the machines have \[3, 1\] ranks"),
        (2, Some([1, 1, 2, 2], [2, 2, 0, -1]), "rank 1: 2; rank 2: None; rank 3: 'machine'"),
        (None, Some([1, 1, 2, 2], [2, 2, 0, -1]), "Give all the same Config"),
    ],
)
def test_what_cannot_be_is_the_same_error_on_every_rank(given, ranks, why):
    with pytest.raises(ConfigError, match=why):
        neighbours_of(given, ranks, HOST)


def test_without_a_setting_nothing_is_kept_or_said(said):
    assert neighbours_of(None, Some([1, 1, 2, 2]), OTHER) == 0
    assert said() == []


def test_an_accelerator_is_refused_with_the_cure():
    with pytest.raises(ConfigError, match=r"2 with device='cuda:1': .*\(device=\"cpu\"\)"):
        neighbours_of(2, Some([1, 1, 2, 2]), OTHER)
