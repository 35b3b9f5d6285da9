"""Training on CUDA. Runs where a GPU is (python3 dev.py gpu); nothing is faked.

Trusted: plain torch's forward and backward on the same GPU, the reference recipe on the CPU, the profiler.
"""

import gc
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import infinity
import models
from covers import matrix
from infinity import AdamW, Init, stats
from infinity.bench.device.gpu import profiled
from infinity.device.cuda import CudaStreams
from infinity.device.device import AcceleratorDevice, open_device
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError
from infinity.reference import ReferenceAdamW, prepare
from infinity.storage.memory import Arena, view
from on_cuda import repeatable_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings(
        "ignore:.*use_reentrant.*",
        "ignore:None of the inputs have requires_grad",
        "ignore:Synchronization debug mode is a prototype feature",
    ),
]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
WIDE = {**models.SIZES, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
BROAD = {**WIDE, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6}
LENGTH = 512
DEVICE = "64MiB"  # a recomputed block of 6.8 MiB with its gradients, and what waits


@pytest.fixture(autouse=True)
def repeatable(monkeypatch, request):
    """With the smaller budget, what `empty` returns is filled as well, by a kernel that no training has."""
    fills = getattr(request.node, "callspec", None) and request.node.callspec.params.get("memory") == "128KiB"
    with repeatable_kernels(monkeypatch, fills=bool(fills)):
        yield


@pytest.fixture
def device():
    opened = open_device("cuda")
    yield opened
    opened.close()


# The device itself


def filled(values):
    """Host memory with these values."""
    arena = Arena(values.nbytes)
    torch.frombuffer(view(arena.address, values.nbytes), dtype=values.dtype).copy_(values)
    return arena


def test_what_is_uploaded_and_downloaded_is_the_same_bits(device):
    values = torch.randint(-(2**15), 2**15, (1 << 20,), dtype=torch.int16).view(torch.bfloat16)
    arena = filled(values)
    device.pin(arena.address, arena.nbytes)
    flat = torch.empty(values.numel(), dtype=torch.bfloat16, device="cuda")
    device.allocated(flat)
    tile = 1 << 16
    transfers = [
        device.upload(flat, start, arena.address + 2 * start, tile) for start in range(0, flat.numel(), tile)
    ]
    device.arrived(flat)
    found = device.to_host(flat)
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    assert all(transfer.done for transfer in transfers)
    assert device.pageable_reason == ""
    device.unpin(arena.address)


def test_uploads_come_behind_kernels_that_still_use_the_memory(device):
    arena = filled(torch.full((1 << 20,), 7, dtype=torch.bfloat16))
    device.pin(arena.address, arena.nbytes)
    for _ in range(20):
        flat = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")
        torch.cuda._sleep(10_000_000)
        seen = flat.clone()
        device.allocated(flat)
        device.upload(flat, 0, arena.address, flat.numel())
        device.arrived(flat)
        assert device.to_host(seen).count_nonzero() == 0
        assert device.to_host(flat).eq(7).all()
        device.leaving(flat)
    device.unpin(arena.address)


def test_a_gradient_is_downloaded_as_it_was_though_its_memory_is_used_again(device):
    expected, downloads = [], []
    for number in range(50):
        source = torch.full((1 << 18,), float(number), device="cuda")
        downloads.append(device.download(source))
        expected.append(number)
        del source
    for number, download in zip(expected, downloads, strict=True):
        download.wait()
        assert download.tensor.eq(number).all()


def test_a_refusal_to_pin_is_no_failure_of_the_next_kernel():
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    arena = Arena(1 << 20)
    assert streams.lock(arena.address, arena.nbytes) == ""
    assert "712" in streams.lock(arena.address, arena.nbytes)  # cudaErrorHostMemoryAlreadyRegistered
    assert torch.ones(3, device="cuda").add(1).tolist() == [2, 2, 2]
    streams.unlock(arena.address)
    assert streams.lock(arena.address, arena.nbytes) == ""
    streams.unlock(arena.address)


# Training


def on_gpu(model, ids):
    loss = model(input_ids=ids.cuda(), labels=ids.cuda()).loss
    loss.backward()
    return loss.item()


def plain_losses(name, checkpoint, steps):
    """Train in device memory, each update made by the reference on the CPU; the losses and the weights.

    The recipe's divisions by a scalar are multiplications in torch's CUDA kernels: one bit may differ there.
    """
    twin = models.build(name)
    model = models.build(name).cuda()
    prepared(model, checkpoint)
    optimizer = ReferenceAdamW(twin.parameters(), **SETTINGS)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    losses = []
    for step in range(steps):
        losses.append(on_gpu(model, models.batch(step)))
        for ours, theirs in pairs:
            theirs.grad = None if ours.grad is None else ours.grad.cpu()
            ours.grad = None
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in pairs:
                ours.copy_(theirs)
    return losses, model.state_dict()


def prepared(model, checkpoint):
    if checkpoint:
        models.checkpointed(model, checkpoint == "reentrant")
    else:
        model.train()


@pytest.mark.parametrize(
    *matrix(
        name=["llama", "gpt2"],
        memory=["128KiB", "64MiB"],
        room={"streams": "128KiB", "lives there": "64MiB"},
        checkpoint={"none": None, "reentrant": "reentrant", "non-reentrant": "non-reentrant"},
        update=["forward", "backward"],
    )
)
def test_training_on_cuda_equals_training_in_device_memory(folder, name, memory, room, checkpoint, update):
    expected, weights = plain_losses(name, checkpoint, 5)
    model = models.build(name, nvme=folder, host_memory=memory, device="cuda", device_memory=room)
    model.to("cuda")
    prepared(model, checkpoint)
    optimizer = AdamW(model.parameters(), update=update, **SETTINGS)
    losses = []
    for step in range(5):
        losses.append(on_gpu(model, models.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses == expected
    found = model.state_dict()
    assert [key for key, value in weights.items() if not torch.equal(found[key].cpu(), value.cpu())] == []
    there = [unit.record.on_device for unit in engine_of_model(model).units]
    assert all(there) if room == "64MiB" else not all(there)


@pytest.mark.parametrize("budget", ["least", "64MiB"])
def test_training_in_a_budget_of_activations_equals_training_in_device_memory(folder, budget):
    expected, weights = plain_losses("llama", None, 5)

    def built(activations):
        given = {"device": "cuda", "activation_memory": activations}
        return models.build("llama", nvme=folder, host_memory="64MiB", **given).to("cuda").train()

    if budget == "least":
        with pytest.raises(ConfigError, match="The smallest that works is") as refused:
            on_gpu(built("1KiB"), models.batch(0))
        budget = re.search(r"smallest that works is activation_memory=(\S+)", str(refused.value))[1]
    model = built(budget)
    optimizer, losses = AdamW(model.parameters(), **SETTINGS), []
    for step in range(5):
        losses.append(on_gpu(model, models.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses == expected
    found = model.state_dict()
    assert [key for key, value in weights.items() if not torch.equal(found[key].cpu(), value.cpu())] == []


def test_what_lives_on_the_device_is_copied_no_more(folder):
    model = models.build("llama", nvme=folder, host_memory="64MiB", device="cuda", device_memory="64MiB")
    model.model.embed_tokens.requires_grad_(requires_grad=False)
    model.to("cuda").train()
    optimizer = AdamW([one for one in model.parameters() if one.requires_grad], update="backward", **SETTINGS)
    device, moved = engine_of_model(model).device, []
    for step in range(6):
        on_gpu(model, models.batch(step))
        optimizer.step()
        optimizer.zero_grad()
        moved.append(device.moved_nbytes)
    assert min(moved[0]) > 0
    assert moved[3:] == moved[2:5]


class Training:
    """A Llama, by default of 12 layers."""

    def __init__(self, folder, update="backward", sizes=WIDE, host="256MiB", device=DEVICE):
        with Init(nvme=folder, host_memory=host, device="cuda", device_memory=device):
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        self.model.to("cuda")
        models.checkpointed(self.model, reentrant=False)
        self.optimizer = AdamW(self.model.parameters(), update=update, **SETTINGS)
        self.engine = engine_of_model(self.model)

    def steps(self, first, last):
        for step in range(first, last):
            on_gpu(self.model, models.batch(step, rows=4, length=LENGTH))
            self.optimizer.step()
            self.optimizer.zero_grad()
        torch.cuda.synchronize()


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_copies_from_and_to_pinned_memory_run_beside_the_kernels(folder, update):
    """Wide enough for a layer's kernels and copies to take longer than the host takes to queue them."""
    training = Training(folder, update, BROAD, "6GiB", "512MiB")
    training.steps(0, 3)
    assert training.engine.device.pageable_reason == ""
    for direction, copies in profiled(lambda: training.steps(3, 5)).copies.items():
        assert copies.nbytes > copies.pageable_nbytes, direction
        assert copies.beside_s > 0, f"{copies.nbytes} bytes {direction}, and no kernel ran beside any"


def test_in_the_steady_state_nothing_is_allocated(folder):
    training = Training(folder)
    training.steps(0, 4)
    buffers = training.engine.device.memory.made
    blocks = torch.cuda.memory_stats()["num_device_alloc"]
    training.steps(4, 8)
    assert training.engine.device.memory.made == buffers
    assert torch.cuda.memory_stats()["num_device_alloc"] == blocks


def peak(run):
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def plain_activations(ids):
    """What plain training takes beside its parameters, with each gradient dropped as it comes."""
    plain = prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE))).cuda()
    models.checkpointed(plain, reentrant=False)
    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    return peak(lambda: on_gpu(plain, ids))


def test_the_device_holds_no_more_than_its_budget_beside_activations(folder):
    activations = plain_activations(models.batch(0, rows=4, length=LENGTH))
    training = Training(folder)
    taken = peak(lambda: training.steps(0, 4))
    now = stats(training.model)
    assert now.device_peak_nbytes <= now.device_budget_nbytes
    assert taken <= activations + now.device_budget_nbytes


def test_a_steady_step_has_no_host_waits_of_torchs_own(folder):
    training = Training(folder)
    training.steps(0, 3)
    ids = models.batch(9, rows=4, length=LENGTH).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss = training.model(input_ids=ids, labels=ids).loss  # transformers waits in its masks
        torch.cuda.set_sync_debug_mode("error")
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ours = str(Path(infinity.__file__).parent)
    assert [one for one in said if Path(one.filename).resolve().is_relative_to(ours)] == []


def test_released_units_take_no_device_memory(folder):
    before = torch.cuda.memory_allocated()
    model = models.build("llama", nvme=folder, host_memory="64MiB", device="cuda")
    model.to("cuda")
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    parameters = sum(1 for _ in model.parameters())
    assert torch.cuda.memory_allocated() - before <= buffers + 512 * parameters + (1 << 16)


def test_closing_an_engine_unpins_its_memory(folder):
    training = Training(folder)
    training.steps(0, 1)
    device = training.engine.device
    assert isinstance(device, AcceleratorDevice)
    training.engine.close()
    streams = CudaStreams(device.torch_device)
    arena = Arena(1 << 20)
    assert streams.lock(arena.address, arena.nbytes) == ""
    streams.unlock(arena.address)
