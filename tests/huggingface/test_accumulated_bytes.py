"""Bytes per parameter of a step of eight micro-batches that share one fetch, in each loop. Counted by the
engine; nothing is faked.
"""

import json
import statistics

import pytest
import torch
import transformers
from accelerate import Accelerator
from rich.console import Console
from torch.utils.data import DataLoader

import infinity
import infinity.deepspeed
import models
from infinity.cli.presets import PRESETS, Preset
from infinity.cli.settings import TrainSettings
from infinity.cli.train import train
from infinity.huggingface import TrainerCallback, accumulate_by_block
from trainers import QUIET

pytestmark = [
    pytest.mark.slow,
    pytest.mark.disk,
    pytest.mark.usefixtures("fresh_accelerate"),
    pytest.mark.filterwarnings(
        "ignore:.*pin_memory.*:UserWarning", "ignore:.*lr_scheduler.step.*:UserWarning"
    ),
]
STEPS = 3
MEMORY = {"host_memory": "384KiB"}
SHAPE = {**models.SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
LIMITS = {"backward": 26.5, "forward": 30.5}
"""Bytes per parameter: 26, and what tiles are padded with; where gradients wait for their norm, as with a
Trainer that clips, two more for weights that are read for the update, and two for gradients that found no
room.
"""


class Moved:
    """Counts the NVMe bytes of each step."""

    def __init__(self, model):
        self.model, self.before, self.steps = model, infinity.stats(model), []

    def step(self):
        now = infinity.stats(self.model)
        step = now.since(self.before)
        nbytes = sum(step.read_nbytes.values()) + sum(step.written_nbytes.values())
        self.steps.append(nbytes / self.model.num_parameters())
        self.before = now


def build(folder):
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), **MEMORY):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).train()


def rows(micro_batches):
    return models.batch(0, rows=micro_batches * STEPS, length=8)


def optimizer_of(model, update="backward"):
    return infinity.AdamW(model.parameters(), lr=1e-2, update=update, speculate=False)


def by_trainer(micro_batches, folder, update="backward"):
    """The Trainer clips by default, by a norm that gradients wait for."""
    model = build(folder)
    moved = Moved(model)

    class Counting(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            moved.step()

    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0.0 if update == "backward" else 1.0,
        **QUIET,
    )
    transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows(micro_batches)],
        optimizers=(optimizer_of(model, update), None),
        callbacks=[TrainerCallback(by_block=True), Counting()],
    ).train()
    return moved.steps


def by_clipping_trainer(micro_batches, folder):
    return by_trainer(micro_batches, folder, "forward")


def by_accelerate(micro_batches, folder):
    model = build(folder)
    moved = Moved(model)
    accelerator = Accelerator(gradient_accumulation_steps=micro_batches, cpu=True)
    prepared, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model), DataLoader(rows(micro_batches), batch_size=1)
    )
    accumulate_by_block(prepared, optimizer)
    for ids in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                moved.step()
    return moved.steps


def by_json(micro_batches, folder):
    model = build(folder)
    moved = Moved(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "infinity": {"accumulate_by_block": True, **MEMORY, "nvme": str(folder)},
    }
    engine, *_ = infinity.deepspeed.initialize(model=model, config=config)
    assert engine.optimizer.update == "backward"
    for ids in rows(micro_batches).split(1):
        last = engine.is_gradient_accumulation_boundary()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        if last:
            moved.step()
    return moved.steps


def by_command(micro_batches, folder):
    """`infinity train --accumulate`; its log has the bytes of each step."""
    preset = Preset(layers=2, hidden=256, intermediate=512, heads=4)
    settings = TrainSettings(
        preset="1m",
        nvme=[str(folder)],
        steps=STEPS,
        sequence=8,
        accumulate=micro_batches,
        update="backward",
        out=str(folder / "out"),
        **MEMORY,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "1m", preset)
        train(settings, Console(quiet=True))
    log = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    return [(one["nvme_read_nbytes"] + one["nvme_written_nbytes"]) / preset.parameters for one in log]


@pytest.mark.parametrize("loop", [by_trainer, by_clipping_trainer, by_accelerate, by_json, by_command])
def test_a_step_of_eight_micro_batches_moves_the_bytes_of_one(folder, loop):
    found = {}
    for micro_batches in (1, 8):
        place = folder / str(micro_batches)
        place.mkdir()
        # A piece that is written late in one step is counted in the next, so steps are looked at together.
        found[micro_batches] = statistics.median(loop(micro_batches, place)[1:])
    assert found[8] <= LIMITS["forward" if loop is by_clipping_trainer else "backward"]
    assert abs(found[8] - found[1]) <= 1.0, "pieces of a unit may be there or not, whatever the number"
