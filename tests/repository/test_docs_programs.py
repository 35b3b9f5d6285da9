"""The programs in README.md and docs/ run as they stand, on a smaller model; a page's one after the other.

What cannot run is marked as a fragment. docs/errors.md has a test of its own: test_docs.
"""

import json
import re

import pytest
import torch

import infinity
from places import ROOT

FENCE = re.compile(r"(<!-- fragment[^>]*-->\n)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {
    path.name: [(program, bool(mark)) for mark, program in FENCE.findall(path.read_text())]
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    if path.name != "errors.md"
}
SIZES = "vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4"
REPLACED = {
    "LlamaConfig()": f"LlamaConfig({SIZES})",
    '"4GiB"': '"16MiB"',
    "save_steps=100, max_steps=200": "save_steps=2, max_steps=3",
    "max_steps=200": "max_steps=3",
    'TrainingArguments("out"': 'TrainingArguments("out", use_cpu=True, report_to="none", disable_tqdm=True',
}


class Loader:
    """A loader that says where it is."""

    def state_dict(self):
        return {"place": torch.tensor(1)}

    def load_state_dict(self, state):
        """There is nothing to go back to."""


def small():
    from transformers import LlamaConfig

    return LlamaConfig(**{name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", SIZES)})


@pytest.fixture
def names(folder, monkeypatch):
    """What programs may name without making it, in a folder of their own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(folder)
    LlamaForCausalLM(small()).save_pretrained(folder / "base")
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"host_memory": "16MiB"},
    }
    (folder / "ds.json").write_text(json.dumps(settings))
    rows = torch.randint(0, 64, (8, 16))
    return {
        "LlamaConfig": LlamaConfig,
        "LlamaForCausalLM": LlamaForCausalLM,
        "batches": [torch.randint(0, 64, (1, 16)) for _ in range(3)],
        "dataset": [{"input_ids": row, "labels": row} for row in rows],
        "infinity": infinity,
        "loader": Loader(),
        "name": folder / "base",
        "torch": torch,
    }


def with_a_model(names):
    """Give a page that begins behind training a model, its optimizer and a schedule."""
    with infinity.Init(host_memory="16MiB"):
        names["model"] = names["LlamaForCausalLM"](small())
    names["optimizer"] = infinity.AdamW(names["model"].parameters())
    names["schedule"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])


def see_readme(folder, names, text):
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert weights["lm_head.weight"].isfinite().all()
    assert re.search(r"^steps +3$", text, re.MULTILINE)


def see_durable(folder, names, text):
    assert (folder / "infinity-run" / "rank0" / "commit-1").stat().st_size > 1000


def see_from_deepspeed(folder, names, text):
    assert (folder / "out" / "latest").read_text() == "global_step3"
    assert "zero_optimization.stage = 3: honoured" in str(names["engine"].settings.report)
    assert names["trainer"].state.global_step == 3


def see_huggingface(folder, names, text):
    assert (folder / "out" / "checkpoint-2" / "infinity" / "manifest.json").is_file()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def see_precision(folder, names, text):
    assert {int(one["step"]) for one in names["optimizer"].state_dict()["state"].values()} <= {1, 2, 3}


def see_start(folder, names, text):
    from transformers import AutoTokenizer

    assert (folder / "finetuned" / "model.safetensors").is_file()
    assert AutoTokenizer.from_pretrained(folder / "base").decode([names["tokenizer"].eos_token_id]) == "<end>"
    assert (folder / "held-out.txt").stat().st_size > 1000


def see_checkpoints(folder, names, text):
    assert names["extra"] == {"batch": 1000}


def see_tiling(folder, names, text):
    assert "TiledLinear" in text


BEFORE = {"checkpoints.md": with_a_model}
AFTER = {
    "README.md": see_readme,
    "checkpoints.md": see_checkpoints,
    "durable.md": see_durable,
    "from-deepspeed.md": see_from_deepspeed,
    "huggingface.md": see_huggingface,
    "precision.md": see_precision,
    "start.md": see_start,
    "tiling.md": see_tiling,
}


@pytest.mark.disk
@pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore:.*pin_memory.*:UserWarning",
    "ignore:Could not find a config file:UserWarning",
)
@pytest.mark.parametrize("page", [page for page, programs in PAGES.items() if programs])
def test_programs_of_a_page_run_one_after_the_other(page, folder, names, capsys):
    if "peft" in "".join(program for program, _ in PAGES[page]):
        pytest.importorskip("peft")
    BEFORE.get(page, lambda _: None)(names)
    for program, is_fragment in PAGES[page]:
        if is_fragment:
            compile(program, page, "exec")
            continue
        for written, here in {**REPLACED, '"/local_nvme"': repr(str(folder))}.items():
            program = program.replace(written, here)  # noqa: PLW2901 - the same, for here
        exec(compile(program, page, "exec"), names)  # noqa: S102 - it is ours
    AFTER.get(page, lambda *_: None)(folder, names, capsys.readouterr().out)


def test_few_programs_are_fragments():
    programs = [one for page in PAGES.values() for one in page]
    assert sum(is_fragment for _, is_fragment in programs) <= 2
    assert len(programs) >= 15
