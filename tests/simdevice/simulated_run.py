"""Runs cases on the simulated device, each in a forked process, and prints a line of JSON for each.

python simulated_run.py CASE...: a name of simulated_cases.CASES, "order: NAME" for a sequence of calls of the
engine's device, or "order: NAME without it" for the same without the order that it depends on.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import warnings

import torch

import simulated_cases
import simulated_faults
import simulated_orders
import simulator
from children import Child
from launches import warm_up

LIMIT_S = 200.0


def work(name):
    """Return what a child does: it loads the device, runs the case, and says how it went."""

    def do(say):
        faulthandler.enable()
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        simulated = simulator.load()
        said = {"raised": ""}
        try:
            said |= _order(name, simulated) if name.startswith("order: ") else _trained(name, simulated)
        except Exception as error:  # noqa: BLE001
            said["raised"] = f"{type(error).__name__}: {error}"[:1000]
        say(**said, failure=simulated.failure(), waited=simulated.waited_for(), **simulated.counts())

    return do


def _trained(name, simulated):
    return simulated_cases.run(simulated_cases.CASES[name], simulated)


def _order(name, simulated):
    called, faulty, _ = name.removeprefix("order: ").partition(" without it")
    fault = simulated_faults.ORDERS[called] if faulty else simulated_faults.Fault("")
    simulated.delay(5000, 1000)
    simulated_orders.ORDERS[called](fault.opened())
    return {}


def main():
    simulator.build()
    warm_up()
    for name in sys.argv[1:]:
        child = Child(work(name), LIMIT_S)
        while not child.over():
            time.sleep(0.01)
        killed = signal.Signals(os.WTERMSIG(child.status)).name if os.WIFSIGNALED(child.status) else ""
        print(json.dumps({"case": name, "killed": killed, **child.last}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
