"""Models that host memory does not hold are refused with what they need. Trusted: trying what is said."""

import re

import pytest
import torch
from torch import nn

import infinity
from infinity.sizes import format_size, parse_size

transformers = pytest.importorskip("transformers")


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(24)))


def half_frozen():
    model = blocks()
    model[:12].requires_grad_(requires_grad=False)
    return model


def llama():  # initialised when the whole model stands, so that what is gone is asked for again
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 4096}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **sizes))


def with_types_of_its_own():
    model = blocks()
    return nn.Sequential(model, nn.Linear(512, 512, dtype=torch.float32))


def step(model, optimizer):
    if hasattr(model, "config"):
        tokens = torch.arange(32).view(2, 16)
        model(input_ids=tokens, labels=tokens).loss.backward()
    else:
        x = torch.ones(4, 512, dtype=next(model.parameters()).dtype)
        for part in model:
            x = part(x.to(next(part.parameters()).dtype))
        x.sum().backward()
    optimizer.step()


def refused(build, host_memory, **init):
    with (
        pytest.raises(infinity.HostMemoryError, match=r"do not fit host memory") as told,
        infinity.Init(host_memory=host_memory, **init),
    ):
        model = build()
        assert len(list(model.parameters())) > 1  # and alive
    return str(told.value)


def sizes_in(message):
    found = re.search(
        r"smallest host_memory that works is (.*) with AdamW \((.*) without an optimizer\)", message
    )
    return [parse_size(one.replace(" ", "")) for one in found.groups()]


@pytest.mark.parametrize(
    ("build", "init"),
    [
        pytest.param(build, init, marks=[] if not init or build is blocks else [pytest.mark.slow])
        for build in (blocks, half_frozen, llama, with_types_of_its_own)
        for init in ({}, {"dtype": "fp32"}, {"state_dtype": "int8"})
    ],
)
def test_the_host_memory_that_the_refusal_names_works_and_less_does_not(build, init):
    training, alone = sizes_in(refused(build, "16MiB", **init))
    with infinity.Init(host_memory=training, **init):
        model = build()
    step(model, infinity.AdamW(model.parameters()))
    with infinity.Init(host_memory=alone, **init):
        model = build()
    with infinity.Init(host_memory=training - (1 << 20), **init):
        model = build()
    with pytest.raises(infinity.HostMemoryError, match="smallest host_memory that works") as told:
        infinity.AdamW(model.parameters())
    assert f"works is {format_size(training)};" in str(told.value)
    assert sizes_in(refused(build, alone - (1 << 20), **init)) == [training, alone]


def test_the_refusal_names_the_users_module_parameters_and_the_numbers():
    message = refused(blocks, "32MiB")
    module, first = re.match(r"(\d+\.\d): (\d+\.\d)\.weight, \2\.bias, ", message).groups()
    assert module == first
    assert "without an NVMe tier all state stays there, and host_memory=32.0 MiB leaves " in message
    assert message.endswith("; or give Config a folder on NVMe (nvme=...).")


def test_an_error_of_the_model_after_memory_has_ended_is_told_as_what_followed_from_it():
    with pytest.raises(infinity.HostMemoryError) as told, infinity.Init(host_memory="16MiB"):
        model = blocks()
        norm = model[12][1].weight.detach()  # evicted when memory had ended
        if norm.sum().item() == 0:
            raise ArithmeticError("norms begin at one")
    assert isinstance(told.value.__cause__, ArithmeticError)
    assert re.search(r"failed \(the error above\): it needs \d+\.\d MiB or more", str(told.value))


def test_a_ctrl_c_while_the_rest_is_counted_stays_one():
    with pytest.raises(KeyboardInterrupt), infinity.Init(host_memory="16MiB"):
        model = blocks()
        assert model is not None
        raise KeyboardInterrupt


def test_values_are_kept_as_long_as_they_fit():
    _, alone = sizes_in(refused(blocks, "16MiB"))
    found = []
    for host_memory in (alone, "256MiB"):
        torch.manual_seed(0)
        with infinity.Init(host_memory=host_memory):
            model = blocks()
        found.append(model.state_dict())
    for (name, one), other in zip(found[0].items(), found[1].values(), strict=True):
        assert torch.equal(one, other), name
