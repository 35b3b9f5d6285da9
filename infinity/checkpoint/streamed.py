"""A model's weights, one tensor after the other, for another program that computes with them: stream_weights.

Training by reinforcement hands its weights to an inference engine after each update. A state_dict would take
the memory of the whole model; here one tensor is in memory at a time, of experts in slices one stack.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.checkpoint.inventory import Inventory
from infinity.checkpoint.ring import check_name, receives_from, sends_to
from infinity.engine.engine import engine_of
from infinity.errors import RanksError
from infinity.ranks.groups import backend_of
from infinity.tensors import is_distributed

Named = tuple[str, torch.Tensor]


def stream_weights(
    model: nn.Module,
    to: Callable[[str, torch.Tensor], object] | str | dist.ProcessGroup | None,
    dtype: torch.dtype | None = None,
    *,
    timeout_s: float = 600.0,
) -> int:
    """Send a model's weights and persistent buffers to `to`, one by one, and return the bytes that were sent.

    All ranks of the model call this. Updates that are pending are applied first, as the next forward would;
    then 2 bytes of each 16-bit weight are read, and nothing is written.

    model: built in Init. to: called with the name of each, as in `model.state_dict()`, and a CPU tensor that
    is its own to keep; or a name, under which another process of this machine and user calls
    `receive_weights`, which it comes to in shared memory; or a process group of this rank and of those that
    call that; None for a rank that has nobody to send to. dtype: torch.float32 for the masters; None for each
    weight's own type. A weight that is used under several names is sent once, under the first. timeout_s:
    seconds to wait, of a name, until its process comes, and then each time until it takes what was sent.

    Raises: ValueError for another dtype, and for a model that was not built in Init; what `to` raises, which
    ends it; RanksError where the process of that name does not come, takes nothing, or has ended;
    CorruptionError.
    """
    if dtype not in (None, torch.float32):
        raise ValueError(f"dtype={dtype}: expected torch.float32, for the masters, or None")
    sent_nbytes = 0
    with _sending(to, timeout_s) as send:
        for name, values in _weights(model, "hi" if dtype is None else "master"):
            if send is not None:
                sent_nbytes += values.nbytes
                send(name, values)
            del values  # the next one takes its place in memory
    return sent_nbytes


def receive_weights(
    group: dist.ProcessGroup | str, source: int = 0, *, timeout_s: float = 600.0
) -> Iterator[Named]:
    """Yield the names and tensors that `stream_weights(model, group)` sends, in a process without the model.

    group: a name that the sender gives, too, a process of this machine and user: one stream at a time from
    one to one, in host memory. Or a group of this rank, the sender, and others that receive; gloo's on the
    CPU, NCCL's on the current device; source: the sender's rank in the whole world. Take all of them: the
    sender waits until they are taken. timeout_s: seconds to wait, of a name, until the sender comes, and then
    for each part of its weights.

    Raises: RanksError with what the sender failed of; of a name also where it does not come, sends nothing
    more, or has ended. ValueError for what cannot be a name.
    """
    if isinstance(group, str):
        check_name(group, timeout_s)
        return receives_from(group, timeout_s)
    return _from_group(group, source)


def _from_group(group: dist.ProcessGroup, source: int) -> Iterator[Named]:
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


def _sending(
    to: Callable[[str, torch.Tensor], object] | str | dist.ProcessGroup | None, timeout_s: float
) -> contextlib.AbstractContextManager[Callable[[str, torch.Tensor], object] | None]:
    """Return a context with what sends to `to`, and which tells it of the end and of errors."""
    if isinstance(to, str):
        check_name(to, timeout_s)
        return sends_to(to, timeout_s)
    return _to_group(to) if isinstance(to, dist.ProcessGroup) else contextlib.nullcontext(to)


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


@contextlib.contextmanager
def _to_group(group: dist.ProcessGroup) -> Iterator[Callable[[str, torch.Tensor], None]]:
    device, source = _device_of(group), dist.get_rank()

    def send(name: str, values: torch.Tensor) -> None:
        _broadcast_header(group, source, (name, values.dtype, tuple(values.shape)))
        dist.broadcast(values.to(device).contiguous(), source, group)

    try:
        yield send
    except BaseException as error:
        _broadcast_header(group, source, f"{type(error).__name__}: {error}")
        raise
    _broadcast_header(group, source, None)


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
