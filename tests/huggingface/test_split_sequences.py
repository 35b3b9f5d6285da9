"""The Trainer's batches in parts, in one process: what is refused, and how a loader is shared.
Trusted: Accelerate's samplers. Sequences are faked; tests/sequences/test_ranks.py trains on two ranks.
"""

from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader

import models
from infinity import UnsupportedError
from infinity.huggingface import split_sequences as module
from infinity.huggingface.split_sequences import check_losses, compare_sequences, share, split_sequences

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
