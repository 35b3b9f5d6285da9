"""What ranks that divide experts hold and send, for a Mixtral by its shapes.

tests/engine/test_expert_ranks.py holds the formula against what ranks have sent.
"""

import argparse
import functools
from pathlib import Path

import pytest

from infinity.bench.planning import outlook
from infinity.bench.planning.cuts import in_slices
from infinity.bench.planning.planned import Question, answer
from infinity.bench.planning.sketch import outline_of
from infinity.errors import ConfigError
from infinity.planning.activations import Method
from infinity.planning.setting import Setting
from infinity.planning.simulator import Disk, Rates

MODEL = str(Path(__file__).parent / "configs" / "mixtral-8x7b.json")
NBYTES = 3 * 32 * 2 * 2048 * 2 * 4096 * 2
"""Passes with recomputation, layers, experts of a token, tokens, there and back, hidden size, in bf16."""


@functools.cache
def planned(size, link=None, *, checkpointing=True):
    """Return the plan of a rank; how long a step takes only where there is a link, in bytes per second."""
    outline, _ = in_slices(outline_of(MODEL), 8 * 2048, size)
    method = Method(2048, 2048, checkpointing=checkpointing)
    setting = Setting(8 << 30, ranks=8, local_ranks=2, expert_parallel=size, method=method)
    rates = link and Rates(Disk(2e9, 1e9, 1.5e9), update=1e9, checked=1e10, copied=1e10, link=link)
    return answer(Question(outline, setting, seconds=10.0, rates=rates))


def test_ranks_that_divide_experts_have_their_part_each_and_send_tokens():
    alone, divided = planned(1), planned(4)
    assert divided.outline.parameters == alone.outline.parameters
    assert divided.demand.nvme_nbytes == pytest.approx(alone.demand.nvme_nbytes, rel=1e-3)
    assert divided.demand.in_use_nbytes < 0.4 * alone.demand.in_use_nbytes, "2 of 8 experts, all used"
    assert alone.sent is None
    assert (divided.sent.nbytes, divided.sent.to_others_nbytes) == (NBYTES, NBYTES * 3 // 4)
    assert planned(4, checkpointing=False).sent.nbytes == NBYTES * 2 // 3


def test_tokens_take_the_time_of_the_link():
    assert planned(4, link=5e8).step_s > planned(4, link=1e9).step_s + NBYTES * 3 // 4 / 1e9


def test_the_plan_says_what_a_rank_has_and_sends():
    options = argparse.Namespace(tbw=None, gpu=None, nvme=None, nvme_read=2, no_nvme=False, link=1)
    options.host_memory = "64GiB"
    options.compute = options.compute_seconds = 1
    findings = outlook.single([({}, planned(4))], options)
    shown = {row["what"]: row["shown"] for row in findings.rows}
    assert "each has 11.3 G of their 45.1 G parameters, which 2 ranks partition" in shown["experts"]
    assert "4.5 GiB of them to other ranks" in shown["tokens to experts and back in a step, each rank"]


def test_groups_that_are_not_whole_are_refused():
    with pytest.raises(ConfigError, match="8 ranks, 3 that divide experts"):
        Setting(1 << 30, ranks=8, expert_parallel=3)
