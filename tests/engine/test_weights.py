"""Training on the fp32 and fp16 records equals the reference recipe bit for bit. Real files, real models.

What plain GradScaler makes of the reference's fp16 gradients: see scaling.py.
"""

import itertools
import math
import pickle

import pytest
import torch
import transformers

import infinity
import models
from infinity import UnsupportedError, reference, stats
from infinity.engine.engine import engine_of_model
from infinity.planning.layout import RecordSchema
from scaling import Beside

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def compare(name, init, *, steps=5, update="forward", accumulate=1, clip=None, checkpoint=None, **optimizer):
    ways = {"update": update, "accumulate": accumulate, "clip": clip, "checkpoint": checkpoint}
    return models.compare(name, {**SETTINGS, **optimizer}, init, steps=steps, **ways)


@pytest.mark.parametrize(
    ("memory", "update"),
    [
        ("128KiB", "forward"),
        ("64MiB", "backward"),
        (None, "forward"),
        pytest.param("128KiB", "backward", marks=pytest.mark.slow),
        pytest.param("64MiB", "forward", marks=pytest.mark.slow),
        pytest.param(None, "backward", marks=pytest.mark.slow),
    ],
)
def test_fp32_training_equals_the_recipe_at_any_budget(folder, memory, update):
    init = {"nvme": folder, "host_memory": memory} if memory else {"host_memory": "64MiB"}
    model, _ = compare("llama", {**init, "dtype": "fp32"}, update=update)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert (stats(model).nvme_nbytes > 0) == (memory == "128KiB")


@pytest.mark.parametrize("memory", ["128KiB", "64MiB"])
def test_fp32_gradients_are_accumulated_spilled_and_clipped(folder, memory):
    init = {"nvme": folder, "host_memory": memory, "dtype": "fp32"}
    compare("gpt2", init, accumulate=2, max_norm=0.5, steps=3)
    compare("mixtral", init, accumulate=2, clip=0.5, steps=2, checkpoint="non-reentrant")


def train_scaled(model, optimizer, *, accumulate, clip, steps=8, planted=(1, 4)):
    """Train with torch's GradScaler; return losses and scales. planted: steps whose gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    plain = isinstance(optimizer, reference.ReferenceAdamW)
    stepped = Beside(model, optimizer) if plain else optimizer
    shown = []
    for step in range(steps):
        for micro in range(accumulate):
            ids = models.batch(100 * step + micro)
            loss = model(input_ids=ids, labels=ids).loss * (1e5 if step in planted and not micro else 1)
            scaler.scale(loss).backward()
            shown.append(loss.item())
        if plain:
            stepped.look()
        if clip is not None or plain:
            inverse = scaler._scale.double().reciprocal().float()
            scaler.unscale_(stepped)
            if plain:
                stepped.unscaled(inverse)
        if clip is not None and plain:
            reference.clip_grad_norm_(optimizer, clip)
        elif clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(stepped)
        scaler.update()
        optimizer.zero_grad()
        shown.append(scaler.get_scale())
    return shown


@pytest.mark.parametrize(
    ("memory", "accumulate", "clip"),
    [
        ("160KiB", 2, 0.5),
        ("64MiB", 2, None),
        (None, 1, None),
        pytest.param("160KiB", 1, None, marks=pytest.mark.slow),
        pytest.param("64MiB", 1, 0.5, marks=pytest.mark.slow),
    ],
)
def test_with_gradscaler_scales_skipped_steps_and_weights_are_those_of_plain_training(
    folder, memory, accumulate, clip
):
    init = {"nvme": folder, "host_memory": memory} if memory else {"host_memory": "64MiB"}
    ours, plain = models.both("llama", SETTINGS, {**init, "dtype": "fp16"})
    shown = [train_scaled(*one[:2], accumulate=accumulate, clip=clip) for one in (ours, plain)]
    assert shown[0] == shown[1]
    scales = shown[0][accumulate :: accumulate + 1]
    assert [later < before for before, later in itertools.pairwise([4096.0, *scales])].count(True) == 2
    assert max(scales) > min(scales)
    models.assert_same_state(ours[0], ours[1], plain[0], plain[1])
    assert {int(one["step"]) for one in ours[1].state_dict()["state"].values()} == {6}


def test_an_overflow_that_is_spilled_is_found_too(folder):
    model = models.build("llama", nvme=folder, host_memory="160KiB", dtype="fp16")
    optimizer = infinity.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shown = train_scaled(model, optimizer, accumulate=1, clip=None, steps=1, planted=(0,))
    assert shown[-1] == 2048.0
    assert "grad" in " ".join(name for _, name in engine_of_model(model).traffic.written)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_gradscaler_works_on_fp32_and_bf16_records_as_well(folder):
    for dtype in ("fp32", "bf16"):
        model = models.build("llama", nvme=folder, host_memory="1MiB", dtype=dtype)
        optimizer = infinity.AdamW(model.parameters())
        shown = train_scaled(model, optimizer, accumulate=1, clip=None, steps=2, planted=())
        assert shown[-1] == 8192.0
        assert all(map(math.isfinite, shown))


def test_a_step_in_fp16_without_a_scaled_loss_is_warned_of_once(folder):
    model = models.build("llama", nvme=folder, host_memory="1MiB", dtype="fp16")
    optimizer = infinity.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="no loss scaling") as caught:
        models.train(model, optimizer, 2)
    assert len(caught) == 1
    assert caught[0].filename.endswith("models.py"), "it names the line that steps"


def test_what_would_apply_an_overflow_is_refused(folder):
    model = models.build("llama", nvme=folder, host_memory="1MiB", dtype="fp16")
    with pytest.raises(UnsupportedError, match=r"update=\"backward\" with dtype='fp16'.*update=\"forward\""):
        infinity.AdamW(model.parameters(), update="backward")
    optimizer = infinity.AdamW(model.parameters(), max_norm=1.0)
    with pytest.raises(UnsupportedError, match="Leave max_norm out"):
        train_scaled(model, optimizer, accumulate=1, clip=None, steps=1, planted=())


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_autocast_gives_what_it_gives_in_memory(folder, dtype):
    init = {"nvme": folder, "host_memory": "1MiB", "dtype": dtype}
    ours, plain = models.both("llama", SETTINGS, init, checkpoint="non-reentrant")
    shown = []
    for model, _, _ in (ours, plain):
        ids = models.batch(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        shown.append([loss.item(), *(one.grad.float() for one in model.parameters())])
    assert shown[0][0] == shown[1][0]
    assert all(map(torch.equal, shown[0][1:], shown[1][1:]))


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_checkpoint_of_any_record_goes_on_bit_for_bit(folder, tmp_path, dtype):
    init = {"nvme": folder, "host_memory": "1MiB", "dtype": dtype}
    model = models.build("llama", **init)
    optimizer = infinity.AdamW(model.parameters(), **SETTINGS)
    models.train(model, optimizer, 2)
    infinity.save(model, optimizer, tmp_path / "saved")
    packed = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))  # noqa: S301
    expected = models.train(model, optimizer, 2, first=2)
    again = models.build("llama", seed=1, **{**init, "host_memory": "64MiB"})
    loaded = infinity.AdamW(again.parameters(), **SETTINGS)
    infinity.load(again, loaded, tmp_path / "saved")
    assert models.train(again, loaded, 2, first=2) == expected
    third = models.build("llama", seed=2, **init)
    unpacked = infinity.AdamW(third.parameters(), **SETTINGS)
    third.load_state_dict(packed[0])
    unpacked.load_state_dict(packed[1])
    if dtype == "fp32":  # the weights of a state_dict are no whole masters otherwise
        assert models.train(third, unpacked, 2, first=2) == expected
    as_bf16 = models.build("llama", seed=3, nvme=folder, host_memory="1MiB")
    infinity.load(as_bf16, infinity.AdamW(as_bf16.parameters(), **SETTINGS), tmp_path / "saved")
    engine = engine_of_model(as_bf16)
    kept = dict(models.build("llama", computes="fp32").named_parameters())
    for name, parameter in as_bf16.named_parameters():
        (master,) = engine.parameters.read(parameter, ["master"])
        assert master.shape == kept[name].shape
        assert not torch.equal(master, master.bfloat16().float()), "masters come whole"


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_durable_run_resumes_and_another_record_is_refused(folder, dtype):
    init = {"nvme": folder, "host_memory": "1MiB", "durable": True}
    losses = []
    for steps in (2, 4):
        model = models.build("llama", seed=steps, **init, dtype=dtype)
        optimizer = infinity.AdamW(model.parameters(), **SETTINGS)
        done = infinity.resume(model, optimizer)
        losses += models.train(model, optimizer, steps - done, first=done)
        infinity.commit(model)
        engine_of_model(model).close()
    expected = models.build("llama", seed=2, nvme=None, host_memory="64MiB", dtype=dtype)
    assert losses == models.train(expected, infinity.AdamW(expected.parameters(), **SETTINGS), 4)
    with pytest.raises(infinity.ConfigError, match=f"'fp32'; the run in .* has '{dtype} record'"):
        models.build("llama", **init)


@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_hugging_face_reads_the_weights_back(folder, tmp_path, dtype):
    model = models.build("llama", nvme=folder, host_memory="1MiB", dtype=dtype)
    optimizer = infinity.AdamW(model.parameters(), **SETTINGS)
    models.train(model, optimizer, 2)
    infinity.save_pretrained(model, tmp_path / "own")
    infinity.save_pretrained(model, tmp_path / "masters", dtype=torch.float32)
    expected = model.state_dict()
    own = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "own", dtype="auto")
    masters = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "masters", dtype="auto")
    assert {one.dtype for one in own.parameters()} == {models.COMPUTES[dtype]}
    for name, value in own.state_dict().items():
        assert torch.equal(value, expected[name])
        assert torch.equal(value, masters.state_dict()[name].to(value.dtype))
    with pytest.raises(ValueError, match=r"torch\.bfloat16: the model computes in"):
        infinity.save_pretrained(model, tmp_path / "other", dtype=torch.bfloat16)
    with infinity.Init(nvme=folder, host_memory="1MiB", dtype=dtype):
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "masters")
    (name, one), other = next(iter(again.named_parameters())), next(iter(model.parameters()))
    assert torch.equal(
        engine_of_model(again).parameters.read(one, ["master"])[0],
        engine_of_model(model).parameters.read(other, ["master"])[0],
    ), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_values_written_in_gathered_are_their_own_masters_and_the_others_keep_theirs(folder, dtype):
    torch.manual_seed(0)
    with infinity.Init(nvme=folder, host_memory="1MiB", dtype=dtype):
        layer = torch.nn.Linear(30, 70)
    engine = engine_of_model(layer)
    (before,) = engine.parameters.read(layer.weight, ["master"])
    with infinity.gathered(layer, write=True):
        layer.weight.data[3] = 0.5
    (after,) = engine.parameters.read(layer.weight, ["master"])
    assert bool((after[3] == 0.5).all())
    before[3] = 0.5
    assert torch.equal(after, before)
    assert torch.equal(layer.state_dict()["weight"], reference.rounded(before, models.COMPUTES[dtype]))


@pytest.mark.parametrize(
    ("dtype", "state_nbytes", "moved"), [("fp16", 14, 28), ("fp32", 12, 28), ("bf16", 12, 26)]
)
def test_a_record_takes_and_a_step_moves_the_bytes_that_its_fields_have(folder, dtype, state_nbytes, moved):
    with infinity.Init(nvme=folder, host_memory="1MiB", dtype=dtype, tile_above=None):
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)])
    numel = 4 * 512 * 512
    optimizer = infinity.AdamW(model.parameters(), speculate=False)
    assert stats(model).nvme_nbytes == state_nbytes * numel
    schema = RecordSchema("fp32", dtype)
    assert sum(schema.nbytes(name, 1) for name in schema.fields) == state_nbytes
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    lane = engine_of_model(model).lane
    for step in range(5):
        if step == 3:
            lane.drain()  # what is read ahead for the next step counts before and behind, or in neither
            before = stats(model)
        x = torch.ones(1, 512, dtype=models.COMPUTES[dtype])
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    lane.drain()
    done = stats(model).since(before)
    fields = {name for _, name in engine_of_model(model).traffic.written if "grad" not in name}
    assert fields == set(schema.fields)
    total = sum(
        nbytes
        for traffic in (done.read_nbytes, done.written_nbytes)
        for (_, name), nbytes in traffic.items()
        if "grad" not in name
    )
    assert moved - 2 < total / (2 * numel) <= moved, "less what is pinned"
