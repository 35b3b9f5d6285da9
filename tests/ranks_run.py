"""What several ranks do in the tests of them, under torchrun: cases by name, an answer as JSON each.

    torchrun --nproc-per-node 2 tests/ranks_run.py FOLDER CASE [CASE ...]

Rank R writes FOLDER/R.json: {case: answer, or {"error": text}}. The reference of N ranks is plain: each holds
the whole model, and every gradient becomes the mean over the ranks, summed in fp32 in their order, divided
once and rounded once, as autograd hands it over.
"""

import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import infinity
from infinity.engine import engine_of_model
from infinity.reference import ReferenceAdamW, prepare
from tests import models


def mean_over_ranks(grad):
    rows = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, grad.contiguous())
    total = rows[0].float()
    for row in rows[1:]:
        total += row.float()
    return (total / len(rows)).to(grad.dtype)


def build_reference(name, seed=0):
    torch.manual_seed(seed)
    model = models.MODELS[name]()
    for parameter in model.parameters():
        parameter.register_hook(mean_over_ranks)
    return prepare(model)


def train(model, optimizer, *, steps=3, micro=1, first=0, sync=None):
    """Train on this rank's batches; return the losses."""
    losses = []
    for step in range(first, first + steps):
        for one in range(micro):
            ids = models.batch(1000 * dist.get_rank() + 10 * step + one)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(name, micro=1, options=None, init=None):
    """Train the reference and ours side by side; return what differs."""
    options = {"lr": 1e-2, "weight_decay": 0.1, **(options or {})}
    plain = build_reference(name)
    reference = ReferenceAdamW(
        plain.parameters(), **{key: one for key, one in options.items() if key != "update"}
    )
    expected = train(plain, reference, micro=micro)
    ours = models.build(name, **{"host_memory": "64MiB", **(init or {})})
    optimizer = infinity.AdamW(ours.parameters(), **options)
    actual = train(ours, optimizer, micro=micro)
    different = [f"loss {number}" for number, pair in enumerate(zip(expected, actual, strict=True)) if len(set(pair)) > 1]
    weights = ours.state_dict()
    different += [key for key, one in plain.state_dict().items() if not torch.equal(one, weights[key])]
    moments = optimizer.state_dict()["state"]
    for number, state in reference.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            if not torch.equal(state[key].float(), moments[number][key]):
                different.append(f"{key} of parameter {number}")
    stats = infinity.stats(ours)
    return {"different": different, "divergences": stats.divergences, "losses": actual}


CASES = {
    "llama": lambda: compare("llama"),
    "gpt2": lambda: compare("gpt2"),
    "mixtral": lambda: compare("mixtral"),
    "clipped": lambda: compare("llama", options={"max_norm": 0.5}),
    "accumulated": lambda: compare("llama", micro=2),
    "backward": lambda: compare("llama", options={"update": "backward"}),
}


def main(folder, cases):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    answers = {}
    for case in cases:
        name, _, nvme = case.partition("@")
        try:
            answers[case] = CASES[name]()
        except Exception as error:  # noqa: BLE001 - it is the answer
            answers[case] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            break
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answers), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
