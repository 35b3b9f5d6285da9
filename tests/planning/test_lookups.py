"""Embeddings of an outline in blocks of rows. Trusted: the engine, with a small Llama on a real disk."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.bench.planning.planned import Question, answer
from infinity.engine.engine import engine_of_model
from infinity.planning import lookups, tile_size
from infinity.planning.activations import Method
from infinity.planning.architectures import outline_of_config
from infinity.planning.demand import demand
from infinity.planning.setting import Setting

ROWS, WIDTH, TOKENS = 2048, 64, 4
SIZES = {
    "vocab_size": ROWS,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
OUTLINE = outline_of_config("small", {"model_type": "llama", **SIZES})
TIED = outline_of_config("small", {"model_type": "llama", "tie_word_embeddings": True, **SIZES})
SETTING = Setting(512 << 10, method=Method(TOKENS, TOKENS))
EMBEDDING = ROWS * WIDTH


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 32 rows, so that a small embedding has as many as a large one."""
    monkeypatch.setattr(tile_size, "LEAST_FEW_ROWS_NBYTES", 32 * 2 * WIDTH)


def train(folder, micro_batches, steps=6):
    """Train on the same ids in each step; return stats of all but the first two, and all of them."""
    with infinity.Init(nvme=folder, host_memory=SETTING.host_nbytes):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    optimizer = infinity.AdamW(model.parameters(), speculate=False)
    ids = torch.arange(TOKENS)[None] * 500  # each in a block of its own
    for step in range(steps):
        if step == 2:
            engine_of_model(model).lane.drain()
            before = infinity.stats(model)
        for _ in range(micro_batches):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine_of_model(model).lane.drain()
    return infinity.stats(model).since(before), steps - 2, infinity.stats(model).nvme_nbytes


@pytest.mark.disk
@pytest.mark.filterwarnings("ignore:`use_cache=True`")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_moves_what_was_planned_and_the_disk_has_room_for_what_it_takes(
    folder, micro_batches, monkeypatch
):
    monkeypatch.setattr(lookups, "used_blocks", lambda blocks, _tokens: min(blocks, TOKENS))
    setting = replace(SETTING, micro_batches=micro_batches)
    need = answer(Question(OUTLINE, setting)).demand
    done, steps, stored_nbytes = train(folder, micro_batches)
    assert done.nvme_read_nbytes / steps == pytest.approx(need.read_nbytes, rel=0.01)
    assert done.nvme_written_nbytes / steps == pytest.approx(need.written_nbytes, rel=0.01)
    assert stored_nbytes <= need.nvme_nbytes <= 1.15 * stored_nbytes
    whole = demand(OUTLINE, setting)
    saved = whole.read_nbytes + whole.written_nbytes - need.read_nbytes - need.written_nbytes
    assert saved > 15 * EMBEDDING


def test_blocks_that_are_looked_up_are_units_of_their_own_and_the_others_are_idle():
    cut = lookups.in_blocks_of_rows(OUTLINE, SETTING)
    idle = [part for part in cut.parts if part.idle]
    blocks = [part for part in cut.parts if ".tiles." in part.name]
    assert (cut.parameters, len(idle), len(blocks)) == (OUTLINE.parameters, 1, TOKENS)
    assert {part.shapes[0] for part in blocks} == {(32, WIDTH)}
    assert idle[0].shapes == ((ROWS - 32 * TOKENS, WIDTH),)
    assert demand(cut, SETTING).in_use_nbytes <= demand(OUTLINE, SETTING).in_use_nbytes


@pytest.mark.parametrize(
    ("outline", "changes"),
    [
        (TIED, {}),
        (OUTLINE, {"nvme": False}),
        (OUTLINE, {"state_dtype": "int8"}),
        (OUTLINE, {"host_nbytes": 1 << 30}),
    ],
    ids=["tied", "no NVMe", "moments in 8 bits", "host memory holds it"],
)
def test_embeddings_stay_whole_where_init_keeps_them_so(outline, changes):
    cut = lookups.in_blocks_of_rows(outline, replace(SETTING, **changes))
    assert [part.name for part in cut.parts] == [part.name for part in outline.parts]


def test_many_tokens_are_in_all_blocks_and_few_in_as_many_as_chance_has_it():
    assert lookups.used_blocks(64, 10_000) == 64
    assert lookups.used_blocks(64, 1) == 1
    assert lookups.used_blocks(64, 64) == 41  # 1 - 1/e of them
    assert not any(
        part.idle for part in lookups.in_blocks_of_rows(OUTLINE, replace(SETTING, method=Method())).parts
    )
