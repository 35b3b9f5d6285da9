"""Trusted: torch's state_dict. The receiving processes are real, over gloo; nothing is faked."""

import json
import weakref

import pytest
import torch
import transformers
from torch import nn

import infinity
import models
from infinity.engine.engine import engine_of
from launches import forked
from places import SUPPORT

pytestmark = pytest.mark.disk
MIXTRAL = {**models.SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}


def build(folder, **settings):
    torch.manual_seed(3)
    with infinity.Init(nvme=str(folder), host_memory="2MiB", **settings):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**models.SIZES, "tie_word_embeddings": True})
        )
    model.register_buffer("seen", torch.arange(3.0))
    return model


def trained(model):
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    ids = models.batch(0, rows=1, length=8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return optimizer


def test_what_is_sent_is_the_state_dict_with_all_updates_each_weight_once(folder):
    model = build(folder)
    optimizer = trained(model)
    sent = {}
    nbytes = infinity.stream_weights(model, lambda name, values: sent.update({name: values}))
    expected = model.state_dict()
    shared = expected.pop("lm_head.weight")  # tied
    assert torch.equal(shared, sent["model.embed_tokens.weight"])
    assert sent.keys() == expected.keys()
    assert all(
        torch.equal(sent[name], one) and sent[name].dtype == one.dtype for name, one in expected.items()
    )
    assert nbytes == sum(one.nbytes for one in expected.values())
    del optimizer


def test_one_tensor_is_in_memory_at_a_time_and_two_bytes_a_parameter_are_read(folder):
    with infinity.Init(nvme=str(folder), host_memory="2MiB"):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(5)))
    alive, most = [], []

    def see(_, values):
        alive.append(weakref.ref(values))
        most.append(sum(one() is not None for one in alive))

    before = infinity.stats(model)
    infinity.stream_weights(model, see)
    moved = infinity.stats(model).since(before)
    numel = sum(one.numel() for one in model.parameters())
    assert max(most) == 1
    assert sum(moved.written_nbytes.values()) == 0
    assert sum(moved.read_nbytes.values()) == 2 * numel


def test_masters_are_sent_in_fp32(folder):
    model = build(folder)
    optimizer = trained(model)
    sent = {}
    infinity.stream_weights(model, lambda name, values: sent.update({name: values}), torch.float32)
    for name, one in model.named_parameters():
        assert torch.equal(sent[name], engine_of(one).parameters.read(one, ["master"])[0])
    del optimizer


def test_experts_in_slices_are_sent_as_whole_stacks(folder):
    with infinity.Init(nvme=str(folder), host_memory="2MiB"):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**MIXTRAL, num_local_experts=4, num_experts_per_tok=1)
        )
    sent = {}
    infinity.stream_weights(model, lambda name, values: sent.update({name: values}))
    expected = model.state_dict()
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], one) for name, one in expected.items())


def test_what_the_receiver_raises_ends_it(folder):
    model = build(folder)

    def fails(name, _):
        raise KeyError(name)

    with pytest.raises(KeyError, match=r"model\.embed_tokens"):
        infinity.stream_weights(model, fails)
    trained(model)


@pytest.mark.parametrize(
    ("model", "dtype", "says"),
    [
        ("ours", torch.int8, "dtype=torch.int8: expected torch.float32"),
        ("ours", torch.float16, "dtype=torch.float16: expected torch.float32"),
        ("plain", None, "Init"),
    ],
)
def test_what_cannot_be_sent_is_refused(folder, model, dtype, says):
    one = build(folder) if model == "ours" else nn.Linear(2, 2)
    with pytest.raises(ValueError, match=says):
        infinity.stream_weights(one, lambda *_: None, dtype)


@pytest.mark.multi
def test_ranks_that_divide_a_model_send_it_to_a_group_and_to_a_name_and_processes_are_told_of_errors(
    tmp_path,
):
    forked(4, SUPPORT / "streamed_run.py", tmp_path)
    sender, second, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4))
    assert len(set(sender["nbytes"])) == 1
    assert second["nbytes"] == [0, 0]
    assert [one["digests"] for one in others] == [[sender["digests"]] * 2, [sender["digests"]]]
    for one in others:
        assert "rank 0 of the world, which sends its weights, has failed: OSError: planted" in one["error"]
