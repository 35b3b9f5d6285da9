"""What torch's schedules evaluate among steps of a training, and ranks of a stage that do different things:
cases of pipeline_run.py.
"""

import contextlib

import torch
import torch.distributed as dist

import infinity

STEPS = 3


def evaluated(place, run, *, kind, dtype):
    """Train stages, and evaluate by `schedule.eval` before, between and behind the steps; return what differs
    from a training in memory that evaluates nothing, and the losses of evaluations here and in memory.
    """
    settings = {"lr": 0.01, "weight_decay": 0.1}
    ends = []
    for ours, evaluates in ((False, False), (False, True), (True, True)):
        if ours:
            stages = run.offloaded(place, kind, dtype=dtype, host_memory=run.TIGHT)
            optimizer = infinity.AdamW(stages.parameters(), max_norm=0.5, **settings)
        else:
            stages = run.build(place, kind)
            for one in stages.parameters() if dist.get_world_size(place.data) > 1 else ():
                one.register_hook(place.mean_of_data)
            plain = run.prepare(stages, run.COMPUTES[dtype]).parameters()
            optimizer = run.ReferenceOfStages(place, plain, max_norm=0.5, **settings)
        losses, seen = trained(place, run, kind, stages, optimizer, evaluates=evaluates)
        state = {"losses": losses, **run.found(place, kind, stages, optimizer)}
        ends.append((state, max(place.of_all(seen), key=len)))
    (expected, none), (_, wanted), (actual, found) = ends
    return {
        "different": [key for key, one in expected.items() if not run.same(one, actual[key])],
        "evaluated": [found, wanted],
        "nothing": none,
        "nvme": infinity.stats(stages).nvme_written_nbytes,
    }


def trained(place, run, kind, stages, optimizer, *, evaluates):
    """Train; return the losses of steps, of all stages, and those of evaluations that this rank has seen."""
    numbers, count = place.numbers(kind)
    schedule = place.schedule(kind, stages, numbers, count)

    def given(batch, seen):
        ids = place.batch(batch)
        aim = {"target": ids.roll(-1, 1), "losses": seen} if count - 1 in numbers else {}
        return [ids] if 0 in numbers else [], aim

    def evaluate(batch, *, makes_graphs=False):
        losses = []
        inputs, aim = given(batch, losses)
        with contextlib.nullcontext() if makes_graphs else torch.no_grad():
            schedule.eval(*inputs, **aim)
        evaluations.extend(float(loss.detach()) for loss in losses)

    seen, evaluations = [], []
    for step in range(STEPS + 1 if evaluates else STEPS):
        if evaluates:
            evaluate(50 + step)
            evaluate(60 + step, makes_graphs=True)
        if step < STEPS:
            losses = []
            inputs, aim = given(step, losses)
            schedule.step(*inputs, **aim)
            optimizer.step()
            optimizer.zero_grad()
            seen += [float(loss.detach()) for loss in losses]
    return max(place.of_all(seen), key=len), evaluations


def other_paths(place, run):
    """Use another layer on one of the ranks that share the last stage; return its ranks' errors."""
    stages = run.offloaded(place, "1f1b", dtype="fp32", host_memory=run.TIGHT, timeout_s=20)
    if place.rank < place.ranks - 1:
        return {"error": ""}
    layer = stages[0].block.gate if dist.get_rank(place.data) else stages[0].block.up

    def use():
        with torch.no_grad():
            for _ in range(3):
                layer(torch.zeros(1, run.WIDTH))

    return {"error": run.refused(use)}
