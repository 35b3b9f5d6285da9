"""What stands for a weight in tiles. Trusted: torch.nn.init on a plain weight."""

import pytest
import torch
from torch import nn

from infinity.tiling import TiledEmbedding, TiledLinear

INITIALISATIONS = {
    "normal": lambda w: nn.init.normal_(w, 0.5, 2.0),
    "uniform": lambda w: nn.init.uniform_(w, -1, 3),
    "constant": lambda w: nn.init.constant_(w, 3.5),
    "xavier normal": nn.init.xavier_normal_,
    "xavier uniform": nn.init.xavier_uniform_,
    "kaiming normal": nn.init.kaiming_normal_,
    "kaiming uniform, fan out": lambda w: nn.init.kaiming_uniform_(w, mode="fan_out", nonlinearity="relu"),
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "data": lambda w: w.data.normal_().mul_(0.02),
    "copy": lambda w: w.detach().copy_(torch.arange(w.numel()).view(w.shape)),
    "generator": lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(7)),
}


@pytest.mark.parametrize("name", INITIALISATIONS)
@pytest.mark.parametrize("tiles", [(5, 1), (2, 3)])
def test_initialisation_gives_tiles_the_values_of_the_whole(name, tiles, seed):
    whole, tiled = nn.Linear(48, 160), TiledLinear(48, 160, out_tiles=tiles[0], in_tiles=tiles[1])
    torch.manual_seed(seed)
    with torch.no_grad():
        INITIALISATIONS[name](whole.weight)
        next_number = torch.rand(1)
        torch.manual_seed(seed)
        INITIALISATIONS[name](tiled.weight)
    assert torch.equal(tiled.state_dict()["weight"], whole.weight)
    assert torch.equal(torch.rand(1), next_number)


def test_metadata_is_that_of_the_whole():
    weight = TiledLinear(48, 160, out_tiles=5, dtype=torch.bfloat16).weight
    assert (tuple(weight.shape), weight.dtype, weight.numel(), weight.dim(), len(weight)) == (
        (160, 48),
        torch.bfloat16,
        160 * 48,
        2,
        160,
    )
    assert (str(weight.device), weight.is_meta, weight.requires_grad) == ("cpu", False, True)
    assert "5 tiles" in repr(weight)


def test_it_is_no_parameter_of_its_module():
    tiled = TiledLinear(48, 160, out_tiles=5)
    names = [name for name, _ in tiled.named_parameters()]
    assert names == [f"tiles.{number}.{name}" for number in range(5) for name in ("weight", "bias")]


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w + 1,
        lambda w: 2 * w,
        lambda w: torch.nn.functional.linear(torch.zeros(2, 48), w),
        lambda w: w.sum(),
        lambda w: w.clone(),
        lambda w: w.t(),
        lambda w: w.T,
        lambda w: w.grad,
        lambda w: w[:, 1],
        lambda w: w.tolist(),
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        lambda w: w.mul_(torch.zeros(160, 48)),
    ],
)
def test_every_use_of_its_values_is_an_error_that_says_what_to_do(use):
    with pytest.raises(RuntimeError, match="exists only in tiles"):
        use(TiledLinear(48, 160, out_tiles=5).weight)


def test_a_row_is_that_of_its_tile():
    embedding = TiledEmbedding(100, 8, row_tiles=4)
    with torch.no_grad():
        embedding.weight[70].fill_(5)
        embedding.weight[-1].fill_(7)
    weight = embedding.state_dict()["weight"]
    assert (weight == 5).all(1).nonzero().tolist() == [[70]]
    assert (weight == 7).all(1).nonzero().tolist() == [[99]]


def test_assigned_to_another_weight_it_ties_the_tiles():
    embedding, head = TiledEmbedding(100, 8, row_tiles=4), TiledLinear(8, 100, bias=False, out_tiles=4)
    head.weight = embedding.weight
    assert [one.weight for one in head.tiles] == [one.weight for one in embedding.tiles]
    assert all(a.weight is b.weight for a, b in zip(head.tiles, embedding.tiles, strict=True))
    state = nn.ModuleList([embedding, head]).state_dict()
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


def test_what_does_not_fit_cannot_be_tied():
    head = TiledLinear(8, 100, bias=False, out_tiles=4)
    with pytest.raises(ValueError, match="cut both the same way"):
        head.weight = TiledEmbedding(100, 8, row_tiles=5).weight
    with pytest.raises(TypeError, match="load_state_dict"):
        head.weight = nn.Parameter(torch.zeros(100, 8))
