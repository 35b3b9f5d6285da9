"""What torch's schedules evaluate without us. Trusted: torch, one process, which is a pipeline's only rank.

It is why docs/limits.md says that schedules with neighbouring stages on one rank cannot evaluate.
"""

import json

import pytest

from launches import python

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
said = {}
for name in sys.argv[1:]:
    place = torch.device("cpu")
    stages = [pipelining.PipelineStage(nn.Linear(4, 4), number, 2, place) for number in range(2)]
    schedule = getattr(pipelining, name)(stages, 2, loss_fn=lambda out, aim: (out - aim).square().mean())
    rows = torch.ones(4, 4)
    schedule.step(rows, target=rows)
    try:
        schedule.eval(rows, target=rows)
        said[name] = "no error"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.mark.multi
def test_torch_itself_cannot_evaluate_where_neighbouring_stages_are_on_one_rank(tmp_path):
    """They hand on a gradient that no backward has made. Once this works, docs/limits.md may say so."""
    names = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
    done = python("-c", PROGRAM, *names, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [*said] == names
    for text in said.values():
        assert text.startswith("AssertionError: can't steal_bwd_input if this stage doesn't have backward")
