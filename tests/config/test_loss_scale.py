"""The loss scale's course is DeepSpeed's. Trusted: DynamicLossScaler's rules, written down once more here."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config.loss_scale import LossScale, Scaling


class AsDeepSpeedHasIt:
    """cur_scale and cur_hysteresis of DynamicLossScaler, step by step."""

    def __init__(self, scale, window, delayed_shift, least, consecutive):
        self.scale, self.window, self.shift, self.least = scale, window, delayed_shift, least
        self.consecutive = consecutive
        self.hysteresis, self.iteration, self.overflown = delayed_shift, 0, -1

    def update(self, overflow):
        if overflow and (self.shift == 1 or self.hysteresis == 1):
            if self.scale == self.least:
                raise OverflowError
            self.scale = max(self.scale / 2, self.least)
        elif overflow:
            self.hysteresis -= 1
        if overflow:
            self.overflown = self.iteration
        else:
            if self.consecutive:
                self.hysteresis = self.shift
            if (self.iteration - self.overflown) % self.window == 0:
                if not self.consecutive:
                    self.hysteresis = self.shift
                self.scale *= 2
        self.iteration += 1


SETTINGS = st.tuples(
    st.sampled_from([1.0, 8.0, 2.0**16]), st.integers(1, 5), st.integers(1, 4), st.just(1.0), st.booleans()
)


@given(SETTINGS, st.lists(st.booleans(), max_size=40), st.integers(0, 40))
def test_any_course_of_overflows_gives_deepspeeds_scales_also_from_a_saved_state(settings, course, cut):
    def fresh():
        scale, window, hysteresis, least, consecutive = settings
        rules = {"window": window, "hysteresis": hysteresis, "least": least, "consecutive": consecutive}
        return LossScale(Scaling(power=int(math.log2(scale)), **rules))

    ours, theirs = fresh(), AsDeepSpeedHasIt(*settings)
    for number, overflow in enumerate(course):
        if number == cut:
            saved, ours = ours.state_dict(), fresh()
            ours.load_state_dict(saved)
        try:
            theirs.update(overflow)
        except OverflowError:
            with pytest.raises(OverflowError, match=r"the least loss scale, 1\.0"):
                ours.update(overflow=overflow)
            return
        ours.update(overflow=overflow)
        assert ours.value == theirs.scale


def test_a_fixed_scale_stays_whatever_overflows():
    scale = LossScale(Scaling(fixed=128.0))
    for _ in range(5):
        scale.update(overflow=True)
    assert (scale.value, scale.dynamic) == (128.0, False)


def test_it_begins_where_the_file_says():
    assert LossScale(Scaling(power=4)).value == 16.0
