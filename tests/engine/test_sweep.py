"""Every public method of torch.Tensor and the operators, on a parameter that is released, in a forward, in
`gathered` with and without write: as in torch at three budgets, or an error whose advice works. Faked:
nothing; sweep.py says how, sweep_calls.py with which arguments.
"""

import pytest
import torch

import sweep
from sweep_calls import LEFT_OUT, methods

pytestmark = pytest.mark.disk


def test_every_method_does_at_one_budget_what_it_does_in_torch_or_its_refusal_says_what_works():
    assert len(methods()) > 600
    assert sweep.sweep(every_nth=len(sweep.BUDGETS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("budget", sweep.BUDGETS)
def test_every_method_does_so_at_every_budget(budget):
    assert sweep.sweep([budget]) == []


def test_what_the_sweep_leaves_out_is_what_torch_has():
    assert [name for name in LEFT_OUT if not hasattr(torch.Tensor, name)] == []
