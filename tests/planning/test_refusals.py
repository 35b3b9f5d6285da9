"""Plans that cannot work: what lacks, to the byte, beside arithmetic of the test's own. Nothing is faked."""

import pytest

from infinity.bench.planning.planned import Question, answer
from infinity.planning.activations import Method
from infinity.planning.architectures import llama
from infinity.planning.capacity import CONTEXT_NBYTES, Capacity, Process
from infinity.planning.setting import Setting
from infinity.sizes import format_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 256, 768, 1024
MODEL = llama("model", LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY)


def planned(machine=None, *, outline=MODEL, tokens=512, sequence=256, **changes):
    names = Method.__dataclass_fields__
    method = Method(tokens, sequence, **{key: value for key, value in changes.items() if key in names})
    rest = {key: value for key, value in changes.items() if key not in names}
    setting = Setting(**{"host_nbytes": 64 * MIB, **rest}, method=method)
    return answer(Question(outline, setting, machine or Capacity()))


def records():
    """Each module's weights and masters, 2 + 2 B an element, and moments, 4 + 4, in blocks of 4 KiB."""
    norms = [HIDDEN] * (2 * LAYERS + 1)
    attention, mlp = [HIDDEN * HIDDEN] * (4 * LAYERS), [HIDDEN * INTERMEDIATE] * (3 * LAYERS)
    modules = [*norms, *attention, *mlp, VOCABULARY * HIDDEN, VOCABULARY * HIDDEN]
    return sum(12 * (-(-numel // 2048) * 2048) for numel in modules)


def lacks(plan, what):
    """Return the bytes that are said to be missing of a resource."""
    (need,) = (one for one in plan.needs if one.what.startswith(what))
    assert not plan.fits
    assert f"{format_size(need.short_nbytes)} too little" in " ".join(plan.reasons)
    return need.short_nbytes


def test_nvme_lacks_what_the_records_take_beyond_it():
    free = 3 * MIB
    assert lacks(planned(Capacity(nvme_nbytes=free), update="backward"), "NVMe") == records() - free


def test_nvme_of_a_durable_run_lacks_twice_the_records():
    free = records() + MIB
    plan = planned(Capacity(nvme_nbytes=free), update="backward", durable=True)
    assert lacks(plan, "NVMe") == 2 * records() - free


def test_nvme_lacks_the_activations_that_are_to_lie_there():
    tokens, on_device = 8 * 256, 3
    plan = planned(Capacity(nvme_nbytes=records()), update="backward", offload="nvme", tokens=tokens)
    assert lacks(plan, "NVMe") == (LAYERS - on_device) * 2 * HIDDEN * tokens


def test_a_gpu_lacks_the_inputs_of_blocks_the_logits_and_what_cuda_takes():
    tokens, layers, hidden, vocabulary = 4096, 2, 1024, 64_000
    wide = llama("wide", layers, hidden, 4096, vocabulary)
    plan = planned(Capacity(gpu_nbytes=GIB), outline=wide, device_nbytes=GIB, tokens=tokens)
    inputs = (layers + 1) * 2 * hidden * tokens  # those of blocks, and the head's
    norm = (2 + 2 + 4) * hidden * tokens
    assert (
        lacks(plan, "memory of each GPU") == inputs + norm + 12 * vocabulary * tokens + CONTEXT_NBYTES - GIB
    )


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_machine_lacks_what_each_of_its_ranks_takes_of_python_and_torch(ranks):
    process, memory = Process(own_nbytes=300 * MIB, shared_nbytes=100 * MIB), GIB // 2
    settings = {"ranks": ranks, "local_ranks": ranks, "device_nbytes": GIB, "host_nbytes": ranks * MIB}
    plan = planned(Capacity(memory_nbytes=memory, process=process), **settings)
    budgets = ranks * plan.demand.held_nbytes
    assert budgets <= ranks * MIB
    assert lacks(plan, "memory of each machine") == budgets + ranks * 300 * MIB + 100 * MIB - memory


def test_a_machine_that_lacks_one_byte_lacks_one_byte():
    (need, *_) = planned().needs
    assert planned(Capacity(memory_nbytes=need.nbytes)).fits
    assert lacks(planned(Capacity(memory_nbytes=need.nbytes - 1)), "memory of each machine") == 1


def test_a_budget_that_moves_no_records_is_told_the_least_of_all_ranks():
    plan = planned(host_nbytes=8 * 128 * KIB - 1, ranks=8, local_ranks=8)
    assert "at least 1.0 MiB on each machine with 8 ranks" in plan.refusal
    assert planned(host_nbytes=8 * 128 * KIB, ranks=8, local_ranks=8).fits


def test_a_budget_without_nvme_is_told_the_least_and_a_mib_less_is_refused_again():
    least = planned(nvme=False, host_nbytes=MIB).least_host_nbytes
    assert f"The smallest that works is {format_size(least)}" in planned(nvme=False, host_nbytes=MIB).refusal
    assert planned(nvme=False, host_nbytes=least).fits
    assert planned(nvme=False, host_nbytes=least - MIB).refusal


def test_a_layer_that_is_larger_than_the_gpu_is_told_with_its_gradient():
    plan = planned(Capacity(gpu_nbytes=MIB // 2), device_nbytes=MIB // 2)
    both = format_size(2 * 2 * VOCABULARY * HIDDEN)
    assert f"alone takes {both} with its gradient, more than the GPU's 512.0 KiB" in " ".join(plan.reasons)
