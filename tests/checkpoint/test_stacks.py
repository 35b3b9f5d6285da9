"""Stacks in slices: checkpoints and exports have them whole, under the names of the plain model.

Real files; trusted: transformers' from_pretrained, and a model whose experts are whole.
"""

import gc

import pytest
import torch
import transformers

import infinity
import models
from infinity import AdamW, Init, Lion
from infinity.checkpoint.export import export_checkpoint
from infinity.checkpoint.save_load import read_manifest
from infinity.engine.engine import engine_of_model

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]


def built(folder, experts, name="mixtral", kind=AdamW, **settings):
    folder.mkdir()
    with Init(nvme=folder, host_memory="2MiB", experts=experts, **settings):
        model = models.of_experts(name)
    return model, kind(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model, optimizer, steps, first=0):
    few = {"rows": 1, "length": 5}
    return models.train(
        model, optimizer, steps, first=first, ids_of=lambda step, _: models.batch(step, **few)
    )


def moments(model, optimizer):
    engine = engine_of_model(model)
    return {
        (name, field): torch.cat([engine.parameters.read(one, [field])[0] for one in pieces])
        for name, pieces in models.named_wholes(model)
        for field in ("master", "m", "v")
    }


def test_a_checkpoint_has_the_names_of_the_plain_model_and_loads_into_whole_and_sliced_models(folder):
    ours = built(folder / "ours", "slices")
    train(*ours, 2)
    infinity.save(*ours, folder / "of slices")
    whole = built(folder / "whole", "whole")
    infinity.load(*whole, folder / "of slices")
    infinity.save(*whole, folder / "of whole")
    again = built(folder / "again", "slices")
    infinity.load(*again, folder / "of whole")
    kinds = [
        {(one.kind, one.name) for one in read_manifest(folder / of).tensors}
        for of in ("of slices", "of whole")
    ]
    assert kinds[0] == kinds[1]
    losses = [train(*one, 2, first=2) for one in (ours, whole, again)]
    assert losses[0] == losses[1] == losses[2]
    expected = moments(*ours)
    for one in (whole, again):
        found = moments(*one)
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_files_for_from_pretrained_are_those_of_the_plain_model_and_are_read_expert_by_expert(folder, name):
    model, optimizer = built(folder / "ours", "slices", name)
    train(model, optimizer, 2)
    infinity.save(model, optimizer, folder / "checkpoint")
    infinity.save_pretrained(model, folder / "files")
    export_checkpoint(folder / "checkpoint", folder / "exported")
    expected = model.state_dict()
    for made in ("files", "exported"):
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / made)
        found = plain.state_dict()
        assert list(found) == list(expected)
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    (folder / "again").mkdir()
    with Init(nvme=folder / "again", host_memory="2MiB"):
        again = type(plain).from_pretrained(folder / "files")
    assert any(".experts.tiles." in unit.name for unit in engine_of_model(again).units)
    found = again.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_a_durable_run_goes_on_with_its_slices(folder):
    straight = built(folder / "straight", "slices")
    expected = train(*straight, 4)
    first = built(folder / "durable", "slices", durable=True)
    infinity.resume(*first)
    losses = train(*first, 2)
    infinity.commit(first[0])
    del first
    gc.collect()
    with Init(nvme=folder / "durable", host_memory="2MiB", durable=True):
        model = models.of_experts("mixtral")
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    done = infinity.resume(model, optimizer)
    assert losses[:done] + train(model, optimizer, 4 - done, first=done) == expected
    found, there = moments(model, optimizer), moments(*straight)
    assert [key for key in there if not torch.equal(found[key], there[key])] == []


@pytest.mark.parametrize(("kind", "state_dtype"), [(AdamW, "int8"), (Lion, "int4")])
def test_codes_of_slices_that_are_whole_blocks_are_saved_as_the_stacks(folder, kind, state_dtype):
    ours, again = (
        built(folder / one, "slices", kind=kind, state_dtype=state_dtype) for one in ("ours", "again")
    )
    train(*ours, 2)
    infinity.save(*ours, folder / "saved")
    names = {one.name for one in read_manifest(folder / "saved").tensors}
    assert not any(".tiles." in name for name in names)
    infinity.load(*again, folder / "saved")
    assert train(*ours, 2, first=2) == train(*again, 2, first=2)


def test_slices_that_are_no_whole_blocks_of_int8_moments_are_exported_as_the_stacks_all_the_same(folder):
    model, optimizer = built(folder / "ours", "slices", "gpt_oss", state_dtype="int8")
    train(model, optimizer, 1)
    infinity.save_pretrained(model, folder / "files")
    expected = model.state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(folder / "files").state_dict()
    assert list(found) == list(expected)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
