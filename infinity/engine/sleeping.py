"""An accelerator's memory for another program, between steps: sleep, wake."""

from __future__ import annotations

import torch
from torch import nn

from infinity.engine.engine import engine_of_model
from infinity.errors import UnsupportedError


def sleep(model: nn.Module) -> int:
    """Take all that Infinity keeps of a model off its accelerator, as before an inference engine computes
    there between two steps of a training by reinforcement; return the bytes that are free for others by that.

    Weights, records and gradients go to host memory and NVMe, as far as they are not there already; torch
    gives the memory back to the device. Nothing is lost, and training may go on at any time: what a step
    needs is brought then, as ever, but nothing stays on the device until `wake`. Activations and buffers are
    the program's own. Where the CPU computes there is nothing to do, and 0 is returned.

    All ranks call it, between the same steps.

    Raises: UnsupportedError within a forward or backward, and of several ranks where they keep the weights
    whole on the accelerator (stages 1 and 2); ValueError for a model that was not built in Init; RanksError
    where other ranks do something else.
    """
    engine = engine_of_model(model)
    if engine.partition is not None:
        engine.ranks.agree("infinity.sleep")
        if engine.config.stage < 3 and not engine.device.is_host:
            raise UnsupportedError(
                f"infinity.sleep with stage={engine.config.stage}, which keeps all 16-bit weights on the "
                "accelerator: stage=3 lets them go"
            )
    if engine.hooks.in_forward:
        raise UnsupportedError("infinity.sleep in a forward or backward: call it between steps")
    room = engine.device.room
    if room is None or engine.pins is None:
        return 0
    before = room.ledger.held_nbytes
    engine.pins.rest()
    room.empty()
    engine.device.synchronize()
    place = engine.device.torch_device.type
    if place != "cpu":
        torch.get_device_module(place).empty_cache()
    return before - room.ledger.held_nbytes


def wake(model: nn.Module) -> None:
    """Let weights and records live on the accelerator again, as before `sleep`: they come back when it is
    next decided what lives there.

    Raises: ValueError for a model that was not built in Init.
    """
    engine = engine_of_model(model)
    if engine.pins is not None:
        engine.pins.wake()
