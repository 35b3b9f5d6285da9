"""When units are fetched, wait and leave. Faked: units, and a lane whose passes end as one waits for them."""

import pytest

from infinity.planning.queue import NO_FETCH, QueuedPass
from infinity.planning.residence import Residence, Residency


class Walk(QueuedPass):
    """A pass over a unit's record, and what it is for."""

    def __init__(self, unit, what):
        super().__init__(unit.record)
        self.unit, self.what = unit, what

    def tiles(self):
        return iter(())

    def __repr__(self):
        return f"{self.what} {self.record}"


class Lane:
    """Notes the passes that it is given; they are over when somebody waits for them."""

    def __init__(self):
        self.log, self.under_way = [], []

    def submit(self, job, *, urgent=False):
        job.submitted(self)
        self.under_way.append(job)
        self.log.append(f"{job!r}{' now' * urgent}")

    def wait(self, job):
        while not job.done:
            self.under_way.pop(0).end_processing()

    def settled(self, record):
        return all(job.record != record for job in self.under_way)

    def promote(self, record):
        pass


class Unit:
    def __init__(self, index, *, in_place=False):
        self.index = self.record = index
        self.window_nbytes = 10
        self.in_place, self.pending, self.memory = in_place, False, False
        self.residence = Residence()

    def allocate(self):
        self.memory = True

    def deallocate(self):
        self.memory = False

    def lend_to(self, job):
        job.what = "update in place"


class Window:
    def __init__(self, nbytes):
        self.nbytes = nbytes

    def try_reserve(self, nbytes):
        if nbytes > self.nbytes:
            return False
        self.nbytes -= nbytes
        return True

    def release(self, nbytes):
        self.nbytes += nbytes


class Simple(Residency):
    def __init__(self, units=4, window=20, *, on_host=True, in_order=False, in_place=()):
        self.lane, self.window, self.waited = Lane(), Window(window), []
        super().__init__(self.window, self.lane, on_host=on_host, in_order=in_order)
        self.units = [Unit(index, in_place=index in in_place) for index in range(units)]

    def _begin_fetch(self, unit, *, urgent):
        job = Walk(unit, "fetch")
        unit.pending = False
        self._lane.submit(job, urgent=urgent)
        return job

    def _make_update(self, unit, *, resident):
        return Walk(unit, "update")

    def _wait(self, job, cause):
        self.waited.append((cause, job.record))
        job.wait()

    def hold(self, index, *fetch, keep=False):
        unit = self.units[index]
        self.use(unit, fetch, keep=keep)
        unit.residence.use()

    def drop(self, index):
        if self.units[index].residence.drop():
            self.release(self.units[index])

    def resident(self):
        return [unit.index for unit in self.units if unit.residence.fetch is not None]


def test_a_unit_that_is_not_there_is_fetched_at_once_and_counted_as_a_miss():
    engine = Simple()
    engine.hold(0)
    assert (engine.lane.log, engine.waited) == (["fetch 0 now"], [("read", 0)])
    assert (engine.counts.misses, engine.counts.hits) == (1, 0)
    engine.drop(0)
    assert engine.resident() == []
    assert not engine.units[0].memory


def test_what_is_owed_is_fetched_in_order_as_far_as_the_window_has_room():
    engine = Simple(window=20)
    engine.begin([1, 2, 3])
    assert engine.lane.log == ["fetch 1", "fetch 2"]
    engine.hold(1)  # waits no more
    assert engine.lane.log[2:] == ["fetch 3"]
    assert (engine.counts.misses, engine.counts.hits, engine.window.nbytes) == (0, 1, 0)


def test_a_unit_that_is_kept_waits_in_the_window_unless_an_update_is_pending_for_it():
    engine = Simple()
    for index in (0, 1):
        engine.hold(index, keep=True)
    engine.units[1].pending = True
    engine.drop(0)
    engine.drop(1)
    assert (engine.resident(), engine.window.nbytes) == ([0], 10)
    engine.hold(0)
    assert engine.window.nbytes == 20
    assert engine.lane.log == ["fetch 0 now", "fetch 1 now"]


def test_a_unit_in_place_is_there_without_a_fetch_unless_an_update_is_pending_for_it():
    engine = Simple(in_place=[0])
    engine.hold(0)
    assert engine.units[0].residence.fetch is NO_FETCH
    assert (engine.lane.log, engine.counts.hits) == ([], 1)
    engine.drop(0)
    engine.units[0].pending = True
    engine.hold(0)
    assert (engine.lane.log, engine.counts.misses) == (["fetch 0 now"], 1)


def test_an_update_waits_for_the_last_user_is_lent_the_memory_and_releases_it():
    engine, over = Simple(), []
    engine.hold(0, keep=True)
    job = engine.apply(engine.units[0], lambda: over.append(engine.units[0].residence.fetch))
    assert engine.lane.log == ["fetch 0 now"]
    engine.drop(0)
    assert engine.lane.log[1:] == ["update in place 0"]
    assert (engine.units[0].residence.lent, engine.resident()) == (job, [0])
    job.wait()
    assert (engine.units[0].residence.lent, engine.resident(), over) == (None, [], [None])
    assert not engine.units[0].memory


def test_an_update_of_values_on_another_device_starts_from_the_record():
    engine = Simple(on_host=False)
    engine.hold(0, keep=True)
    engine.apply(engine.units[0], lambda: None)
    assert engine.lane.log[1:] == ["update 0"]
    engine.drop(0)
    assert engine.resident() == [], "what was on the device is stale"


@pytest.mark.parametrize("in_order", [False, True])
def test_the_fetch_of_a_unit_that_is_lent_waits_for_it_on_several_ranks_alone(in_order):
    engine = Simple(in_order=in_order)
    engine.hold(0)
    engine.apply(engine.units[0], lambda: None)
    engine.drop(0)
    engine.begin([0, 1])
    assert engine.lane.log[2:] == (["fetch 0", "fetch 1"] if in_order else [])
    assert engine.waited[1:] == ([("update", 0)] if in_order else [])
    engine.hold(2)
    assert engine.lane.log[2:] == (
        ["fetch 0", "fetch 1", "fetch 2 now"] if in_order else ["fetch 2 now", "fetch 0", "fetch 1"]
    )


def test_after_a_use_that_was_not_planned_units_that_are_not_needed_next_leave():
    engine = Simple(window=20)
    engine.begin([0, 1, 2])
    needed = [engine.units[index] for index in (3, 3, 1, 2)]
    engine.look_again(needed, 20, but=engine.units[2])
    assert engine.resident() == [1]
    engine.fetch_owed()
    assert engine.resident() == [1, 3]


def test_after_a_use_that_was_not_planned_what_stays_until_it_is_updated_stays():
    engine = Simple(window=40)
    engine._keeps_resident = True
    engine.begin([0, 1, 2])
    engine.look_again([], 40, but=None)
    assert engine.resident() == [0, 1, 2]


def test_at_the_end_of_a_step_nothing_waits_and_nothing_is_owed():
    engine = Simple(window=10)
    engine.begin([0, 1])
    engine.end()
    engine.fetch_owed()
    assert (engine.resident(), engine.window.nbytes) == ([], 10)


class Watching(Lane):
    """Notes, too, what is under way when somebody waits."""

    def wait(self, job):
        self.log.append(f"wait with {len(self.under_way)} under way")
        super().wait(job)


class InRound(Simple):
    """One whose uses are those of a round."""

    in_round = True


def watched(engine):
    engine.lane = engine._lane = Watching()
    engine.begin([0, 1])
    engine.hold(0, 2)
    return engine


def test_in_a_round_what_is_owed_begins_before_a_use_waits_and_what_had_no_room_then_behind_it():
    engine = watched(InRound(window=20))
    assert engine.lane.log == ["fetch 0", "fetch 1", "fetch 2", "wait with 3 under way"]
    engine.drop(0)
    engine.lane.log.clear()
    engine.hold(3, 0)  # a miss, for which nothing makes room
    assert engine.lane.log == ["fetch 3 now", "wait with 3 under way"]
    engine.hold(1)
    assert engine.lane.log[2:] == ["fetch 0"], "1 waits no more"


def test_in_a_step_what_is_owed_begins_behind_the_wait_of_a_use():
    engine = watched(Simple(window=20))
    assert engine.lane.log == ["fetch 0", "fetch 1", "wait with 2 under way", "fetch 2"]


def test_a_window_that_has_shrunk_has_units_leave_that_the_data_chooses():
    engine = Simple(window=30)
    engine._routed = dict.fromkeys(engine.units, False)
    for index in (2, 0, 1):
        engine.hold(index, keep=True)
        engine.drop(index)
    engine.window.nbytes -= 20
    engine.look_again([], 10, but=None)
    assert (engine.resident(), engine.window.nbytes) == ([1], 0)


def lodging(*lodged, units=4, window=20):
    engine = Simple(units, window, on_host=False)
    engine.lodge([engine.units[index] for index in lodged])
    return engine


def visit(engine, index):
    engine.hold(index)
    engine.drop(index)


def test_a_lodged_unit_stays_from_its_first_use_on_across_steps_and_takes_none_of_the_window():
    engine = lodging(0, 1, 2)
    for _ in range(2):
        for index in range(4):
            visit(engine, index)
        engine.end()
    assert engine.lane.log == ["fetch 0 now", "fetch 1 now", "fetch 2 now", "fetch 3 now", "fetch 3 now"]
    assert (engine.resident(), engine.window.nbytes) == ([0, 1, 2], 20)


def test_a_lodged_unit_goes_when_an_update_is_pending_for_it_or_it_is_lodged_no_more():
    engine = lodging(0, 1, 2)
    for index in range(3):
        visit(engine, index)
    engine.units[1].pending = True
    engine.end()
    assert engine.resident() == [0, 2]
    engine.lodge([engine.units[2]])
    assert engine.resident() == [2]


@pytest.mark.parametrize("whole", [False, True])
def test_a_unit_whose_record_was_updated_while_it_was_in_use_does_not_stay_with_its_old_values(whole):
    engine = lodging(*() if whole else (0,))
    engine._keeps_resident = whole
    engine.hold(0)
    engine.apply(engine.units[0], lambda: None)
    engine.drop(0)
    assert engine.resident() == []
    visit(engine, 0)
    assert engine.resident() == [0]


def test_the_unit_needed_last_gives_way_and_a_lodged_one_only_when_no_other_waits():
    engine = lodging(0)
    for index in range(3):
        engine.hold(index, keep=True)
        engine.drop(index)
    upcoming = [engine.units[index] for index in (0, 2, 1, 2, 0)]
    went = []
    while engine.give_way(upcoming):
        went.append([index for index in (0, 1, 2) if index not in engine.resident()])
    assert went == [[1], [1, 2], [0, 1, 2]]
    visit(engine, 0)
    assert engine.resident() == []
