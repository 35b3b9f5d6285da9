"""Weights that stay in a checkpoint's files. Trusted: plain from_pretrained of the folder; the recipe."""

import ctypes
import hashlib
import logging
import mmap
import os
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
import models
from infinity import AdamW, CorruptionError, Init, UnsupportedError, reference
from infinity.engine.engine import engine_of_model
from infinity.engine.origins import Origins
from parity import differences

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("three_layers", "deterministic")]

BF16 = torch.bfloat16
_MAP_FIXED = 0x10  # of mmap(2), on Linux


def saved(folder, name="llama", dtype=BF16, **options):
    torch.manual_seed(1)
    models.MODELS[name]().to(dtype).save_pretrained(folder / "model", **{"max_shard_size": "60kB", **options})
    return folder / "model"


def plain_of(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def loaded(path, nvme, host_memory="256KiB", *, frozen=True, **init):
    nvme = str(nvme) if nvme else None
    with Init(nvme=nvme, host_memory=host_memory, frozen=frozen, **init):
        return plain_of(path)


def logits(model, number=0):
    with torch.no_grad():
        return model(input_ids=models.batch(number)).logits


def in_files(model):
    return [unit.record.in_files is not None for unit in engine_of_model(model).units]


def fingerprint(path):
    """Names, bytes and times of all that is in a folder, and the folder's own time."""
    files = {
        one.name: (hashlib.sha256(one.read_bytes()).hexdigest(), one.stat().st_mtime_ns)
        for one in sorted(path.iterdir())
    }
    return files, path.stat().st_mtime_ns


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("nvme", [True, False])
def test_a_frozen_base_is_read_from_its_files_which_nothing_touches(folder, name, nvme):
    path = saved(folder, name)
    before = fingerprint(path)
    ours, plain = loaded(path, folder if nvme else None), plain_of(path)
    counted = infinity.stats(ours)
    assert (counted.read_nbytes, counted.written_nbytes) == ({}, {})
    assert all(in_files(ours))
    assert not any(one.requires_grad for one in ours.parameters())
    for number in range(3):
        assert torch.equal(logits(ours, number), logits(plain, number))
    counted = infinity.stats(ours)
    assert counted.checkpoint_read_nbytes > 2 * counted.parameters
    assert counted.nvme_read_nbytes == counted.nvme_written_nbytes == 0
    assert differences(plain.state_dict(), ours.state_dict()) == []
    assert fingerprint(path) == before


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_weights_stay_where_they_are_in_every_type_that_computes(folder, dtype):
    path = saved(folder, dtype=models.COMPUTES[dtype])
    ours, plain = loaded(path, folder, dtype=dtype), plain_of(path)
    assert all(in_files(ours))
    assert torch.equal(logits(ours), logits(plain))
    with infinity.gathered(ours):
        assert differences(dict(plain.named_parameters()), dict(ours.named_parameters())) == []


def test_a_read_moves_the_bytes_that_are_asked_for_and_no_more_than_a_window_besides(folder):
    with torch.device("cpu"):
        wide = nn.Sequential(nn.Linear(1024, 1500, bias=False, dtype=BF16))
    path = folder / "wide.safetensors"
    save_file({"pad": torch.zeros(3, dtype=torch.uint8), "w": wide[0].weight.detach()}, path)
    with Init(nvme=str(folder), host_memory="4MiB", frozen=True):
        with torch.device("meta"):
            ours = nn.Sequential(nn.Linear(1024, 1500, bias=False, dtype=BF16))
        with infinity_safe_open(path) as file:
            ours[0].weight = nn.Parameter(file.get_slice("w")[...])
    assert in_files(ours) == [True]
    inputs = torch.randn(2, 1024).to(BF16)
    with torch.no_grad():
        assert torch.equal(ours(inputs), wide(inputs))
    packed = 2 * 1024 * 1500
    tiles = -(-packed // (1 << 16))
    assert packed <= infinity.stats(ours).checkpoint_read_nbytes <= packed + tiles * 8192


def infinity_safe_open(path):
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def test_what_cannot_be_read_in_place_is_copied_and_the_log_says_why(folder, caplog):
    path = saved(folder, "mixtral")
    with caplog.at_level(logging.INFO, "infinity"):
        ours = loaded(path, folder)
    assert set(in_files(ours)) == {True, False}  # its experts are merged
    said = [one.message for one in caplog.records if "records of their own" in one.message]
    assert len(said) == 1
    assert "merged, transposed or initialised" in said[0]
    assert torch.equal(logits(ours), logits(plain_of(path)))
    caplog.clear()
    converted = saved(folder, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "infinity"):
        ours = loaded(converted, folder)
    assert not any(in_files(ours))
    assert "torch.float32 is converted to torch.bfloat16" in caplog.text


def test_what_was_changed_after_it_was_mapped_is_not_read_from_the_file(folder):
    path = folder / "w.safetensors"
    save_file({"a": torch.ones(1 << 20, dtype=BF16), "b": torch.ones(1 << 20, dtype=BF16)}, path)
    origins = Origins()
    with infinity_safe_open(path) as file:
        a, b = (file.get_slice(name)[...] for name in ("a", "b"))
    assert origins.may_have(a)
    a.data[5] = 3.0
    assert origins.of(a, BF16) == "changed after it was loaded"
    found = origins.of(b[100:200], BF16)
    assert (found.path, found.nbytes) == (str(path), 200)
    assert path.read_bytes()[found.offset : found.offset + 4] == b"\x80\x3f\x80\x3f"
    assert "merged" in origins.of(b.view(1024, 1024).t(), BF16)
    assert "converted" in origins.of(b, torch.float32)
    assert not origins.may_have(torch.ones(1000))
    path.rename(folder / "other.safetensors")
    fresh = Origins()
    assert fresh.may_have(b)
    assert fresh.of(b, BF16).path == str(folder / "other.safetensors")
    (folder / "other.safetensors").unlink()
    gone = Origins()
    assert gone.may_have(b)
    assert "cannot be opened" in gone.of(b, BF16)


def test_training_starts_from_the_files_and_equals_the_recipe(folder):
    path = saved(folder)
    plain = reference.prepare(plain_of(path))
    ours = loaded(path, folder, frozen=False)
    assert infinity.stats(ours).written_nbytes == {}
    losses = [
        models.train(model, kind(model.parameters(), lr=1e-2), 2)
        for model, kind in ((plain, reference.ReferenceAdamW), (ours, AdamW))
    ]
    assert losses[0] == losses[1]
    assert not any(in_files(ours))


def test_freezing_afterwards_needs_no_copy_and_thawing_makes_one_and_says_so(folder, caplog):
    path = saved(folder)
    plain, ours = reference.prepare(plain_of(path)), loaded(path, folder, frozen=False)
    optimizers = []
    for model, kind in ((plain, reference.ReferenceAdamW), (ours, AdamW)):
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        with caplog.at_level(logging.INFO, "infinity"):
            optimizers.append(kind(model.lm_head.parameters(), lr=1e-2))
    assert "lm_head were copied from the checkpoint's files to records of their own, " in caplog.text
    assert "since AdamW trains them" in caplog.text
    losses = [models.train(*both, 3) for both in zip((plain, ours), optimizers, strict=True)]
    assert losses[0] == losses[1]
    assert in_files(ours).count(False) == 1
    assert {name for _, name in infinity.stats(ours).written_nbytes} >= {"hi", "lo"}


def test_values_that_are_written_leave_the_files_and_equal_ones_do_not(folder):
    path = saved(folder)
    ours, other = loaded(path, folder), plain_of(path)
    before = fingerprint(path)
    ours.load_state_dict(other.state_dict())
    with infinity.gathered(ours, write=True):
        pass
    assert all(in_files(ours))
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    with infinity.gathered(ours, write=True), torch.no_grad():
        ours.model.norm.weight.mul_(2)
    assert in_files(ours).count(False) == 1
    assert torch.equal(logits(ours), logits(other))
    with torch.no_grad():
        other.lm_head.weight.zero_()
    ours.load_state_dict(other.state_dict())
    assert in_files(ours).count(False) == 2
    assert torch.equal(logits(ours), logits(other))
    assert fingerprint(path) == before


def test_a_file_that_changes_or_is_cut_during_the_run_is_named(folder):
    path = saved(folder)
    shard = path / "model-00001-of-00002.safetensors"
    ours = loaded(path, folder)
    logits(ours)
    os.utime(shard, ns=(1, 1))
    with pytest.raises(CorruptionError, match=rf"{shard} was changed .* 1970-01-01 .*; when the model was"):
        logits(ours, 1)
    ours = loaded(saved(folder), folder)
    os.truncate(shard, shard.stat().st_size - 100)
    with pytest.raises(CorruptionError, match=rf"{shard} was changed"):
        logits(ours)


@pytest.mark.parametrize("verify", ["always", "off"])
def test_content_is_compared_with_what_was_read_first(folder, verify):
    path = saved(folder)
    shard = path / "model-00001-of-00002.safetensors"
    ours = loaded(path, folder, verify=verify)
    first = logits(ours)
    status, data = shard.stat(), bytearray(shard.read_bytes())
    data[-10:] = bytes(10)
    with shard.open("r+b") as file:
        file.write(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    if verify == "off":
        assert not torch.equal(logits(ours), first)
    else:
        with pytest.raises(CorruptionError, match=rf"read from {shard} at byte .* not those that were read"):
            logits(ours)


@pytest.mark.parametrize("bad", ["a shard is missing", "a shard is cut", "a shard is no such file"])
def test_a_folder_that_is_not_whole_is_refused_by_the_files_name_before_anything_moves(folder, bad):
    path = saved(folder, max_shard_size="60kB")
    (folder / "nvme").mkdir()
    shard = sorted(path.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2] if "cut" in bad else b"<html>not found</html>" * 100)
    if "missing" in bad:
        shard.unlink()
    with pytest.raises((FileNotFoundError, infinity.TensorFileError), match=str(shard)):
        loaded(path, folder / "nvme")
    assert list((folder / "nvme").iterdir()) == []


def test_a_file_replaced_by_another_of_its_name_stays_what_it_was(folder):
    path = saved(folder)
    ours = loaded(path, folder)
    first = logits(ours)
    for shard in path.glob("*.safetensors"):
        new = shard.with_suffix(".new")
        save_file({name: torch.zeros_like(one) for name, one in load_file(shard).items()}, new)
        new.rename(shard)
    assert torch.equal(logits(ours), first)


def test_links_lead_to_the_files(folder):
    path, links = saved(folder), folder / "snapshot"
    links.mkdir()
    for one in path.iterdir():
        (links / one.name).symlink_to(one)
    ours = loaded(links, folder)
    assert all(in_files(ours))
    assert torch.equal(logits(ours), logits(plain_of(path)))


def test_files_without_direct_reads_are_read_through_the_page_cache(folder, caplog, monkeypatch):
    path = saved(folder)
    real = os.open

    def refusing(name, flags, *rest, **more):
        if flags & os.O_DIRECT and str(name).endswith(".safetensors"):
            raise OSError(22, "Invalid argument", name)
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    ours = loaded(path, folder)
    assert torch.equal(logits(ours), logits(plain_of(path)))
    said = [one.message for one in caplog.records if "no O_DIRECT there" in one.message]
    assert len(list(path.glob("*.safetensors"))) > 1
    assert [str(path) in one and "Invalid argument" in one for one in said] == [True]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs")  # noqa: S108
def test_files_on_a_tmpfs_are_read_like_any(folder):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        path = saved(Path(memory))
        ours = loaded(path, folder)
        assert all(in_files(ours))
        assert torch.equal(logits(ours), logits(plain_of(path)))
        assert infinity.stats(ours).written_nbytes == {}


def test_a_budget_that_holds_the_base_reads_each_byte_once_and_lets_go_of_it_without_writing(folder):
    path = saved(folder)
    ours = loaded(path, folder, host_memory="8MiB")
    prompt = torch.zeros(2, 8, 32, dtype=BF16, requires_grad=True)
    expected = None
    for step in range(4):
        out = ours(inputs_embeds=prompt).logits.float().square().mean()
        out.backward()
        expected = out.item() if expected is None else expected
        assert out.item() == expected
        if step == 2:
            engine_of_model(ours).lane.drain()
            before = infinity.stats(ours)
    moved = infinity.stats(ours).since(before)
    assert moved.read_nbytes.get(("checkpoint", "hi"), 0) == 0
    assert infinity.stats(ours).written_nbytes == {}
    unit = engine_of_model(ours).units[1]
    assert unit.record.tiers() == (("hi", "host"),)
    unit.record.drop_host_copy()
    unit.unbind()
    assert unit.record.tiers() == (("hi", "checkpoint"),)
    assert torch.equal(logits(ours), logits(plain_of(path)))


def test_a_frozen_base_is_saved_and_exported_and_generates(folder):
    path = saved(folder)
    ours, plain = loaded(path, folder), plain_of(path)
    infinity.save(ours, None, folder / "saved")
    infinity.save_pretrained(ours, folder / "exported")
    assert differences(plain.state_dict(), plain_of(folder / "exported").state_dict()) == []
    with Init(nvme=str(folder), host_memory="256KiB"):
        again = models.MODELS["llama"]()
    infinity.load(again, None, folder / "saved")
    assert torch.equal(logits(again), logits(plain))
    ids = models.batch(5)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.generate(ids, **options), ours.generate(ids, **options))
    assert all(in_files(ours))


def test_weights_can_be_used_while_the_model_is_built(folder):
    path = saved(folder)
    with Init(nvme=str(folder), host_memory="256KiB", frozen=True):
        ours = plain_of(path)
        with torch.no_grad():
            sums = [one.float().sum().item() for one in ours.parameters()]
            ours.model.norm.weight.add_(1)
    plain = plain_of(path)
    assert sums == [one.float().sum().item() for one in plain.parameters()]
    with torch.no_grad():
        plain.model.norm.weight.add_(1)
    assert torch.equal(logits(ours), logits(plain))
    assert 0 < in_files(ours).count(False) < len(in_files(ours))  # those on one page with what was changed


def test_a_checkpoint_with_the_same_weights_leaves_them_in_their_files_and_with_others_does_not(folder):
    path = saved(folder)
    ours = loaded(path, folder)
    infinity.save(ours, None, folder / "same")
    ours.lm_head.requires_grad_(True)
    models.train(ours, AdamW(ours.lm_head.parameters(), lr=1e-2), 2)
    infinity.save(ours, None, folder / "other")
    again = loaded(path, folder)
    infinity.load(again, None, folder / "same")
    assert all(in_files(again))
    infinity.load(again, None, folder / "other")
    assert in_files(again).count(False) == 1
    assert torch.equal(logits(again), logits(ours))
    head = engine_of_model(ours).parameters.read(ours.lm_head.weight, ["master"])[0]
    assert torch.equal(engine_of_model(again).parameters.read(again.lm_head.weight, ["master"])[0], head)


def test_a_durable_run_names_the_files_and_resumes_from_them(folder):
    path = saved(folder)
    init = {"durable": True, "frozen": False}

    def begin():
        ours = loaded(path, folder / "nvme", **init)
        ours.requires_grad_(False)
        ours.lm_head.requires_grad_(True)
        optimizer = AdamW(ours.lm_head.parameters(), lr=1e-2)
        return ours, optimizer, infinity.resume(ours, optimizer)

    (folder / "nvme").mkdir()
    ours, optimizer, step = begin()
    assert step == 0
    models.train(ours, optimizer, 2)
    infinity.commit(ours)
    expected = logits(ours)
    engine_of_model(ours).close()
    del ours, optimizer
    ours, optimizer, step = begin()
    assert step == 2
    assert torch.equal(logits(ours), expected)
    assert in_files(ours).count(False) == 1
    engine_of_model(ours).close()
    del ours, optimizer
    shard = path / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-10:] = bytes(10)
    shard.write_bytes(data)
    ours, optimizer, step = begin()
    with pytest.raises(CorruptionError, match=f"read from {shard}"):
        logits(ours)
    del ours, optimizer


def test_a_committed_run_on_other_files_is_refused_by_name(folder):
    path = saved(folder)
    (folder / "nvme").mkdir()
    ours = loaded(path, folder / "nvme", durable=True, frozen=False)
    ours.requires_grad_(False)
    ours.lm_head.requires_grad_(True)
    optimizer = AdamW(ours.lm_head.parameters())
    infinity.resume(ours, optimizer)
    models.train(ours, optimizer, 1)
    infinity.commit(ours)
    engine_of_model(ours).close()
    del ours, optimizer
    other = saved(folder, max_shard_size="5GB")
    ours = loaded(other, folder / "nvme", durable=True, frozen=False)
    ours.requires_grad_(False)
    ours.lm_head.requires_grad_(True)
    with pytest.raises(infinity.CheckpointError, match=r"model.embed_tokens: bytes .* there, .* here"):
        infinity.resume(ours, AdamW(ours.lm_head.parameters()))


def test_nothing_is_ever_written_to_the_files(folder):
    ours = loaded(saved(folder), folder)
    record = engine_of_model(ours).units[0].record
    store = record.in_files.store
    assert not store.writable
    with pytest.raises(UnsupportedError, match="never written"):
        record.write("hi", 0, record.shard.numel, 4096, None)
    with pytest.raises(UnsupportedError, match="cannot be allocated"):
        store.allocate(10, "x")


def prompt_steps(model, count):
    """Steps of a prompt alone: the base is used, and comes to lie in host memory."""
    prompt = torch.zeros(2, 8, 32, dtype=BF16, requires_grad=True)
    for _ in range(count):
        model(inputs_embeds=prompt).logits.float().square().mean().backward()


def test_without_nvme_pinned_weights_get_records_of_their_own_and_go_on(folder):
    path = saved(folder)
    ours, plain = loaded(path, None, "8MiB"), plain_of(path)
    prompt_steps(ours, 2)
    engine = engine_of_model(ours)
    with torch.no_grad():
        plain.model.norm.weight.mul_(2)
        plain.lm_head.weight.mul_(3)
    with infinity.gathered([ours.model.norm.weight, ours.lm_head.weight], write=True), torch.no_grad():
        ours.model.norm.weight.mul_(2)
        ours.lm_head.weight.mul_(3)
    assert in_files(ours).count(False) == 2
    own = [unit.record for unit in engine.units if unit.record.in_files is None]
    assert all("hi" not in record.targets and record.all_in_host for record in own)
    assert torch.equal(logits(ours), logits(plain))
    prompt_steps(ours, 9)  # the placement is decided anew
    engine.pins.make_room(1 << 40)
    assert torch.equal(logits(ours), logits(plain))
    assert engine.kept.aside_nbytes == 0


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("thawed", [False, True])
def test_without_nvme_weights_on_their_way_to_host_memory_get_records_of_their_own(folder, waiting, thawed):
    path = saved(folder)
    ours, plain = loaded(path, None, "8MiB"), plain_of(path)
    prompts = torch.zeros(
        4, 2, 8, 32, dtype=BF16, requires_grad=True
    )  # used often: worth more than gradients
    sum(ours(inputs_embeds=one).logits.float().square().mean() for one in prompts).backward()
    engine = engine_of_model(ours)
    taken = engine.kept.free_nbytes if waiting else 0
    assert engine.kept.try_reserve(taken)
    engine.close_step()
    assert any(unit.record.targets for unit in engine.units) is not waiting
    assert (engine.kept.aside_nbytes > 0) is waiting
    engine.kept.release(taken)
    with torch.no_grad():
        plain.lm_head.weight.mul_(1 if thawed else 3)
    if thawed:
        ours.lm_head.requires_grad_(True)
        AdamW(ours.lm_head.parameters())
    else:
        ours.load_state_dict(plain.state_dict())
    assert in_files(ours).count(False) == 1
    for _ in range(2):
        assert torch.equal(logits(ours), logits(plain))
    engine.close_step()
    assert torch.equal(logits(ours), logits(plain))
    own = next(unit.record for unit in engine.units if unit.record.in_files is None)
    assert "hi" not in own.targets
    held = [one.record.nbytes("host") for one in engine.units]
    targets = [extent.nbytes for one in engine.units for extent in one.record.targets.values()]
    assert engine.host_store.held_nbytes == sum(held) + sum(targets)
    assert engine.kept.aside_nbytes == 0


def test_without_nvme_a_pinned_base_that_is_thawed_trains_as_the_recipe(folder):
    path = saved(folder)
    plain, ours = reference.prepare(plain_of(path)), loaded(path, None, "8MiB")
    prompt_steps(ours, 1)
    optimizers = []
    for model, kind in ((plain, reference.ReferenceAdamW), (ours, AdamW)):
        model.requires_grad_(False)
        model.model.layers[0].requires_grad_(True)
        optimizers.append(kind(model.model.layers[0].parameters(), lr=1e-2))
    losses = [models.train(*both, 10) for both in zip((plain, ours), optimizers, strict=True)]
    assert losses[0] == losses[1]


def test_fp16_weights_in_files_are_saved_exported_and_loaded(folder):
    path = saved(folder, dtype=torch.float16)
    ours, plain = loaded(path, folder, dtype="fp16"), plain_of(path)
    infinity.save(ours, None, folder / "saved")
    infinity.save_pretrained(ours, folder / "exported", dtype=torch.float32)
    assert differences(plain.float().state_dict(), plain_of(folder / "exported").float().state_dict()) == []
    again = loaded(path, folder, dtype="fp16")
    infinity.load(again, None, folder / "saved")
    assert all(in_files(again))
    assert torch.equal(logits(again), logits(ours))


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_what_is_loaded_is_frozen_wherever_it_comes_to_lie(folder, name):
    path = saved(folder, name, dtype=torch.float32 if name == "llama" else BF16)
    ours = loaded(path, folder)
    assert not all(in_files(ours))
    assert not any(one.requires_grad for one in ours.parameters())


def test_a_new_head_on_a_frozen_base_is_trained(folder):
    path = saved(folder)
    kind = transformers.AutoModelForSequenceClassification
    torch.manual_seed(3)
    plain = reference.prepare(kind.from_pretrained(path, num_labels=3, pad_token_id=0))
    for name, one in plain.named_parameters():
        one.requires_grad_(name == "score.weight")
    torch.manual_seed(3)
    with Init(nvme=str(folder), host_memory="256KiB", frozen=True):
        ours = kind.from_pretrained(path, num_labels=3, pad_token_id=0)
    assert [name for name, one in ours.named_parameters() if one.requires_grad] == ["score.weight"]
    results = []
    for model, optimizer in ((plain, reference.ReferenceAdamW), (ours, AdamW)):
        steps = optimizer([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        for number in range(2):
            loss = model(input_ids=models.batch(number), labels=torch.arange(len(models.batch(0))) % 3).loss
            loss.backward()
            steps.step()
            steps.zero_grad()
        results.append(loss.item())
    assert results[0] == results[1]


def test_packed_weights_are_looked_for_in_what_is_mapped_now(folder):
    paths = [folder / "first.safetensors", folder / "second.safetensors"]
    for path in paths:
        tensors = {"codes": torch.zeros(64, 64).to(torch.float8_e4m3fn), "scales": torch.ones(2, 2)}
        save_file(tensors, path)
    with infinity_safe_open(paths[0]) as file:
        codes, scales = (file.get_slice(name)[...] for name in ("codes", "scales"))
    origins = Origins()
    origins.look()
    assert origins.where(codes).path == origins.where(scales).path == str(paths[0])
    start = min(codes.data_ptr(), scales.data_ptr()) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    with paths[1].open("rb") as other:  # as if the first were unmapped, and the second came there
        args = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, other.fileno()
        size = ctypes.c_size_t(paths[1].stat().st_size)
        got = libc.mmap(ctypes.c_void_p(start), size, *args, ctypes.c_long(0))
    assert got == start
    origins.look()
    assert origins.where(codes).path == origins.where(scales).path == str(paths[1])


def test_building_a_model_that_is_not_loaded_never_looks_at_what_is_mapped(folder, monkeypatch):
    monkeypatch.setattr(Origins, "look", lambda _: pytest.fail("it looked"))
    with Init(nvme=str(folder), host_memory="256KiB"):
        model = models.MODELS["llama"]()
    assert not any(in_files(model))
