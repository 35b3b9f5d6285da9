"""Updates that are made before step() decides them where nobody asks for it, with speculate="auto": when, of
which units, and where the disk has no room. Trusted: the recipe in memory. Nothing is faked but a full disk,
and what was decided from clocks.
"""

import contextlib

import pytest

import infinity
from deep import LAYERS, SETTINGS
from infinity import SGD, AdamW, stats
from infinity.aio import StorageFullError
from infinity.gradients import early, speculation
from infinity.planning.split import HalfStep, UpdateSplit
from made_ahead import HI_PINNED, NEVER, UNITS, Both
from parity import engine_in

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

KINDS = [
    (AdamW, {}),
    (infinity.Adam, {}),
    (SGD, {"lr": 0.1}),
    (infinity.Adagrad, {}),
    (infinity.Lion, {}),
]


@pytest.fixture
def all_ahead(monkeypatch):
    """Have it decided that the backward makes all updates that it can."""

    def divide(_computes, _plan, _units, candidates, _rates, *, ahead, room_nbytes):
        assert ahead
        return UpdateSplit(tuple(candidates), len(candidates), HalfStep(1.0, 0.0), HalfStep(1.0, 1.0))

    monkeypatch.setattr(early, "split_updates", divide)


def test_without_being_told_updates_are_made_ahead_of_so_many_units_that_both_halves_are_as_busy(
    folder, monkeypatch
):
    half = UpdateSplit((2, 0), LAYERS, HalfStep(1.0, 0.5), HalfStep(2.0, 1.0))
    monkeypatch.setattr(
        early, "split_updates", lambda *_, ahead, room_nbytes: half if ahead else pytest.fail("not asked")
    )
    both = Both(folder, speculate="auto", max_norm=NEVER)
    for number in range(6):
        both.step(number)
    both.check()
    assert both.counts == (4 * 2, 0)
    assert both.speculation.refused["the next forward has time for them"] == 4 * 2
    assert stats(both.model).updates == str(half)


def test_what_was_timed_decides_which_updates_are_made_ahead_and_bits_stay(folder):
    both = Both(folder, speculate="auto", memory=HI_PINNED, max_norm=0.1)
    assert stats(both.model).updates == ""
    for number, factor in enumerate([1.0] * 6 + [100.0, 1.0]):
        both.step(number, factor)
    both.check()
    split = engine_in(both.model).arrivals.ahead.split
    assert split.candidates == UNITS
    assert split.forward.compute_s > 0
    assert split.forward.disk_s + split.backward.disk_s > 0


@pytest.mark.slow
@pytest.mark.usefixtures("all_ahead")
def test_without_being_told_it_begins_where_norms_have_stayed_within_their_bound(folder):
    both = Both(folder, speculate="auto", max_norm=0.1)
    for number in range(4):
        both.step(number)
    assert both.counts[0], "two steps show what to expect"
    confirmed = both.counts[0]
    for number in range(4, 12):
        both.step(number, 100.0)
    both.check()
    assert both.counts[0] == confirmed
    assert both.counts[1] <= 3 * UNITS
    assert both.speculation.counts["the last steps were not as expected"] >= 4 * UNITS, "told in stats"


@pytest.mark.slow
@pytest.mark.usefixtures("all_ahead")
def test_a_full_disk_ends_it_with_a_word_in_the_log_or_an_error_where_it_was_asked_for(
    folder, monkeypatch, caplog
):
    both = Both(folder, speculate="auto", max_norm=NEVER)
    store = engine_in(both.model).nvme_store
    allocate = store.allocate

    def full(nbytes, what):
        if "second generation" not in what:
            return allocate(nbytes, what)
        raise StorageFullError(28, f"{what}: no room", folder).with_sizes(needed=nbytes, free=0)

    monkeypatch.setattr(store, "allocate", full)
    for number in range(5):
        both.step(number)
    assert both.counts == (0, 0)
    assert len([one for one in caplog.messages if "before step() any more" in one]) == 1
    with pytest.warns(UserWarning, match="supersedes"), pytest.raises(StorageFullError, match="second gen"):
        AdamW(both.model.parameters(), speculate=True)


@pytest.mark.usefixtures("all_ahead")
@pytest.mark.parametrize("missing", [0, 1])
def test_without_being_told_it_takes_no_more_than_half_of_what_is_free(folder, monkeypatch, caplog, missing):
    both = Both(folder, speculate="auto", max_norm=NEVER)
    records = [unit.record for unit in both.engine.units]
    needed = sum(one.field_nbytes(name) for one in records for name in one.fields)
    monkeypatch.setattr(speculation, "room_in", lambda _: 2 * needed - missing)
    caplog.set_level("INFO", "infinity")
    for number in range(5):
        both.step(number)
    both.check()
    assert both.counts == ((0, 0) if missing else (3 * UNITS, 0))
    said = "before step() any more" if missing else "a second generation of records takes up to"
    assert len([one for one in caplog.messages if said in one]) == 1
    assert (both.speculation.nbytes == 0) is bool(missing)
    assert stats(both.model).updates.startswith("4 of 4" if not missing else "all in the next forward")


def test_every_optimizer_does_so_where_nothing_is_said(folder):
    both = Both(folder)
    with pytest.warns(UserWarning, match="supersedes"):
        found = [kind(both.model.parameters(), **more) for kind, more in KINDS]
    assert all(one.speculation.decides for one in found)


@pytest.mark.usefixtures("all_ahead")
@pytest.mark.parametrize("speculate", [True, pytest.param("auto", marks=pytest.mark.slow)])
def test_what_was_taken_before_the_disk_was_full_is_freed(folder, monkeypatch, speculate):
    both = Both(folder, speculate=False, max_norm=NEVER)
    store, left = engine_in(both.model).nvme_store, [6]
    allocate = store.allocate

    def full(nbytes, what):
        left[0] -= "second generation" in what
        if left[0] < 0:
            raise StorageFullError(28, f"{what}: no room", folder).with_sizes(needed=nbytes, free=0)
        return allocate(nbytes, what)

    monkeypatch.setattr(store, "allocate", full)
    expected = pytest.raises(StorageFullError) if speculate is True else contextlib.nullcontext()
    with pytest.warns(UserWarning, match="supersedes"), expected:
        both.optimizer = AdamW(both.model.parameters(), speculate=speculate, max_norm=NEVER, **SETTINGS)
    if speculate == "auto":
        for number in range(6):
            both.step(number)
        both.check()
        assert sum(both.counts) > 0
    assert left[0] < 0
    assert both.speculation.nbytes == 0
