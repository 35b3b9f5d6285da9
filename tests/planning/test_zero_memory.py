"""The arithmetic of ZeRO. Trusted: the figures of the paper (arXiv 1910.02054, figure 1)."""

import pytest

from infinity.planning.zero_memory import model_states


def test_the_figures_of_the_paper():
    gb = [round(model_states(7.5e9, 64, stage) / 1e9, 1) for stage in (0, 1, 2, 3)]
    assert gb == [120.0, 31.4, 16.6, 1.9]


def test_one_rank_gains_nothing_by_sharing():
    assert {model_states(1000, 1, stage) for stage in (0, 1, 2, 3)} == {16000}


def test_stage_3_divides_all_there_is():
    assert model_states(1000, 16, 3) == 1000


@pytest.mark.parametrize(
    ("ranks", "stage", "says"), [(4, 4, "stage 4"), (4, -1, "stage -1"), (0, 1, "0 ranks")]
)
def test_what_there_is_not_is_refused(ranks, stage, says):
    with pytest.raises(ValueError, match=says):
        model_states(1.0, ranks, stage)
