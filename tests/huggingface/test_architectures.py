"""Models of many kinds, unmodified, train as the reference recipe does: three steps, bit for bit."""

import pytest
import torch

import architectures
import infinity
import models
import parity
from infinity.reference import ReferenceAdamW, prepare

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIKE_OTHERS = {
    *("qwen3", "opt, tied", "gpt-neox", "bloom, tied", "modernbert", "bart, tied", "vit", "olmoe"),
    *("qwen3-moe", "gpt-oss", "deepseek-v3"),  # which tests/engine/test_routing.py trains
}


def given(batch, step, dtype):
    """Return a step's batch, whose images are of the type that computes."""
    values = batch(torch.Generator().manual_seed(step))
    return {
        name: one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for name, one in values.items()
    }


def train(model, optimizer, batch, dtype):
    losses = []
    model.train()
    torch.manual_seed(5)  # of dropout
    for step in range(3):
        loss = model(**given(batch, step, dtype)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(build, dtype):
    """Build a model for the reference. What its code asks for in fp32, whatever the default, stays fp32."""
    torch.set_default_dtype(torch.float64)
    try:
        asked = {name for name, one in build().named_parameters() if one.dtype == torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = build()
    for name in asked:
        owner, _, own = name.rpartition(".")
        prepare(torch.nn.ParameterList([getattr(model.get_submodule(owner), own)]), torch.float32)
    return prepare(model, dtype)


@pytest.mark.parametrize(
    ("name", "computes", "checkpointed"),
    [  # by default each architecture that is like no other once, in the two types by turns
        pytest.param(
            name,
            computes,
            checkpointed,
            marks=[] if way == number % 2 and name not in LIKE_OTHERS else [pytest.mark.slow],
        )
        for number, name in enumerate(architectures.ARCHITECTURES)
        for way, (computes, checkpointed) in enumerate([("bf16", False), ("fp32", False), ("bf16", True)])
    ],
)
def test_three_steps_equal_the_recipes(folder, name, computes, checkpointed):
    dtype = DTYPES[computes]
    build, batch = architectures.ARCHITECTURES[name]
    plain = prepared(build, dtype)
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", dtype=computes):
        ours = build()
    parity.nothing_waits(ours)
    if checkpointed:
        if not ours.supports_gradient_checkpointing:
            pytest.skip("this model has no checkpointing")
        for model in (plain, ours):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recipe = ReferenceAdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, max_norm=1.0)
    optimizer = infinity.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1, max_norm=1.0)
    expected = train(plain, recipe, batch, dtype)
    assert train(ours, optimizer, batch, dtype) == expected
    models.assert_same_state(ours, optimizer, plain, recipe)
