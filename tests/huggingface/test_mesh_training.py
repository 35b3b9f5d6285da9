"""What a Trainer does on a mesh, in one process: what is refused, and what counts once. Trusted: Accelerate's
samplers. Faked: the mesh, its ranks, and the Trainer, but for the functions that are replaced. Real ranks
train so in test_trainer_meshes.py.
"""

from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

import infinity
import models
from infinity import UnsupportedError
from infinity.huggingface import mesh_training as module
from infinity.huggingface.mesh_training import check_on_mesh, train_on_mesh
from infinity.huggingface.trainer_setup import FOLDER

ROWS = torch.arange(16).unsqueeze(1)
ARGUMENTS = {
    "eval_use_gather_object": False,
    "save_only_model": False,
    "load_best_model_at_end": False,
    "average_tokens_across_devices": True,
    "train_sampling_strategy": "random",
    "include_num_input_tokens_seen": "no",
}


def loader_of(ranks, place):
    sampler = BatchSampler(range(len(ROWS)), batch_size=2, drop_last=False)
    return DataLoader(ROWS, batch_sampler=BatchSamplerShard(sampler, ranks, place))


class Accelerator:
    """Of four ranks, of which 0 and 1 have the same rows, and 2 and 3."""

    num_processes = 4

    def gather(self, values):
        return torch.cat([values, values, values + 10, values + 10])


class Trainer:
    """A Trainer on the last of four ranks."""

    def __init__(self, model):
        self.model = model
        self.loader = loader_of(4, 3)
        self.accelerator = Accelerator()
        self.state = SimpleNamespace(best_model_checkpoint=None)

    def get_train_dataloader(self):
        return self.loader

    def evaluation_loop(self, dataloader, *_args):
        counted = self._get_num_items_in_batch([2, 3])
        return counted, [self.accelerator.gather(one).flatten().tolist() for one in dataloader]

    def _get_num_items_in_batch(self, labels):
        return self.accelerator.gather(torch.tensor(labels)).tolist()


@pytest.fixture
def on_mesh(monkeypatch):
    """A model of two ranks beside each other, of which there are two."""
    with infinity.Init(host_memory="64MiB"):
        model = models.MODELS["llama"]()
    engine = SimpleNamespace(
        config=SimpleNamespace(sequence_parallel=1),
        ranks=SimpleNamespace(size=2, rank=1, members=[1, 3]),
        stages=SimpleNamespace(mesh=SimpleNamespace(several=True, ranks=SimpleNamespace(size=2))),
    )
    monkeypatch.setattr(module, "engine_of_model", lambda _model: engine)
    return model


@pytest.fixture
def trainer(on_mesh, monkeypatch):
    """The Trainer that is made with the model."""
    one = Trainer(on_mesh)
    monkeypatch.setattr(module, "made_trainer", lambda: one)
    train_on_mesh(on_mesh, SimpleNamespace(**ARGUMENTS))
    return one


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"eval_use_gather_object": True}, "eval_use_gather_object=True"),
        ({"save_only_model": True, "load_best_model_at_end": True}, "save_only_model=True.*infinity.save"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False.*too large"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"include_num_input_tokens_seen": "all"}, "tokens_seen='all'.*count a batch once for each"),
    ],
)
def test_settings_that_give_each_rank_what_is_its_own_are_refused_by_name(on_mesh, asked, says):
    with pytest.raises(UnsupportedError, match=says):
        train_on_mesh(on_mesh, SimpleNamespace(**{**ARGUMENTS, **asked}))


def test_what_is_trained_outside_of_the_mesh_is_refused_by_its_name(on_mesh):
    on_mesh.register_parameter("outside", nn.Parameter(torch.ones(2)))
    with pytest.raises(UnsupportedError, match="does not train outside, which was not built inside Init"):
        train_on_mesh(on_mesh, SimpleNamespace(**ARGUMENTS))


def test_ranks_beside_each_other_are_given_the_same_batches(trainer):
    expected = [one.tolist() for one in loader_of(2, 1)]
    assert [one.tolist() for one in trainer.get_train_dataloader()] == expected
    assert trainer.get_tp_size() == 2
    trainer.loader = DataLoader(ROWS)
    with pytest.raises(UnsupportedError, match=r"DataLoader does not share its batches.*dispatch_batches"):
        trainer.get_train_dataloader()


def test_an_evaluation_keeps_the_rows_of_one_rank_of_each_row_and_counts_labels_as_accelerate_does(trainer):
    counted, evaluated = trainer.evaluation_loop(loader_of(4, 3))
    assert evaluated == [[first, first + 1, first + 10, first + 11] for first in (2, 6, 10, 14)]
    assert counted == trainer._get_num_items_in_batch([2, 3]) == [2, 3, 2, 3, 12, 13, 12, 13]


def test_weights_of_a_checkpoint_come_from_the_files_of_infinity_save(trainer, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(module, "load", lambda *given: (loaded.append(given), torch.manual_seed(1)))
    trainer.state.best_model_checkpoint = str(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"no folder '{FOLDER}'.*saved with save_only_model"):
        trainer._load_best_model()
    (tmp_path / FOLDER).mkdir()
    before = torch.get_rng_state()
    trainer._load_from_checkpoint(str(tmp_path))
    assert loaded == [(trainer.model, None, tmp_path / FOLDER)]
    assert torch.equal(torch.get_rng_state(), before), "the Trainer restores its generators itself"


def test_a_trainer_that_was_made_without_the_callback_is_refused_when_it_begins(trainer, monkeypatch):
    monkeypatch.setattr(module, "running_trainer", lambda: trainer)
    check_on_mesh(trainer.model)
    monkeypatch.setattr(module, "running_trainer", lambda: Trainer(trainer.model))
    with pytest.raises(UnsupportedError, match="gives each of them other batches: give it the callback"):
        check_on_mesh(trainer.model)
