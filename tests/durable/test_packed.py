"""Durable runs on a base in fewer bits, killed by SIGKILL. Trusted: the same run, not interrupted."""

import json
import signal

import pytest
import torch
import transformers
from safetensors import safe_open

import quantised
from launches import python
from places import SUPPORT

pytest.importorskip("peft")
pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone is seen to")

pytestmark = [pytest.mark.disk, pytest.mark.timeout(900)]


def run(folder, base, frozen, kill=-1):
    folder.mkdir(exist_ok=True)
    return python(SUPPORT / "packed_run.py", folder, base, frozen, kill, folder=folder)


def losses(folder):
    """Return the loss of each step, the last one that was said of it."""
    return dict(map(json.loads, (folder / "losses").read_text().splitlines()))


def saved(folder, kind):
    """Save a base; return its folder, and the frozen_dtype to give it."""
    if kind != "quantised when it is loaded":
        return quantised.bitsandbytes_llama(folder / "base", kind, folder / "plain"), "-"
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**quantised.SIZES)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    return folder / "base", "nf4"


@pytest.mark.parametrize(
    "kind", [pytest.param("nf4 nested", marks=pytest.mark.slow), "quantised when it is loaded"]
)
def test_a_killed_run_on_a_packed_base_goes_on_with_the_same_bits(folder, kind):
    base, frozen = saved(folder, kind)
    whole = run(folder / "whole", base, frozen)
    assert whole.returncode == 0, whole.stderr[-2000:]
    killed = run(folder / "killed", base, frozen, kill=2)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert list(losses(folder / "killed")) == [0, 1]
    assert not list((folder / "killed" / "nvme").glob("infinity-frozen-*"))
    resumed = run(folder / "killed", base, frozen)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert losses(folder / "killed") == losses(folder / "whole")
    expected, found = (torch.load(folder / one / "adapters.pt") for one in ("whole", "killed"))
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_codes_that_changed_between_two_lives_are_named_by_the_hashes_that_the_run_keeps(folder):
    base, _ = saved(folder, "nf4 nested")
    killed = run(folder / "run", base, "-", kill=1)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    file = base / "model.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    with safe_open(file, "pt") as tensors:
        codes = bytes(tensors.get_tensor(name).flatten().tolist())
    data = bytearray(file.read_bytes())
    at = bytes(data).index(codes)
    data[at] ^= 0x11
    file.write_bytes(data)
    ended = run(folder / "run", base, "-")
    assert ended.returncode == 1
    assert "CorruptionError" in ended.stderr
    assert str(file) in ended.stderr
