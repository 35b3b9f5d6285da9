"""Where ranks meet that have weights in common. Faked: the other ranks, and what a unit is."""

import types

import pytest
import torch

from infinity.errors import RanksError
from infinity.gradients.machine_gathering import MachineGathering
from infinity.units.machine_units import MachineShare


class Assembly:
    """One of a unit that was fetched `generation` times."""

    nbytes, name = 1 << 20, "layers.3"

    def __init__(self, generation):
        self.aside = MachineShare.__new__(MachineShare)
        self.aside.generation, self.taken = generation, False

    def take(self):
        self.taken = True


class Channel:
    """Gathers this rank's number, and what the other rank's would be."""

    ranks = types.SimpleNamespace(size=2)

    def __init__(self, other=None):
        self.other, self.sent = other, []

    def gather(self, rows, mine, what):
        self.sent.append((what, mine.nbytes))
        rows[0] = mine[0]
        rows[1] = mine[0] if self.other is None else torch.tensor(self.other)


def gathering(*generations):
    return MachineGathering([Assembly(one) for one in generations], None, None)


def test_ranks_that_meet_send_a_number_and_no_weights():
    job, channel = gathering(3, 4), Channel()
    job.run(channel)
    assert (job.nbytes, job.count) == (0, 1)
    assert channel.sent == [("assemble layers.3; layers.3", 8)]


def test_ranks_that_have_fetched_a_unit_another_number_of_times_get_an_error():
    with pytest.raises(RanksError, match=r"layers\.3: the ranks have fetched these units another number"):
        gathering(3, 4).run(Channel(other=gathering(3, 5)._fetches))
