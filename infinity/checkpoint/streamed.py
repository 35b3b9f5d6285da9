"""A model's weights, one tensor after the other, for another program that computes with them: stream_weights.

Training by reinforcement hands its weights to an inference engine after each update. A state_dict would take
the memory of the whole model; here one tensor is in memory at a time, of experts in slices one stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.checkpoint.inventory import Inventory
from infinity.engine.engine import engine_of
from infinity.errors import RanksError
from infinity.ranks.groups import backend_of
from infinity.tensors import is_distributed

Named = tuple[str, torch.Tensor]


def stream_weights(
    model: nn.Module,
    to: Callable[[str, torch.Tensor], object] | dist.ProcessGroup | None,
    dtype: torch.dtype | None = None,
) -> int:
    """Send a model's weights and persistent buffers to `to`, one by one, and return the bytes that were sent.

    All ranks of the model call this. Updates that are pending are applied first, as the next forward would;
    then 2 bytes of each 16-bit weight are read, and nothing is written.

    model: built in Init. to: called with the name of each, as in `model.state_dict()`, and a CPU tensor that
    is its own to keep; or a process group of this rank and of those that call `receive_weights`; None for a
    rank that has nobody to send to. dtype: torch.float32 for the masters; None for each weight's own type. A
    weight that is used under several names is sent once, under the first.

    Raises: ValueError for another dtype, and for a model that was not built in Init; what `to` raises, which
    ends it; CorruptionError.
    """
    if dtype not in (None, torch.float32):
        raise ValueError(f"dtype={dtype}: expected torch.float32, for the masters, or None")
    send = _to_group(to) if isinstance(to, dist.ProcessGroup) else to
    sent_nbytes = 0
    try:
        for name, values in _weights(model, "hi" if dtype is None else "master"):
            if send is not None:
                sent_nbytes += values.nbytes
                send(name, values)
            del values  # the next one takes its place in memory
    except BaseException as error:
        if isinstance(to, dist.ProcessGroup):
            _broadcast_header(to, dist.get_rank(), f"{type(error).__name__}: {error}")
        raise
    if isinstance(to, dist.ProcessGroup):
        _broadcast_header(to, dist.get_rank(), None)
    return sent_nbytes


def receive_weights(group: dist.ProcessGroup, source: int = 0) -> Iterator[Named]:
    """Yield the names and tensors that `stream_weights(model, group)` sends, in a process without the model.

    group: this rank, the sender, and others that receive; gloo's on the CPU, NCCL's on the current device.
    source: the sender's rank in the whole world. Take all of them: the sender waits until they are taken.

    Raises: RanksError with what the sender failed of.
    """
    device = _device_of(group)
    while True:
        header = _broadcast_header(group, source)
        if header is None:
            return
        if isinstance(header, str):
            raise RanksError(f"rank {source} of the world, which sends its weights, has failed: {header}")
        name, dtype, shape = header
        values = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(values, source, group)
        yield name, values
        del values


def _weights(model: nn.Module, field: str) -> Iterator[Named]:
    """Yield all parameters, those that are offloaded by this field of their records, and buffers."""
    inventory = Inventory(model, None)
    inventory.check_unmarked("infinity.stream_weights")
    stacks = inventory.stacks_of_weights
    filling: dict[str, tuple[torch.Tensor, int]] = {}
    for name, parameter in model.named_parameters():
        engine = engine_of(parameter)
        if engine is None:
            continue  # among the inventory's plain tensors
        values = engine.parameters.read(parameter, [field])[0]
        if is_distributed(values):
            values = values.full_tensor()  # type: ignore[attr-defined]
        place = stacks.places.get(name)
        if place is None:
            yield name, values
            del values
            continue
        whole, missing = filling.pop(place.stack, (None, math.prod(place.shape)))
        if whole is None:
            whole = torch.empty(place.shape, dtype=values.dtype, device="cpu")
        whole.view(-1)[place.first : place.first + values.numel()] = values.view(-1)
        del values
        if missing := missing - parameter.numel():
            filling[place.stack] = whole, missing
        else:
            yield place.stack, whole
            del whole
    for name, tensor in inventory.plain.items():
        yield name, tensor.detach().to("cpu", copy=True)


def _to_group(group: dist.ProcessGroup) -> Callable[[str, torch.Tensor], None]:
    device, source = _device_of(group), dist.get_rank()

    def send(name: str, values: torch.Tensor) -> None:
        _broadcast_header(group, source, (name, values.dtype, tuple(values.shape)))
        dist.broadcast(values.to(device).contiguous(), source, group)

    return send


def _broadcast_header(group: dist.ProcessGroup, source: int, header: Any = None) -> Any:
    """Tell, or be told by `source`: what comes next, the text of an error, or None at the end."""
    told = [header]
    dist.broadcast_object_list(told, source, group, device=_device_of(group))
    return told[0]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    seen = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if seen is None or dist.get_backend(group) != backend_of(seen.type):
        return torch.device("cpu")
    return torch.device(seen.type, torch.get_device_module(seen).current_device())
