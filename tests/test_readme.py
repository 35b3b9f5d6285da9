"""The README's program runs as it stands, on a smaller model."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
SIZES = "vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4"


@pytest.mark.disk
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_program_in_the_readme_runs(folder, capsys):
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
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
    assert "steps=3" in capsys.readouterr().out
