"""TensorBoard and Weights & Biases show what moved, by transformers' own callbacks; where they are installed.

Trusted: the event files that they leave, read back by their own readers.
"""

import json
import struct

import pytest
import transformers.integrations

import infinity
from trainers import ADAM, ROWS, build, logged

pytestmark = [pytest.mark.disk, pytest.mark.filterwarnings("ignore")]  # what the boards bring

NAMES = (
    "infinity_nvme_read_gb",
    "infinity_nvme_written_gb",
    "infinity_stall_s",
    "infinity_misses",
    "infinity_host_gb",
)


def train(folder, board):
    args = transformers.TrainingArguments(
        str(folder / "out"), max_steps=3, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1
    )
    trainer = transformers.Trainer(
        build("llama", folder),
        args,
        train_dataset=ROWS,
        optimizer_cls_and_kwargs=(infinity.AdamW, ADAM),
        callbacks=[infinity.huggingface.TrainerCallback(), board],
    )
    trainer.train()
    return {name: [one[0] for one in logged(trainer, name)] for name in NAMES}


def test_tensorboard_shows_what_moved(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "board")) as writer:
        expected = train(folder, transformers.integrations.TensorBoardCallback(writer))
    events = EventAccumulator(str(folder / "board"))
    events.Reload()
    shown = {name: [one.value for one in events.Scalars(f"train/{name}")] for name in NAMES}
    assert len(shown["infinity_host_gb"]) == 4, "three steps, and the summary"
    assert {name: pytest.approx(one) for name, one in expected.items()} == shown
    assert shown["infinity_nvme_read_gb"][0] > 0


def records(content):
    """Cut a file of W&B into its records: LevelDB's log format, behind 7 bytes that say whose it is."""
    at, record, block = 7, b"", 1 << 15
    while at + 7 <= len(content):
        left = block - at % block
        if left < 7:
            at += left
            continue
        nbytes, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + nbytes]
        at += 7 + nbytes
        if kind in (1, 4):  # all of a record, the last part of one
            yield record
            record = b""


def test_weights_and_biases_shows_what_moved(folder, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_SILENT", "true")
    expected = train(folder, transformers.integrations.WandbCallback())
    import wandb

    wandb.finish()
    wandb.teardown()  # its service writes behind
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    shown = {name: [] for name in NAMES}
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            name = (item.key or item.nested_key[0]).removeprefix("train/")
            if name in NAMES:
                shown[name].append(json.loads(item.value_json))
    assert shown == expected
