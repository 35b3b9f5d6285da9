"""Groups over gloo that share one device.

[Note: one device]
torch makes a device of gloo's for each group: a socket that listens, and a thread that looks a hundred times
a second whether something has come. An engine has several groups, most of which wait most of the time. So all
groups of ours that are open at once in a process share the devices that torch has made for the first of them.
Which ones these are torch decides, by GLOO_SOCKET_IFNAME or else the machine's name, and TORCH_GLOO_LAZY_INIT
says how they connect. Groups that are made under other values of these, or in a forked process, share others;
the groups of the program keep their own. When the last group that shares a device is closed, that ends.

A device's thread moves bytes from and to sockets, and waits for nothing else. What waits is the group's own
thread, on which its collectives run in the order in which they were called. A collective can end on all ranks
only after all have called it, and so also those before it: one thread for each group is enough, and no group
waits for another one.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger("infinity")

_CHOICE = ("GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT")
"""By these variables torch chooses devices, and how they connect."""
_OF_C10D = (
    *("Backend", "BackendConfig", "PrefixStore", "ProcessGroup", "ProcessGroupGloo"),
    *("_register_process_group", "_world"),
)
_OF_GROUP = ("_register_backend", "_set_default_backend", "_set_group_desc", "_set_group_name")
_OF_GLOO = ("_Options", "_set_sequence_number_for_group", "options")


@dataclass(frozen=True, slots=True)
class _Devices:
    """Devices that groups share, and by what they were chosen: the process, and variables."""

    chosen_by: tuple[object, ...]
    devices: list[Any]


_OPEN: weakref.WeakKeyDictionary[Any, _Devices] = weakref.WeakKeyDictionary()
"""The devices of each group of ours."""
_SAID: set[str] = set()


def new_gloo_group(name: str, ranks: Sequence[int], rank: int, meeting: Any, timeout: timedelta) -> Any:
    """Make a group of these ranks of the world, of which this is the one at index `rank`, under a name of its
    own. All of them do so. Where this torch does not let groups share a device, which is said, each has one.
    """
    chosen_by = (os.getpid(), *map(os.environ.get, _CHOICE))
    there = [one for one in list(_OPEN.values()) if one.chosen_by == chosen_by]
    why = _why_not()
    if there and not why:
        group = _group_on(there[0].devices, name, ranks, rank, meeting, timeout)
        _OPEN[group] = there[0]
        return group
    group = plain_group("gloo", name, ranks, rank, meeting, timeout)
    devices = [] if why else _devices_of(group)
    if devices:
        _OPEN[group] = _Devices(chosen_by, devices)
    else:
        _say(why or f"{type(_backend_of(group)).__name__} tells none")
    return group


def plain_group(
    backend: str, name: str, ranks: Sequence[int], rank: int, meeting: Any, timeout: timedelta
) -> Any:
    """Make a group as dist.new_group does, but under the given name."""
    c10d: Any = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001 - new_group takes no name
        len(ranks), rank, list(ranks), c10d.Backend(backend), meeting, name, timeout=timeout
    )
    return group


def _group_on(
    devices: list[Any], name: str, ranks: Sequence[int], rank: int, meeting: Any, timeout: timedelta
) -> Any:
    """Do what torch's own function does for gloo, which takes no options of gloo's."""
    c10d: Any = dist.distributed_c10d
    options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001
    for key, value in (("_devices", devices), ("_threads", 1), ("_timeout", timeout)):
        setattr(options, key, value)
    backend = c10d.Backend("gloo")
    config = c10d.BackendConfig(backend)
    computed_on = list(config.get_device_backend_map())
    own = c10d.PrefixStore(f"{name}/", meeting)
    over = c10d.ProcessGroupGloo(c10d.PrefixStore(f"{computed_on[0]}/", own), rank, len(ranks), options)
    over.options.global_ranks_in_group, over.options.group_name = list(ranks), name
    over._set_sequence_number_for_group()  # noqa: SLF001
    group, kind = c10d.ProcessGroup(own, rank, len(ranks)), c10d.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)  # noqa: SLF001
    for device in computed_on:
        group._register_backend(torch.device(device), kind, over)  # noqa: SLF001
    group._set_group_name(name)  # noqa: SLF001
    group._set_group_desc("undefined")  # noqa: SLF001
    _register(group, backend, own, name, str(config))
    return group


def _register(group: Any, backend: Any, own: Any, name: str, config: str) -> None:
    """Let torch know of a group as of those that it makes itself."""
    c10d: Any = dist.distributed_c10d
    register = getattr(c10d, "_register_pg_in_world", None)  # newer torch has it
    if register is not None:
        described = {"backend_name": backend, "store": own, "group_name": name, "backend_config": config}
        register(group, **described, add_to_default_tag=True)
        return
    world, tag = c10d._world, f"ptd:{name}"  # noqa: SLF001
    world.pg_map[group], world.pg_names[group] = (backend, own), name
    c10d._register_process_group(name, group)  # noqa: SLF001
    world.pg_backend_config[group] = config
    for one in ("", tag):
        world.tags_to_pg.setdefault(one, []).append(group)
    world.pg_to_tag[group] = tag


def _backend_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu"))  # noqa: SLF001


def _devices_of(group: Any) -> list[Any]:
    """Return the devices that torch has chosen for a group; none where it does not tell."""
    over = _backend_of(group)
    if not isinstance(over, dist.distributed_c10d.ProcessGroupGloo):
        return []
    return list(getattr(over.options, "_devices", []))


def _why_not() -> str:
    """Return why groups cannot share a device here; nothing where they can."""
    c10d: Any = dist.distributed_c10d
    if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each group"
    lacks = [one for one in _OF_C10D if not hasattr(c10d, one)]
    lacks = lacks or [one for one in _OF_GROUP if not hasattr(c10d.ProcessGroup, one)]
    lacks = lacks or [one for one in _OF_GLOO if not hasattr(c10d.ProcessGroupGloo, one)]
    return f"torch {torch.__version__} has no {', '.join(lacks)}" if lacks else ""


def _say(why: str) -> None:
    if why not in _SAID:
        _SAID.add(why)
        logger.info("each group over gloo has a device of its own, with a thread that polls: %s", why)
