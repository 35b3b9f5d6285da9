"""Steps of a model that its budget of host memory holds whole, by counts: nothing is moved, made or awaited
from the third one on, and no update is ever written. Trusted: the recipe in memory, and what the engine
counts. Nothing is faked.
"""

import pytest

from deep import Both
from infinity import stats

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

KINDS = [
    ({"update": "backward"}, {}),
    ({"update": "forward"}, {"max_norm": 1e-3}),
    ({"update": "auto"}, {}),
    ({"speculate": "auto"}, {"max_norm": 1.0}),
]


def build(folder, kind):
    ours, both = kind
    return Both(folder, memory="16MiB", ours=ours, **both)


def train(both, number):
    both.backward(number)
    for _, optimizer in both:
        optimizer.step()
        optimizer.zero_grad()


def counted(both):
    """What has been moved, made and decided so far."""
    engine = both.engine
    engine.lane.drain()
    seen = stats(both.model)
    return {
        "read": seen.nvme_read_nbytes,
        "written": seen.nvme_written_nbytes,
        "units' buffers": engine.residency.blocks.buffers.made,
        "gradients' buffers": engine.outgoing_share.buffers.made,
        "placements": engine.pins.revisions,
        "misses": seen.misses,
        "divergences": seen.divergences,
        "stalls": dict(engine.residency.counts.stalls_s),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_third_step_on_nothing_is_moved_made_or_awaited(folder, kind):
    both, seen = build(folder, kind), []
    for number in range(6):
        train(both, number)
        seen.append(counted(both))
    both.check()
    assert stats(both.model).nvme_nbytes == 0, "all of it is in host memory"
    assert seen[2:] == [seen[1]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_no_update_is_written_and_each_field_is_read_once_at_most(folder, kind):
    both = build(folder, kind)
    before = counted(both)
    for number in range(3):
        train(both, number)
    after, numel = counted(both), stats(both.model).parameters
    assert after["written"] == before["written"]
    assert 0 < after["read"] - before["read"] <= 1.1 * 4 * numel, "hi and lo, in whole blocks"
