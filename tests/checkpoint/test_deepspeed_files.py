"""DeepSpeed's checkpoints. Trusted: its layout, as version 0.19 writes it. Faked: DeepSpeed's own classes."""

import os

import pytest
import torch
from torch import nn

import deepspeed_checkpoints
from deepspeed_checkpoints import FROZEN, build, write
from infinity import AdamW, Init
from infinity.checkpoint.deepspeed_files import load_deepspeed
from infinity.engine.engine import engine_of
from infinity.storage.manifest import CheckpointError
from parity import differences

pytestmark = pytest.mark.disk
classes = deepspeed_checkpoints.classes


def ours(folder, **init):
    with Init(nvme=folder, host_memory="1MiB", **init):
        model = build()
    return model, AdamW([one for one in model.parameters() if one.requires_grad])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cut", [1, 2])
def test_every_value_arrives_from_any_number_of_ranks(folder, classes, ranks, cut):
    masters, m, v = write(folder / "ds", ranks, classes, cut=cut)
    model, optimizer = ours(folder)
    load_deepspeed(model, optimizer, folder / "ds")
    for name, parameter in model.named_parameters():
        fields = ["master", "m", "v"] if name != FROZEN else ["master"]
        expected = [masters[name], m[name], v[name]][: len(fields)]
        assert differences(expected, engine_of(parameter).parameters.read(parameter, fields)) == [], name
        assert (optimizer.state[parameter]["step"] if name != FROZEN else 3) == 3
    assert model.count.tolist() == [7.0, 8.0]


def test_an_enum_that_was_pickled_by_name_as_python_3_11_0_does_is_read(folder, classes, monkeypatch):
    monkeypatch.setattr(
        classes[1], "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)), raising=False
    )
    masters, _, _ = write(folder / "ds", 1, classes)
    assert any(b"getattr" in one.read_bytes() for one in (folder / "ds").rglob("*_states.pt"))
    model, optimizer = ours(folder)
    load_deepspeed(model, optimizer, folder / "ds")
    assert torch.equal(
        engine_of(model.a.weight).parameters.read(model.a.weight, ["master"])[0], masters["a.weight"]
    )


def test_weights_alone_are_loaded_without_an_optimizer_or_without_moments(folder, classes):
    masters, _, _ = write(folder / "ds", 2, classes, moments=False)
    for take in (True, False):
        model, optimizer = ours(folder)
        load_deepspeed(model, optimizer if take else None, folder / "ds", tag="global_step3")
        found = {
            name: engine_of(one).parameters.read(one, ["master"])[0] for name, one in model.named_parameters()
        }
        assert differences({name: masters[name] for name in found}, found) == []
        assert not optimizer.state


def test_what_does_not_fit_is_named_before_anything_changes(folder, classes):
    write(folder / "ds", 2, classes)
    with Init(host_memory="16MiB"):
        model = build()
        model.a = nn.Linear(16, 3)
        model.other = nn.Linear(2, 2, bias=False)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"(?s)nothing was loaded.*missing.*other.weight.*a.weight: F32 \[33, 16\]"
    ):
        load_deepspeed(model, None, folder / "ds")
    assert differences(before, dict(model.state_dict())) == []


def test_a_rank_that_is_missing_is_named(folder, classes):
    write(folder / "ds", 3, classes)
    model, optimizer = ours(folder)
    for kind in (
        "zero_pp_rank_1_mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ):
        (folder / "ds" / "global_step3" / kind).unlink()
        with pytest.raises(CheckpointError, match=r"not a complete checkpoint.*\[0, 2\] for the model"):
            load_deepspeed(model, optimizer, folder / "ds")


def test_moments_that_deepspeed_lost_are_not_taken_for_zero(folder, classes):
    write(folder / "ds", 1, classes)
    path = folder / "ds" / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with torch.serialization.safe_globals([*classes]):
        state = torch.load(path, weights_only=False)  # our own file
    state["optimizer_state_dict"]["optimizer_state_dict"]["state"][1]["exp_avg"] = torch.empty(0)
    torch.save(state, path)
    model, optimizer = ours(folder)
    with pytest.raises(CheckpointError, match=r"exp_avg of rank 0.*\[1168, 0\].*expected \[1168, 33\].*NVMe"):
        load_deepspeed(model, optimizer, folder / "ds")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/infinity-evil",)  # noqa: S108 - never made


def test_nothing_that_a_file_asks_for_is_run(folder, classes, tmp_path):
    write(folder / "ds", 1, classes)
    path = folder / "ds" / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    ran = tmp_path / "ran"
    Evil.__reduce__ = lambda _self: (os.mkdir, (str(ran),))
    torch.save({"module": Evil()}, path)
    model, _ = ours(folder)
    with pytest.raises(CheckpointError, match=r"model_states.pt: cannot be read without running"):
        load_deepspeed(model, None, folder / "ds")
    assert not ran.exists()
