"""random-LTD's schedule. Trusted: numbers worked out by hand; DeepSpeed's scheduler, written down anew."""

import itertools
import math

import pytest

from infinity import ConfigError
from infinity.planning.kept_tokens import TokenSchedule


def test_the_tokens_grow_evenly_and_are_rounded_down_until_all_are_kept():
    schedule = TokenSchedule(shortest=128, longest=200, steps=10, multiple=16)
    # 128 + 7.2 a step: 128, 135.2, 142.4, 149.6, 156.8, 164, 171.2, 178.4, 185.6, 192.8, 200
    # 207.2, 214.4: what is rounded down may come to the end later than after ten
    found = [schedule.after(steps) for steps in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1000)]
    assert found == [128, 128, 128, 144, 144, 160, 160, 176, 176, 192, 192, 192, 200, 200]


def test_the_tokens_at_the_beginning_are_rounded_down_too():
    assert TokenSchedule(shortest=100, longest=1000, steps=10, multiple=16).after(0) == 96


def test_one_length_for_all_steps_may_be_no_multiple():
    assert [TokenSchedule(shortest=5, longest=5, steps=1).after(steps) for steps in (0, 2)] == [5, 5]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shortest": 0}, "shortest=0: expected a whole number above 0"),
        ({"steps": 1.5}, "steps=1.5: expected a whole number"),
        ({"multiple": True}, "multiple=True"),
        ({"shortest": 300}, "shortest=300 is above longest=256"),
        ({"shortest": 15}, "rounded down to no token at all"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, says):
    with pytest.raises(ConfigError) as error:
        TokenSchedule(**{"shortest": 128, "longest": 256, "steps": 10, "multiple": 16, **changes})
    assert says in str(error.value)


def stateful(shortest, longest, steps, multiple):
    """Yield the tokens of each step as DeepSpeed's scheduler does, which knows those of the step before."""
    tokens = shortest
    for step in itertools.count():
        if tokens < longest:
            tokens = math.floor((float(step) / steps) ** (1.0 / 1) * (longest - shortest) + shortest)
            tokens = min(tokens - tokens % multiple, longest)
        yield tokens


@pytest.mark.parametrize(
    "numbers",
    [(128, 2048, 2000, 16), (100, 1000, 777, 7), (64, 64, 10, 64), (5, 99, 3, 4), (1, 1024, 9999, 1)],
)
def test_each_of_10_000_steps_has_the_tokens_of_deepspeeds_scheduler(numbers):
    schedule = TokenSchedule(**dict(zip(("shortest", "longest", "steps", "multiple"), numbers, strict=True)))
    expected = itertools.islice(stateful(*numbers), 10_000)
    assert [schedule.after(step) for step in range(10_000)] == list(expected)
