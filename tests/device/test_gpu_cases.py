"""What the simulated device trains, on CUDA. Runs where a GPU is (python3 dev.py gpu); nothing is faked.

Trusted: plain torch's forward and backward on the same GPU, the reference recipe on the CPU.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import transformers

import models
import simulated_cases
from infinity.reference import ReferenceAdamW, prepare
from on_cuda import repeatable_kernels
from simulated_cases import SETTINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    with repeatable_kernels(monkeypatch):
        yield


def steps(case, model, take, update):
    """Train as a case says; `take` is called after each backward, `update` after the last of a step."""
    losses = []
    for step in range(case.steps):
        if case.interrupted and step == 1:
            simulated_cases.interrupt(model, "cuda")
        for micro in range(case.accumulate):
            losses.append(simulated_cases.backward(case, model, 100 * step + micro, "cuda"))
            take()
        update()
    return losses


def plain(case):
    """A model in memory. Where a GPU is, transformers would compute fp8 weights in fp8: they are widened."""
    load, widened = transformers.AutoModelForCausalLM.from_pretrained, {}
    if "packed" in case.model:
        widened = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
    torch.manual_seed(0)
    with mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", partial(load, **widened)):
        return prepare(models.MODELS[case.model]())


def in_device_memory(case):
    """The losses and weights of plain training, each update made by the reference on the CPU."""
    twin = plain(case)
    model = simulated_cases.ready(plain(case), case.checkpoint).cuda()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    optimizer = ReferenceAdamW([theirs for _, theirs in pairs if theirs.requires_grad], **SETTINGS)

    def take():
        for ours, theirs in pairs:
            if ours.grad is not None:
                torch.autograd.backward([theirs], [ours.grad.cpu()])
            ours.grad = None

    def update():
        if case.clip is not None:
            simulated_cases.reference_clip(optimizer, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in pairs:
                ours.copy_(theirs)

    return steps(case, model, take, update), {key: one.cpu() for key, one in model.state_dict().items()}


def offloaded(case, folder, **more):
    """The losses and weights of ours."""
    room = simulated_cases.least(case, "cuda") if case.device == "the least" else case.device
    model = simulated_cases.opened(case, folder, room, "cuda", **more).to("cuda")
    simulated_cases.ready(model, case.checkpoint)
    optimizer = simulated_cases.optimizer_of(case, model)

    def update():
        if case.clip is not None and not case.speculates:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()

    return steps(case, model, lambda: None, update), {
        key: one.cpu() for key, one in model.state_dict().items()
    }


def assert_equal(found, expected):
    assert found[0] == expected[0]
    assert [key for key, value in expected[1].items() if not torch.equal(found[1][key], value)] == []


@pytest.mark.parametrize("name", simulated_cases.BASES)
def test_what_the_simulated_device_trains_trains_on_cuda_with_the_same_bits(folder, name):
    case = simulated_cases.BASES[name]
    assert_equal(offloaded(case, folder), in_device_memory(case))


BY_BLOCK = ["llama in much memory", "accumulated", "non-reentrant", "lora on the device"]


@pytest.mark.parametrize("name", BY_BLOCK)
def test_units_of_blocks_train_on_cuda_with_the_same_bits(folder, name):
    case = replace(simulated_cases.BASES[name], device=None)
    assert_equal(offloaded(case, folder, units="block"), in_device_memory(case))


@pytest.mark.parametrize("tiles", [{"sequence_tiles": 4}, {"loss_tiles": True}])
def test_tiles_of_a_sequence_train_with_the_same_bits_in_every_device_memory(folder, tiles):
    case = replace(simulated_cases.OFFLOADED, offload=None, checkpoint="non-reentrant")
    found = []
    for number, room in enumerate(("64MiB", simulated_cases.WIDER)):
        own = folder / str(number)
        own.mkdir()
        found.append(offloaded(replace(case, device=room), own, **tiles))
    assert_equal(*found)


@pytest.mark.parametrize("memory", ["128KiB", "64MiB"])
def test_generated_tokens_are_those_of_the_model_in_device_memory(folder, memory):
    ids = models.batch(0).cuda()
    chosen = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = models.build("llama").cuda().eval().generate(ids, **chosen)
    model = models.build("llama", nvme=folder, host_memory=memory, device="cuda", device_memory="128KiB")
    assert torch.equal(model.to("cuda").eval().generate(ids, **chosen), expected)
