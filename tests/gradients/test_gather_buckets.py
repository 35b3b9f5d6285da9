"""Buckets of units that are assembled. Faked: units, the lane's fetches, which are over, and the channel,
whose other rank has one more in each element.
"""

import types

import pytest
import torch

from infinity.gradients.gather_buckets import GatherBuckets
from infinity.lane.outgoing import OutgoingShare
from infinity.planning.queue import Job
from infinity.timeline import Timeline

DEVICE = types.SimpleNamespace(is_host=True, arrived=lambda _: None, assembled=lambda _: None)
KIB = 1 << 10
FETCHED = Job(types.SimpleNamespace(wait=lambda _: None), done=True)


class Lane:
    """Waits for a job as the lane does, and lets the collectives run."""

    crossed_nbytes = None

    def __init__(self):
        self.queued = []

    def submit(self, job):
        self.queued.append(job)

    def wait(self, job):
        job.called_for()
        for one in self.queued:
            if not one.done:
                one.ready()
                one.run(CHANNEL)
                one.end()
        assert job.done


class Channel:
    ranks = types.SimpleNamespace(size=2)

    def gather_beside_numel(self, _numel):
        return 0

    def gather(self, whole, part, _what, _beside=None):
        whole.view(2, -1).copy_(torch.stack([part, part + 1]))


CHANNEL = Channel()


def unit(name, nbytes, dtype=torch.bfloat16, first=0):
    """A unit of which this rank has the first half."""
    flat = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    part = flat[: len(flat) // 2]
    part.copy_(torch.arange(first, first + len(part)) % 64)
    record = types.SimpleNamespace(shard=None)
    return types.SimpleNamespace(name=name, index=0, flat=flat, part_of_rank=part, record=record)


def opened(bucket=64 * KIB, window=1 << 30, outgoing=1 << 30, device=DEVICE):
    lane, share = Lane(), OutgoingShare(device, Timeline())
    share.open(outgoing)
    buckets = GatherBuckets(lane, device, share, bucket)
    buckets.size(window)
    return buckets, lane, share


def grown(buckets, lane):
    """Fill buckets until they have their whole size."""
    for number in range(3):
        lane.wait(buckets.assemble(unit(f"before {number}", KIB), FETCHED, lane))
    lane.queued.clear()
    return buckets


def names(lane):
    return [one.what for one in lane.queued]


def test_neighbours_go_in_one_collective_until_it_is_full():
    buckets, lane, _ = opened()
    grown(buckets, lane)
    for name in "abcde":
        buckets.assemble(unit(name, 30 * KIB), FETCHED, lane)
    assert names(lane) == ["assemble a; b", "assemble c; d"]


def test_a_unit_that_is_waited_for_closes_its_bucket_and_all_of_it_comes():
    buckets, lane, share = opened()
    units = [unit("a", 2 * KIB), unit("b", 3 * KIB, torch.float32, first=7), unit("c", KIB, first=3)]
    jobs = [buckets.assemble(one, FETCHED, lane) for one in units]
    assert not lane.queued
    lane.wait(jobs[1])
    assert names(lane) == ["assemble a; b; c"]
    assert all(one.done and one.finished for one in jobs)
    for one in units:
        assert torch.equal(one.flat[len(one.flat) // 2 :], one.part_of_rank + 1)
    assert (lane.queued[0].count, lane.queued[0].nbytes, share.ledger.held_nbytes) == (1, 6 * KIB, 0)


def test_the_copies_of_a_bucket_are_no_changes_of_the_weights():
    buckets, lane, _ = opened()
    units = [unit("a", KIB), unit("b", KIB)]
    versions = [one.flat._version for one in units]
    jobs = [buckets.assemble(one, FETCHED, lane) for one in units]
    lane.wait(jobs[0])
    assert [one.flat._version for one in units] == versions


def test_the_first_buckets_of_a_step_are_small_since_computing_waits_for_them():
    buckets, lane, _ = opened()
    for _ in range(2):
        for _ in range(30):
            buckets.assemble(unit("a", 2 * KIB), FETCHED, lane)
        assert [one.nbytes // KIB for one in lane.queued] == [8, 16, 32]
        buckets.begin_step()
        lane.wait(buckets.assemble(unit("a", 2 * KIB), FETCHED, lane))
        lane.queued.clear()
        buckets.begin_step()


@pytest.mark.parametrize("limits", [{"bucket": 0}, {"window": 0}, {"window": 7 * KIB}, {"outgoing": 7 * KIB}])
def test_without_room_each_unit_goes_by_itself_where_it_lies(limits):
    buckets, lane, _ = opened(**limits)
    for name in "abc":
        buckets.assemble(unit(name, 2 * KIB), FETCHED, lane)
    assert names(lane) == ["assemble a", "assemble b", "assemble c"]


def test_on_an_accelerator_units_of_a_bucket_are_gathered_where_they_lie():
    device = types.SimpleNamespace(is_host=False, arrived=lambda _: None, assembled=lambda _: None)
    buckets, lane, share = opened(device=device)
    units = [unit("a", KIB), unit("b", KIB)]
    jobs = [buckets.assemble(one, FETCHED, lane) for one in units]
    took = []
    share.lease_anyway = took.append
    lane.wait(jobs[0])
    assert (lane.queued[0].count, took) == (2, [])
    for one in units:
        assert torch.equal(one.flat[len(one.flat) // 2 :], one.flat[: len(one.flat) // 2] + 1)
