"""Embeddings cut by their rows without anybody asking: what is not looked up costs nothing.

Real training on a real disk, against the reference recipe in memory. Trusted: torch's own nn.Embedding.
"""

import gc
import logging

import pytest
import torch
import transformers
from torch import nn

import infinity
import models
from allocations import Allocations
from infinity import AdamW, Init, tiling
from infinity.engine.engine import engine_of_model
from infinity.planning import tile_size
from infinity.ranks import machine_memory
from infinity.reference import ReferenceAdamW, prepare

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("deterministic")]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
ROWS, WIDTH = 4096, 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 32 rows, so that a small embedding has as many as a large one."""
    monkeypatch.setattr(tile_size, "LEAST_FEW_ROWS_NBYTES", 32 * 2 * WIDTH)


class Lookup(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, WIDTH, **settings), nn.Linear(WIDTH, 8)

    def forward(self, ids):
        return self.head(self.embed(ids)).float().square().sum()


class AlsoWhole(Lookup):
    """Uses the weight of its embedding as a whole, too."""

    def forward(self, ids):
        return super().forward(ids) + (self.embed(ids) @ self.embed.weight.t()).float().square().mean()


def models_of(folder, kind=Lookup, **settings):
    """Return a model offloaded, and the same in memory."""
    torch.manual_seed(0)
    plain = prepare(kind(**settings))
    torch.manual_seed(0)
    with Init(nvme=folder, host_memory="2MiB"):
        return kind(**settings), plain


def both(folder, kind=Lookup, **settings):
    """Return (model, optimizer) offloaded, and the same in memory."""
    ours, plain = models_of(folder, kind, **settings)
    optimizers = AdamW(ours.parameters(), **SETTINGS), ReferenceAdamW(plain.parameters(), **SETTINGS)
    return (ours, optimizers[0]), (plain, optimizers[1])


def step(ours, plain, ids):
    losses = []
    for model, optimizer in (ours, plain):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def moved(model, steps):
    """Return the NVMe bytes per parameter and step of `steps` of these ids."""
    engine_of_model(model).lane.drain()
    before = infinity.stats(model)
    for one in steps:
        one()
    engine_of_model(model).lane.drain()
    done = infinity.stats(model).since(before)
    return (done.nvme_read_nbytes + done.nvme_written_nbytes) / done.parameters / len(steps)


def blocks_of(model):
    """Return the number of blocks of each embedding that is cut."""
    return [len(one.tiles) for one in model.modules() if isinstance(one, tiling.TiledEmbedding)]


@pytest.mark.parametrize("settings", [{"padding_idx": 70}, {"scale_grad_by_freq": True}])
def test_rows_that_are_not_looked_up_are_neither_read_nor_written_and_bits_are_the_recipes(folder, settings):
    ours, plain = both(folder, **settings)
    assert blocks_of(ours[0]) == [ROWS // 32]
    few = torch.tensor([3, 70, 3, 4000, 70, 70])
    step(ours, plain, torch.arange(0, ROWS, 16))
    for _ in range(2):
        step(ours, plain, few)
    assert moved(ours[0], [lambda: step(ours, plain, few)] * 4) <= 1
    step(ours, plain, torch.arange(0, ROWS, 61))
    models.assert_same_state(*ours, *plain)
    assert list(ours[0].state_dict()) == list(plain[0].state_dict())


class Tied(Lookup):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight


class Clipped(Lookup):
    def __init__(self):
        super().__init__(max_norm=1.0)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


class OfAnotherClass(Lookup):
    def __init__(self):
        super().__init__()
        self.embed = Scaled(ROWS, WIDTH)


class Hooked(Lookup):
    def __init__(self):
        super().__init__()
        self.embed.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("kind", [Tied, Clipped, OfAnotherClass, Hooked, lambda: Lookup(sparse=True)])
def test_embeddings_whose_weight_is_used_otherwise_stay_whole(folder, kind):
    with Init(nvme=folder, host_memory="4MiB"):
        model = kind()
    assert blocks_of(model) == []


LARGE = {"host_memory": "64MiB"}
"""What holds all of the model."""
STAYS_WHOLE = [{"experts": "whole"}, {"state_dtype": "int8"}, LARGE, {"nvme": None, **LARGE}]


@pytest.mark.parametrize("settings", STAYS_WHOLE)
def test_embeddings_stay_whole_where_that_is_asked_for_or_saves_nothing(folder, settings):
    with Init(**{"nvme": folder, "host_memory": "2MiB", **settings}):
        model = Lookup()
    assert blocks_of(model) == []


def test_a_small_embedding_stays_whole(folder):
    with Init(nvme=folder, host_memory="512KiB"):
        model = nn.Sequential(nn.Embedding(15 * 32, WIDTH), nn.Embedding(16 * 32, WIDTH))
    assert blocks_of(model) == [16]


def test_code_that_uses_the_weight_as_a_whole_gets_it_and_the_log_says_so_once(folder, caplog):
    caplog.set_level(logging.WARNING, logger="infinity")
    ours, plain = both(folder, AlsoWhole)
    for number in range(3):
        step(ours, plain, torch.tensor([3, 70, number]))
    models.assert_same_state(*ours, *plain)
    said = [one for one in caplog.messages if "as a whole" in one]
    assert len(said) == 1
    assert "weight of 4096 x 64 as a whole, which is kept in 128 slices" in said[0]


def test_the_weight_is_read_and_changed_in_gathered_as_ever(folder):
    ours, plain = both(folder)
    step(ours, plain, torch.tensor([3, 70]))
    expected = plain[0].embed.weight
    with infinity.gathered(ours[0].embed), torch.no_grad():
        weight = ours[0].embed.weight
        assert torch.equal(weight[5:900], expected[5:900])
        assert torch.equal(weight.float().norm(), expected.float().norm())
        assert weight.shape == (ROWS, WIDTH)
        assert weight.grad is None
    with infinity.gathered(ours[0].embed, write=True), torch.no_grad():
        ours[0].embed.weight[31:34] = 1
        ours[0].embed.weight.data.clamp_(-0.5, 0.5)
    found = ours[0].state_dict()["embed.weight"]
    changed = expected.detach().clone()
    changed[31:34] = 1
    assert torch.equal(found, changed.clamp(-0.5, 0.5))
    with pytest.raises(infinity.NotResidentError, match=r"embed\.tiles\.0\.weight"):
        ours[0].embed.weight.float()


def test_the_weight_may_be_named_to_an_optimizer(folder):
    pairs = []
    for model, kind in zip(models_of(folder), (AdamW, ReferenceAdamW), strict=True):
        of_embedding = {"params": [model.embed.weight], "lr": 1e-3}
        pairs.append((model, kind([of_embedding, {"params": list(model.head.parameters())}], **SETTINGS)))
    for number in range(3):
        step(*pairs, torch.tensor([3, 70, number]))
    models.assert_same_state(*pairs[0], *pairs[1])


class OfBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, ids):
        return self.block(self.embed(ids)).float().square().sum()


def test_micro_batches_of_one_forward_give_the_gradients_of_an_embedding_that_is_whole(folder):
    found = []
    for experts in ("whole", "slices"):
        (folder / experts).mkdir()
        torch.manual_seed(0)
        with Init(nvme=folder / experts, host_memory="2MiB", experts=experts):
            model = OfBlocks()
        assert "embed" in tiling.tile_batch_(model, 2, blocks=nn.Linear)
        ids = torch.randint(0, 300, (7, 40), generator=torch.Generator().manual_seed(1))
        model(ids).backward()
        pieces = model.embed.tiles if experts == "slices" else [model.embed]
        grads = [one.weight.grad for one in pieces]
        found.append(
            torch.cat(
                [
                    torch.zeros(one.weight.shape) if grad is None else torch.zeros(one.weight.shape) + grad
                    for one, grad in zip(pieces, grads, strict=True)
                ]
            )
        )
    assert torch.equal(found[0], found[1])
    assert found[0].any()


def test_ids_that_are_no_rows_are_named(folder):
    with Init(nvme=folder, host_memory="4MiB"):
        model = Lookup()
    with pytest.raises(IndexError, match="ids range from -1 to 4096, but the embedding has 4096 rows"):
        model(torch.tensor([-1, 4096]))


def test_checkpoints_of_whole_embeddings_load_and_the_other_way_round(folder):
    kept = {}
    for experts in ("whole", "slices"):
        (folder / experts).mkdir()
        with Init(nvme=folder / experts, host_memory="2MiB", experts=experts):
            model = Lookup()
        kept[experts] = model, AdamW(model.parameters(), **SETTINGS)
    ids = torch.tensor([3, 70, 4000])

    def train(model, optimizer):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for source, target in (("whole", "slices"), ("slices", "whole")):
        train(*kept[source])
        infinity.save(*kept[source], folder / f"of {source}")
        infinity.load(*kept[target], folder / f"of {source}")
        assert train(*kept[source]) == train(*kept[target])
    found, expected = kept["slices"][0].state_dict(), kept["whole"][0].state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_a_durable_run_whose_embedding_is_whole_names_the_setting_to_go_on_with(folder):
    def build(experts):
        with Init(nvme=folder, host_memory="2MiB", durable=True, experts=experts):
            model = Lookup()
        return model, AdamW(model.parameters(), **SETTINGS)

    for experts in ("whole", "slices", "whole"):
        pair = build(experts)
        if experts == "slices":
            told = r'2 units in the commit, 129.*experts="whole"'
            with pytest.raises(infinity.CheckpointError, match=told):
                infinity.resume(*pair)
        else:
            done = infinity.resume(*pair)
            pair[0](torch.tensor([3])).backward()
            pair[1].step()
            infinity.commit(pair[0])
        del pair
        gc.collect()
    assert done == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_of_from_pretrained_stay_in_their_files_by_rows_and_leave_them_when_they_train(folder, dtype):
    config = transformers.LlamaConfig(**{**models.SIZES, "vocab_size": ROWS, "hidden_size": WIDTH})
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    plain.save_pretrained(folder / "files")
    (folder / "nvme").mkdir()
    with Init(nvme=folder / "nvme", host_memory="2MiB"):
        ours = transformers.LlamaForCausalLM.from_pretrained(folder / "files", dtype=dtype)
    assert blocks_of(ours) == [128]
    blocks = [one for one in engine_of_model(ours).units if "embed_tokens" in one.name]
    assert [one.record.in_files is not None for one in blocks] == [dtype == "bfloat16"] * 128
    reference = transformers.LlamaForCausalLM.from_pretrained(folder / "files", dtype=dtype)
    reference = prepare(reference)
    pairs = (
        (ours, AdamW(ours.parameters(), **SETTINGS)),
        (
            reference,
            ReferenceAdamW(reference.parameters(), **SETTINGS),
        ),
    )
    for number in range(3):
        ids = torch.tensor([[3, 70, 4000 + number]])
        losses = []
        for model, optimizer in pairs:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    models.assert_same_state(*pairs[0], *pairs[1])


def test_eight_of_65536_rows_move_less_than_a_byte_per_parameter(folder, monkeypatch, seed):
    monkeypatch.setattr(tile_size, "LEAST_ROWS_NBYTES", 4 * tile_size.LEAST_SLICE_NBYTES)
    with Init(nvme=folder, host_memory="16MiB"):
        model = nn.Sequential(nn.Embedding(65_536, 512), nn.Linear(512, 1))
    optimizer, random = AdamW(model.parameters(), **SETTINGS), torch.Generator().manual_seed(seed)
    assert blocks_of(model) == [256]

    def train():
        model(torch.randint(65_536, (8,), generator=random)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    assert 0.4 < moved(model, [train] * 4) <= 1


class AlsoInAList(Lookup):
    """Has the weight in a list, too, of which torch knows nothing, and uses it."""

    def __init__(self):
        super().__init__()
        self.tied = [self.embed.weight]

    def forward(self, ids):
        return super().forward(ids) + (self.embed(ids) @ self.tied[0].t()).float().square().mean()


def test_an_embedding_that_was_written_is_cut_without_room_for_all_of_it(folder):
    torch.manual_seed(0)
    plain = prepare(nn.Embedding(8 * ROWS, WIDTH))
    torch.manual_seed(0)
    with Allocations() as counted, Init(nvme=folder, host_memory="2MiB"):
        model = nn.ModuleList([nn.Embedding(8 * ROWS, WIDTH), nn.Linear(1024, 512)])
        before = counted.live_nbytes
        counted.peak_nbytes = before
    assert blocks_of(model) == [256]
    assert counted.peak_nbytes - before < model[0].weight.numel() * 4 * 0.75
    with infinity.gathered(model):
        assert torch.equal(model[0].weight, plain.weight)


def test_a_weight_that_something_else_refers_to_stays_whole_and_trains(folder):
    ours, plain = both(folder, AlsoInAList)
    assert blocks_of(ours[0]) == []
    for number in range(2):
        step(ours, plain, torch.tensor([3, 70, number]))
    models.assert_same_state(*ours, *plain)


def test_a_weight_with_a_hook_of_its_gradient_stays_whole(folder):
    seen = []
    with Init(nvme=folder, host_memory="2MiB"):
        model = Lookup()
        model.embed.weight.register_hook(lambda grad: seen.append(grad.shape))
    model(torch.tensor([3])).backward()
    assert seen == [(ROWS, WIDTH)]


def in_view(weight):
    weight.data.view(-1)[40 * WIDTH : 42 * WIDTH].fill_(6)


EDITS = [
    lambda w: w.data[40].zero_(),
    lambda w: w.data[31:34].fill_(9.0),
    lambda w: w[31:34].data.zero_(),
    lambda w: w[31:34].copy_(torch.ones(3, WIDTH)),
    in_view,
    lambda w: w.narrow(0, 31, 2).zero_(),
    lambda w: nn.init.zeros_(w[31:34]),
    lambda w: w.t()[:, 40].fill_(3.0),
    lambda w: w.detach().index_fill_(0, torch.tensor([3, 70]), 2.0),
    lambda w: torch.add(w, 1, out=w.data),
    lambda w: setattr(w, "data", torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)),
    lambda w: w.add_(w),
]


def test_what_is_written_to_views_of_the_weight_is_kept_and_torchs(folder):
    ours, plain = models_of(folder)
    for number, edit in enumerate(EDITS):
        with infinity.gathered(ours, write=True), torch.no_grad():
            edit(ours.embed.weight)
        with torch.no_grad():
            edit(plain.embed.weight)
        assert torch.equal(ours.state_dict()["embed.weight"], plain.embed.weight), number


def test_a_view_of_the_weight_sees_what_a_block_is_given_and_the_forward_what_a_view_is(folder):
    ours, _ = models_of(folder)
    ids = torch.tensor([3, 70])
    with infinity.gathered(ours, write=True), torch.no_grad():
        values = ours.embed.weight.data
        ours.load_state_dict({**ours.state_dict(), "embed.weight": torch.ones(ROWS, WIDTH)})
        assert torch.equal(values, torch.ones_like(values))
        values[3] = 2
        assert torch.equal(ours.embed(ids)[0], values[3])
        del values
    assert ours.state_dict()["embed.weight"][[3, 4], 0].tolist() == [2, 1]


def test_a_change_of_a_view_where_changes_are_not_kept_is_an_error(folder):
    ours, _ = models_of(folder)
    changed = pytest.raises(infinity.UnsupportedError, match=r"embed\.tiles\.1\.weight was changed inside")
    with changed, infinity.gathered(ours), torch.no_grad():
        ours.embed.weight[40:42].zero_()


def test_an_edit_inside_a_look_is_kept_and_seen_by_it(folder):
    ours, _ = models_of(folder)
    with infinity.gathered(ours):
        assert ours.embed.weight[40, 0] != 2
        with infinity.gathered(ours, write=True), torch.no_grad():
            ours.embed.weight[40:42].fill_(2)
        assert ours.embed.weight[40, 0] == 2
    assert (ours.state_dict()["embed.weight"][40:42] == 2).all()


def test_a_view_of_the_weight_that_outlives_its_memory_is_an_error(folder):
    ours, _ = models_of(folder)
    kept = []
    outlived = pytest.raises(
        infinity.NotResidentError, match="an embedding, or a stack of experts: a tensor that shares memory"
    )
    with outlived, infinity.gathered(ours, write=True):
        kept.append(ours.embed.weight.data[5:7])


def test_memory_for_the_whole_weight_that_is_not_there_is_an_error(folder, monkeypatch):
    ours, _ = models_of(folder)
    refused = pytest.raises(infinity.HostMemoryError, match="a weight in blocks of rows")
    with refused, infinity.gathered(ours):
        monkeypatch.setattr(machine_memory, "available_nbytes", lambda: 1)
        ours.embed.weight.float()


def test_gradients_of_the_whole_weight_inside_gathered_are_the_blocks(folder):
    ours, plain = models_of(folder)
    with infinity.gathered(ours):
        ours.embed.weight[60:70].float().square().sum().backward()
        grads = [one.weight.grad for one in ours.embed.tiles]
        assert torch.equal(
            grads[2] + torch.zeros(32, WIDTH),
            (2 * plain.embed.weight[64:96].float()) * (torch.arange(32) < 6)[:, None],
        )


def test_a_plain_tensor_is_changed_by_the_weight_and_not_the_weight(folder):
    ours, plain = models_of(folder)
    average = torch.zeros(ROWS, WIDTH)
    with infinity.gathered(ours), torch.no_grad():
        assert average.copy_(ours.embed.weight) is average
        average.mul_(0.5).add_(ours.embed.weight, alpha=0.5)
    assert torch.equal(average, plain.embed.weight.float())
    assert torch.equal(ours.state_dict()["embed.weight"], plain.embed.weight)


def test_where_nothing_is_looked_up_there_are_gradients_all_the_same(folder):
    ours, plain = both(folder)
    step(ours, plain, torch.tensor([3, 70]))
    empty = torch.zeros(1, 0, dtype=torch.long)
    assert ours[0].embed(empty).requires_grad
    step(ours, plain, empty)
    models.assert_same_state(*ours, *plain)


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizers_state_dict_has_the_shapes_of_torchs_at_every_budget(folder, named):
    ours, plain = models_of(folder)
    optimizer = AdamW(ours.named_parameters() if named else ours.parameters(), **SETTINGS)
    reference = ReferenceAdamW(plain.parameters(), **SETTINGS)
    of_torch = torch.optim.AdamW(plain.named_parameters() if named else plain.parameters(), **SETTINGS)
    (folder / "whole").mkdir()
    with Init(nvme=folder / "whole", host_memory="2MiB", experts="whole"):
        whole = Lookup()
    step((ours, optimizer), (plain, reference), torch.tensor([3, 70]))
    found = optimizer.state_dict()
    other = AdamW(whole.named_parameters() if named else whole.parameters(), **SETTINGS)
    other.load_state_dict(found)
    of_torch.load_state_dict(found)
    assert of_torch.state[plain.embed.weight]["exp_avg"].shape == (ROWS, WIDTH)
    (group,) = found["param_groups"]
    assert group["params"] == [0, 1, 2]
    if named:
        assert group["param_names"] == ["embed.weight", "head.weight", "head.bias"]
    for source, dtype in ((other, torch.float32), (of_torch, torch.bfloat16)):  # torch's are the weights'
        optimizer.load_state_dict(source.state_dict())
        again = optimizer.state_dict()["state"]
        for number, state in found["state"].items():
            assert all(
                torch.equal(again[number][key], value.to(dtype).float()) for key, value in state.items()
            )
    wrong = {**found, "state": {0: {**found["state"][0], "exp_avg": torch.zeros(3, 4)}}}
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0: \(3, 4\), expected \(4096, 64\)"):
        optimizer.load_state_dict(wrong)


def test_the_state_of_the_weight_is_read_and_written_whole(folder):
    ours, plain = both(folder)
    assert ours[0].embed.weight not in ours[1].state
    step(ours, plain, torch.tensor([3, 70]))
    state = ours[1].state[ours[0].embed.weight]
    assert ours[0].embed.weight in ours[1].state
    assert state["step"] == 1
    assert state["exp_avg"].shape == (ROWS, WIDTH)
    assert state["exp_avg"][[3, 70]].any()
    state["exp_avg"] = torch.ones(ROWS, WIDTH)
    assert ours[1].state[ours[0].embed.tiles[-1].weight]["exp_avg"].eq(1).all()
    with pytest.raises(ValueError, match=r"expected a tensor of shape \(4096, 64\)"):
        state["exp_avg"] = torch.ones(3)


def test_the_weight_alone_may_be_gathered(folder):
    ours, plain = models_of(folder)
    with infinity.gathered(ours.embed.weight):
        assert torch.equal(ours.embed.weight.clone(), plain.embed.weight)


def tied_after(model):
    model.other = nn.Linear(WIDTH, ROWS, bias=False)
    model.other.weight = model.embed.weight


def given_another(model):
    model.embed.weight = nn.Parameter(torch.ones(ROWS, WIDTH))


def clipped(model):
    model(torch.tensor([3])).backward()
    nn.utils.clip_grad_norm_([model.embed.weight], 1.0)


def with_other_values(model):
    torch.func.functional_call(model, model.state_dict(), (torch.tensor([3]),))


def of_another_shape(model):
    with infinity.gathered(model, write=True):
        model.embed.weight.data = torch.ones(3, 4)


REFUSED = [
    tied_after,
    given_another,
    clipped,
    with_other_values,
    of_another_shape,
    lambda model: model.embed.weight.register_hook(print),
    lambda model: setattr(model.embed.weight, "grad", torch.zeros(ROWS, WIDTH)),
]


def test_what_blocks_cannot_do_is_an_error_that_names_the_setting_and_no_tiles(folder):
    ours, _ = models_of(folder)
    for use in REFUSED:
        with pytest.raises(infinity.UnsupportedError, match='experts="whole"') as refused:
            use(ours)
        assert "tile" not in str(refused.value), use
        assert "kept in blocks of rows" in str(refused.value), use
