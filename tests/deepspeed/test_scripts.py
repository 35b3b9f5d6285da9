"""Scripts written for DeepSpeed run with one line changed: `import infinity.deepspeed as deepspeed`.

The texts are those of DeepSpeed's "Getting Started", and a fine-tuning loop as its users write it; models are
small.
"""

import argparse
import json
import textwrap

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

import infinity
import models
from infinity.deepspeed import zero

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

TRAINING = """
import infinity.deepspeed as deepspeed

model_engine, optimizer, _, _ = deepspeed.initialize(args=cmd_args,
                                                     model=model,
                                                     model_parameters=params)

for step, batch in enumerate(data_loader):
    #forward() method
    loss = model_engine(batch)

    #runs backpropagation
    model_engine.backward(loss)

    #weight update
    model_engine.step()
"""

CHECKPOINTING = """
#load checkpoint
_, client_sd = model_engine.load_checkpoint(args.load_dir, args.ckpt_id)
step = client_sd['step']

#advance data loader to ckpt step
dataloader_to_step(data_loader, step + 1)

for step, batch in enumerate(data_loader):

    #forward() method
    loss = model_engine(batch)

    #runs backpropagation
    model_engine.backward(loss)

    #weight update
    model_engine.step()

    #save checkpoint
    if step % args.save_interval:
        client_sd['step'] = step
        ckpt_id = loss.item()
        model_engine.save_checkpoint(args.save_dir, ckpt_id, client_sd = client_sd)
"""

FINE_TUNING = """
import infinity.deepspeed as deepspeed

deepspeed.init_distributed()
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args(["--deepspeed", "--deepspeed_config", ds_config])

with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    model = transformers.LlamaForCausalLM(config)

engine, optimizer, train_loader, lr_scheduler = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=rows
)
engine.train()
for epoch in range(2):
    for batch in train_loader:
        batch = batch.to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(output_dir, tag=f"epoch-{epoch}", client_state={"epoch": epoch})
if torch.distributed.get_rank() == 0:
    print("lr", engine.get_lr(), "norm", engine.get_global_grad_norm(), "step", engine.global_steps)
engine.save_16bit_model(output_dir)
"""

GETTING_STARTED = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "bf16": {"enabled": True},  # "fp16" on DeepSpeed's page
    "zero_optimization": True,
    "infinity": {"host_memory": "16MiB"},
}


class Regression(nn.Module):
    """A model that returns its loss, as those of DeepSpeed's page do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, batch):
        return self.layers(batch.to(self.layers[0].weight.dtype)).float().square().mean()


@pytest.fixture
def started(tmp_path):
    """What DeepSpeed's page takes for granted."""
    torch.manual_seed(3)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(GETTING_STARTED))
    model = Regression()
    return {
        "cmd_args": argparse.Namespace(deepspeed=True, deepspeed_config=str(file), local_rank=0),
        "model": model,
        "params": model.parameters(),
        "data_loader": DataLoader(torch.randn(40, 8), batch_size=8),
    }


def execute(script, names):
    exec(textwrap.dedent(script), names)  # noqa: S102 - they are above
    return names


def test_the_training_script_of_getting_started_trains(started):
    names = execute(TRAINING, started)
    engine = names["model_engine"]
    assert (engine.global_steps, engine.global_samples) == (5, 40)
    torch.manual_seed(3)
    untrained = Regression()
    after, before = (
        sum(model(batch).item() for batch in started["data_loader"]) for model in (engine, untrained)
    )
    assert after < before


def test_the_checkpointing_script_of_getting_started_goes_on(started, tmp_path):
    names = execute(TRAINING, started)
    engine = names["model_engine"]
    engine.save_checkpoint(tmp_path / "in", tag="first", client_state={"step": 4})
    advanced = []
    names["args"] = argparse.Namespace(
        load_dir=tmp_path / "in", ckpt_id="first", save_dir=tmp_path / "out", save_interval=2
    )
    names["dataloader_to_step"] = lambda _, step: advanced.append(step)
    execute(CHECKPOINTING, names)
    saved = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert (advanced, engine.global_steps, len(saved)) == ([5], 10, 3), "steps 1 and 3, and `latest`"
    assert engine.load_checkpoint(tmp_path / "out")[1] == {"step": 3}
    assert engine.global_steps == 9


@pytest.fixture
def no_group_left():
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.usefixtures("no_group_left")
@pytest.mark.parametrize("launched", [True, False])
def test_a_process_group_is_made_of_torchruns_ranks_or_of_one(launched, monkeypatch):
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "LOCAL_RANK": "0",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if launched else monkeypatch.delenv(name, raising=False)
    infinity.deepspeed.init_distributed(dist_init_required=False)
    assert not distributed.is_initialized()
    infinity.deepspeed.init_distributed()
    infinity.deepspeed.init_distributed()  # a second time changes nothing
    assert (distributed.get_rank(), distributed.get_world_size()) == (0, 1)


def test_a_model_that_ranks_have_built_in_memory_is_refused(started, monkeypatch):
    monkeypatch.setattr(zero, "ranks", lambda: 2)
    with pytest.raises(infinity.UnsupportedError, match=r"by each of 2 ranks: build it inside .*zero.Init"):
        execute(TRAINING, started)


@pytest.mark.usefixtures("no_group_left")
def test_a_fine_tuning_script_runs_from_nvme(folder, capsys):
    transformers = pytest.importorskip("transformers")
    nvme = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True}
    ds_config = folder / "ds.json"
    ds_config.write_text(
        json.dumps(
            {
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"warmup_num_steps": 2, "total_num_steps": 8, "warmup_max_lr": 1e-2},
                },
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": nvme,
                    "offload_optimizer": nvme,
                    "overlap_comm": True,
                    "contiguous_gradients": True,
                    "reduce_bucket_size": 5e8,
                    "sub_group_size": 1e9,
                    "stage3_prefetch_bucket_size": 5e8,
                    "stage3_param_persistence_threshold": 1e6,
                    "stage3_max_live_parameters": 1e9,
                    "stage3_max_reuse_distance": 1e9,
                    "stage3_gather_16bit_weights_on_model_save": True,
                },
                "aio": {"block_size": 262144, "queue_depth": 32, "single_submit": False},
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 1.0,
                "train_micro_batch_size_per_gpu": 2,
                "steps_per_print": 100,
                "wall_clock_breakdown": False,
                "infinity": {"host_memory": "1MiB"},
            }
        )
    )
    names = {
        "argparse": argparse,
        "torch": torch,
        "transformers": transformers,
        "config": transformers.LlamaConfig(**models.SIZES),
        "ds_config": str(ds_config),
        "output_dir": str(folder / "out"),
        "rows": list(models.batch(0, rows=16)),
        "losses": [],
    }
    torch.manual_seed(0)
    execute(FINE_TUNING, names)
    losses = names["losses"]
    assert (len(losses), names["engine"].global_steps) == (16, 8)
    assert sum(losses[8:]) < sum(losses[:8])
    assert "step 8" in capsys.readouterr().out
    saved = sorted(path.name for path in (folder / "out").iterdir())
    assert saved == ["epoch-0", "epoch-1", "latest", "pytorch_model.bin"]
    assert infinity.stats(names["model"]).nvme_written_nbytes > 0
