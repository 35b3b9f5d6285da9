"""Keys and values in host memory and on NVMe. Trusted: transformers' own cache."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infinity import AdamW, HostMemoryError, Init, KVCache, resume, stats
from infinity.engine.engine import engine_of_model
from infinity.errors import ConfigError

pytestmark = pytest.mark.disk
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
)
IDS = torch.arange(24).reshape(2, 12) % 128


def model_of(folder, memory="16MiB"):
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory=memory):
        model = LlamaForCausalLM(CONFIG)
    return model.eval()


def generate(model, cache=None, **options):
    given = {} if cache is None else {"cache": cache}
    return model.generate(IDS, max_new_tokens=20, do_sample=False, pad_token_id=0, **given, **options)


def test_tokens_are_those_of_transformers_own_cache_wherever_keys_and_values_lie(folder):
    model = model_of(folder)
    expected = generate(model)
    for share in ("1MiB", 4096):
        cache = KVCache(model, host_memory=share)
        assert torch.equal(generate(model, cache), expected)
        assert cache.get_seq_length() == IDS.shape[1] + 19
        assert (cache.nvme_nbytes > 0) == (share == 4096)
        assert cache.host_nbytes <= 2 << 19
    moved = stats(model)
    assert moved.nvme_written_nbytes > 0
    assert moved.divergences == 0


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 5}], ids=str)
def test_beams_and_a_prefill_in_chunks_give_the_same_tokens(folder, options):
    model = model_of(folder)
    assert torch.equal(
        generate(model, KVCache(model, host_memory=4096), **options), generate(model, **options)
    )


def test_the_share_comes_from_the_budget_and_goes_back_with_the_cache(folder):
    model = model_of(folder, "4MiB")
    generate(model)
    engine = engine_of_model(model)
    before = engine.kept.held_nbytes
    cache = KVCache(model, host_memory=engine.kept.limit_nbytes - (64 << 10))
    assert engine.kept.held_nbytes <= engine.kept.limit_nbytes
    assert torch.equal(generate(model, cache), generate(model))
    del cache
    assert engine.kept.held_nbytes <= before


def noting(told, name, call):
    def noted(*args):
        told.append(name)
        return call(*args)

    return noted


def test_in_a_durable_run_weights_make_room_when_a_commit_has_captured_them(folder, monkeypatch):
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory="4MiB", durable=True):
        model = LlamaForCausalLM(CONFIG)
    optimizer = AdamW(model.parameters())
    resume(model, optimizer)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    engine, told = engine_of_model(model), []
    for owner, name in ((engine.durable, "before_change"), (engine.pins, "make_room")):
        monkeypatch.setattr(owner, name, noting(told, name, getattr(owner, name)))
    KVCache(model, host_memory=engine.kept.limit_nbytes - (512 << 10))
    assert told == ["before_change", "make_room"]


def test_without_room_or_a_disk_the_numbers_and_the_cure_are_named(folder):
    model = model_of(folder)
    with pytest.raises(HostMemoryError, match=r"KVCache\(host_memory=1.0 GiB\) does not fit: .* works"):
        KVCache(model, host_memory="1GiB")
    with pytest.raises(ConfigError, match="Linear has no `config`"):
        KVCache(torch.nn.Linear(2, 2))
    in_memory = model_of(None)
    with pytest.raises(HostMemoryError, match="there is no NVMe tier"):
        generate(in_memory, KVCache(in_memory, host_memory=4096))
