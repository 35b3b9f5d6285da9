"""The Trainer's batches in parts, in one process: what is refused, and how a loader is shared.
Trusted: Accelerate's samplers. Sequences are faked; tests/sequences/test_ranks.py trains on two ranks.
"""

import contextlib
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader

import models
from infinity import UnsupportedError
from infinity.huggingface import split_sequences as module
from infinity.huggingface.split_sequences import (
    check_losses,
    check_split,
    compare_sequences,
    share,
    split_sequences,
)

ROWS = torch.arange(12).unsqueeze(1)


@pytest.mark.parametrize(("name", "whose"), [("sp_size", "DeepSpeed"), ("cp_size", "FSDP")])
def test_accelerates_own_division_of_sequences_is_refused_with_what_to_build_instead(name, whose):
    asked = accelerate.ParallelismConfig(**{name: 2})
    arguments = SimpleNamespace(parallelism_config=asked)
    with pytest.raises(UnsupportedError, match=rf"{name}=2.*{whose}.*Config\(sequence_parallel=2\)"):
        split_sequences(models.MODELS["llama"](), arguments)
    split_sequences(models.MODELS["llama"](), SimpleNamespace(parallelism_config=None))


def test_a_size_that_is_not_the_models_is_refused_with_both_and_its_own_is_taken(monkeypatch):
    monkeypatch.setattr(module, "is_divided", lambda _model: True)
    monkeypatch.setattr(module, "sequences_of", lambda _model: SimpleNamespace(size=4))
    model = models.MODELS["llama"]()
    compare_sequences(model, accelerate.ParallelismConfig(sp_size=4))
    compare_sequences(model, accelerate.ParallelismConfig())
    with pytest.raises(UnsupportedError, match=r"sp_size=2\), but 4 ranks share .*Llama.*Set sp_size=4"):
        compare_sequences(model, accelerate.ParallelismConfig(sp_size=2))
    with pytest.raises(UnsupportedError, match=r"cp_size=4.*FSDP"):
        compare_sequences(model, accelerate.ParallelismConfig(cp_size=4))


@pytest.mark.parametrize(("sequences", "rank"), [(1, 0), (2, 1)])
def test_the_ranks_of_a_sequence_are_given_the_batches_of_one(sequences, rank):
    """Four ranks: those of one sequence, or of two, see what one rank of one, or of two, would see."""

    def loader_of(ranks, place):
        sampler = BatchSampler(range(len(ROWS)), batch_size=2, drop_last=False)
        return DataLoader(ROWS, batch_sampler=BatchSamplerShard(sampler, ranks, place))

    shared, expected = loader_of(4, 3), loader_of(sequences, rank)
    share(shared, SimpleNamespace(data_ranks=sequences, data_rank=rank))
    assert len(shared) == len(expected) == 6 // sequences
    assert [one.tolist() for one in shared] == [one.tolist() for one in expected]


def test_a_loader_that_shares_its_batches_otherwise_is_refused_with_one_that_works():
    with pytest.raises(UnsupportedError, match=r"SequenceParallelLoader\(loader, self.model, batches="):
        share(DataLoader(ROWS), SimpleNamespace(data_ranks=1, data_rank=0))


@pytest.mark.parametrize("name", ["label_smoothing_factor", "compute_loss_func"])
def test_a_loss_that_the_trainer_makes_of_a_ranks_logits_is_refused_by_name(name):
    asked = {"label_smoothing_factor": 0.0, "compute_loss_func": None}
    check_losses(SimpleNamespace(**asked), SimpleNamespace(**asked))
    one = SimpleNamespace(**{**asked, name: 0.1})
    with pytest.raises(UnsupportedError, match=rf"{name}, where ranks share .*shift_labels"):
        check_losses(one, one)


class Trainer:
    """A Trainer on rank 1 of four, of which two share each sequence; faked but for its loader."""

    def __init__(self, model):
        self.model = model
        sampler = BatchSampler(range(len(ROWS)), batch_size=2, drop_last=False)
        self.loader = DataLoader(ROWS, batch_sampler=BatchSamplerShard(sampler, 4, 1))
        self.label_smoothing_factor, self.compute_loss_func = 0.0, None

    def get_train_dataloader(self):
        return self.loader

    def get_batch_samples(self, epoch_iterator, count):
        return [next(epoch_iterator) for _ in range(count)]

    def evaluation_loop(self, dataloader):
        return dataloader, self.whole


@pytest.fixture
def trainer(monkeypatch):
    """The Trainer that is made with a model of which two ranks share each sequence."""
    model = models.MODELS["llama"]()
    one = Trainer(model)
    one.whole = False

    @contextlib.contextmanager
    def whole():
        one.whole = True
        yield
        one.whole = False

    sequences = SimpleNamespace(size=2, data_ranks=2, data_rank=0, whole=whole)
    monkeypatch.setattr(module, "is_divided", lambda _model: True)
    monkeypatch.setattr(module, "sequences_of", lambda _model: sequences)
    monkeypatch.setattr(module, "made_trainer", lambda: one)
    monkeypatch.setattr(module, "SequenceParallelLoader", Split)
    split_sequences(model, SimpleNamespace(label_smoothing_factor=0.0))
    return one


class Split:
    """Stands for a loader that splits the batches of another."""

    def __init__(self, batches, sequences):
        self.batches = batches

    def __iter__(self):
        return (("part of", one.flatten().tolist()) for one in self.batches)

    def __len__(self):
        return 3


def test_a_trainers_batches_are_split_and_evaluations_see_whole_ones(trainer):
    loader = trainer.get_train_dataloader()
    assert trainer.get_batch_samples(iter(loader), 2) == [("part of", [0, 1]), ("part of", [4, 5])]
    assert trainer.evaluation_loop("loader") == ("loader", True)
    assert not trainer.whole


def test_a_loader_that_splits_its_batches_itself_is_left_as_it_is(trainer):
    own = trainer.loader = Split([torch.ones(1)], None)
    assert trainer.get_train_dataloader() is own
    assert trainer.get_batch_samples(iter([1, 2]), 2) == [1, 2]


def test_a_training_that_would_not_split_its_batches_is_refused_when_it_begins(trainer, monkeypatch):
    arguments = SimpleNamespace(ignore_data_skip=False, gradient_accumulation_steps=2, max_steps=10)
    own, model = Split([], None), trainer.model
    monkeypatch.setattr(module, "running_trainer", lambda: trainer)
    for steps in (0, 2, 4):  # epochs of three batches have two steps
        check_split(model, arguments, SimpleNamespace(global_step=steps), own)
    with pytest.raises(UnsupportedError, match="step 3 is in the middle of an epoch of 2 steps"):
        check_split(model, arguments, SimpleNamespace(global_step=3), own)
    check_split(model, arguments, SimpleNamespace(global_step=3), trainer.loader)
    monkeypatch.setattr(module, "running_trainer", lambda: Trainer(model))
    with pytest.raises(UnsupportedError, match="batches are not split: give it the callback"):
        check_split(model, arguments, SimpleNamespace(global_step=0), own)
