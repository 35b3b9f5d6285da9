"""What stages do that save to one folder, and differ in what they have beside parameters."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import infinity


def together_unlike(place, *, refused):
    """Save stages that differ in what they have beside parameters to one folder, and load them; return what
    came of each, and the seconds until an error of one stage was one of all.
    """
    groups = {"process_group": place.data, "pipeline_group": place.pipeline, "timeout_s": 60}
    own = {"nvme": place.folder, "host_memory": "2MiB", "dtype": "bf16"}
    alone = [dist.new_group([number]) for number in range(dist.get_world_size())][dist.get_rank()]

    def built(*numbers, **groups):
        with infinity.Init(**own, **groups):
            return nn.ModuleDict({str(one): nn.Linear(8, 8) for one in numbers})

    stages, folder = built(place.rank, **groups), Path(place.folder)
    optimizer = scheduler = None
    if place.rank == 0:
        stages.requires_grad_(False)
    else:
        optimizer = infinity.AdamW(stages.parameters(), lr=0.01)
        optimizer.param_groups[0]["mine"] = torch.tensor(3.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    infinity.save(stages, optimizer, folder / "frozen", scheduler=scheduler)
    if place.rank:
        optimizer.param_groups[0]["mine"] = None
    infinity.load(stages, optimizer, folder / "frozen", scheduler=scheduler)
    found = {"frozen": None if optimizer is None else float(optimizer.param_groups[0]["mine"])}
    stages = built(place.rank, place.rank + 2, **groups)
    weights = list(stages.parameters())
    parts = (weights, []) if place.rank == 0 else (weights[:1], weights[1:])
    optimizer = infinity.AdamW([{"params": one} for one in parts], lr=0.01)
    infinity.save(stages, optimizer, folder / "empty group")
    infinity.load(stages, optimizer, folder / "empty group")
    optimizer = infinity.AdamW(weights, lr=0.01)
    infinity.save(stages, optimizer, folder / "interleaved")
    whole = built(*range(4), process_group=alone)
    infinity.load(whole, infinity.AdamW(whole.parameters()), folder / "interleaved")
    for name, value in (("alike", 5.0), ("tensors", 5.0 + place.rank)):
        optimizer.param_groups[0]["mine"] = torch.tensor(value)
        found[name] = refused(lambda name=name: infinity.save(stages, optimizer, folder / name))
    optimizer.param_groups[0]["mine"] = object() if place.rank == 1 else None
    begun = time.monotonic()
    found["error"] = refused(lambda: infinity.save(stages, optimizer, folder / "wrong"))
    return found | {"soon": time.monotonic() - begun < 30}
