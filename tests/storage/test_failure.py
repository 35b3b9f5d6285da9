import traceback

import pytest

from infinity.errors import EngineFailedError
from infinity.storage.failure import Failure, without_frames


class TwoArgumentsError(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def caught(error, cause=None):
    def fail():
        raise error from cause

    with pytest.raises(type(error)) as raised:
        fail()
    return raised.value


def frames(error):
    return traceback.extract_tb(error.__traceback__)


@pytest.mark.parametrize("error", [OSError(28, "No space", "/nvme"), KeyError("x"), KeyboardInterrupt()])
def test_what_stands_for_an_error_is_of_its_type_and_text_without_its_frames(error):
    error = caught(error, caught(ValueError("why")))
    stands = without_frames(error)
    assert (type(stands), str(stands), stands.args) == (type(error), str(error), error.args)
    assert (type(stands.__cause__), str(stands.__cause__)) == (ValueError, "why")
    assert not frames(stands)
    assert not frames(stands.__cause__)
    assert frames(error)
    assert frames(error.__cause__)


def test_an_error_that_cannot_be_made_again_is_told_of():
    stands = without_frames(caught(TwoArgumentsError("this", "that")))
    assert type(stands) is EngineFailedError
    assert str(stands) == "TwoArgumentsError: this and that"


def test_an_error_is_raised_once_as_it_is_and_then_told_of():
    failure, error = Failure(), OSError("disk is gone")
    failure.check()
    failure.note(error, raised=False)
    failure.note(ValueError("because of the first"), raised=False)
    with pytest.raises(OSError, match="disk is gone") as first:
        failure.check()
    assert first.value is error
    for _ in range(2):
        with pytest.raises(EngineFailedError, match="an earlier error: disk is gone") as later:
            failure.check()
        assert type(later.value.__cause__) is OSError
        assert not frames(later.value.__cause__)


def test_an_error_that_was_raised_where_it_was_caught_is_only_told_of():
    failure = Failure()
    failure.note(caught(ArithmeticError()), raised=True)
    with pytest.raises(EngineFailedError, match="earlier error: ArithmeticError") as later:
        failure.check()
    assert not frames(later.value.__cause__)


def test_an_error_that_one_thread_of_the_engine_tells_another_reaches_the_user_as_it_is():
    failure = Failure()
    failure.note(OSError("disk is gone"), raised=False)
    with pytest.raises(OSError, match="disk is gone") as told:
        failure.check()
    failure.note(told.value, raised=False)
    with pytest.raises(OSError, match="disk is gone"):
        failure.check()
    with pytest.raises(EngineFailedError, match="an earlier error: disk is gone"):
        failure.check()
