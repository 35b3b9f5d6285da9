"""Checkpoints' inputs offloaded: Config(offload_activations=...). Trusted: the same model without it, in
memory, by the reference recipe. Nothing is faked but, for one test, the disk's answer."""

import gc
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
import models
from covers import matrix
from infinity import tiling
from infinity.engine.engine import engine_of_model
from infinity.lane.whole_records import ACTIVATION

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks, each in a checkpoint."""

    def __init__(self, how="non-reentrant", blocks=6):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.how = how

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.how == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


def offloaded(folder, mode="nvme", memory="1MiB", seed=0, **stack):
    torch.manual_seed(seed)
    nvme = str(folder) if folder is not None else None
    with infinity.Init(nvme=nvme, host_memory=memory, offload_activations=mode):
        return Stack(**stack)


def inputs(number=0, rows=256):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()


def moved(model):
    stats = infinity.stats(model)
    return stats.written_nbytes.get(("nvme", ACTIVATION), 0), stats.read_nbytes.get(("nvme", ACTIVATION), 0)


def alive(model):
    """Bytes on NVMe and of the shares that boundaries hold."""
    gc.collect()
    engine = engine_of_model(model)
    engine.lane.drain()
    free = sum(nbytes * len(offsets) for nbytes, offsets in engine.nvme_store._free._offsets.items())
    return engine.nvme_store._end - free, engine.outgoing_share.ledger.held_nbytes


@pytest.mark.parametrize(
    *matrix(
        together=1,
        mode=["host", "nvme"],
        how=["reentrant", "non-reentrant", "slices"],
        name=["llama", "gpt2-dropout", "mixtral"],
    )
)
def test_models_train_with_the_bits_of_activations_left_in_place(folder, name, how, mode, monkeypatch):
    monkeypatch.setattr("infinity.activations.boundaries.BLOCK", 64)  # these models are small
    init = {"nvme": str(folder), "host_memory": "1MiB", "offload_activations": mode}
    sliced = how == "slices"
    ours, plain = models.both(name, {"lr": 1e-2}, init, checkpoint=None if sliced else how)
    results = []
    for model, optimizer, _ in (ours, plain):
        if sliced:
            tiling.tile_batch_(model, 1)
        torch.manual_seed(3)
        results.append(models.train(model, optimizer, 3))
    assert results[0] == results[1]
    models.assert_same_state(ours[0], ours[1], plain[0], plain[1])
    boundaries = engine_of_model(ours[0]).boundaries
    assert boundaries._saved >= 3 * ours[0].config.num_hidden_layers
    assert (moved(ours[0])[0] > 0) == (mode == "nvme")


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_the_newest_stays_and_each_other_is_written_and_read_once(folder, how):
    model = offloaded(folder, how=how)
    nbytes = inputs().nbytes
    loss = model(inputs().requires_grad_()).sum()
    engine_of_model(model).lane.drain()  # what is still being written need not be read
    loss.backward()
    assert moved(model) == (5 * nbytes, 5 * nbytes)
    boundaries = engine_of_model(model).boundaries
    assert boundaries._saved == 6


def test_the_tensors_are_gone_between_forward_and_backward(folder):
    seen = []

    class Watched(Block):
        def forward(self, x):
            seen.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
            return super().forward(x)

    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", offload_activations="nvme"):
        model = Stack()
        model.blocks = nn.ModuleList(Watched() for _ in range(6))
    loss = model(inputs()).sum()
    engine = engine_of_model(model)
    engine.lane.drain()
    engine.boundaries.settle()
    assert [one.expired() for one in seen] == [True] * 5 + [False]
    loss.backward()


@pytest.mark.parametrize("end", ["backward", "dropped", "error", "interrupt"])
def test_places_and_shares_are_given_back_however_the_graph_ends(folder, end):
    model = offloaded(folder)
    model(inputs()).sum().backward()
    before = alive(model)
    for number in range(4):
        if end in ("error", "interrupt"):
            error = ValueError if end == "error" else KeyboardInterrupt
            kill = model.blocks[4].register_forward_pre_hook(
                lambda *_, error=error: (_ for _ in ()).throw(error())
            )
            with pytest.raises(error):
                model(inputs(number))
            kill.remove()
        else:
            loss = model(inputs(number)).sum()
            if end == "backward":
                loss.backward()
            del loss
    if end == "interrupt":  # which runs no hooks: the next forward ends what this one left
        model(inputs()).sum().backward()
    assert alive(model) == before


def test_many_forwards_before_their_backwards_and_a_graph_that_is_kept(folder):
    ours, plain = offloaded(folder), offloaded(folder, mode=None)
    gradients = []
    for model in (ours, plain):
        x = [inputs(number).requires_grad_() for number in range(3)]
        losses = [model(one).square().sum() for one in x]
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        losses[2].backward()
        gradients.append([*(one.grad for one in x), *(one.grad.clone() for one in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_in_host_memory_until_the_budget_is_full_then_on_nvme(folder):
    model = offloaded(folder, "host", memory="1MiB", blocks=40)
    engine = engine_of_model(model)
    loss = model(inputs()).sum()
    engine.lane.drain()  # what is on its way is written
    written, _ = moved(model)
    charged = engine.kept.held_nbytes
    assert 0 < charged <= engine.kept.limit_nbytes
    assert written + charged == 39 * inputs().nbytes
    assert engine.held_nbytes() <= engine.budget.total_nbytes
    loss.backward()
    assert engine.held_nbytes() <= engine.budget.total_nbytes
    del loss
    engine.lane.drain()


def test_without_nvme_a_full_budget_is_an_error_with_the_numbers():
    model = offloaded(None, "host", memory="20MiB", blocks=60)
    with pytest.raises(infinity.HostMemoryError, match=r"activation \d+ .*512.0 KiB do not fit.*of"):
        model(inputs(rows=4096))
    gc.collect()
    model(inputs(rows=64)).sum().backward()


def test_damaged_bytes_are_an_error_that_names_the_boundary(folder):
    model = offloaded(folder)
    engine = engine_of_model(model)
    loss = model(inputs()).sum()
    engine.lane.drain()
    read = engine.nvme_store.read

    def damaged(request):
        transfer = read(request)
        if request.what.startswith("activation 3"):
            transfer.wait()
            torch.frombuffer(infinity.storage.memory.view(request.address, 8), dtype=torch.uint8).add_(1)
        return transfer

    engine.nvme_store.read = damaged
    with pytest.raises(infinity.CorruptionError, match=r"activation 3 \(256, 64\)"):
        loss.backward()


@pytest.mark.parametrize("number", [3, 5])
def test_an_input_changed_in_place_after_it_was_saved_is_an_error(folder, number):
    model = offloaded(folder)

    def change(_module, args, _output):
        args[0].add_(1)

    hook = model.blocks[number].register_forward_hook(change)
    with pytest.raises(RuntimeError, match=rf"activation {number + 1} .*changed in place"):
        model(inputs()).sum().backward()
    hook.remove()
    model(inputs()).sum().backward()


def test_a_model_without_checkpoints_keeps_what_it_saves_and_is_told(folder, caplog):
    model = offloaded(folder, how="none")
    with caplog.at_level(logging.WARNING, "infinity"):
        for _ in range(2):
            model(inputs()).sum().backward()
    assert moved(model) == (0, 0)
    assert [record.message.count("gradient_checkpointing_enable") for record in caplog.records] == [1]


def test_a_transposed_input_comes_back_with_its_strides(folder):
    strides = []

    class Turned(Block):
        def forward(self, x):
            strides.append(x.stride())
            return super().forward(x.t()).t()

    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", offload_activations="nvme"):
        model = Stack()
        model.blocks = nn.ModuleList(Turned() for _ in range(3))
    model.first.register_forward_hook(lambda _m, _a, output: output.t())
    total = model(inputs()).sum()
    engine_of_model(model).lane.drain()  # else what is not written yet need not be read
    total.backward()
    assert strides == [(1, WIDTH)] * 6
    assert moved(model)[1] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload_activations": "disk"}, "expected one of None, 'host', 'nvme'"),
        ({"offload_activations": "nvme"}, "needs a folder"),
    ],
)
def test_a_place_that_is_none_is_refused(fields, message):
    with pytest.raises(infinity.ConfigError, match=message):
        infinity.Config(**fields)
