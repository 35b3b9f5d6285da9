"""Where ranks meet that have weights in common. Faked: the other ranks and machines, and what a unit is."""

import types

import pytest
import torch

from infinity.device.device import CpuDevice
from infinity.errors import RanksError
from infinity.gradients.machine_gathering import MachineGathering
from infinity.lane.outgoing import OutgoingShare
from infinity.timeline import Timeline
from infinity.units.machine_units import MachineShare


class Assembly:
    """One of a unit that was fetched `generation` times, of which this rank has eight bytes."""

    nbytes, name = 1 << 20, "layers.3"

    def __init__(self, generation):
        self.aside = MachineShare.__new__(MachineShare)
        self.aside.generation, self.taken = generation, False
        self.aside.flat = torch.arange(8, dtype=torch.uint8) + 10 * generation

    def take(self):
        self.taken = True


class Channel:
    """Gathers this rank's number, and what the other rank's would be."""

    ranks = types.SimpleNamespace(size=2)

    def __init__(self, other=None):
        self.other, self.sent = other, []

    def gather_between(self, whole, part, what):
        """Two other machines, one before this one, have one less and one more in each byte."""
        self.sent.append((what, part.nbytes))
        whole.view(3, -1).copy_(torch.stack([part - 1, part, part + 1]))

    def gather(self, rows, mine, what):
        self.sent.append((what, mine.nbytes))
        rows[0] = mine[0]
        rows[1] = mine[0] if self.other is None else torch.tensor(self.other)


def gathering(*generations):
    return MachineGathering([Assembly(one) for one in generations], None, None, None, 1)


def test_ranks_that_meet_send_a_number_and_no_weights():
    job, channel = gathering(3, 4), Channel()
    job.run(channel)
    assert (job.nbytes, job.count) == (0, 1)
    assert channel.sent == [("assemble layers.3; layers.3", 8)]


def test_ranks_that_have_fetched_a_unit_another_number_of_times_get_an_error():
    with pytest.raises(RanksError, match=r"layers\.3: the ranks have fetched these units another number"):
        gathering(3, 4).run(Channel(other=gathering(3, 5)._fetches))


def test_shares_of_other_machines_cross_once_together_and_lie_where_this_machine_sees_them():
    share, assemblies = OutgoingShare(CpuDevice(), Timeline()), [Assembly(3), Assembly(4)]
    share.open(1 << 20)
    places = [torch.zeros(3, 8, dtype=torch.uint8) for _ in assemblies]
    for one, place in zip(assemblies, places, strict=True):
        place[1] = one.aside.flat
        one.aside.flat, one.aside.brought = place[1], [row.data_ptr() for row in place]
    job, channel = MachineGathering(assemblies, None, None, share, 3), Channel()
    assert (job.nbytes, job.count) == (3 * 16, 1)
    job.run(channel)
    assert [nbytes for _, nbytes in channel.sent] == [16, 8], "the shares of this rank, and then a number"
    for generation, place in zip((3, 4), places, strict=True):
        first = torch.arange(8, dtype=torch.uint8) + 10 * generation
        assert torch.equal(place, torch.stack([first - 1, first, first + 1]))
    assert share.held_nbytes == 0
