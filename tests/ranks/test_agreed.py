"""What ranks foresee of a step. Nothing is faked: it is pure."""

from infinity.ranks.agreed import _MOST, AgreedOrder, Agreement

FORESEEN, ASK, ALOUD = Agreement.FORESEEN, Agreement.ASK, Agreement.ASK_ALOUD
PLAN, OTHER = 1, 2


def steps(order, *names, plan=PLAN):
    """Return what has to be done before each collective of a step."""
    order.begin(plan)
    return [order.come(name) for name in names]


def test_a_step_that_repeats_the_last_one_of_its_plan_is_foreseen():
    order = AgreedOrder()
    assert steps(order, "a", "b") == [ASK, ASK]
    assert steps(order, "a", "b") == [FORESEEN, FORESEEN]
    assert steps(order, "c", plan=OTHER) == [ASK]
    assert steps(order, "a", "b") == [FORESEEN, FORESEEN]
    assert steps(order, "c", plan=OTHER) == [FORESEEN]


def test_what_was_not_foreseen_is_asked_aloud_and_all_that_follows_it_is_asked():
    order = AgreedOrder()
    steps(order, "a", "b", "c")
    assert steps(order, "a", "d", "c", "e") == [FORESEEN, ALOUD, ASK, ASK]
    assert steps(order, "a", "d", "c", "e", "f") == [FORESEEN] * 4 + [ALOUD]
    assert steps(order, "a") == [FORESEEN]
    assert steps(order, "a", "d") == [FORESEEN, ALOUD], "the shorter step is the last one"


def test_where_ranks_have_queued_other_things_nothing_is_foreseen_and_nothing_is_learnt():
    order = AgreedOrder()
    steps(order, "a")
    steps(order, "a")
    assert steps(order, "a", "b", plan=None) == [ALOUD, ALOUD]
    assert steps(order, "a", "b") == [FORESEEN, ALOUD]


def test_places_count_all_collectives_so_that_ranks_compare_them():
    order = AgreedOrder()
    steps(order, "a", "b")
    steps(order, "c")
    assert order.place == 3


def test_a_step_without_end_is_not_remembered():
    order = AgreedOrder()
    steps(order, *["a"] * (_MOST + 1))
    assert steps(order, "a") == [ASK]


def test_plans_that_were_followed_long_ago_are_forgotten():
    order = AgreedOrder()
    for plan in range(9):
        steps(order, "a", plan=plan)
    assert steps(order, "a", plan=0) == [ASK]
    assert steps(order, "a", plan=5) == [FORESEEN]
