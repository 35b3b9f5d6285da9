"""What groups over gloo do in the tests, on two ranks: gloo_run.py FOLDER, launched by launches.forked."""

import contextlib
import json
import logging
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from children import ended
from infinity.ranks import gloo
from infinity.ranks.gloo import new_gloo_group
from infinity.ranks.groups import all_gather, new_group, store
from leftovers import settled

GROUPS = 6


class Both:
    size, members = 2, [0, 1]

    @property
    def rank(self):
        return dist.get_rank()


def polls():
    """Return how many of gloo's devices this process has: each waits for its sockets in one place."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += "eventpoll" in str(one.readlink())
    return found


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def made(count, name, timeout_s=60.0):
    return [new_group(f"{name} {number}", Both(), "gloo", timeout_s) for number in range(count)]


def gathered(group, value):
    whole = torch.zeros(2 * 1000, dtype=torch.int64)
    all_gather(whole, torch.full((1000,), value), group=group)
    return whole.view(2, -1).unique(dim=1).flatten().tolist()


def at_once(groups):
    """Let each group have a collective under way, begun in other orders on the ranks: return what came."""
    found = [None] * len(groups)

    def run(number):
        found[number] = gathered(groups[number], 10 * number + dist.get_rank())

    workers = [threading.Thread(target=run, args=(number,)) for number in range(len(groups))]
    for one in workers if dist.get_rank() == 0 else reversed(workers):
        one.start()
        one.join(0.02)  # in which it does not end: the other rank begins elsewhere
    for one in workers:
        one.join()
    return found


def known(group):
    """What torch says of a group."""
    ranks = dist.get_process_group_ranks(group)
    return [dist.get_backend(group), group.group_name, ranks, dist.get_rank(group)]


def late():
    """Return what a rank is told for which another one does not come."""
    dist.barrier()  # a group is made by ranks that come to it within its timeout
    group = made(1, "late", 2.0)[0]
    try:
        if dist.get_rank() == 0:
            gathered(group, 0)
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


def in_child():
    """Return how many devices a forked child has more, with a group of its own."""

    def work(say):
        before = polls()
        meeting, own = dist.HashStore(), [dist.get_rank()]
        own_ones = [new_gloo_group(f"child {n}", own, 0, meeting, timedelta(seconds=60)) for n in range(2)]
        say(more=[polls() - before, len(own_ones)])

    return ended(work)["more"]


def main(folder):
    dist.init_process_group("gloo")
    said, told = [], {}
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("infinity").addHandler(handler)
    logging.getLogger("infinity").setLevel(logging.INFO)
    before, threads_before = polls(), settled(threads)
    groups = made(GROUPS, "a")
    told["devices"], told["threads"] = polls() - before, settled(threads) - threads_before
    told["known"], told["at once"] = known(groups[-1]), at_once(groups)
    dist.destroy_process_group(groups[0])
    told["after the first is closed"] = [gathered(one, dist.get_rank()) for one in groups[1:]]
    told["in a child"] = in_child()
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "lo,lo"}):
        others = made(3, "b")
    told["of two more"] = polls() - before - 1
    told["at once, of two"] = at_once(others)
    told["late"], told["said"] = late(), list(said)
    for one in [*groups[1:], *others]:
        dist.destroy_process_group(one)
    del groups, others, one
    gloo._OF_GLOO += ("planted",)
    alone = made(2, "c")
    told["alone"], told["said then"] = [gathered(one, dist.get_rank()) for one in alone], said
    store().set(f"done {dist.get_rank()}", "")
    store().wait(["done 0", "done 1"])
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
