"""The size of tiles where nobody has said it, and plans in them. Trusted: memory.divide, tiling.tile_."""

import logging

import pytest
import torch
from rich.console import Console
from torch import nn

import infinity
from infinity import tiling
from infinity.bench.planning import cuts
from infinity.bench.planning.meta import outline_of_model
from infinity.planning.budget import divide
from infinity.planning.tile_size import LEAST_NBYTES, tile_choice

MIB = 1 << 20


@pytest.mark.parametrize("total", [128 * MIB, 512 * MIB, 4096 * MIB])
def test_a_tile_fits_the_share_that_waits_twice_and_the_share_that_leaves_once(total):
    choice = tile_choice(total)
    budget = divide(total, choice.nbytes)
    assert 2 * choice.nbytes <= budget.ahead_nbytes
    assert choice.nbytes <= budget.outgoing_nbytes
    assert "an eighth of host_memory" in choice.reason
    assert choice.of_built(4) == 2 * choice.nbytes


def test_a_small_device_decides_and_no_tile_is_smaller_than_is_worth_it():
    assert tile_choice(4096 * MIB, 256 * MIB).nbytes == 64 * MIB
    assert "device_memory" in tile_choice(4096 * MIB, 256 * MIB).reason
    assert tile_choice(4096 * MIB, 4096 * MIB) == tile_choice(4096 * MIB)
    assert tile_choice(MIB).nbytes == LEAST_NBYTES
    assert "more time" in tile_choice(MIB).reason


@pytest.mark.disk
def test_init_chooses_tells_why_and_can_be_overridden(folder, caplog):
    def build(tile_above):
        with infinity.Init(nvme=str(folder), host_memory="1MiB", tile_above=tile_above):
            return nn.Sequential(nn.Linear(2048, 4096), nn.Linear(64, 64))

    with caplog.at_level(logging.INFO, "infinity"):
        model = build("auto")
    assert [type(one).__name__ for one in model] == ["TiledLinear", "Linear"]
    assert len(model[0].tiles) == 2
    told = [one.message for one in caplog.records if "tiles" in one.message]
    assert told == [f"a Linear of 4096 x 2048 is built in 2 tiles by {tile_choice(MIB).reason}"]
    assert type(build(None)[0]) is nn.Linear
    assert len(build("4MiB")[0].tiles) == 8


def test_a_plan_cuts_what_tile_cuts(capsys):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(1000, 64)
            self.blocks = nn.ModuleList(nn.Linear(64, 256 if one else 4096) for one in range(2))

        def forward(self, input_ids, attention_mask):
            return self.blocks[1](self.blocks[0](self.embedding(input_ids))[..., :64])

    with torch.device("meta"):
        model = Model().to(torch.bfloat16)
    whole = outline_of_model(model)
    outline = cuts.tiled(whole, 1 << 16, MIB, None, Console(width=200))
    told = capsys.readouterr().out
    tiling.tile_(model, above=1 << 16)
    tiles = [one for one in model.modules() if isinstance(one, tiling.Tile) or type(one) is nn.Linear]
    expected = [tuple(tuple(p.shape) for p in one.parameters()) for one in tiles]
    assert [part.shapes for part in outline.parts] == expected
    assert outline.parameters == whole.parameters
    assert sorted(unit for stage in outline.stages for unit in stage.units) == list(range(len(tiles)))
    assert "embedding: 1000 x 64, 125.0 KiB, in 2 tiles of" in told
    assert cuts.tiled(whole, None, MIB, None, Console()) is whole
    cuts.tiled(whole, "auto", MIB, None, Console(width=200))
    assert "tile_above: 8.0 MiB, as smaller tiles" in capsys.readouterr().out
