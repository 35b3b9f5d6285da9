"""Masters in 24 bits: bits of the reference, and what refuses them. Trusted: the recipe in memory."""

import pytest
import torch

import infinity
from deep import WIDTH, Deep
from infinity import AdamW, ConfigError, UnsupportedError
from infinity.engine.engine import engine_of_model
from infinity.planning.layout import RecordSchema
from infinity.reference import ReferenceAdamW, prepare
from infinity.reference.moments import in_24_bits
from parity import differences

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable")]

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


def build(folder, state="int4", master="fp24", **more):
    torch.manual_seed(0)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", state_dtype=state, master_dtype=master, **more):
        return Deep()


def train(model, optimizer, numbers):
    for number in numbers:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "state", ["int4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fp32", "bf16", "int8"))]
)
def test_masters_are_the_references_to_the_bit(folder, state):
    torch.manual_seed(0)
    plain = prepare(Deep())
    model = build(folder, state)
    reference = ReferenceAdamW(plain.parameters(), state_dtype=state, master_dtype="fp24", **SETTINGS)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    for one, two in ((model, optimizer), (plain, reference)):
        train(one, two, range(4))
    assert differences(plain.state_dict(), model.state_dict()) == []
    engine, masters = engine_of_model(model), reference.masters()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        master = engine.parameters.read(ours, ["master"])[0]
        assert torch.equal(master, masters[theirs])
        assert torch.equal(master, in_24_bits(master))


def test_with_moments_in_4_bits_a_step_moves_ten_bytes_of_a_parameter_and_four_are_stored(folder):
    schema = RecordSchema("int4", master_dtype="fp24")
    assert sum(schema.nbytes(name, 1 << 20) for name in schema.fields) / (1 << 20) == 4 + 1 / 32
    model = build(folder)
    optimizer = AdamW(model.parameters(), update="backward", **SETTINGS)
    engine = engine_of_model(model)
    train(model, optimizer, range(2))
    engine.lane.drain()
    before = infinity.stats(model)
    train(model, optimizer, range(2, 4))
    engine.lane.drain()
    done = infinity.stats(model).since(before)
    numel = 2 * sum(unit.record.shard.numel for unit in engine.units)
    assert (done.nvme_read_nbytes + done.nvme_written_nbytes) / numel <= 12
    assert infinity.stats(model).nvme_nbytes / (numel / 2) <= 7


@pytest.mark.slow
def test_a_checkpoint_has_fp32_masters_and_goes_to_exact_ones_and_back(folder):
    (folder / "a").mkdir()
    model = build(folder / "a")
    optimizer = AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, range(2))
    infinity.save(model, optimizer, folder / "saved")
    (folder / "b").mkdir()
    exact = build(folder / "b", master="fp32")
    other = AdamW(exact.parameters(), **SETTINGS)
    infinity.load(exact, other, folder / "saved")
    masters = {}
    for name, one in model.named_parameters():
        masters[name] = engine_of_model(model).parameters.read(one, ["master"])[0]
    for name, one in exact.named_parameters():
        assert torch.equal(engine_of_model(exact).parameters.read(one, ["master"])[0], masters[name])
    train(exact, other, range(2, 4))
    infinity.save(exact, other, folder / "exact")
    infinity.load(model, optimizer, folder / "exact")
    for name, one in exact.named_parameters():
        master = engine_of_model(exact).parameters.read(one, ["master"])[0]
        ours = engine_of_model(model).parameters.read(dict(model.named_parameters())[name], ["master"])[0]
        assert torch.equal(ours, in_24_bits(master))


@pytest.mark.slow
def test_a_durable_run_goes_on_with_the_same_bits_and_not_with_exact_masters(folder):
    def run(place, stop, **types):
        model = build(place, durable=True, **types)
        optimizer = AdamW(model.parameters(), **SETTINGS)
        first = infinity.resume(model, optimizer)
        train(model, optimizer, range(first, stop))
        infinity.commit(model)
        values = {name: one.clone() for name, one in model.state_dict().items()}
        engine_of_model(model).close()
        return values

    for name in ("whole", "cut"):
        (folder / name).mkdir()
    expected = run(folder / "whole", 4)
    run(folder / "cut", 2)
    with pytest.raises(ConfigError, match="int4, masters in fp24"):
        run(folder / "cut", 4, master="fp32")
    assert differences(expected, run(folder / "cut", 4)) == []


def test_it_is_for_adamw_and_adam_with_weights_in_bf16(folder):
    for dtype in ("fp16", "fp32"):
        with pytest.raises(ConfigError, match="goes with"):
            build(folder, dtype=dtype)
    model = build(folder, "fp32")
    with pytest.raises(UnsupportedError, match="Lion needs exact masters"):
        infinity.Lion(model.parameters())
    infinity.Adam(model.parameters())
