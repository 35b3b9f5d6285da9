"""What each rank of a mesh holds at once, in bytes: real processes over gloo. What they do is in
mesh_peaks_run.py.

What threads that compute have of torch, and all that the engine maps, is counted as it comes and goes.
Nothing is faked.
"""

import pytest

from answers import answering, read_answers
from launches import forked
from places import SUPPORT

UNIT_NBYTES, PAGE = 1 << 20, 4096
"""Of a layer, whole, as mesh_peaks_run has it; and of memory."""
LAUNCHES = {
    "two ranks": (2, ["alone", "divided"]),
    "stages": (2, ["first large", "last large"]),
    "loaded": (2, ["loaded"]),
    "four ranks": (4, ["alone", "divided", "divided and partitioned"]),
}

pytestmark = [pytest.mark.multi, pytest.mark.disk]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what each rank of a launch answers in a case."""

    def launched(launch):
        ranks, cases = LAUNCHES[launch]
        folder = tmp_path_factory.mktemp("peaks")
        forked(ranks, SUPPORT / "mesh_peaks_run.py", folder, *cases)
        return read_answers(folder, ranks)

    return answering(launched)


@pytest.mark.parametrize(
    ("launch", "case", "parts", "beside"),
    [
        ("two ranks", "divided", 2, 0),
        pytest.param("four ranks", "divided", 4, 0, marks=pytest.mark.slow),
        pytest.param("four ranks", "divided and partitioned", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_no_rank_of_a_tensor_dimension_ever_holds_more_of_a_layer_than_its_part(
    answers, launch, case, parts, beside
):
    """Where ranks with other data partition its part, it has its share beside what it gathers, and a gradient
    until it is the ranks' mean: `beside` parts of a layer.
    """
    whole = answers(launch, "alone")
    assert min(one["largest"] for one in whole) >= UNIT_NBYTES, "on one rank a layer is in one piece"
    for one in answers(launch, case):
        assert one["largest"] <= UNIT_NBYTES // parts + PAGE
        assert one["peak"] <= (1.1 * whole[0]["peak"] + beside * UNIT_NBYTES) / parts
        assert one["nvme"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("case", "large"), [("first large", 0), ("last large", 1)])
def test_no_rank_of_a_pipeline_ever_holds_as_much_as_a_layer_of_another_stage(answers, case, large):
    given = answers("stages", case)
    assert given[large]["largest"] >= UNIT_NBYTES
    assert given[1 - large]["peak"] < UNIT_NBYTES
    assert all(one["nvme"] > 0 for one in given)


@pytest.mark.slow
def test_a_model_is_loaded_from_its_files_part_by_part(answers):
    for one in answers("loaded", "loaded"):
        assert one["largest"] <= UNIT_NBYTES // 2 + PAGE
