"""Muon over offloaded matrices: the bits of torch.optim.Muon, at any budget, and what it refuses.

Real training on a real disk. Trusted: torch.optim.Muon for fp32; for 16 bits the plain step, which is
compared with torch's here; the reference recipe's AdamW for all other parameters.
"""

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn

import infinity
import models
from covers import matrix
from infinity import reference, tiling
from infinity.engine.engine import engine_of_model
from infinity.errors import UnsupportedError
from infinity.reference.steps import muon_step
from plain_muon import (
    ADAMW,
    KNOBS,
    MUON,
    MUONS,
    PlainMuon,
    assert_same,
    backward,
    built,
    groups_of,
    ids_of,
    train,
)
from streams import compute_late

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]


def test_the_plain_step_has_torchs_bits():
    for shape in ((60, 211), (211, 60), (7, 7)):
        values, grads = torch.randn(shape), torch.randn(3, *shape)
        for options in ({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}):
            theirs, ours = nn.Parameter(values.clone()), values.clone()
            optimizer, m = torch.optim.Muon([theirs], **MUON, **options), torch.zeros(shape)
            for grad in grads:
                theirs.grad = grad.clone()
                optimizer.step()
                muon_step(ours, m, grad, torch.ones(()), {**KNOBS, **MUON, **options})
            assert torch.equal(ours, theirs)
            assert torch.equal(m, optimizer.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize(*matrix(memory=["192KiB", "64MiB"], update=["forward", "backward"]))
def test_training_in_fp32_has_the_bits_of_torchs_muon(folder, memory, update):
    muons = MUONS - {"stack"}  # which torch does not take
    ours, plain = built(nvme=folder, host_memory=memory), built()
    optimizer = infinity.Muon(groups_of(ours, muons), update=update)
    theirs = torch.optim.Muon([one for name, one in plain.named_parameters() if name in muons], **MUON)
    rest = [one for name, one in plain.named_parameters() if name not in muons]
    beside = reference.ReferenceAdamW(rest, **ADAMW)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, theirs, beside)]
    for step in range(4):
        assert backward(ours, step) == backward(plain, step)
        for one in (optimizer, theirs, beside):
            one.step()
            one.zero_grad()
        for schedule in schedules:
            schedule.step()
    found = ours.state_dict()
    assert [name for name, one in plain.state_dict().items() if not torch.equal(one, found[name])] == []
    momenta = [theirs.state[one]["momentum_buffer"] for one in theirs.param_groups[0]["params"]]
    for one, expected in zip(optimizer.param_groups[0]["params"], momenta, strict=True):
        assert torch.equal(optimizer.state[one]["momentum_buffer"], expected)


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize(
    *matrix(
        dtype=["bf16", "fp16", "fp32"],
        memory=["192KiB", "448KiB", "64MiB"],
        accumulate={"1 backward": 1, "2 backwards": 2},
        clip={"whole": None, "clipped": 0.05},
        options={"plain": {}, "odd": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.5}},
    )
)
def test_training_equals_the_plain_steps(folder, dtype, memory, accumulate, clip, options):
    ours, plain = built(dtype, nvme=folder, host_memory=memory), built(dtype)
    muon = {**MUON, **options}
    optimizer = infinity.Muon(groups_of(ours, muon=muon), max_norm=clip)
    theirs = PlainMuon(plain, MUONS, muon, clip=clip)
    assert train(ours, optimizer, 3, accumulate=accumulate) == train(plain, theirs, 3, accumulate=accumulate)
    assert_same(ours, optimizer, theirs)


@pytest.mark.parametrize(
    ("state_dtype", "memory", "layers"),
    [
        ("fp32", "2MiB", 60),
        pytest.param("int4", "4MiB", 120, marks=pytest.mark.slow),
        pytest.param("int8", "4MiB", 120, marks=pytest.mark.slow),
    ],
)
def test_a_tile_that_holds_a_bias_too_is_read_again_when_the_momentum_is_written(
    folder, state_dtype, memory, layers
):
    with infinity.Init(nvme=folder, host_memory=memory, dtype="fp32", state_dtype=state_dtype):
        ours = nn.ModuleList(nn.Linear(20, 50) for _ in range(layers))
    engine = engine_of_model(ours)
    record = engine.units[0].record
    assert record.tile_numel >= record.shard.segments[1].stop
    optimizer = infinity.Muon(
        groups_of(ours, {name for name, _ in ours.named_parameters() if "weight" in name})
    )
    plain = copy.deepcopy(ours.state_dict())
    mine = nn.ModuleList(nn.Linear(20, 50) for _ in range(layers))
    mine.load_state_dict(plain)
    weights = {f"{n}.weight" for n in range(layers)}
    theirs = PlainMuon(reference.prepare(mine, torch.float32), weights, state_dtype=state_dtype)
    for step in range(3):
        x = torch.full((2, 20), 0.1 * (step + 1))
        for model, one in ((ours, optimizer), (mine, theirs)):
            sum(layer(x).square().sum() for layer in model).backward()
            one.step()
            one.zero_grad()
    assert not record.all_in_host
    assert_same(ours, optimizer, theirs)


@pytest.mark.parametrize(
    ("memory", "state_dtype"),
    [
        ("192KiB", "fp32"),
        ("64MiB", "fp32"),
        ("320KiB", "int4"),
        pytest.param("320KiB", "bf16", marks=pytest.mark.slow),
        pytest.param("320KiB", "int8", marks=pytest.mark.slow),
        pytest.param("64MiB", "int4", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_and_state_dicts_carry_the_momentum(folder, tmp_path, memory, state_dtype):
    init = {"nvme": folder, "host_memory": memory, "state_dtype": state_dtype}
    model = built(**init)
    optimizer = infinity.Muon(groups_of(model))
    train(model, optimizer, 2)
    infinity.save(model, optimizer, tmp_path / "saved")
    packed = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 2, first=2)
    again = built(**init)
    loaded = infinity.Muon(groups_of(again, muon={"lr": 5.0}))
    infinity.load(again, loaded, tmp_path / "saved")
    assert loaded.param_groups[0]["lr"] == MUON["lr"]
    assert train(again, loaded, 2, first=2) == expected
    again.load_state_dict(packed[0])
    loaded.load_state_dict(packed[1])
    assert train(again, loaded, 2, first=2) == expected
    other = built(**init)
    with pytest.raises(infinity.CheckpointError, match=r"state of infinity\.Muon, but .*AdamW"):
        infinity.load(other, infinity.AdamW(other.parameters()), tmp_path / "saved")
    swapped = infinity.Muon(groups_of(other, {"up.weight"}))
    with pytest.raises(infinity.CheckpointError):
        infinity.load(other, swapped, tmp_path / "saved")


@pytest.mark.parametrize("state_dtype", ["fp32", "int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_durable_run_resumes_with_the_momentum(folder, state_dtype):
    memory = "192KiB" if state_dtype == "fp32" else "320KiB"
    init = {"nvme": folder, "host_memory": memory, "durable": True, "state_dtype": state_dtype}
    model = built(**init)
    optimizer = infinity.Muon(groups_of(model))
    infinity.resume(model, optimizer)
    train(model, optimizer, 2)
    infinity.commit(model)
    expected = train(model, optimizer, 2, first=2)
    engine_of_model(model).lane.drain()
    del model, optimizer
    gc.collect()
    again = built(**init)
    loaded = infinity.Muon(groups_of(again))
    step = infinity.resume(again, loaded)
    assert train(again, loaded, 4 - step, first=step) == expected[step - 2 :]


def test_a_state_dict_of_torchs_muon_is_taken(folder):
    plain = nn.Linear(8, 12, bias=False)
    theirs = torch.optim.Muon(plain.parameters())
    plain(torch.ones(2, 8)).sum().backward()
    theirs.step()
    with infinity.Init(nvme=folder, host_memory="1MiB", dtype="fp32"):
        layer = nn.Linear(8, 12, bias=False)
    optimizer = infinity.Muon(layer.parameters())
    optimizer.load_state_dict(theirs.state_dict())
    found = optimizer.state[layer.weight]["momentum_buffer"]
    assert torch.equal(found, theirs.state[plain.weight]["momentum_buffer"])
    with pytest.warns(UserWarning, match="supersedes it"):
        optimizer = infinity.Muon([{"params": layer.parameters(), "use_muon": False}])
    with pytest.raises(ValueError, match=r"\[True\] in the state_dict, \[False\] here"):
        optimizer.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    ("name", "memory", "update", "state_dtype"),
    [
        ("gpt_oss", "640KiB", "forward", "fp32"),
        ("mixtral", "64MiB", "backward", "fp32"),
        ("mixtral", "640KiB", "forward", "int4"),
        pytest.param("gpt_oss", "640KiB", "backward", "fp32", marks=pytest.mark.slow),
        pytest.param("mixtral", "640KiB", "forward", "fp32", marks=pytest.mark.slow),
        pytest.param("mixtral", "640KiB", "backward", "fp32", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "64MiB", "forward", "bf16", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "640KiB", "forward", "int8", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "640KiB", "backward", "int4", marks=pytest.mark.slow),
    ],
)
def test_slices_of_experts_have_the_bits_of_their_stack(folder, name, memory, update, state_dtype):
    with infinity.Init(nvme=folder, host_memory=memory, state_dtype=state_dtype):
        ours = models.of_experts(name)
    plain = models.prepared_of_experts(name)
    groups = infinity.muon_groups(ours, ADAMW, **MUON)
    optimizer = infinity.Muon(groups, update=update)
    muons = {id(one) for one in groups[0]["params"]}
    whole = {name: {id(one) in muons for one in pieces} for name, pieces in models.named_wholes(ours)}
    assert all(len(kinds) == 1 for kinds in whole.values())
    names = {name for name, kinds in whole.items() if kinds == {True}}
    assert any("experts" in one for one in names)
    assert not any("bias" in one or "embed" in one or "lm_head" in one or "norm" in one for one in names)
    order = [id(one) for group in groups for one in group["params"]]
    pieces_of = {name: [order.index(id(one)) for one in pieces] for name, pieces in models.named_wholes(ours)}
    theirs = PlainMuon(plain, names, state_dtype=state_dtype, positions=pieces_of)
    for step in range(3):
        ids = torch.randint(0, 64, (1, 4), generator=torch.Generator().manual_seed(step))
        losses = []
        for model, one in ((ours, optimizer), (plain, theirs)):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            one.step()
            one.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    found = ours.state_dict()
    assert [n for n, one in plain.state_dict().items() if not torch.equal(one, found[n])] == []
    assert any(".experts.tiles." in unit.name for unit in engine_of_model(ours).units)


def test_gradients_of_zeros_and_none_do_what_they_do_in_torch(folder):
    ours, plain = built(nvme=folder, host_memory="192KiB"), built()
    optimizer, theirs = infinity.Muon(groups_of(ours)), PlainMuon(plain, MUONS)
    for step in range(5):
        for model, one in ((ours, optimizer), (plain, theirs)):
            if step == 2:
                model.down.weight.requires_grad_(False)
            if step == 4:
                model.down.weight.requires_grad_(True)
            if step != 1:
                backward(model, step)
            one.step()
            if one is optimizer and step == 0:
                one.zero_grad(set_to_none=False)
            elif step == 0:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            else:
                one.zero_grad()
            with torch.no_grad():
                model(ids_of(90))
    assert_same(ours, optimizer, theirs)


def test_what_muon_cannot_do_is_refused_by_name(folder):
    ours = built(nvme=folder, host_memory="1MiB")
    with pytest.raises(ValueError, match=r"up\.bias: Muon takes matrices.*\(211,\).*use_muon.*muon_groups"):
        infinity.Muon(ours.parameters())
    with pytest.raises(ValueError, match=r"use_muon=False has momentum, nesterov"):
        infinity.Muon([{"params": ours.parameters(), "use_muon": False, "momentum": 0.9, "nesterov": True}])
    with pytest.raises(ValueError, match=r"use_muon=True has betas"):
        infinity.Muon([{"params": [ours.up.weight], "betas": (0.9, 0.99)}])
    for options, says in (
        ({"lr": -1.0}, "lr=-1.0"),
        ({"ns_steps": 100}, "ns_steps=100"),
        ({"adjust_lr_fn": "mine"}, "adjust_lr_fn='mine'"),
        ({"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ({"max_norm": 1.0, "update": "backward"}, "max_norm needs"),
    ):
        with pytest.raises(ValueError, match=says):
            infinity.Muon([ours.up.weight], **options)
    with pytest.raises(TypeError, match="has no option 'foreach'"):
        infinity.Muon([ours.up.weight], foreach=True)
    optimizer = infinity.Muon(groups_of(ours))
    backward(ours, 0)
    optimizer.param_groups[0]["use_muon"] = False
    with pytest.raises(UnsupportedError, match="use_muon of param group 0 was True"):
        optimizer.step()


def test_a_matrix_that_is_moved_to_a_group_of_adamw_is_refused_by_name(folder):
    ours = built(nvme=folder, host_memory="1MiB")
    optimizer = infinity.Muon(groups_of(ours))
    backward(ours, 0)
    muon, adamw = (group["params"] for group in optimizer.param_groups[:2])
    muon[0], adamw[0] = adamw[0], muon[0]
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"was moved from param group \d to \d, whose update rule"):
            optimizer.step()


def test_tiles_of_a_matrix_are_refused_and_go_to_adamw(folder):
    with infinity.Init(nvme=folder, host_memory="4MiB"):
        model = nn.Sequential(nn.Embedding(20, 64), nn.Linear(64, 96), nn.Linear(96, 32))
        tiling.tile_(model, above=32 * 96 * 4)
    weight = next(name for name, _ in model.named_parameters() if name.startswith("1.tiles"))
    with pytest.raises(UnsupportedError, match=rf"{weight}: .*cut into tiles.*Leave the layer out of tiling"):
        infinity.Muon([one for one in model.parameters() if one.dim() == 2])
    with pytest.raises(UnsupportedError, match=r"shape \(96, 64\): .*cut into tiles"):
        infinity.Muon([model[1].weight])
    muon, adamw = infinity.muon_groups(model)
    assert [tuple(one.shape) for one in muon["params"]] == [(32, 96)]
    assert len(adamw["params"]) == len(list(model.parameters())) - 1
    infinity.Muon([muon, adamw])


def test_blocks_of_an_embeddings_rows_are_adamws(folder):
    with infinity.Init(nvme=folder, host_memory="8MiB"):
        model = nn.Sequential(nn.Embedding(70000, 64), nn.Linear(64, 64, bias=False))
    assert len([one for one in engine_of_model(model).units if ".tiles." in one.name]) > 1
    with pytest.raises(UnsupportedError, match="cut into tiles"):
        infinity.Muon(model.parameters())
    with pytest.raises(UnsupportedError, match=r"shape \(70000, 64\)"):
        infinity.Muon([model[0].weight])
    muon, adamw = infinity.muon_groups(model)
    assert [tuple(one.shape) for one in muon["params"]] == [(64, 64)]
    optimizer = infinity.Muon([muon, adamw])
    model(torch.arange(9)).float().square().sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][1]["exp_avg"].shape == (70000, 64)


def test_groups_leave_tied_output_layers_and_marked_parameters_out(folder):
    with infinity.Init(nvme=folder, host_memory="8MiB"):
        model = models.MODELS["gpt2"]()
    muon, adamw = infinity.muon_groups(model, {"lr": 1e-3}, lr=1e-2, ns_steps=4)
    assert {tuple(one.shape) for one in muon["params"]} == {(32, 96), (32, 32), (32, 128), (128, 32)}
    assert (muon["lr"], muon["ns_steps"], adamw["lr"], adamw["use_muon"]) == (1e-2, 4, 1e-3, False)
    for options, says in (
        ({"adamw": {"momentum": 0.9}}, "AdamW has no option 'momentum'"),
        ({"lrr": 0.1}, "Muon has no option 'lrr'; did you mean 'lr'"),
    ):
        with pytest.raises(TypeError, match=says):
            infinity.muon_groups(model, **options)
    muon["params"][0].use_muon = False
    assert len(infinity.muon_groups(model)[0]["params"]) == len(muon["params"]) - 1


class PatchEmbeddings(nn.Module):
    """A vision model's first layer: its tokens have three dimensions, and are no stacks of matrices."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(1, 5, 32))
        self.projection = nn.Linear(16, 32, bias=False)


def test_groups_leave_convolutions_and_tokens_of_three_dimensions_to_adamw(folder):
    with infinity.Init(nvme=folder, host_memory="8MiB"):
        model = nn.Sequential(
            nn.Conv1d(8, 16, 3), nn.ConvTranspose1d(16, 8, 3), PatchEmbeddings(), nn.Linear(32, 64)
        )
    muon, adamw = infinity.muon_groups(model)
    assert [tuple(one.shape) for one in muon["params"]] == [(32, 16), (64, 32)]
    assert {(16, 8, 3), (16, 8, 3), (1, 5, 32)} <= {tuple(one.shape) for one in adamw["params"]}


@pytest.mark.parametrize(
    ("update", "state_dtype", "nbytes"),
    [
        ("forward", "fp32", 18),
        ("backward", "fp32", 18),
        ("forward", "bf16", 14),
        ("forward", "int8", 12),
        ("backward", "int4", 11),
    ],
)
def test_a_step_moves_18_bytes_a_parameter_and_less_with_small_moments(folder, update, state_dtype, nbytes):
    with infinity.Init(nvme=folder, host_memory="4MiB", state_dtype=state_dtype):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    optimizer = infinity.Muon(model.parameters(), update=update)
    x = torch.randn(4, 256, dtype=torch.bfloat16)

    def step():
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    engine = engine_of_model(model)
    engine.pins = None  # host memory would keep some
    for _ in range(3):
        step()
    engine.lane.drain()
    before = infinity.stats(model)
    for _ in range(2):
        step()
    engine.lane.drain()
    done = infinity.stats(model).since(before)
    numel = sum(one.numel() for one in model.parameters())
    moved = (done.nvme_read_nbytes + done.nvme_written_nbytes) / numel / 2
    assert nbytes - 1 < moved <= nbytes + 0.5
    assert all("v" not in unit.record for unit in engine.units)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("update", "state_dtype"),
    [("forward", "fp32"), ("backward", "fp32"), pytest.param("backward", "int4", marks=pytest.mark.slow)],
)
def test_where_an_accelerator_computes_the_cpu_orthogonalizes_with_the_same_bits(
    folder, monkeypatch, update, state_dtype
):
    compute_late(monkeypatch)
    ours, plain = built("bf16", nvme=folder, host_memory="448KiB", state_dtype=state_dtype), built("bf16")
    optimizer = infinity.Muon(groups_of(ours), update=update)
    theirs = PlainMuon(plain, MUONS, state_dtype=state_dtype)
    assert train(ours, optimizer, 4) == train(plain, theirs, 4)
    assert_same(ours, optimizer, theirs)
    assert not any(unit.record.on_device for unit in engine_of_model(ours).units)


@pytest.mark.parametrize("memory", ["192KiB", "1200KiB", "64MiB"])
def test_reads_edits_and_second_steps_between_see_and_keep_every_update(folder, memory):
    ours, plain = built(nvme=folder, host_memory=memory), built()
    optimizer, theirs = infinity.Muon(groups_of(ours)), PlainMuon(plain, MUONS)
    for step in range(6):
        for model, one in ((ours, optimizer), (plain, theirs)):
            with torch.autocast("cpu", torch.bfloat16, enabled=step == 4):
                model(ids_of(step)).float().square().mean().backward()
            one.step()
            if step == 1:  # of the same gradients
                one.step()
            one.zero_grad()
            if step == 2:
                edit = infinity.gathered(model, write=True) if model is ours else contextlib.nullcontext()
                with edit, torch.no_grad():
                    model.up.weight.mul_(0.5)
            if step == 3:
                model.load_state_dict(copy.deepcopy(model.state_dict()))
        assert torch.equal(ours.state_dict()["down.weight"], plain.state_dict()["down.weight"]), step
    assert_same(ours, optimizer, theirs)


def test_an_error_in_a_forward_or_backward_loses_no_update(folder):
    ours, plain = built(nvme=folder, host_memory="192KiB"), built()
    optimizer, theirs = infinity.Muon(groups_of(ours)), PlainMuon(plain, MUONS)

    def fail(*_):
        raise OSError("no")

    for step in range(4):
        hook = ours.norm.register_forward_hook(fail)
        if step % 2:
            with pytest.raises(OSError, match="no"):
                ours(ids_of(step))
        hook.remove()
        for model, one in ((ours, optimizer), (plain, theirs)):
            backward(model, step)
            one.step()
            one.zero_grad()
    assert_same(ours, optimizer, theirs)


def test_another_optimizer_takes_the_matrices_over_with_moments_of_its_own(folder):
    ours, plain = built(nvme=folder, host_memory="192KiB"), built()
    optimizer, theirs = infinity.Muon(groups_of(ours)), PlainMuon(plain, MUONS)
    assert train(ours, optimizer, 2) == train(plain, theirs, 2)
    with pytest.warns(UserWarning, match="supersedes it"):
        second = infinity.AdamW(ours.parameters(), **ADAMW)
    adamw = PlainMuon(plain, set())
    assert train(ours, second, 2, first=2) == train(plain, adamw, 2, first=2)
    with pytest.warns(UserWarning, match="supersedes it"):
        third = infinity.Muon(groups_of(ours))
    again = PlainMuon(plain, MUONS)
    assert train(ours, third, 2, first=4) == train(plain, again, 2, first=4)
    assert_same(ours, third, again)


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_two_optimizers_may_share_the_layers_as_torchs_muon_has_it(folder, update):
    ours, plain = built(nvme=folder, host_memory="192KiB"), built()
    muon, adamw = groups_of(ours)
    optimizers = [
        infinity.Muon(muon["params"], update=update, **MUON),
        infinity.AdamW(adamw["params"], update=update, **ADAMW),
    ]
    theirs = PlainMuon(plain, MUONS)
    for step in range(3):
        backward(ours, 10 * step)
        for one in optimizers:
            one.step()
        for one in optimizers:
            one.zero_grad()
        train(plain, theirs, 1, first=step)
    weights = ours.state_dict()
    assert [n for n, one in plain.state_dict().items() if not torch.equal(weights[n], one)] == []
