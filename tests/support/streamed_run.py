"""Rank 0 streams its weights to two others, which have no model; then it fails amid a second time."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import infinity
import models
from infinity.engine.parameters import Parameters
from infinity.tensors import digest

FOLDER = Path(sys.argv[1])


def sender(group):
    import transformers

    alone = dist.new_group([0])
    with infinity.Init(nvme=str(FOLDER), host_memory="2MiB", process_group=alone):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**models.SIZES))
    infinity.stream_weights(model, group)
    digests = {name: digest(one) for name, one in model.state_dict().items()}
    read, count = Parameters.read, iter(range(3))

    def fails(*arguments):
        if next(count, None) is None:
            raise OSError("planted")
        return read(*arguments)

    Parameters.read = fails
    try:
        infinity.stream_weights(model, group)
    except OSError as error:
        return {"digests": digests, "error": str(error)}


def receiver(group):
    dist.new_group([0])
    digests = {name: digest(one) for name, one in infinity.receive_weights(group)}
    try:
        list(infinity.receive_weights(group))
    except infinity.RanksError as error:
        return {"digests": digests, "error": str(error)}


dist.init_process_group("gloo")
torch.manual_seed(0)
rank, everybody = dist.get_rank(), dist.new_group()
(FOLDER / f"{rank}.json").write_text(json.dumps((receiver if rank else sender)(everybody)))
dist.destroy_process_group()
