"""PEFT's adapters on a base built in Init. Trusted: PEFT in memory on the same 16-bit weights; the recipe."""

import pytest
import torch
import transformers

import infinity
import models
import quantised
from covers import matrix
from infinity.engine.engine import engine_of_model
from infinity.reference import ReferenceAdamW, prepare, rounded
from trainers import HELD, QUIET, ROWS, logged

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings(
        "ignore:.*pin_memory.*:UserWarning",
        "ignore:.*lr_scheduler.step.*:UserWarning",
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # transformers 4's import
        "ignore:Could not find a config file:UserWarning",
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
        "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning",
    ),
]


def adapted(model, *, autocast=True, **options):
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM", **options
    )
    torch.manual_seed(3)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=autocast)


def build(folder=None, seed=0):
    """Return a base: in memory, of the 16-bit weights, or offloaded."""
    torch.manual_seed(seed)
    if folder is None:
        model = models.MODELS["llama"]()
        for parameter in model.parameters():
            parameter.data = rounded(parameter.data)
        return model
    with infinity.Init(nvme=str(folder), host_memory="256KiB"):
        return models.MODELS["llama"]()


def train(model, optimizer, steps=4):
    torch.manual_seed(11)  # of dropout
    return models.train(model, optimizer, steps, ids_of=models.by_number)


def trained(model):
    return [one for one in model.parameters() if one.requires_grad]


def different(expected, found):
    assert list(expected) == list(found)
    return [name for name in expected if not torch.equal(expected[name], found[name])]


def test_adapters_train_on_an_offloaded_base_which_is_never_written(folder):
    plain, ours = adapted(build()), adapted(build(folder))
    optimizers = [torch.optim.AdamW(trained(one), lr=1e-2) for one in (plain, ours)]
    expected = train(plain, optimizers[0])
    before = infinity.stats(ours)
    assert train(ours, optimizers[1]) == expected
    moved = infinity.stats(ours).since(before)
    assert moved.nvme_read_nbytes > 100_000
    assert moved.nvme_written_nbytes == 0
    assert set(infinity.stats(ours).written_nbytes) == {("nvme", "hi"), ("nvme", "lo")}, (
        "no state of the base"
    )
    assert different(peft.get_peft_model_state_dict(plain), peft.get_peft_model_state_dict(ours)) == []


def from_files(path, folder=None, **init):
    """Return a base of saved weights: in memory, or read from its files where it computes."""
    if folder is None:
        return transformers.AutoModelForCausalLM.from_pretrained(path)
    with infinity.Init(nvme=str(folder), host_memory="256KiB", **init):
        return transformers.AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("frozen", [True, False])
def test_adapters_train_on_a_base_that_stays_in_its_files(folder, frozen):
    """PEFT freezes the base by itself."""
    build().save_pretrained(folder / "base", max_shard_size="60kB")
    plain, ours = (
        adapted(from_files(folder / "base")),
        adapted(from_files(folder / "base", folder, frozen=frozen)),
    )
    optimizers = [torch.optim.AdamW(trained(one), lr=1e-2) for one in (plain, ours)]
    assert train(ours, optimizers[1]) == train(plain, optimizers[0])
    assert different(peft.get_peft_model_state_dict(plain), peft.get_peft_model_state_dict(ours)) == []
    counted = infinity.stats(ours)
    assert counted.written_nbytes == {}
    assert counted.checkpoint_read_nbytes > 4 * 2 * 2 * counted.parameters * 0.5
    assert all(unit.record.in_files is not None for unit in engine_of_model(ours).units)


def test_adapters_built_in_the_init_of_a_frozen_base_train_and_the_base_stays_in_its_files(folder):
    build().save_pretrained(folder / "base", max_shard_size="60kB")
    plain = prepare(adapted(from_files(folder / "base")))
    with infinity.Init(nvme=str(folder), host_memory="256KiB", frozen=True):
        ours = adapted(transformers.AutoModelForCausalLM.from_pretrained(folder / "base"))
    recipe, optimizer = ReferenceAdamW(trained(plain), lr=1e-2), infinity.AdamW(trained(ours), lr=1e-2)
    assert train(ours, optimizer) == train(plain, recipe)
    assert different(peft.get_peft_model_state_dict(plain), peft.get_peft_model_state_dict(ours)) == []
    own = {unit.name for unit in engine_of_model(ours).units if unit.record.in_files is None}
    assert own
    assert all("lora_" in name for name in own)


def base_of(folder, kind):
    """Save a base, in 16 bits or packed; return its folder, and that of what its weights are."""
    if kind == "bf16":
        build().save_pretrained(folder / "base", max_shard_size="60kB")
        return folder / "base", folder / "base"
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone is seen to")
    quantised.bitsandbytes_llama(folder / "base", kind, folder / "plain")
    return folder / "base", folder / "plain"


@pytest.mark.parametrize(*matrix(together=1, kind=["bf16", "nf4 nested"], place=["memory", "the tiers"]))
def test_dora_trains_on_a_frozen_base_in_its_files(folder, kind, place):
    """Its magnitudes begin as the norms of the base's weights, and each forward takes norms of them anew."""
    packed, values = base_of(folder, kind)
    dora = {"use_dora": True, "modules_to_save": ["lm_head"] if place == "the tiers" else None}
    plain = adapted(from_files(values), **dora)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", frozen=True):
        ours = transformers.AutoModelForCausalLM.from_pretrained(packed)
        ours = adapted(ours, **dora) if place == "the tiers" else ours
    ours = adapted(ours, **dora) if place == "memory" else ours
    if place == "the tiers":
        optimizers = ReferenceAdamW(trained(prepare(plain)), lr=1e-2), infinity.AdamW(trained(ours), lr=1e-2)
    else:
        optimizers = [torch.optim.AdamW(trained(one), lr=1e-2) for one in (plain, ours)]
    assert train(ours, optimizers[1]) == train(plain, optimizers[0])
    found = peft.get_peft_model_state_dict(ours)
    assert different(peft.get_peft_model_state_dict(plain), found) == []
    assert any("magnitude" in name for name in found)
    adapters = {"lora_", "modules_to_save"}
    own = {unit.name for unit in engine_of_model(ours).units if unit.record.in_files is None}
    assert all(any(one in name for one in adapters) for name in own)
    assert bool(own) == (place == "the tiers")
    if place == "memory":
        assert infinity.stats(ours).written_nbytes == {}


def test_making_doras_adapters_leaves_no_weight_in_memory(folder):
    packed, _ = base_of(folder, "bf16")
    ours = from_files(packed, folder, frozen=True)
    before = infinity.stats(ours)
    adapted(ours, use_dora=True)
    assert infinity.stats(ours).since(before).checkpoint_read_nbytes > 0
    weight = ours.model.layers[0].self_attn.q_proj.base_layer.weight
    with pytest.raises(infinity.NotResidentError, match="gathered"):
        weight.norm()
    assert not any(unit.attached for unit in engine_of_model(ours).units)


def test_adapters_train_on_a_base_in_fp8(folder):
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone converts fp8")
    path = quantised.fp8_llama(folder / "base")
    plain, ours = adapted(from_files(path)), adapted(from_files(path, folder, frozen=True))
    optimizers = [torch.optim.AdamW(trained(one), lr=1e-2) for one in (plain, ours)]
    assert train(ours, optimizers[1]) == train(plain, optimizers[0])
    assert different(peft.get_peft_model_state_dict(plain), peft.get_peft_model_state_dict(ours)) == []
    assert infinity.stats(ours).written_nbytes == {}
    assert all(unit.record.in_files is not None for unit in engine_of_model(ours).units)


def test_a_step_on_a_base_in_nf4_reads_its_packed_bytes_in_each_pass_and_writes_none(folder):
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone is seen to")
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 1}
    quantised.bitsandbytes_llama(folder / "base", "nf4 nested", folder / "plain", **sizes)
    with infinity.Init(nvme=str(folder), host_memory="16MiB", frozen=True):
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    ours, plain = adapted(ours), adapted(from_files(folder / "plain"))
    optimizers = [torch.optim.AdamW(trained(one), lr=1e-2) for one in (plain, ours)]
    engine, losses, read = engine_of_model(ours), ([], []), []
    parameters = sum(unit.record.shard.end for unit in engine.units)
    for _ in range(2):
        losses[0].extend(train(plain, optimizers[0], 1))
        before = infinity.stats(ours)
        losses[1].extend(train(ours, optimizers[1], 1))
        read.append(infinity.stats(ours).since(before).checkpoint_read_nbytes)
    assert losses[0] == losses[1]
    assert different(peft.get_peft_model_state_dict(plain), peft.get_peft_model_state_dict(ours)) == []
    packed = sum(unit.record.packed_nbytes or unit.record.field_nbytes("hi") for unit in engine.units)
    assert 0.5 * parameters < packed < 0.55 * parameters
    assert packed < read[0] < 2 * 0.6 * parameters
    assert read[1] < read[0]
    assert infinity.stats(ours).written_nbytes == {}


def test_a_recomputed_frozen_base_leaves_nothing_in_memory(folder):
    ours = adapted(build(folder))
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    train(ours, torch.optim.AdamW(trained(ours), lr=1e-2))
    kept = [one for unit in engine_of_model(ours).units for one in unit._abandoned if not one.expired()]
    assert kept == []


def test_saved_adapters_are_replaced_when_asked_and_a_card_that_was_written_stays(folder):
    ours = adapted(build(folder))
    infinity.save_pretrained(ours, folder / "adapter")
    card = folder / "adapter" / "README.md"
    card.write_text(card.read_text() + "\nMy own words.\n")
    (folder / "adapter" / "notes.txt").write_text("mine")
    train(ours, torch.optim.AdamW(trained(ours), lr=1e-2))
    with pytest.raises(FileExistsError, match="overwrite=True replaces it"):
        infinity.save_pretrained(ours, folder / "adapter")
    infinity.save_pretrained(ours, folder / "adapter", overwrite=True)
    loaded = peft.PeftModel.from_pretrained(build(), folder / "adapter")
    state = peft.get_peft_model_state_dict
    assert different(state(ours), state(loaded)) == []
    assert "My own words." in card.read_text()
    assert (folder / "adapter" / "notes.txt").read_text() == "mine"


def test_adapters_are_saved_without_reading_the_base_for_plain_peft_to_load(folder):
    ours = adapted(build(folder))
    train(ours, torch.optim.AdamW(trained(ours)))
    engine_of_model(ours).lane.drain()  # what is read ahead for the next step
    before = infinity.stats(ours).nvme_read_nbytes
    infinity.save_pretrained(ours, folder / "adapter")
    assert infinity.stats(ours).nvme_read_nbytes == before
    ours.save_pretrained(folder / "by peft")  # which reads it all
    state = peft.get_peft_model_state_dict(ours)
    for name, base in (("adapter", build()), ("by peft", build()), ("adapter", build(folder))):
        again = peft.PeftModel.from_pretrained(base, folder / name)
        assert different(state, peft.get_peft_model_state_dict(again)) == []


@pytest.mark.parametrize("place", ["the same Init", "an Init of their own"])
def test_adapters_built_in_init_have_masters_and_the_recipes_bits(folder, place):
    """With the model, they come with a trained copy of its head; later, in the 16 bits of their base."""
    if place == "the same Init":
        whole = {"modules_to_save": ["lm_head"]}
        torch.manual_seed(0)
        plain = prepare(adapted(models.MODELS["llama"](), **whole))
        torch.manual_seed(0)
        with infinity.Init(nvme=str(folder), host_memory="256KiB"):
            ours = adapted(models.MODELS["llama"](), **whole)
    else:
        plain, base = prepare(adapted(build(), autocast=False)), build(folder)
        with infinity.Init(nvme=str(folder), host_memory="256KiB"):
            ours = adapted(base)
    recipe, optimizer = ReferenceAdamW(trained(plain), lr=1e-2), infinity.AdamW(trained(ours), lr=1e-2)
    assert train(ours, optimizer) == train(plain, recipe)
    expected = peft.get_peft_model_state_dict(plain)
    assert different(expected, peft.get_peft_model_state_dict(ours)) == []
    infinity.save_pretrained(ours, folder / "adapter")
    again = peft.PeftModel.from_pretrained(build(), folder / "adapter", autocast_adapter_dtype=False)
    assert different(expected, peft.get_peft_model_state_dict(again)) == []


def test_copies_of_modules_outside_init_say_where_they_work(folder):
    """Inside the same Init, as the first place above, where they train."""
    with pytest.raises(infinity.NotResidentError, match=r"Call peft\.get_peft_model inside `with infinity\."):
        adapted(build(folder), modules_to_save=["lm_head"])


def test_adapters_are_switched_off_and_merged_and_texts_generated(folder):
    plain, ours = adapted(build()), adapted(build(folder))
    for one in (plain, ours):
        train(one, torch.optim.AdamW(trained(one), lr=1e-2))
        one.eval()
    ids = models.batch(5)
    texts = [one.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for one in (plain, ours)]
    assert torch.equal(*texts)
    with plain.disable_adapter(), ours.disable_adapter(), torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, ours(input_ids=ids).logits)
    with pytest.raises(infinity.NotResidentError, match="gathered"):
        ours.merge_adapter()
    with infinity.gathered(ours, write=True):
        ours.merge_adapter()
    plain.merge_adapter()
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, ours(input_ids=ids).logits)


def trainer_of(model, place, **options):
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        **QUIET,
        "logging_steps": 1,
        **options,
    }
    ours = any(infinity.engine.engine.engine_of(one) for one in model.parameters())
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(place), **options),
        train_dataset=ROWS,
        eval_dataset=HELD,
        callbacks=[infinity.huggingface.TrainerCallback()] if ours else [],
    )


@pytest.mark.usefixtures("three_layers")
def test_the_trainer_trains_adapters_with_its_own_optimizer_and_resumes(folder):
    saved = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    plain, ours = (
        trainer_of(adapted(build(place)), folder / name, **saved, load_best_model_at_end=True)
        for place, name in ((None, "plain"), (folder, "ours"))
    )
    torch.manual_seed(7)
    plain.train()
    before = infinity.stats(ours.model)
    torch.manual_seed(7)
    ours.train()
    assert infinity.stats(ours.model).since(before).nvme_written_nbytes == 0
    names = "loss", "grad_norm", "learning_rate"
    assert logged(ours, *names) == logged(plain, *names)
    assert logged(ours, "eval_loss") == logged(plain, "eval_loss")
    checkpoint = folder / "ours" / "checkpoint-2"
    found = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "optimizer.pt"} <= found
    assert not {"infinity", "model.safetensors"} & found
    again = trainer_of(adapted(build(folder)), folder / "ours", **saved)
    torch.manual_seed(7)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert logged(again, "loss") == logged(ours, "loss")
    found = (peft.get_peft_model_state_dict(one.model) for one in (plain, again))
    assert different(*found) == []
