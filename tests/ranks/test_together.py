"""Every pair of features that go together trains: real processes over gloo, half of the pairs on two machines
that a setting makes of one. What they do is in together_run.py.
"""

import json

import pytest

from infinity.ranks.machines import LOCAL_SIZE
from launches import forked
from places import SUPPORT

pytestmark = [pytest.mark.multi, pytest.mark.slow]


@pytest.mark.parametrize(("local", "half"), [(2, "one half"), (4, "the other half")])
def test_each_pair_trains_and_features_that_change_no_bit_do_not(tmp_path, local, half):
    forked(4, SUPPORT / "together_run.py", tmp_path, half, RANKS_DISK=tmp_path, **{LOCAL_SIZE: str(local)})
    for rank in range(4):
        said = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))[half]
        assert "error" not in said, said
        assert len(said["given"]) > 20
        wrong = {pair: both for pair, both in said["given"].items() if both[1] not in (None, both[0])}
        assert not wrong
