"""What training needs, decided before it begins. Trusted: the engine, with a small model on a real disk."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import infinity
from infinity.cli import presets
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError, HostMemoryError
from infinity.planning.architectures import llama
from infinity.planning.budget import scratch_nbytes
from infinity.planning.capacity import Capacity, needs
from infinity.planning.demand import demand, least_host_nbytes
from infinity.planning.outline import trace_of
from infinity.planning.setting import Setting

PRESET = presets.Preset(layers=3, hidden=256, intermediate=704, heads=4)
HALF = presets.Preset(layers=3, hidden=128, intermediate=352, heads=4)
OUTLINE, HALF_OUTLINE = (
    llama("small", one.layers, one.hidden, one.intermediate, presets.VOCABULARY) for one in (PRESET, HALF)
)
MIB = 1 << 20


def built(setting, nvme=None, preset=PRESET):
    """A model in Init and its optimizer, at the budget of a setting."""
    types = {"dtype": setting.dtype, "state_dtype": setting.state_dtype}
    with infinity.Init(nvme=nvme, host_memory=setting.host_nbytes, **types):
        model = presets.llama(preset, sequence=16)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, infinity.AdamW(model.parameters(), update=setting.update)


def train(model, optimizer, micro_batches):
    ids = torch.zeros(1, 4, dtype=torch.long)
    for _ in range(micro_batches):
        model(input_ids=ids, labels=ids).loss.backward()
    trace = tuple(engine_of_model(model).residency.cursor.trace)
    optimizer.step()
    optimizer.zero_grad()
    engine_of_model(model).lane.drain()
    return trace


def moved(engine):
    """NVMe bytes so far, by field and direction."""
    found = Counter()
    for way, traffic in (("read", engine.traffic.read), ("written", engine.traffic.written)):
        for (tier, name), nbytes in traffic.items():
            if tier == "nvme":
                found["grad" if name.startswith("grad") else name, way] += nbytes
    return found


@pytest.mark.disk
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*no loss scaling")
@pytest.mark.parametrize(
    ("kib", "changes"),
    [
        pytest.param(1024, {"update": "backward"}, marks=pytest.mark.slow),
        pytest.param(1024, {"update": "forward"}, marks=pytest.mark.slow),
        pytest.param(6144, {"update": "backward"}, marks=pytest.mark.slow),
        (6144, {"update": "forward"}),
        (256, {"update": "forward", "micro_batches": 2}),
        pytest.param(6144, {"update": "forward", "micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param(6144, {"update": "forward", "micro_batches": 3}, marks=pytest.mark.slow),
        (4096, {"update": "backward", "state_dtype": "int8"}),
        pytest.param(65536, {"update": "backward"}, marks=pytest.mark.slow),
        (6144, {"update": "backward", "dtype": "fp32"}),
        (6144, {"update": "forward", "dtype": "fp16"}),
        pytest.param(256, {"update": "forward", "micro_batches": 2, "dtype": "fp32"}, marks=pytest.mark.slow),
    ],
)
def test_the_engine_moves_what_was_planned(kib, changes, folder):
    setting = Setting(kib << 10, **changes)
    need = demand(HALF_OUTLINE, setting)
    model, optimizer = built(setting, str(folder), HALF)
    engine = engine_of_model(model)
    for _ in range(4):
        trace = train(model, optimizer, setting.micro_batches)
    engine.lane.drain()
    before = moved(engine)
    for _ in range(2):
        train(model, optimizer, setting.micro_batches)
    engine.lane.drain()
    took = {key: nbytes / 2 for key, nbytes in (moved(engine) - before).items()}
    assert trace == trace_of(HALF_OUTLINE.script(micro_batches=setting.micro_batches))
    assert engine.budget == need.budget
    assert sum(took.values()) == pytest.approx(need.read_nbytes + need.written_nbytes, rel=0.05)
    for key in {*took, *need.moved}:
        nbytes = took.get(key, 0)
        assert need.moved.get(key, 0) == pytest.approx(nbytes, rel=0.02, abs=0.02 * sum(took.values())), key
    for way in ("read", "written"):  # of gradients that find no room, to the byte
        assert need.moved.get(("grad", way), 0) == took.get(("grad", way), 0)


TYPES = [
    {"state_dtype": "fp32"},
    {"state_dtype": "bf16"},
    {"state_dtype": "int8"},
    {"dtype": "fp16"},
    {"dtype": "fp32"},
]


@pytest.mark.disk
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_init_accepts_the_smallest_budget_with_nvme_and_nothing_below(types, folder):
    least = least_host_nbytes(OUTLINE, Setting(MIB, **types))
    built(Setting(least, **types), str(folder))
    with pytest.raises(HostMemoryError):
        built(Setting(least - 1, **types), str(folder))
    with pytest.raises(HostMemoryError):
        demand(OUTLINE, Setting(least - 1, **types))


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_init_accepts_the_smallest_budget_without_nvme_and_nothing_a_mib_below(types):
    setting = Setting(MIB, nvme=False, **types)
    least = least_host_nbytes(OUTLINE, setting)
    built(replace(setting, host_nbytes=least))
    demand(OUTLINE, replace(setting, host_nbytes=least))
    with pytest.raises(HostMemoryError):
        built(replace(setting, host_nbytes=least - MIB))
    with pytest.raises(HostMemoryError, match="smallest that works"):
        demand(OUTLINE, replace(setting, host_nbytes=least - MIB))


# What needs no engine


def test_the_fewer_bytes_moments_take_the_less_memory_holds_all_of_a_model():
    settings = [Setting(MIB, nvme=False, state_dtype=one) for one in ("fp32", "bf16", "int8", "int4")]
    least = [least_host_nbytes(OUTLINE, one) for one in settings]
    assert sorted(set(least), reverse=True) == least


def per_parameter(**changes):
    need = demand(OUTLINE, Setting(**{"host_nbytes": 128 << 10, "update": "backward", **changes}))
    numel = sum(unit.numel for unit in need.units)
    return round(need.read_nbytes / numel), round(need.written_nbytes / numel)


def test_bytes_per_parameter_are_those_of_the_design():
    assert per_parameter() == (14, 12)
    assert per_parameter(state_dtype="bf16") == (10, 8)
    # With the smallest budget a tile has 4096 elements; the scales of 32 of them share a block.
    assert per_parameter(state_dtype="int8", host_nbytes=256 << 10) == (8, 6)
    assert per_parameter(state_dtype="int4", host_nbytes=256 << 10) == (7, 5)


def test_spilled_gradients_are_written_and_read_and_grow_with_micro_batches():
    assert per_parameter(update="forward") == (16, 14)
    # Twice 2 more reads of hi; the gradient: 2 written, 2 read and 4 written, 4 read and written, 4 read.
    assert per_parameter(update="forward", micro_batches=3) == (14 + 8 + 2 + 4 + 4, 12 + 2 + 4 + 4)


def test_a_budget_for_everything_moves_nothing():
    need = demand(OUTLINE, Setting(1 << 30))
    assert (need.read_nbytes, need.written_nbytes) == (0, 0)
    assert need.pinned_nbytes + need.kept_gradients_nbytes <= need.budget.kept_nbytes
    assert need.nvme_nbytes > 0, "weights and moments are on NVMe before they are pinned"


def test_ranks_share_what_is_stored_and_gather_what_the_others_have():
    one, four = (demand(OUTLINE, Setting(128 << 10, ranks=ranks)) for ranks in (1, 4))
    assert four.nvme_nbytes == pytest.approx(one.nvme_nbytes / 4, rel=0.02)
    assert [unit.gathered_nbytes for unit in one.units] == [0] * len(one.units)
    assert four.units[0].gathered_nbytes == OUTLINE.parts[0].numel * 2 * 3 // 4


def test_ranks_send_codes_and_scales_of_weights_and_gradients_and_updates_read_the_weights_once_more():
    below = {"ranks": 4, "update": "backward"}
    plain, coded = (
        demand(OUTLINE, Setting(128 << 10, **below, **more))
        for more in ({}, {"quantized_weights": "int8", "quantized_gradients": "int4"})
    )
    share = OUTLINE.parts[0].numel // 4
    assert plain.units[0].gathered_nbytes == plain.units[0].reduced_nbytes == 3 * 2 * share
    assert coded.units[0].gathered_nbytes == 3 * (share + 4 * -(-share // 256))
    assert coded.units[0].reduced_nbytes == 3 * (share // 2 + 4 * -(-share // 256))
    assert coded.units[0].gathered_nbytes < 0.53 * plain.units[0].gathered_nbytes
    once_more = coded.moved["hi", "read"] - plain.moved["hi", "read"]
    written = plain.moved["hi", "written"]
    assert 0.9 * written < once_more <= written, "but where a backward does not use them, as an embedding"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantized_weights": "int4"}, "quantized_weights='int4': expected 'int8', or None"),
        ({"quantized_gradients": "fp8"}, "quantized_gradients='fp8': expected 'int8' or 'int4'"),
        ({"quantized_gradients": "int8", "device_nbytes": MIB}, "with device_nbytes=1048576: an accelerator"),
        ({"quantized_weights": "int8", "dtype": "fp32"}, 'with dtype="fp32": .* the masters themselves'),
    ],
)
def test_a_plan_refuses_codes_where_a_run_does(fields, said):
    with pytest.raises(ConfigError, match=said):
        Setting(1 << 30, **fields)


def test_a_device_holds_what_waits_and_updates_read_the_weights_once_more():
    below = {"update": "backward", "state_dtype": "int8"}  # such records do not live there
    on_device = demand(OUTLINE, Setting(256 << 10, device_nbytes=3 * MIB, **below))
    assert on_device.limits.window_nbytes == 3 * MIB
    assert (
        on_device.moved["hi", "read"] > demand(OUTLINE, Setting(256 << 10, **below)).moved["hi", "read"] / 2
    )
    assert not any(unit.in_place for unit in on_device.units)


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_whole_records_live_on_a_device_as_far_as_it_has_room_and_move_nothing(update):
    none, some, all_ = (
        demand(OUTLINE, Setting(1 * MIB, device_nbytes=nbytes, update=update))
        for nbytes in (1 * MIB, 3 * MIB, 64 * MIB)
    )
    there = [
        {unit for (unit, _), tier in one.placement.items() if tier == "device"} for one in (none, some, all_)
    ]
    assert len(there[0]) < len(there[1]) < len(there[2]) == len(OUTLINE.parts)
    assert all_.read_nbytes == all_.written_nbytes == all_.kept_gradients_nbytes == 0
    assert none.read_nbytes > some.read_nbytes > 0
    for one, units in zip((some, all_), there[1:], strict=True):
        assert {
            unit for unit, moves in enumerate(one.units) if moves.in_place and not moves.trainable
        } >= units
        assert one.lodged_nbytes < one.setting.device_nbytes


@pytest.mark.parametrize("update", ["forward", "backward"])
def test_of_several_ranks_each_ones_parts_live_on_its_device_and_a_use_puts_units_together(update):
    below = {"ranks": 4, "local_ranks": 4, "update": update}
    none, some, all_ = (
        demand(OUTLINE, Setting(4 * MIB, device_nbytes=nbytes, **below))
        for nbytes in (1 * MIB, 3 * MIB, 64 * MIB)
    )
    assert none.records_nbytes < some.records_nbytes < all_.records_nbytes == all_.lodged_nbytes
    assert all_.read_nbytes == all_.written_nbytes == all_.kept_gradients_nbytes == 0
    assert none.read_nbytes > some.read_nbytes > 0
    for moves in all_.units:
        assert moves.part_there
        assert not any((moves.trainable, moves.in_place, moves.lodged))
        assert moves.waiting_nbytes == moves.gathered_nbytes * 4 // 3 > 0
    own = sum((12 + 2) * moves.numel for moves in all_.units)  # with the mean of gradients
    largest = max(moves.waiting_nbytes for moves in all_.units)
    assert all_.records_nbytes == own + scratch_nbytes(64 * MIB + 4 * largest, largest)
    assert all_.in_use_nbytes == none.in_use_nbytes, "what is in use is put together all the same"


def test_of_several_ranks_frozen_weights_live_whole_on_every_device():
    frozen = replace(OUTLINE, parts=tuple(replace(part, trainable=False) for part in OUTLINE.parts))
    need = demand(frozen, Setting(4 * MIB, device_nbytes=64 * MIB, ranks=4, local_ranks=4))
    assert (need.read_nbytes, need.records_nbytes) == (0, 0)
    assert need.lodged_nbytes == demand(frozen, Setting(4 * MIB, device_nbytes=64 * MIB)).lodged_nbytes > 0
    assert all(moves.lodged and moves.in_place and not moves.part_there for moves in need.units)


def test_what_lives_on_devices_of_ranks_does_not_depend_on_the_room_of_their_hosts():
    def there(host_nbytes):
        setting = Setting(host_nbytes, device_nbytes=3 * MIB, ranks=4, local_ranks=4)
        return [key for key, tier in demand(OUTLINE, setting).placement.items() if tier == "device"]

    assert there(2 * MIB) == there(256 * MIB) != []


def test_the_record_of_the_embedding_lives_on_a_device_before_those_of_layers():
    def there(device_nbytes):
        placed = demand(OUTLINE, Setting(MIB, device_nbytes=device_nbytes, update="backward")).placement
        return {unit for (unit, _), tier in placed.items() if tier == "device"}

    first = next(there(nbytes) for nbytes in range(MIB, 16 * MIB, MIB // 4) if there(nbytes) & {0})
    assert OUTLINE.parts[0].name.endswith("embed_tokens")
    matrices = {one for one, part in enumerate(OUTLINE.parts) if max(map(len, part.shapes)) > 1}
    assert first & matrices == {0}, "and beside it what it leaves room for"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 6, "local_ranks": 4}, "whole number of machines"),
        ({"update": "sideways"}, "sideways"),
        ({"update": "backward", "micro_batches": 2}, '2 micro-batches need update="forward"'),
        ({"state_dtype": "fp8"}, "fp8"),
        ({"host_nbytes": 0}, "host_nbytes=0"),
    ],
)
def test_settings_that_no_engine_would_take_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        Setting(**{"host_nbytes": MIB, **changes})


def test_second_parts_are_charged_to_host_memory_or_on_nvme_and_further_uses_read_no_record():
    below = {"ranks": 4, "local_ranks": 2, "update": "backward"}

    def planned(mib, neighbours):
        return demand(OUTLINE, Setting(mib * MIB, **below, secondary_shard=neighbours))

    weights = sum(one.waiting_nbytes for one in planned(16, 0).units)
    second = planned(16, 2)
    assert second.second_nbytes == pytest.approx(weights / 2, rel=0.01)
    assert second.budget.kept_nbytes == planned(16, 0).budget.kept_nbytes - second.second_nbytes
    assert second.units[0].again_nbytes == pytest.approx(second.units[0].waiting_nbytes / 2, rel=0.01)
    little = planned(1, 2)
    assert little.moved["hi", "read"] < planned(1, 0).moved["hi", "read"]
    on_nvme = little.moved["second", "written"]
    assert on_nvme == second.second_nbytes - little.second_nbytes > 0
    assert 0 < little.moved["second", "read"] <= 2 * on_nvme


@pytest.mark.parametrize(("state_dtype", "padding"), [("fp32", 0.03), ("bf16", 0.03), ("int8", 0.05)])
def test_momenta_of_workers_lie_on_nvme_and_are_read_and_written_in_each_step(state_dtype, padding):
    below = {"ranks": 4, "state_dtype": state_dtype}
    plain, one_bit = (demand(OUTLINE, Setting(1 << 20, **below, one_bit=on)) for on in (False, True))
    more = one_bit.nvme_nbytes - plain.nvme_nbytes
    assert more == one_bit.moved["workers", "read"] == one_bit.moved["workers", "written"]
    assert more == pytest.approx(8 * OUTLINE.parameters, rel=padding)


def test_weights_in_use_lie_once_on_a_machine_whose_ranks_have_memory_in_common():
    below = {"ranks": 4, "local_ranks": 4}
    plain, shared = (demand(OUTLINE, Setting(1 << 20, **below, shared_memory=on)) for on in (False, True))
    used, waiting = shared.in_common_nbytes
    assert plain.in_common_nbytes == (0, 0)
    assert (used, waiting) > (0, 0)
    (own, *_), (common, *_) = needs(plain, Capacity()), needs(shared, Capacity())
    assert own.nbytes - common.nbytes == 3 * (used + waiting)
    assert [one.gathered_nbytes for one in shared.units] == [0] * len(shared.units)


def test_errors_of_codes_lie_where_the_state_lies_and_each_sum_of_gradients_reads_and_writes_them():
    below = {"ranks": 4, "local_ranks": 2, "quantized_gradients": "int4"}
    for micro in (1, 3):
        plain, fed = (
            demand(OUTLINE, Setting(2 << 20, micro_batches=micro, error_feedback=on, **below))
            for on in (False, True)
        )
        more = fed.nvme_nbytes - plain.nvme_nbytes
        assert more == pytest.approx(4 * (4 + 2) * OUTLINE.parameters / 4, rel=0.03)
        assert fed.moved["workers", "read"] == fed.moved["workers", "written"] == micro * more
    without = [
        demand(OUTLINE, Setting(256 * MIB, nvme=False, error_feedback=on, **below)).pinned_nbytes
        for on in (False, True)
    ]
    assert without[1] - without[0] == more
    least = [
        least_host_nbytes(OUTLINE, Setting(MIB, nvme=False, error_feedback=on, **below))
        for on in (False, True)
    ]
    assert least[1] > least[0] + more
