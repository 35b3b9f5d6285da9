"""A batch generated in tiles. Trusted: transformers' generate of each tile alone, and of the whole batch."""

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from infinity import AdamW, Init, KVCache, UnsupportedError, stats, tile_generation_
from infinity.engine.engine import engine_of_model
from infinity.huggingface.batch_tiles import tile_where_possible_
from infinity.tiling import tile_batch_, untile_

pytestmark = pytest.mark.disk
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
IDS = torch.arange(60).reshape(5, 12) * 7 % 128
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0


def model_of(folder, memory="1MiB", config=None):
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory=memory):
        model = MistralForCausalLM(config) if config else LlamaForCausalLM(LlamaConfig(**SIZES))
    return model.eval()


def generate(model, rows=slice(None), **options):
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(IDS[rows], attention_mask=MASK[rows], **given, **options)


def of_tiles(model, sequences, **options):
    return torch.cat([generate(model, rows, **options) for rows in torch.arange(5).split(sequences)])


@pytest.mark.parametrize("kept", ["transformers", "1MiB", "4KiB"])
def test_tokens_are_those_of_the_tiles_alone_and_each_pass_reads_the_weights_once(folder, kept):
    model = model_of(folder, "256KiB" if kept == "transformers" else "4MiB")
    expected = of_tiles(model, 2)
    generate(model)
    engine_of_model(model).lane.drain()
    before = stats(model)
    whole = generate(model)
    engine_of_model(model).lane.drain()
    plain = stats(model).since(before)
    names = tile_generation_(model, sequences=2)
    assert names == ["model.layers.0", "model.layers.1", "model.layers.2", "model.norm"]
    cache = None if kept == "transformers" else KVCache(model, host_memory=kept)
    generate(model)
    engine_of_model(model).lane.drain()
    before = stats(model)
    tokens = generate(model, cache=cache) if cache is not None else generate(model)
    engine_of_model(model).lane.drain()
    tiled = stats(model).since(before)
    assert torch.equal(tokens, expected)
    assert torch.equal(tokens, whole)
    assert tiled.rounds == plain.rounds == 12
    if cache is None:
        assert plain.nvme_read_nbytes > 0
        assert tiled.nvme_read_nbytes <= 1.02 * plain.nvme_read_nbytes
    else:
        assert (cache.nvme_nbytes > 0) == (kept == "4KiB")
        cache.reset()
        assert cache.host_nbytes + cache.nvme_nbytes == 0


def test_chunks_of_prompts_windows_of_attention_and_beams_work_in_tiles(folder):
    model = model_of(folder)
    beams, chunks = generate(model, num_beams=2), generate(model, prefill_chunk_size=5)
    tile_generation_(model, sequences=4)
    assert torch.equal(generate(model, num_beams=2), beams)
    assert torch.equal(generate(model, num_beams=2, cache=KVCache(model, host_memory=4096)), beams)
    assert torch.equal(generate(model, prefill_chunk_size=5), chunks)
    sliding = model_of(folder, config=MistralConfig(**SIZES, sliding_window=6))
    expected = of_tiles(sliding, 2)
    tile_generation_(sliding, sequences=2)
    assert torch.equal(generate(sliding), expected)


def test_training_between_and_behind_tiled_generations_keeps_its_bits(folder):
    losses = []
    for tiles in (False, True):
        model = model_of(folder)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            if tiles:
                tile_generation_(model, sequences=2 + step)
                generate(model)
            loss = model(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    untile_(model)
    assert "forward" not in model.model.layers[0].__dict__


def test_a_batch_of_one_tile_runs_as_it_is(folder):
    model = model_of(folder)
    expected = generate(model)
    tile_generation_(model, sequences=5)
    cache = DynamicCache(config=model.config)
    assert torch.equal(generate(model, cache=cache), expected)
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}


def test_what_cannot_be_cut_is_refused_by_name(folder):
    model = model_of(folder)
    with pytest.raises(ValueError, match="sequences=0: expected 1 or more"):
        tile_generation_(model, sequences=0)
    with pytest.raises(ValueError, match="Linear has no blocks of a known class"):
        tile_generation_(torch.nn.Linear(2, 2), sequences=2)
    filled = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, cache=filled)
    tile_generation_(model, sequences=2)
    for options, said in (
        ({"cache": filled}, "holds keys and values of a whole batch already"),
        ({"cache": DynamicCache()}, r"config=model.config"),
        ({"cache_implementation": "static"}, "StaticLayer cannot be cut"),
        ({"num_beams": 3}, "give tile_generation_ a multiple of num_beams"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            generate(model, **options)
    cache = DynamicCache(config=model.config)
    generate(model, cache=cache)
    tile_generation_(model, sequences=3)
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedError, match=r"in tiles of \[2, 2, 1\] .* tiles of \[3, 2\]"),
    ):
        model(IDS, cache=copy.deepcopy(cache))
    for change in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(IDS[0])):
        with pytest.raises(UnsupportedError, match="a cache in tiles cannot"):
            change()


def shared_keys():
    sizes = {**SIZES, "num_hidden_layers": 4, "pad_token_id": 0}
    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            **sizes,
            head_dim=16,
            global_head_dim=16,
            num_kv_shared_layers=2,
            layer_types=kinds,
            sliding_window=32,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=128,
        )
    )


def heads_in_front():
    return MptForCausalLM(MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=128, max_seq_len=64))


@pytest.mark.parametrize(
    ("build", "why"),
    [(shared_keys, "KVSharingDict"), (heads_in_front, r"position_bias of shape \(4, 1, ")],
)
def test_what_tiles_would_share_or_cut_wrongly_is_refused_or_runs_whole(folder, caplog, build, why):
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory="4MiB"):
        model = build().eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        tile_generation_(model, sequences=1)
        with pytest.raises(UnsupportedError, match=why):
            model(input_ids=IDS)
        reasons = tile_where_possible_(model, 1)
        assert reasons == []
        for _ in range(2):
            assert torch.equal(model(input_ids=IDS).logits, expected)
    assert len(reasons) == 1
    assert len([text for text in caplog.messages if "run whole, not in tiles" in text]) == 1


@pytest.mark.parametrize(
    ("build", "why"), [(shared_keys, "KVSharingDict"), (heads_in_front, r"position_bias of shape \(4, 1, ")]
)
def test_tiles_of_training_refuse_what_blocks_hand_each_other_and_what_has_heads_in_front(build, why):
    model = build()
    tile_batch_(model, 1)
    with pytest.raises(ValueError, match=why):
        model(input_ids=IDS, labels=IDS, use_cache=False)


def test_encoder_decoders_are_refused(folder):
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    with Init(nvme=folder, host_memory="4MiB"):
        model = BartForConditionalGeneration(
            BartConfig(
                d_model=64, encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=128, **sizes
            )
        ).eval()
    tile_generation_(model, sequences=1)
    with pytest.raises(UnsupportedError, match="EncoderDecoderCache"):
        model.generate(IDS, attention_mask=MASK, max_new_tokens=2, do_sample=False)
