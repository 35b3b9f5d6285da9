"""Frozen experts, of a model that was built and of one that was loaded: what a pass reads of them. Real
training and generation on a real disk, against transformers in memory.
"""

import pytest
import torch
import transformers

import infinity
import models
from infinity import AdamW, Init
from infinity.engine.engine import engine_of_model

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]


def read_by(model, call):
    """Return the bytes that a call reads, and those of `hi` of all units that it uses, once for each use."""
    units = engine_of_model(model).units
    engine_of_model(model).lane.drain()
    before, uses = infinity.stats(model), [unit.residence.uses for unit in units]
    call()
    engine_of_model(model).lane.drain()
    done = infinity.stats(model).since(before)
    times = [unit.residence.uses - count for unit, count in zip(units, uses, strict=True)]
    needed = sum(count * unit.resident_nbytes for unit, count in zip(units, times, strict=True))
    return done.nvme_read_nbytes + done.checkpoint_read_nbytes, needed, done, times


def test_frozen_experts_cost_two_bytes_for_each_parameter_and_pass_that_uses_it(folder):
    with Init(nvme=folder, host_memory="2MiB"):
        model = models.of_experts(
            "mixtral", num_local_experts=32, num_experts_per_tok=1, intermediate_size=512, vocab_size=64
        )
        model.requires_grad_(requires_grad=False)
        model.model.embed_tokens.requires_grad_()
    optimizer, ids, count = AdamW(model.model.embed_tokens.parameters(), lr=1e-2), torch.tensor([[3, 3]]), 4

    def steps():
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    _, _, done, times = read_by(model, steps)
    units = engine_of_model(model).units
    used = [unit for unit, uses in zip(units, times, strict=True) if uses and not unit.trainable]
    trained = sum(2 * unit.record.nbytes("nvme") for unit in units if unit.trainable)
    assert sum(unit.layout.numel for unit in used) < 0.1 * sum(unit.layout.numel for unit in units)
    in_two_passes = 2 * sum(unit.record.field_nbytes("hi") for unit in used)
    assert 0 < done.nvme_read_nbytes + done.nvme_written_nbytes <= 1.05 * count * (in_two_passes + trained)
    assert done.nvme_written_nbytes <= count * trained


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_generation_from_a_folder_reads_the_experts_that_a_token_is_routed_to_less_what_is_kept(folder, name):
    torch.manual_seed(0)
    models.of_experts(name).to(torch.bfloat16).save_pretrained(folder / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    given = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids, read = models.batch(1, rows=1, length=6), {}
    expected = plain.generate(ids, **given)
    for memory in ("512KiB", "2MiB", "64MiB"):
        (folder / memory).mkdir()
        with Init(nvme=folder / memory, host_memory=memory, frozen=True):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
        assert torch.equal(model.generate(ids, **given), expected)
        read[memory], needed, done, times = read_by(model, lambda: model.generate(ids, **given))  # noqa: B023
        assert done.nvme_written_nbytes == 0 or name == "mixtral", "its experts are merged, and its own"
        assert read[memory] <= needed + 8192 * sum(times), "files are read in blocks of 4 KiB"
        every = 10 * sum(unit.resident_nbytes for unit in engine_of_model(model).units)
        assert needed < every / 2
    assert read["512KiB"] > read["2MiB"] > read["64MiB"] == 0
