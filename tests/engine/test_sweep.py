"""Every public method of torch.Tensor and the operators, on a parameter that is released, in a forward, in
`gathered` with and without write: as in torch at three budgets, or an error whose advice works. Faked:
nothing; sweep.py says how, sweep_calls.py with which arguments.
"""

import pytest
import torch

import sweep
from sweep_calls import LEFT_OUT, methods

pytestmark = pytest.mark.disk


def test_a_third_of_the_methods_do_each_at_one_budget_as_in_torch_or_their_refusal_says_what_works():
    assert len(methods()) > 600
    assert sweep.sweep(every_nth=3 * len(sweep.BUDGETS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("budget", sweep.BUDGETS)
def test_every_method_does_so_at_every_budget(budget):
    assert sweep.sweep([budget]) == []


def test_what_the_sweep_leaves_out_is_what_torch_has():
    assert [name for name in LEFT_OUT if not hasattr(torch.Tensor, name)] == []
