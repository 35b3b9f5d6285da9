"""A loop of Accelerate with sp_size, in one process: what is refused, and what counts once for a sequence.
Trusted: Accelerate. Faked: ranks that share a sequence; tests/sequences/test_ranks.py trains on real ones.
"""

from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DistributedType
from torch.utils.data import BatchSampler, DataLoader

import infinity
import models
from infinity import SequenceParallelLoader, UnsupportedError
from infinity.huggingface import ParallelismConfig
from infinity.huggingface import accelerate_loop as module
from infinity.huggingface.accelerate_loop import _once_each, _SplitLoop, compare
from infinity.sequences.batches import split

DATA = [{"input_ids": torch.arange(4) + 10 * row} for row in range(12)]


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture
def kept():
    with infinity.Init(host_memory="64MiB"):
        return models.MODELS["llama"]()


def of_cpus(ranks, kind=DistributedType.MULTI_CPU):
    """An Accelerator of several processes, as it is while it is made."""
    return SimpleNamespace(
        multi_device=False,
        is_fsdp2=False,
        is_main_process=True,
        num_processes=ranks,
        distributed_type=kind,
        **dict.fromkeys(
            (
                "prepare",
                "prepare_data_loader",
                "prepare_scheduler",
                "gather_for_metrics",
                "skip_first_batches",
            )
        ),
        prepare_model=lambda model, *_: model,
        _models=[],
    )


def rank_of(sequences, size, place):
    """What divides a model's sequences, of rank 1 of the sequence `place`."""
    group = SimpleNamespace(gather=lambda values, _what: torch.stack([values] * size))
    return SimpleNamespace(
        size=size,
        data_ranks=sequences,
        data_rank=place,
        is_whole=False,
        group=group,
        split=lambda batch: split(batch, 1, size),
    )


@pytest.fixture
def looping(monkeypatch, kept):
    """Return a function that gives an Accelerator, of one process, what a loop over sequences has; its model
    is prepared. Four ranks: two sequences of two.
    """

    def loop(**options):
        monkeypatch.setattr(module, "is_divided", lambda _model: True)
        monkeypatch.setattr(module, "sequences_of", lambda _model: rank_of(2, 2, 1))
        accelerator = accelerate.Accelerator(cpu=True, **options)
        loop = _SplitLoop(ParallelismConfig(sp_size=2), accelerator, lambda: None)
        monkeypatch.setattr(loop, "_compare", lambda _model: None)
        accelerator.prepare(kept)
        return accelerator

    return loop


def sharing(batch_size=2):
    """A loader whose sampler shares its batches, as Accelerate's of four processes does."""
    sampler = BatchSampler(range(len(DATA)), batch_size=batch_size, drop_last=False)
    return DataLoader(DATA, batch_sampler=BatchSamplerShard(sampler, 4, 3))


def first_ids(loader):
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


@pytest.mark.parametrize(
    ("sizes", "ranks", "said"),
    [
        ({"sp_size": 2}, (4, 1, 4), r"sp_size=2\), but 4 ranks share each sequence of Llama.*Set sp_size=4"),
        ({"sp_size": 2}, (1, 2, 2), r"sp_size=2\), but each rank has whole .*Config\(sequence_parallel=2\)"),
        ({"sp_size": 2, "dp_shard_size": 3}, (2, 2, 4), r"dp_shard_size=3\), but 2 sequences of 2 ranks"),
        ({"sp_size": 2, "tp_size": 2}, (2, 1, 4), r"tp_size=2, sp_size=2\).*Leave tp_size out"),
        ({"sp_size": 2}, (2, 1, 4), r"trained by 2 ranks, 1 sequence\(s\) of 2, and Accelerate has 4"),
    ],
)
def test_sizes_that_are_not_the_models_are_refused_with_both_numbers(sizes, ranks, said):
    with pytest.raises(UnsupportedError, match=said):
        compare(accelerate.ParallelismConfig(**sizes), "Llama", *ranks)
    compare(accelerate.ParallelismConfig(sp_size=2), "Llama", 2, 2, 4)
    compare(accelerate.ParallelismConfig(sp_size=2, dp_replicate_size=2), "Llama", 2, 2, 4)


def test_a_model_with_whole_sequences_is_refused_by_prepare_with_what_to_build(kept):
    accelerator = accelerate.Accelerator(cpu=True)
    _SplitLoop(ParallelismConfig(sp_size=2), accelerator, lambda: None)
    with pytest.raises(UnsupportedError, match=r"each rank has whole sequences of LlamaForCausalLM"):
        accelerator.prepare(kept)


def test_processes_that_sp_size_does_not_divide_are_refused_while_the_accelerator_is_made():
    with pytest.raises(UnsupportedError, match=r"sp_size=2\), but Accelerate has 1 process"):
        accelerate.Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))


def test_without_sp_size_or_with_a_plugin_it_is_accelerates_own():
    with pytest.raises(ValueError, match="only compatible"):
        ParallelismConfig(dp_shard_size=4)._validate_accelerator(of_cpus(4))
    plugged = of_cpus(4, DistributedType.DEEPSPEED)
    before = dict(vars(plugged))
    ParallelismConfig(sp_size=2)._validate_accelerator(plugged)
    assert vars(plugged) == before


def test_a_model_that_is_not_ours_meets_accelerates_own_refusal_when_it_is_prepared():
    accelerator = of_cpus(4)
    ParallelismConfig(sp_size=2)._validate_accelerator(accelerator)
    with pytest.raises(ValueError, match="only compatible"):
        accelerator.prepare_model(models.MODELS["llama"]())
    with pytest.raises(ValueError, match="only compatible"):
        accelerate.ParallelismConfig(sp_size=2)._validate_accelerator(of_cpus(4))


def test_what_trains_beside_the_model_outside_of_init_is_refused_by_its_name(looping, kept):
    accelerator = looping()
    accelerator.free_memory()
    kept.extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(UnsupportedError, match=r"extra.weight was not built inside Init.*inside Init"):
        accelerator.prepare(kept)


def test_the_ranks_of_a_sequence_get_its_batches_in_parts_also_behind_those_that_are_skipped(looping):
    accelerator = looping()
    loader = accelerator.prepare(sharing())
    assert isinstance(loader, SequenceParallelLoader)
    assert accelerator.prepare(loader) is loader
    # sequence 1 of two has every other batch; rank 1 of it the second half of four tokens
    assert first_ids(loader) == [[22, 32], [62, 72], [102, 112]]
    assert first_ids(accelerator.skip_first_batches(loader, 2)) == [[102, 112]]
    assert len(accelerator.skip_first_batches(sharing(), 1)) == 1, "other loaders are skipped as ever"
    turning = SequenceParallelLoader(sharing(), loader.sequences, batches="in turn")
    with pytest.raises(UnsupportedError, match=r"batches='in turn'"):
        accelerator.skip_first_batches(turning, 1)


def test_a_loader_that_comes_first_or_shares_nothing_is_refused(looping):
    accelerator = looping()
    with pytest.raises(UnsupportedError, match=r"dispatch_batches=False"):
        accelerator.prepare(DataLoader(DATA))
    assert accelerator._dataloaders == []
    accelerator.free_memory()
    with pytest.raises(UnsupportedError, match=r"before its model"):
        accelerator.prepare(sharing())


@pytest.mark.parametrize(("options", "steps"), [({}, 2), ({"step_scheduler_with_optimizer": False}, 1)])
def test_a_schedule_makes_a_step_for_each_sequence(looping, kept, options, steps):
    accelerator = looping(**options)
    optimizer = infinity.SGD(kept.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    ids = torch.ones(1, 4, dtype=torch.long)
    accelerator.backward(kept(input_ids=ids, labels=ids).loss)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [1.0 + steps]
    accelerator.gradient_state._set_sync_gradients(False)
    schedule.step()
    assert schedule.get_last_lr() == [3.0]  # one that follows the optimizer waits where that does


def test_metrics_are_kept_once_for_each_sequence_and_those_of_a_ranks_tokens_refused():
    nan = float("nan")
    rows = torch.tensor([[1.0, nan], [1.0, nan], [3.0, 4.0], [3.0, 4.0]])
    assert _once_each([0, 0, 1, 1], rows).isnan().tolist() == [[False, True], [False, False]]
    assert _once_each([0, 1, 0, 1], torch.tensor([5, 6, 5, 6])).tolist() == [5, 6]
    assert _once_each([0, 0], torch.zeros(0, 3)).shape == (0, 3)
    with pytest.raises(UnsupportedError, match=r"ranks 2 and 3 share a sequence.*shape \(1, 2\)"):
        _once_each([0, 0, 1, 1], torch.tensor([[0, 1], [0, 1], [2, 3], [4, 5]]))


def test_metrics_that_are_no_tensors_are_refused_and_of_other_models_gathered_as_ever(looping, monkeypatch):
    accelerator = looping()
    for given, options in ((["text"], {}), (torch.ones(2), {"use_gather_object": True})):
        with pytest.raises(UnsupportedError, match=r"gather_object"):
            accelerator.gather_for_metrics(given, **options)
    assert accelerator.gather_for_metrics({"loss": torch.ones(2)})["loss"].tolist() == [1.0, 1.0]
    assert "gather" not in vars(accelerator)
    monkeypatch.setattr(module, "is_divided", lambda _model: False)
    assert accelerator.gather_for_metrics(["text"]) == ["text"]
