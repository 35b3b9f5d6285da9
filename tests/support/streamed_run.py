"""Ranks 0 and 1 have a model; rank 0 streams its weights to two others, which have none, then to one of them
by a name; then both fail amid another time.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import infinity
import models
from infinity.engine.parameters import Parameters
from infinity.tensors import digest

FOLDER = Path(sys.argv[1])


NAME = f"streamed-{os.environ['MASTER_PORT']}"


def trainer(rank, group, trainers):
    import transformers

    with infinity.Init(nvme=str(FOLDER), host_memory="2MiB", process_group=trainers):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**models.SIZES))
    first = rank == 0
    nbytes = [infinity.stream_weights(model, to if first else None) for to in (group, NAME)]
    digests = {name: digest(one) for name, one in model.state_dict().items()}
    read, count = Parameters.read, iter(range(3))

    def fails(*arguments):
        if next(count, None) is None:
            raise OSError("planted")
        return read(*arguments)

    Parameters.read = fails
    try:
        infinity.stream_weights(model, group if first else None)
    except OSError as error:
        return {"digests": digests, "error": str(error), "nbytes": nbytes}


def receiver(rank, group, _trainers):
    streams = [infinity.receive_weights(group)]
    if rank == 2:
        streams.append(infinity.receive_weights(NAME))
    digests = [{name: digest(one) for name, one in stream} for stream in streams]
    try:
        list(infinity.receive_weights(group))
    except infinity.RanksError as error:
        return {"digests": digests, "error": str(error)}


dist.init_process_group("gloo")
torch.manual_seed(0)
rank, those = dist.get_rank(), [dist.new_group(ranks) for ranks in ([0, 2, 3], [0, 1])]
(FOLDER / f"{rank}.json").write_text(json.dumps((trainer if rank < 2 else receiver)(rank, *those)))
dist.destroy_process_group()
