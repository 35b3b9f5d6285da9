"""What ranks train with each pair of features that go together: a hash of it, by the names of the pair.

    together_run.py FOLDER CASE [CASE ...]  # launched by launches.forked

Rank R writes FOLDER/R.json. Some features change no bit: with one of them a training has the hash of the same
one without.
"""

import gc
import itertools
import sys
from functools import partial

import xxhash

import infinity
import models
import ranks_reference
import ranks_run
from infinity.planning.together import Feature, why_not
from infinity.tensors import as_bytes

ranks_reference.WIDE["num_hidden_layers"] = 1  # twelve units that features meet at
FIELDS = {
    Feature.SECONDARY_SHARD: {"secondary_shard": 2},
    Feature.SHARED_MEMORY: {"shared_memory": True},
    Feature.BUCKETS: {"gather_bucket": 0, "reduce_bucket": 0},
    Feature.EARLY_STAGE: {"stage": 1},
    Feature.QUANTIZED_WEIGHTS: {"quantized_weights": "int8"},
    Feature.QUANTIZED_GRADIENTS: {"quantized_gradients": "int4"},
    Feature.ERROR_FEEDBACK: {"error_feedback": True, "quantized_gradients": "int4"},
    Feature.EXPERT_PARALLEL: {"expert_parallel": 2},
    Feature.FP32: {"dtype": "fp32"},
    Feature.WHOLE_EXPERTS: {"experts": "whole"},
    Feature.ONE_BIT: {},
}
EXACT = {Feature.SECONDARY_SHARD, Feature.SHARED_MEMORY, Feature.BUCKETS, Feature.EARLY_STAGE}
"""Of these, those that change no bit."""


def trained(used):
    """Return a hash of the losses and weights of three steps."""
    experts = used & {Feature.EXPERT_PARALLEL, Feature.WHOLE_EXPERTS}
    fields = {"host_memory": "64MiB", "shared_memory": False}
    for one in used:
        fields |= FIELDS[one]
    model = models.build("mixtral" if experts else "llama", **fields)
    if Feature.ONE_BIT in used:
        optimizer = infinity.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=1)
    else:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    losses = ranks_run.train(model, optimizer)
    found = xxhash.xxh3_64(str(losses).encode())
    for _, value in sorted(model.state_dict().items()):
        found.update(as_bytes(value.flatten().contiguous()))
    del model, optimizer
    gc.collect()  # else gloo's threads of engines that nobody has take a good part of the cores
    return found.hexdigest()


def pairs(first):
    """Return for each second pair, beginning with number `first`, what it trains to, and what it should where
    another training says that.
    """
    known, given = {}, {}

    def hash_of(used):
        if used not in known:
            known[used] = trained(used)
        return known[used]

    possible = [one for one in itertools.combinations(FIELDS, 2) if why_not(dict.fromkeys(one, "")) is None]
    for pair in possible[first::2]:
        used = frozenset(pair)
        without = used - EXACT
        expected = hash_of(without) if without != used else None
        given[" and ".join(one.name for one in pair)] = [hash_of(used), expected]
    return {"given": given}


ranks_run.CASES.update({"one half": partial(pairs, 0), "the other half": partial(pairs, 1)})


if __name__ == "__main__":
    ranks_run.main(sys.argv[1], sys.argv[2:])
