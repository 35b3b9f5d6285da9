"""The README's programs run as they stand, on a smaller model."""

import json
import re

import pytest
import torch

from places import ROOT

README = ROOT / "README.md"
SIZES = "vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4"


def programs():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.disk
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_program_in_the_readme_runs(folder, capsys):
    program = programs()[0]
    for written, here in (
        ('"/local_nvme"', repr(str(folder))),
        ("LlamaConfig()", f"LlamaConfig({SIZES})"),
        ('"weights.pt"', repr(str(folder / "weights.pt"))),
    ):
        assert written in program
        program = program.replace(written, here)
    exec(program, {"batches": [torch.randint(0, 64, (1, 16)) for _ in range(3)]})  # noqa: S102 - it is ours
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert weights["lm_head.weight"].isfinite().all()
    assert re.search(r"^steps +3$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.disk
def test_the_durable_program_in_the_readme_runs(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    import fragile
    import infinity

    program = programs()[1].replace('"/local_nvme"', repr(str(folder))).replace("4GiB", "4MiB")
    program = program.replace("LlamaConfig()", f"LlamaConfig({SIZES})")
    names = {"infinity": infinity, "torch": torch, "LlamaConfig": LlamaConfig, "loader": fragile.Loader()}
    exec(program, {**names, "LlamaForCausalLM": LlamaForCausalLM})  # noqa: S102 - it is ours
    assert (folder / "infinity-run" / "rank0" / "commit-1").stat().st_size > 1000


@pytest.mark.disk
def test_the_deepspeed_script_in_the_readme_runs(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    nvme = {"device": "nvme", "nvme_path": str(folder)}
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"host_memory": "4MiB"},
    }
    (folder / "ds.json").write_text(json.dumps(content))
    program = programs()[2]
    for written, here in (
        ('"ds.json"', repr(str(folder / "ds.json"))),
        ("LlamaConfig()", f"LlamaConfig({SIZES})"),
        ('"out"', repr(str(folder / "out"))),
    ):
        assert written in program
        program = program.replace(written, here)
    names = {
        "LlamaConfig": LlamaConfig,
        "LlamaForCausalLM": LlamaForCausalLM,
        "batches": [torch.randint(0, 64, (1, 16)) for _ in range(3)],
    }
    exec(program, names)  # noqa: S102 - it is ours
    assert (folder / "out" / "latest").read_text() == "global_step3"
    assert "zero_optimization.stage = 3: honoured" in str(names["engine"].settings.report)


@pytest.mark.disk
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_trainer_in_the_readme_runs(folder):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", SIZES)}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "model")
    program = programs()[3]
    for written, here in (
        ('"/local_nvme"', repr(str(folder))),
        ('"out"', f'{str(folder / "out")!r}, use_cpu=True, report_to="none", disable_tqdm=True'),
        ("save_steps=100, max_steps=200", "save_steps=2, max_steps=3"),
    ):
        assert written in program
        program = program.replace(written, here)
    names = {
        "LlamaForCausalLM": LlamaForCausalLM,
        "Trainer": Trainer,
        "TrainingArguments": TrainingArguments,
        "infinity": __import__("infinity"),
        "name": folder / "model",
        "dataset": [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 16))],
    }
    exec(program, names)  # noqa: S102 - it is ours
    assert (folder / "out" / "checkpoint-2" / "infinity" / "manifest.json").is_file()


@pytest.mark.disk
def test_the_loop_with_a_scaler_in_the_readme_runs(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    program = programs()[5].replace('"/local_nvme"', repr(str(folder))).replace("4GiB", "4MiB")
    program = program.replace("LlamaConfig()", f"LlamaConfig({SIZES})")
    names = {
        "LlamaConfig": LlamaConfig,
        "LlamaForCausalLM": LlamaForCausalLM,
        "batches": [torch.randint(0, 64, (1, 16)) for _ in range(3)],
        "infinity": __import__("infinity"),
        "torch": torch,
    }
    assert "GradScaler()" in program
    exec(program.replace("GradScaler()", 'GradScaler("cpu")'), names)  # noqa: S102 - it is ours
    assert {int(one["step"]) for one in names["optimizer"].state_dict()["state"].values()} <= {1, 2, 3}


@pytest.mark.disk
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Could not find a config file:UserWarning")
def test_the_adapters_in_the_readme_train(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    peft = pytest.importorskip("peft")
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", SIZES)}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "model")
    program = programs()[4]
    for written, here in (('"/local_nvme"', repr(str(folder))), ('"adapter"', repr(str(folder / "adapter")))):
        assert written in program
        program = program.replace(written, here)
    names = {
        "LlamaForCausalLM": LlamaForCausalLM,
        "LoraConfig": peft.LoraConfig,
        "get_peft_model": peft.get_peft_model,
        "infinity": __import__("infinity"),
        "torch": torch,
        "name": folder / "model",
        "batches": [torch.randint(0, 64, (1, 16)) for _ in range(2)],
    }
    exec(program, names)  # noqa: S102 - it is ours
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
