"""Runs a training twice, on a model built plainly and on one built inside Init; compares all it shows."""

import contextlib
import gc

import torch
from torch import nn
from torch.utils import _pytree as pytree

import infinity
from infinity import reference
from infinity.engine.engine import Engine, engine_of

LEAST = "1MiB"


@contextlib.contextmanager
def repeatable():
    """One thread and deterministic algorithms: torch itself is not repeatable otherwise."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def engine_in(model):
    """Return the engine of a model, None for a plain one."""
    return next((engine for parameter in model.parameters() if (engine := engine_of(parameter))), None)


def nothing_waits(model):
    """Leave no room for units that wait: every unit is fetched for each use and released after it."""
    engine = engine_in(model)
    engine.residency._ahead.limit_nbytes = 0
    engine.residency.close_step(updates_at_fetch=True)
    return model


def resident(model):
    """Return the names of the units that have their bytes, and are not merely waiting for their next use."""
    engine = engine_in(model)
    if engine is None:
        return []
    engine.lane.drain()
    return [
        unit.name
        for unit in engine.units
        if unit.attached or (unit.flat.numel() and not unit.residence.waits and not unit.in_place)
    ]


def gradients(model):
    """Return a plain copy of every parameter's gradient, by name; None where there is none."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def build_both(build, *, seed=0, nvme=None, memory=LEAST, waits=False, **init):
    """Return the model that `build` makes, plain and prepared, and the same made inside Init."""
    torch.manual_seed(seed)
    plain = reference.prepare(build())
    torch.manual_seed(seed)
    with infinity.Init(nvme=nvme and str(nvme), host_memory=memory if nvme else "16MiB", **init):
        ours = build()
    return plain, ours if waits else nothing_waits(ours)


def optimizers(plain, ours, **options):
    """Return an optimizer for each of the two models."""
    options = {"lr": 1e-2, "weight_decay": 0.1, **options}
    return (
        reference.ReferenceAdamW([one for one in plain.parameters() if one.is_floating_point()], **options),
        infinity.AdamW([one for one in ours.parameters() if one.is_floating_point()], **options),
    )


def differences(expected, actual):
    """Return where two structures of tensors and plain values differ, bit for bit."""
    expected_leaves, expected_tree = pytree.tree_flatten_with_path(expected)
    actual_leaves, actual_tree = pytree.tree_flatten_with_path(actual)
    if expected_tree != actual_tree:
        return [f"structure: {expected_tree} != {actual_tree}"]
    return [
        pytree.keystr(path)
        for (path, one), (_, other) in zip(expected_leaves, actual_leaves, strict=True)
        if not same(one, other)
    ]


def same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        nan = one.is_floating_point() and bool(torch.isnan(one).any())
        equal = torch.equal(one.nan_to_num(), other.nan_to_num()) if nan else torch.equal(one, other)
        return one.dtype == other.dtype and one.shape == other.shape and equal
    return bool(one == other)


def total(output):
    """Return one fp32 number that depends on every floating tensor in a module's output."""
    leaves = output if isinstance(output, list) else pytree.tree_leaves(output)
    floating = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return sum(leaf.float().square().mean() + leaf.float().mean() for leaf in floating)


def train(model, optimizer, batch, *, loss=None, steps=3, seed=7):
    """Train some steps; return losses, gradients of inputs and parameters, and the state at the end."""
    shown = []
    loss = loss or (lambda model, inputs: total(model(*inputs)))
    for step in range(steps):
        inputs = batch(torch.Generator().manual_seed(seed + step))
        for one in inputs:
            if one.is_floating_point():
                one.requires_grad_()
        value = loss(model, inputs)
        assert resident(model) == [], f"after the forward of step {step}"
        value.backward()
        assert resident(model) == [], f"after the backward of step {step}"
        shown += [value.detach(), [one.grad for one in inputs], gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*shown, {name: value.clone() for name, value in model.state_dict().items()}]


def compare(build, batch, *, loss=None, steps=3, nvme=None, memory=LEAST, waits=False, **options):
    """Train both models and hold what they show against each other."""
    plain, ours = build_both(build, nvme=nvme, memory=memory, waits=waits)
    ref_optimizer, optimizer = optimizers(plain, ours, **options)
    torch.manual_seed(1)
    expected = train(plain, ref_optimizer, batch, loss=loss, steps=steps)
    torch.manual_seed(1)
    actual = train(ours, optimizer, batch, loss=loss, steps=steps)
    found = differences(expected, actual)
    assert found == [], found
    return ours, optimizer


def halves(*shape):
    """Return a function that draws one bf16 input of `shape`."""
    return lambda generator: [torch.randn(*shape, generator=generator).bfloat16()]


def tokens(vocabulary, *shape):
    """Return a function that draws one input of token numbers."""
    return lambda generator: [torch.randint(0, vocabulary, shape, generator=generator)]


def engines():
    """Return the engines that are alive."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Engine]


class Wrap(nn.Module):
    """A module whose forward is the function it is given."""

    def __init__(self, forward, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
        self._forward = forward

    def forward(self, *inputs):
        return self._forward(self, *inputs)


def assert_same_moments(model, optimizer, plain, reference):
    """Compare weights with the reference's, and moments as an optimizer's state shows them."""
    assert differences(plain.state_dict(), model.state_dict()) == []
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        state, expected = optimizer.state[ours], reference.state[theirs]
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"])
