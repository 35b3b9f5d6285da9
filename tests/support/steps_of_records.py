"""Records of a few special and many random values, and the steps that are tried on them."""

import torch

from infinity import kernels
from infinity.records.update_rules import ADAGRAD, ADAM, ADAMW, LION, MOMENTUM, SGD

NUMEL = 1000
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 3.0e38, -3.0e38, 1.0]
ADAMS = [
    kernels.AdamWScalars(1e-2, 0.9, 0.999, 1e-8, 0.1, 3, 0.7),
    kernels.AdamWScalars(1e-2, 0.3, 0.9, 1e-6, 0.0, 1),
]
RULES = [
    *((rule, scalars) for rule in (ADAMW, ADAM) for scalars in ADAMS),
    (SGD, kernels.SGDScalars(0.1, 0.0, 0.1, 2, clip=0.3)),
    *((MOMENTUM, kernels.SGDScalars(0.1, 0.9, 0.1, step, dampening=0.2)) for step in (1, 2)),
    (MOMENTUM, kernels.SGDScalars(0.1, 0.9, 0.0, 2, nesterov=True)),
    (ADAGRAD, kernels.AdagradScalars(0.1, 1e-10, 0.1, 3, lr_decay=0.01)),
    (LION, kernels.LionScalars(1e-3, 0.9, 0.99, 0.1, clip=0.5)),
]


def randoms(seed):
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    values[: len(SPECIAL)] = torch.tensor(SPECIAL).roll(seed)
    return values


def fields(dtype, rule):
    """A record's fields by name."""
    master, at = randoms(1), {}
    master[master.isnan()] = torch.nan  # as stored
    if dtype == "fp32":
        at["hi"] = master
    else:
        at["hi"], at["lo"] = torch.empty(NUMEL, dtype=torch.bfloat16), torch.empty(NUMEL, dtype=torch.int16)
        kernels.split(NUMEL, master.data_ptr(), at["hi"].data_ptr(), at["lo"].data_ptr())
    moments = {"m": randoms(2), "v": randoms(3).abs()}
    return at | {name: moments[name] for name in rule.state}


def same_bits(ours, theirs):
    """Hold every field, on whatever device, against those on the CPU."""
    for name, one in theirs.items():
        bits = torch.int16 if one.element_size() == 2 else torch.int32
        assert torch.equal(ours[name].cpu().view(bits), one.view(bits)), name
