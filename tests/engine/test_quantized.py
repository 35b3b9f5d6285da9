"""Checkpoints that stay packed in their files. Trusted: transformers' own conversion of the same files."""

import contextlib
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import infinity
import models
import quantised
from infinity import AdamW, CorruptionError, Init, UnsupportedError, reference
from infinity.engine import quantized as loading
from infinity.engine.engine import engine_of_model
from infinity.engine.quantized import check_order, leaving_packed, say_activations_stay
from parity import differences

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]

auto = pytest.importorskip("transformers.quantizers.auto")
pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone converts fp8 for a CPU")


@pytest.fixture
def path(folder):
    return quantised.fp8_llama(folder / "model")


def plain_of(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def loaded(path, nvme, host_memory="1MiB", **init):
    with Init(nvme=str(nvme), host_memory=host_memory, **{"frozen": True, **init}):
        return plain_of(path)


def logits(model, number=0):
    with torch.no_grad():
        return model(input_ids=models.batch(number)).logits


def test_fp8_weights_are_read_packed_and_have_the_bits_of_transformers(folder, path, caplog):
    plain, ours = plain_of(path), loaded(path, folder)
    assert caplog.text.count("activations quantised (activation_scheme): inside Init they are not") == 1
    counted = infinity.stats(ours)
    assert (counted.read_nbytes, counted.written_nbytes) == ({}, {})
    assert all(unit.record.in_files is not None for unit in engine_of_model(ours).units)
    assert torch.equal(logits(ours), logits(plain))
    assert differences(plain.state_dict(), ours.state_dict()) == []
    assert infinity.stats(ours).written_nbytes == {}


def test_fp8_weights_are_read_packed_where_transformers_sees_a_gpu_that_computes_in_fp8(
    folder, path, monkeypatch
):
    plain = plain_of(path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    ours = loaded(path, folder, device="cpu")
    monkeypatch.undo()
    assert all(unit.record.in_files is not None for unit in engine_of_model(ours).units)
    assert torch.equal(logits(ours), logits(plain))


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "compressed-tensors"])
def test_a_transformers_that_offers_no_weights_widens_them_also_where_it_sees_a_gpu(method, monkeypatch):
    class Quantizer:
        pre_quantized, quantization_config = True, SimpleNamespace(dequantize=False)

        def validate_environment(self):
            """Ask for nothing."""

    monkeypatch.setattr(loading, "_table", lambda: {method: Quantizer})
    with leaving_packed(lambda *_: None):
        Quantizer().validate_environment()
    assert Quantizer.quantization_config.dequantize
    Quantizer.quantization_config.dequantize = False
    Quantizer().validate_environment()
    assert not Quantizer.quantization_config.dequantize


@pytest.mark.parametrize("host_memory", ["128KiB", "1MiB", "64MiB"])
def test_any_budget_gives_the_same_values(folder, path, host_memory):
    plain, ours = plain_of(path), loaded(path, folder, host_memory)
    for number in range(2):
        assert torch.equal(logits(ours, number), logits(plain, number))


def test_a_use_reads_about_a_byte_for_each_parameter(folder, path):
    ours = loaded(path, folder, "64MiB")
    module = ours.model.layers[0].mlp.gate_proj
    before = infinity.stats(ours)
    with infinity.gathered(module):
        pass
    moved = infinity.stats(ours).since(before).checkpoint_read_nbytes
    numel = module.in_features * module.out_features
    assert numel <= moved <= numel + 4 * 4096


def test_packed_weights_train_from_the_files(folder, path):
    plain, ours = reference.prepare(plain_of(path)), loaded(path, folder, frozen=False)
    for model in (plain, ours):
        model.requires_grad_(False)
        model.model.layers[1].requires_grad_(True)
    losses = [
        models.train(model, kind([one for one in model.parameters() if one.requires_grad], lr=1e-3), 2)
        for model, kind in ((plain, reference.ReferenceAdamW), (ours, AdamW))
    ]
    assert losses[0] == losses[1]


def test_packed_weights_are_saved_as_what_they_are_widened_to(folder, path):
    ours, plain = loaded(path, folder), plain_of(path)
    infinity.save_pretrained(ours, folder / "exported")
    assert differences(plain.state_dict(), plain_of(folder / "exported").state_dict()) == []
    infinity.save(ours, None, folder / "saved")
    assert torch.equal(logits(ours), logits(plain))


def test_one_scale_for_a_whole_weight_is_a_block_of_all_of_it(folder, path):
    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        one = {name: t.max() if name.endswith("scale_inv") else t for name, t in tensors.items()}
        save_file(one, shard, {"format": "pt"})
    quantised.add_method(path, quant_method="fp8", activation_scheme="dynamic")
    ours = loaded(path, folder)
    assert all(unit.record.in_files is not None for unit in engine_of_model(ours).units)
    assert torch.equal(logits(ours), logits(plain_of(path)))


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_of_blocks_in_16_bits_are_read_in_place_and_others_converted_as_ever(
    folder, path, other, caplog
):
    for shard in path.glob("*.safetensors"):
        tensors = load_file(shard)
        those = {name: one.to(other) if name.endswith("scale_inv") else one for name, one in tensors.items()}
        save_file(those, shard, {"format": "pt"})
    with caplog.at_level(logging.INFO, "infinity"):
        ours = loaded(path, folder, "16MiB")
    assert ("have records of their own" in caplog.text) == (other == torch.float64)
    assert torch.equal(logits(ours), logits(plain_of(path)))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("kind", sorted(quantised.COMPRESSED))
def test_compressed_tensors_are_read_packed_and_have_the_bits_of_transformers(folder, kind):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    path = quantised.compressed_llama(folder / "packed", kind, folder / "plain")
    plain, ours = plain_of(folder / "plain"), loaded(path, folder)
    method = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=method)
    assert differences(plain.state_dict(), theirs.state_dict()) == []
    assert len(in_files(ours)) == len(engine_of_model(ours).units)
    assert differences(plain.state_dict(), ours.state_dict()) == []
    for number in range(2):
        assert torch.equal(logits(ours, number), logits(plain, number))
    assert infinity.stats(ours).written_nbytes == {}
    numel = [unit.record.shard.end for unit in in_files(ours) if unit.record.packed_nbytes]
    packed = sum(unit.record.packed_nbytes or 0 for unit in in_files(ours))
    assert len(numel) == 2 * 7
    assert packed / sum(numel) < (0.58 if "int4" in kind else 1.05)
    assert type(ours.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_packed_weights_can_be_used_and_changed_while_the_model_is_built(folder, path):
    with Init(nvme=str(folder), host_memory="16MiB", frozen=True):
        ours = plain_of(path)
        with torch.no_grad():
            total = ours.model.layers[0].mlp.up_proj.weight.float().sum()
            ours.model.layers[0].mlp.up_proj.weight.mul_(2)
    plain = plain_of(path)
    assert total == plain.model.layers[0].mlp.up_proj.weight.float().sum()
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert torch.equal(logits(ours), logits(plain))


def test_changed_scales_are_named(folder, path):
    ours = loaded(path, folder, "128KiB")
    logits(ours)
    shard = next(iter(sorted(path.glob("*.safetensors"))))
    shard.write_bytes(shard.read_bytes())
    with pytest.raises(CorruptionError, match=f"{shard} was changed"):
        logits(ours, 1)


def test_a_transformers_that_is_imported_within_init_leaves_weights_packed_as_well(folder, path, monkeypatch):
    with monkeypatch.context() as not_yet:
        not_yet.delitem(sys.modules, "transformers")
        init = Init(nvme=str(folder), host_memory="1MiB", frozen=True)
        init.__enter__()
    with contextlib.ExitStack() as stack:
        stack.push(init.__exit__)
        ours = plain_of(path)
    assert all(unit.record.in_files is not None for unit in engine_of_model(ours).units)
    assert torch.equal(logits(ours), logits(plain_of(path)))


def test_transformers_quantizer_is_put_back(folder):
    kind = auto.AUTO_QUANTIZER_MAPPING["fp8"]
    own = vars(kind)["get_load_operations"]
    with Init(nvme=str(folder), host_memory="16MiB"):
        assert kind.get_load_operations is not own
    assert vars(kind)["get_load_operations"] is own
    with pytest.raises(ValueError, match="x"), Init(nvme=str(folder), host_memory="16MiB"):
        raise ValueError("x")
    assert vars(kind)["get_load_operations"] is own


def test_packed_weights_that_nothing_here_reads_are_refused_by_name_before_anything_moves(folder):
    with (
        pytest.raises(infinity.UnsupportedError, match=r"Linear\.weight is torch.uint8 .* packed weights"),
        Init(nvme=str(folder), host_memory="16MiB"),
    ):
        layer = torch.nn.Linear(4, 4, bias=False, device="meta")
        layer.weight = torch.nn.Parameter(
            torch.empty(4, 2, dtype=torch.uint8, device="meta"), requires_grad=False
        )
    with (
        pytest.raises(infinity.UnsupportedError, match=r"Linear\.weight is torch.float8_e4m3fn"),
        Init(nvme=str(folder), host_memory="16MiB"),
    ):
        torch.nn.Linear(4, 4, bias=False, device="meta", dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("method", ["gptq", "awq", "torchao", "one that is yet to come"])
def test_checkpoints_quantised_by_other_methods_are_refused_by_name_before_anything_moves(folder, method):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**quantised.SIZES)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    quantised.add_method(folder / "model", quant_method=method, bits=4)
    (folder / "nvme").mkdir()
    with pytest.raises(
        infinity.UnsupportedError, match=rf"quant_method='{method}' .* fp8, mxfp4, bitsandbytes"
    ):
        loaded(folder / "model", folder / "nvme")
    assert list((folder / "nvme").iterdir()) == []


def in_files(model):
    """Return the units that lie in files, packed or not."""
    return [unit for unit in engine_of_model(model).units if unit.record.in_files is not None]


def test_stacks_of_mxfp4_are_read_packed_and_have_the_bits_of_transformers(folder):
    path = quantised.mxfp4_gpt_oss(folder / "gpt-oss")
    plain, ours = plain_of(path), loaded(path, folder, "4MiB")
    assert infinity.stats(ours).written_nbytes == {}
    assert len(in_files(ours)) == len(engine_of_model(ours).units)
    for number in range(2):
        assert torch.equal(logits(ours, number), logits(plain, number))
    assert differences(plain.state_dict(), ours.state_dict()) == []
    assert infinity.stats(ours).written_nbytes == {}


def test_a_use_of_an_expert_in_mxfp4_reads_its_packed_bytes_once(folder):
    path = quantised.mxfp4_gpt_oss(folder / "gpt-oss", hidden_size=256, intermediate_size=512)
    ours = loaded(path, folder, "4MiB")
    (unit,) = [one for one in in_files(ours) if one.name.endswith("layers.0.mlp.experts.tiles.0")][:1]
    before = infinity.stats(ours)
    with infinity.gathered(unit.parameters[0]):
        pass
    moved = infinity.stats(ours).since(before).checkpoint_read_nbytes
    numel = unit.parameters[0].numel()
    assert unit.record.tile_numel * 4 < numel
    assert numel * 17 // 32 <= moved <= 1.2 * numel * 17 // 32


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_weights_of_bitsandbytes_are_read_packed_and_have_the_bits_of_its_formulas(folder, kind):
    path = quantised.bitsandbytes_llama(folder / "packed", kind, folder / "plain")
    plain, ours = plain_of(folder / "plain"), loaded(path, folder)
    assert len(in_files(ours)) == len(engine_of_model(ours).units)
    assert differences(plain.state_dict(), ours.state_dict()) == []
    assert torch.equal(logits(ours), logits(plain))
    counted = infinity.stats(ours)
    assert counted.written_nbytes == {}
    assert type(ours.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert not hasattr(ours.config, "quantization_config")


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_what_the_budget_holds_stays_packed_and_counts_as_such(folder, kind):
    path = quantised.bitsandbytes_llama(folder / "packed", kind, folder / "plain")
    plain, ours = plain_of(folder / "plain"), loaded(path, folder, "3MiB")
    read = []
    for number in range(6):
        before = infinity.stats(ours)
        assert torch.equal(logits(ours, number), logits(plain, number))
        read.append(infinity.stats(ours).since(before).checkpoint_read_nbytes)
    kept = [unit.record for unit in in_files(ours) if unit.record.packed_copy is not None]
    assert kept
    assert read[-1] < read[0]
    for record in kept:
        nbytes = record.packed_copy.nbytes
        assert record.packed_nbytes <= nbytes <= record.packed_nbytes + 4096
        assert record.packed_nbytes < 0.6 * record.field_nbytes("hi")
    engine = engine_of_model(ours)
    assert engine.host_store.held_nbytes == sum(unit.record.nbytes("host") for unit in engine.units)
    assert engine.kept.held_nbytes <= engine.kept.limit_nbytes


def test_what_is_kept_packed_leaves_its_copy_when_it_is_trained_or_written(folder):
    path = quantised.bitsandbytes_llama(folder / "packed", "nf4", folder / "plain")
    plain, ours = plain_of(folder / "plain"), loaded(path, folder, "3MiB")
    for _ in range(4):
        logits(ours)
    engine = engine_of_model(ours)
    kept = [unit for unit in engine.units if unit.record.packed_copy is not None]
    layer = kept[0].parameters[0]
    name = engine.parameters.name_of(layer)
    with torch.no_grad(), infinity.gathered(layer, write=True):
        layer.mul_(2)
    with torch.no_grad():
        dict(plain.named_parameters())[name].mul_(2)
    assert kept[0].record.in_files is None
    for number in range(5):
        assert torch.equal(logits(ours, number), logits(plain, number))
    assert engine.host_store.held_nbytes == sum(unit.record.nbytes("host") for unit in engine.units)


@pytest.mark.parametrize("order", ["group", "dynamic", "weight", "static", None])
def test_scales_of_columns_in_their_own_order_are_refused_before_anything_is_read(order):
    scheme = SimpleNamespace(weights=SimpleNamespace(actorder=order))
    said = SimpleNamespace(quantization_config=SimpleNamespace(config_groups={"group_0": scheme}))
    if order in ("group", "dynamic"):
        with pytest.raises(UnsupportedError, match="group_0 of the checkpoint's configuration has actorder"):
            check_order(said)
    else:
        check_order(said)


@pytest.mark.parametrize("kind", ["input_activations", "output_activations"])
def test_activations_that_a_checkpoint_wants_quantised_are_said_to_stay(kind, caplog):
    for asked in (None, SimpleNamespace(num_bits=8)):
        said = SimpleNamespace(config_groups={"group_0": SimpleNamespace(weights=None, **{kind: asked})})
        say_activations_stay(SimpleNamespace(quantization_config=said))
        assert (f"activations quantised ({kind})" in caplog.text) == (asked is not None)
