"""Training on a disk that fails: right bits, or an error that names what, where and why; never a hang.

Faults are injected in the C core.
"""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import models
from children import Child
from covers import matrix
from infinity import AdamW, CorruptionError, EngineFailedError, Init
from infinity.aio import IoError, StorageFullError
from infinity.aio.faults import inject
from infinity.engine.engine import engine_of_model
from launches import Program
from leftovers import held, left_since
from places import SUPPORT

pytestmark = [pytest.mark.disk, pytest.mark.timeout(400)]


def pieces(model):
    return engine_of_model(model).nvme_store.engine.statistics().pieces


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory):
    """The losses of three steps, and the number of pieces that building and training move."""
    model = models.build("llama", nvme=tmp_path_factory.mktemp("nvme"), host_memory="128KiB")
    built = pieces(model)
    losses = models.train(model, AdamW(model.parameters(), lr=1e-2, max_norm=1.0), 3)
    return losses, pieces(model) - built


def test_records_go_through_registered_memory(folder):
    """What is injected below, too, meets pieces that lie there."""
    model = models.build("llama", nvme=folder, host_memory="128KiB", aio="io_uring")
    engine = engine_of_model(model).nvme_store.engine
    if not engine.registered_nbytes:
        pytest.skip(engine.reason)
    models.train(model, AdamW(model.parameters(), lr=1e-2), 1)
    count = engine.statistics()
    assert engine.registered_nbytes > 0, engine.reason
    assert count.registered > count.pieces / 2


@pytest.mark.parametrize(
    *matrix(
        together=1,
        kind=["io_uring", "threads"],
        where=[0.0, 0.3, 0.7],
        result=[-errno.EIO, -errno.ENOSPC, -errno.EAGAIN, -errno.EINTR, 512, 4096],
    )
)
def test_every_fault_gives_the_right_bits_or_a_named_error(folder, fault_free, kind, where, result):
    losses, count = fault_free
    model = models.build("llama", nvme=folder, host_memory="128KiB", aio=kind)
    optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=1.0)
    inject(engine_of_model(model).nvme_store.engine, 1 + int(where * count), result)
    if result in (-errno.EIO, -errno.ENOSPC):
        with pytest.raises(IoError, match=r"(layers|embed|norm|lm_head).*(hi|lo|m|v|grad\d\d)") as caught:
            models.train(model, optimizer, 3)
            model.state_dict()
        assert caught.value.errno == -result
        assert caught.value.cure
        with pytest.raises(EngineFailedError, match="earlier error"):
            models.train(model, optimizer, 1)
    else:
        assert models.train(model, optimizer, 3) == losses


def test_a_flipped_bit_in_the_file_is_found_when_it_is_read(folder):
    model = models.build("llama", nvme=folder, host_memory="128KiB")
    engine = engine_of_model(model)
    unit = next(unit for unit in engine.units if unit.name == "model.layers.1.mlp.up_proj")
    engine.lane.drain()
    place = unit.record._extents["hi"].offset + 100
    with Path(f"/proc/self/fd/{engine.nvme_store._file.fd}").open("r+b") as buffered:  # not O_DIRECT
        buffered.seek(place)
        flipped = bytes([buffered.read(1)[0] ^ 1])
        buffered.seek(place)
        buffered.write(flipped)
        buffered.flush()
        os.fsync(buffered.fileno())
    with pytest.raises(CorruptionError, match=r"model\.layers\.1\.mlp\.up_proj\.hi"):
        models.train(model, AdamW(model.parameters()), 1)


def test_a_disk_that_fills_up_while_building_is_named_and_leaves_nothing(folder):
    import resource

    before = held()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        with pytest.raises(StorageFullError) as caught:
            models.build("llama", nvme=folder, host_memory="128KiB")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(caught.value)
    assert re.search(
        r"for: the model's weights, .* KiB, and moments of AdamW, .* are allocated so far, .* free", said
    )
    assert re.search(
        r"the first without room: model\.(embed_tokens|layers\.0\.)\S* \(model\.\S+\.weight", said
    )
    assert f"where: {folder}" in said
    caught = None
    assert left_since(before) == []
    assert list(folder.iterdir()) == []


TRAIN_FOREVER = """
import sys, torch
import models
from infinity import AdamW
model = models.build("llama", nvme=sys.argv[1], host_memory="1MiB")
optimizer = AdamW(model.parameters())
print("built", flush=True)
models.train(model, optimizer, 100000)
"""


def test_a_killed_run_leaves_nothing_on_disk(folder):
    def train_forever(say):
        torch.set_num_threads(1)
        model = models.build("llama", nvme=folder, host_memory="1MiB")
        optimizer = AdamW(model.parameters())
        say(built=True)
        models.train(model, optimizer, 100000)

    child = Child(train_forever)
    while not (child.over() or child.said):
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(child.pid, signal.SIGKILL)
    while not child.over():
        time.sleep(0.01)
    assert (dict(child.last), child.status) == ({"built": True}, signal.SIGKILL)
    assert list(folder.iterdir()) == []


def test_an_interrupted_run_leaves_nothing_on_disk(folder, tmp_path):
    run = Program("-c", TRAIN_FOREVER, folder, folder=tmp_path)
    try:
        while not any("built" in path.read_text() for path in tmp_path.glob("*.out")):
            assert not run.over(), run.end()
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(run.pid, signal.SIGINT)
        ended = run.end()
    finally:
        run.kill()
    assert "KeyboardInterrupt" in ended.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_an_interpreter_that_is_interrupted_leaves_nothing_on_disk(folder):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN_FOREVER, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        assert process.stdout.readline() == "built\n", process.stderr.read()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in errors
    assert list(folder.iterdir()) == []


def test_data_loader_workers_may_fork_and_die(folder):
    model = models.build("llama", nvme=folder, host_memory="1MiB")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(
        [models.batch(n)[0] for n in range(8)], batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    losses = []
    for ids in data:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == 4


def test_an_error_while_building_gives_everything_back(folder):
    before = held()
    with pytest.raises(ZeroDivisionError), Init(nvme=folder, host_memory="1MiB"):
        torch.nn.Linear(1000, 1000)
        raise ZeroDivisionError
    assert left_since(before) == []
    torch.nn.Linear(4, 4)(torch.ones(4))  # Init's hooks are gone
