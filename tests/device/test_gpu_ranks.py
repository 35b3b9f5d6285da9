"""Two ranks that train on one GPU. Runs where a GPU is (python3 dev.py gpu). Faked: the exchange between
GPUs, by gloo over the host's memory, since NCCL takes one rank of a GPU.

Trusted: plain data parallelism on the same GPU, with updates of the reference recipe on the CPU.
"""

import json
import os

import pytest
import torch

from launches import torchrun
from places import SUPPORT
from simulated_ranks import RANKS, STAGES, TIER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the ranks said of each case, in one launch."""
    folder = tmp_path_factory.mktemp("said")
    paths = os.pathsep.join(map(str, (SUPPORT, SUPPORT.parent / "simdevice")))
    more = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": paths}
    done = torchrun(RANKS, SUPPORT / "gpu_ranks_run.py", folder, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    of_ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [one[name] for one in of_ranks] for name in STAGES}


@pytest.mark.parametrize("name", STAGES)
def test_two_ranks_on_a_gpu_have_the_bits_of_plain_data_parallelism(said, name):
    for one in said[name]:
        assert "raised" not in one, one["raised"]
        assert (one["losses"], one["different"]) == (True, [])


@pytest.mark.parametrize("name", TIER)
def test_parts_of_their_records_live_on_the_gpu(said, name):
    assert all(one["on_device"] > 0 for one in said[f"on the device, {name}"])
