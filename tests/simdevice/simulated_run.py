"""Runs cases on the simulated device in forked processes, and prints a line of JSON for each: those that
differ in delays alone one after the other in one process, which computes once what they are compared with.

Each line of its input asks for cases, as {"names": [CASE, ...], "at_once": how many run beside each other};
behind the last line of what they say stands "over". CASE: a name of simulated_cases.CASES or of
simulated_tiers.TOWERS; one of simulated_ranks.CASES, which prints a line for each rank; "order: NAME" for a
sequence of calls of the engine's device, or "order: NAME without it" for the same without the order that it
depends on.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import logging
import os
import resource
import signal
import sys
import time
import warnings

import torch

import simulated_cases
import simulated_faults
import simulated_orders
import simulated_ranks
import simulated_tiers
import simulator
from children import Child
from infinity.bench.ports import free_port
from launches import warm_up

LIMIT_S = 600.0
RAISED = []
"""What a case has raised: its frames own memory that late copies still read, until the process ends."""


class Warned(logging.Handler):
    """Keeps what the engine warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def work(names, environment):
    """Return what a child does: it loads the device, runs the cases, and says how each went."""

    def do(say):
        os.environ.update(environment)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a fault on device memory is expected to end some
        faulthandler.enable()
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        simulated = simulator.load()
        warned = Warned()
        logging.getLogger("infinity").addHandler(warned)
        for name in names:
            warned.texts = []
            said = {"case": name, "raised": "", "warned": warned.texts}
            try:
                said |= result(name, simulated)
            except Exception as error:  # noqa: BLE001
                RAISED.append(error)
                said["raised"] = f"{type(error).__name__}: {error}"[:1000]
            say(**said, failure=simulated.failure(), waited=simulated.waited_for(), **simulated.counts())
            if RAISED:
                break

    return do


def base_of(name):
    """Return what cases have in common that differ in delays alone."""
    base, _, delay = name.rpartition(", ")
    is_late = delay in simulated_cases.DELAYS
    return base if is_late and name in simulated_cases.CASES | simulated_ranks.CASES else name


def result(name, simulated):
    if name in simulated_ranks.CASES:
        return simulated_ranks.run(name, simulated)
    if name in simulated_tiers.TOWERS:
        return simulated_tiers.run(name, simulated)
    if not name.startswith("order: "):
        return simulated_cases.run(simulated_cases.CASES[name], simulated)
    called, faulty, _ = name.removeprefix("order: ").partition(" without it")
    fault = simulated_faults.ORDERS[called] if faulty else simulated_faults.Fault("")
    simulated.delay(5000, 1000)
    simulated_orders.ORDERS[called](fault.opened())
    torch.accelerator.synchronize()
    return {}


def environments(name):
    """Return what the environment of each of a case's processes has besides."""
    if name not in simulated_ranks.CASES:
        return [{}]
    size = str(simulated_ranks.RANKS)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    team = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **group}
    return [{**team, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(simulated_ranks.RANKS)]


def run(names, at_once):
    """Run cases, so many bases of them beside each other, and print what each of their processes said."""
    waiting, running = [list(together) for _, together in itertools.groupby(names, base_of)], []
    while waiting or running:
        while waiting and len(running) < at_once:
            some = waiting.pop(0)
            running.append((some, [Child(work(some, more), LIMIT_S) for more in environments(some[0])]))
        for some, children in list(running):
            if not [child for child in children if child.status is None and not child.over()]:
                running.remove((some, children))
                tell(some, children)
        time.sleep(0.01)


def tell(names, children):
    """Print what each process said of each of its cases, with how it ended."""
    for rank, child in enumerate(children):
        killed = signal.Signals(os.WTERMSIG(child.status)).name if os.WIFSIGNALED(child.status) else ""
        of_case = {line["case"]: line for line in child.said if "case" in line}
        of_all = {key: value for line in child.said if "case" not in line for key, value in line.items()}
        missed = {"raised": "a case before it ended their process", "failure": ""} if of_case else {}
        for name in names:
            said = {"case": name, "rank": rank, "killed": killed, **of_all, **of_case.get(name, missed)}
            print(json.dumps(said), flush=True)  # noqa: T201


def main():
    simulator.build()
    warm_up()
    gc.collect()
    gc.freeze()  # else each case's collections walk all that is imported
    for line in sys.stdin:
        run(**json.loads(line))
        print("over", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
