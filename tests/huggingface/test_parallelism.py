"""What Accelerate's ParallelismConfig may say of a model over a mesh, in one process. Trusted: Accelerate's
own checks. Faked: the Accelerator of several ranks, the Trainer that is being made, and the marks of a model
that transformers has divided. Real ranks train so in test_trainer_meshes.py.
"""

from types import SimpleNamespace

import accelerate
import pytest
import transformers
from accelerate.utils import DistributedType

import infinity
import models
from infinity.errors import UnsupportedError
from infinity.huggingface import TrainerCallback
from infinity.huggingface.parallelism import compare, take_over


def asked(**sizes):
    return accelerate.ParallelismConfig(**sizes)


def of_cpus(ranks):
    return SimpleNamespace(
        multi_device=False,
        is_fsdp2=False,
        is_main_process=True,
        num_processes=ranks,
        distributed_type=DistributedType.MULTI_CPU,
    )


class Made(transformers.Trainer):
    """A Trainer of which only the check of its Accelerator is made."""

    def __init__(self, config, accelerator, callbacks=None, model=None):
        self.model = model
        config._validate_accelerator(accelerator)


@pytest.fixture
def kept():
    with infinity.Init(host_memory="64MiB"):
        return models.MODELS["llama"]()


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tp_size": 2, "dp_shard_size": 4},
        {"tp_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2},
        {"dp_replicate_size": 8},  # as Accelerate sets it where nothing is said
    ],
)
def test_sizes_that_are_the_meshs_are_taken(sizes):
    compare(asked(**sizes), "Llama", parts=2, data=4)
    compare(None, "Llama", parts=2, data=4)
    compare(asked(dp_shard_size=4), "Llama", parts=1, data=4)


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        (
            {"tp_size": 4, "dp_shard_size": 2},
            r"tp_size=4\), but 2 ranks .* Set tp_size=2 and dp_shard",
        ),
        ({"dp_shard_size": 8}, r"tp_size=1\), but 2 ranks have parts"),
        (
            {"tp_size": 2},
            r"dp_shard_size=1\), but 4 ranks have data .* Set dp_shard_size=4",
        ),
    ],
)
def test_sizes_that_are_not_the_meshs_are_refused_with_both_numbers(sizes, error):
    with pytest.raises(UnsupportedError, match=error):
        compare(asked(**sizes), "Llama", parts=2, data=4)


def test_a_tp_size_for_a_model_that_is_not_divided_is_refused_with_what_to_build(kept):
    arguments = SimpleNamespace(parallelism_config=asked(tp_size=2))
    with pytest.raises(UnsupportedError, match=r"tp_size=2\), but no layer of LlamaFor.*tensor_parallel\("):
        take_over(kept, arguments)


def test_a_trainer_with_the_callback_is_made_with_a_tp_size_on_cpus():
    given = TrainerCallback()
    sizes = {"tp_size": 2, "dp_shard_size": 2}
    with pytest.raises(ValueError, match="only compatible"):
        Made(asked(**sizes), of_cpus(4), callbacks=[transformers.TrainerCallback()])
    with pytest.raises(ValueError, match="only compatible"):
        asked(**sizes)._validate_accelerator(of_cpus(4))
    with pytest.raises(ValueError, match="only compatible"):
        Made(asked(dp_shard_size=4), of_cpus(4), callbacks=[given])
    with pytest.raises(ValueError, match=r"total_size \(4\) does not match num_processes \(2\)"):
        Made(asked(**sizes), of_cpus(2), callbacks=[given])
    Made(asked(**sizes), of_cpus(4), callbacks=[given])


def test_a_model_that_transformers_has_divided_is_to_a_trainer_as_any_other(kept):
    for one in (kept, other := models.MODELS["llama"]()):
        one._tp_size, one._is_distributed_loading_by_transformers = 2, True
    with pytest.raises(UnsupportedError, match=r"tp_size=2\), but no layer"):
        Made(asked(tp_size=2), of_cpus(2), callbacks=[TrainerCallback()], model=kept)
    Made(asked(tp_size=2), of_cpus(2), callbacks=[TrainerCallback()], model=other)
    assert (kept.tp_size, kept.is_distributed_loading_by_transformers) == (None, False)
    assert (other.tp_size, other.is_distributed_loading_by_transformers) == (2, True)
    heads, expected = (one._get_static_cache_init_shape() for one in (kept, other))
    assert heads == expected, "a static cache that is made ahead holds a rank's heads"
