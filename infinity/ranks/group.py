"""The processes that train one model together, and their collectives, over torch.distributed.

[Note: one order]
Every rank has to call the same collectives in the same order. So each *channel* has groups of its own and is
used by one thread, and its collectives are decided by the thread that computes, whose steps are the same on
every rank. Before data moves, the ranks have compared what they are about to move: ranks that disagree
(because their models took different paths through the forward) get an error that names both operations. Plain
collectives would hang, or mix two weights of the same size. What a step repeats of an earlier one they
compare once, when it begins: see agreed.

[Note: names]
A group is named by its members, and by how many engines they have built before. Torch names a group by a
count that each process keeps for itself: after one row of a mesh has built two engines and another row one,
the ranks of a column would wait for each other under different names. With our names disjoint groups may
build any number of engines at the same time, and only its members have to know of a group.

[Note: two hops]
A link between machines is slower than what ranks of one machine share. So where each of several machines has
several ranks, and they are neighbours, gradients are summed within each machine first, and the sums then
between the ranks of one number on all machines; weights go between those first, and then within each machine.
Each byte crosses between two machines once, and not once for each rank there. The sums of machines travel in
the gradients' own type: the bits depend on the number of ranks and of machines alone.

[Note: missing ranks]
A rank whose wait exceeds the timeout, or that loses a connection, posts its reason in the store through which
the processes met, and reads the reasons of the others there; a rank that posts nothing within a few seconds
is named in the error. Long before that, a slow wait is logged: see waiting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash

from infinity.errors import ConfigError, RanksError
from infinity.ranks.groups import all_gather, backend_of, meet, members_of, new_group, placed, store
from infinity.ranks.machines import Hops, grid_of, neighbours, this_machine
from infinity.ranks.places import Names
from infinity.ranks.waiting import Waiting, brief, from_the_difference, in_one_line

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("infinity")


class _Rank(logging.Filter):
    """Adds this process's rank to every log record, as `rank`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return True


logger.addFilter(_Rank())

_GRACE_S = 5.0
"""Seconds that a rank gives the others to post why they failed."""
_engines: Counter[str] = Counter()
"""How many engines this process has built with the same members; see [Note: names]."""


class Channel:
    """Collectives of one thread, in one order; see [Note: one order]."""

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        backend: str,
        timeout_s: float,
        *,
        tells: bool = True,
        foresees: bool = False,
        hops: bool = False,
        near: int = 0,
    ) -> None:
        """Connect the ranks under `name`, for data over `backend`. All ranks call this.

        tells: whether long waits are logged; see waiting. foresees: whether it is used by what repeats; see
        agreed. Over NCCL all is agreed on: its wait for a rank that does not come neither ends nor names it.
        hops: whether data goes in two hops where the ranks are a grid; see [Note: two hops]. near: how many
        neighbours each are connected for `gather_near`; 0: none are.
        """
        self.ranks = ranks
        self._timeout_s = timeout_s
        self._data = self._host = self._control = new_group(f"{name} {backend}", ranks, backend, timeout_s)
        self.foresees = foresees and backend == "gloo"
        """Whether collectives may be `foreseen`."""
        if backend != "gloo":
            self._host = self._control = new_group(f"{name} gloo", ranks, "gloo", timeout_s)
        elif foresees:
            self._control = new_group(f"{name} agreement", ranks, "gloo", timeout_s)
        self.hops: Hops | None = None
        if hops and ranks.grid is not None:
            self.hops = Hops(ranks.grid, ranks, name, backend, timeout_s)
        self._near: Any = None
        if near:
            self._near = new_group(*neighbours(near, ranks, f"{name} {backend}"), backend, timeout_s)
        self._hops_on_host = backend == "gloo"
        self.crossed_nbytes = 0
        """Bytes that this rank has sent to other machines in two hops."""
        self._sequence = 0
        self._tells = tells
        self._said = f"{name} asks at"
        self._listen: Callable[[], None] | None = None

    def agree(self, what: str) -> None:
        """Return when every rank is about to do `what`.

        Raises: RanksError naming what each rank is about to do, if they differ.
        """
        self._sequence += 1
        mine = [self._sequence, xxhash.xxh3_64_intdigest(what.encode()) >> 1]
        if any(
            other != mine for other in self.rows(torch.tensor(mine, dtype=torch.int64, device="cpu"), what)
        ):
            raise self._different(what)

    def agree_aloud(self, what: str, place: int) -> None:
        """Like `agree`, where other ranks may wait in what was foreseen as the collective number `place`."""
        with contextlib.suppress(Exception):  # the store may have died with its process
            store().set(self._said, str(place))
        self.agree(what)

    @contextlib.contextmanager
    def foreseen(self, what: str, place: int, begun_at: int) -> Iterator[None]:
        """Do in the `with` what all ranks have foreseen as the collective number `place`, of a step that
        began behind number `begun_at`. It comes to an agreement after all if another rank says that it does
        something else, here or at an earlier place of the step, at which this rank had not to wait for it.

        Raises: RanksError as `agree` does.
        """
        self._listen = partial(self._come_to_agree, what, range(begun_at + 1, place + 1))
        try:
            yield
        finally:
            self._listen = None

    def _come_to_agree(self, what: str, places: range) -> None:
        try:
            meeting = store()
            if not meeting.check([self._said]) or int(meeting.get(self._said)) not in places:
                return
        except Exception as error:  # it may have died with its process, of which this may not need anything
            logger.debug("listening to the other ranks", exc_info=error)
            return
        self._listen = None
        try:
            self.agree(what)
        except RanksError:
            with contextlib.suppress(Exception):  # nobody will end what was begun
                self._data.abort()
            raise

    def _different(self, what: str) -> RanksError:
        text = what.encode()
        most = max(row[0] for row in self.integers([len(text)], what))
        rows = self.rows(torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8), what)
        texts = from_the_difference([bytes(row).decode().strip() for row in rows])
        doing = self.ranks.names.told(texts)
        return RanksError(
            f"the ranks are about to do different things: {doing}. Likely cause: their forwards take "
            "different paths through the model (experts or branches chosen by the data, a longer loop on one "
            "rank, state_dict() or an evaluation on one rank alone). Let every rank run the same modules in "
            "the same order."
        )

    def integers(self, values: Sequence[int], what: str) -> list[list[int]]:
        """Return every rank's 63-bit integers; all ranks give the same number of them."""
        return self.rows(torch.tensor(values, dtype=torch.int64, device="cpu"), what)

    def rows(self, mine: torch.Tensor, what: str) -> list[list[Any]]:
        """Return every rank's numbers; all ranks give the same number of them, of the same dtype."""
        rows = torch.empty(self.ranks.size * mine.numel(), dtype=mine.dtype, device="cpu")
        self._do(what, self._control, partial(all_gather, rows, mine))
        whole: list[list[Any]] = rows.view(self.ranks.size, -1).tolist()
        return whole

    def gather(
        self, whole: torch.Tensor, part: torch.Tensor, what: str, beside: torch.Tensor | None = None
    ) -> None:
        """Fill `whole` with every rank's `part`, in the order of ranks; `part` may be a view of `whole`.
        beside: memory for a part of each machine, with which it goes in two hops where there are `hops`.
        """
        if self.hops is None or beside is None:
            self._do(what, self._over(whole), partial(all_gather, whole, part))
            return
        self.gather_between(beside, part, what)
        machines = self.hops.grid.machines
        for there, one in zip(whole.view(machines, -1), beside.view(machines, -1), strict=True):
            self._do(what, self.hops.within, partial(all_gather, there, one))

    def gather_between(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> None:
        """Fill `whole` with the parts of the ranks of this one's number on all machines, in their order."""
        self._do(what, self._hop(what).between, partial(all_gather, whole, part))
        self.crossed_nbytes += whole.nbytes - part.nbytes

    def gather_near(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> None:
        """Fill `whole` with the parts of this rank and its neighbours, in the order of ranks."""
        self._do(what, self._near, partial(all_gather, whole, part))

    def gather_beside_numel(self, numel: int) -> int:
        """Return the elements of memory that `gather` takes for two hops, of parts of `numel`; 0 for one."""
        return self.hops.grid.machines * numel if self.hops is not None and self._hops_on_host else 0

    def spread(self, values: torch.Tensor, root: int, what: str) -> None:
        """Fill `values`, of the same size on every rank, with those of rank `root`."""
        source = self.ranks.members[root]
        self._do(what, self._over(values), partial(dist.broadcast, values, source))

    def wait_for(self, begin: Callable[..., Any], what: str) -> None:
        """Wait for the work that `begin` returns, as for a collective over gloo."""
        self._do(what, self._host, begin)

    def _over(self, values: torch.Tensor) -> Any:
        return self._host if values.device.type == "cpu" else self._data  # host memory goes over gloo

    def exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        what: str,
        rows: tuple[list[int], list[int]] | None = None,
    ) -> None:
        """Send the i-th equal part of `sent` to rank i; fill `received` in the order of ranks. rows: how many
        come from each rank, and how many go to each, where these differ.
        """
        self._do(what, self._data, partial(dist.all_to_all_single, received, sent, *(rows or ())))

    def exchange_in_hop(
        self, received: torch.Tensor, sent: torch.Tensor, what: str, *, between_machines: bool
    ) -> None:
        """Exchange equal parts within this machine, or with the ranks of this one's number on the others."""
        hops = self._hop(what)
        group = hops.between if between_machines else hops.within
        self._do(what, group, partial(dist.all_to_all_single, received, sent))
        if between_machines:
            self.crossed_nbytes += sent.nbytes // hops.grid.machines * (hops.grid.machines - 1)

    def _hop(self, what: str) -> Hops:
        if self.hops is None:
            raise AssertionError(f"{what}: expected ranks on several machines, got {self.ranks.grid}")
        return self.hops

    def _do(self, what: str, group: Any, collective: Callable[..., Any]) -> None:
        hop = any(group is one for one in self._some())
        on_host = self._hops_on_host if hop else group is self._host or group is self._control
        on_host &= self._tells
        listen = self._listen if group is not self._control else None
        if hop and on_host:
            listen = partial(self._look_for_failures, listen)
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed them
                work = collective(group=group, async_op=on_host)
            if on_host:
                self.ranks.waiting.until(work, what, listen)
        except RanksError:
            raise
        except RuntimeError as error:
            raise self.ranks.broken(what, time.perf_counter() - began, self._timeout_s, error) from error

    def _some(self) -> list[Any]:
        """Return the groups of some of the ranks."""
        hops = [self.hops.within, self.hops.between] if self.hops is not None else []
        return hops if self._near is None else [*hops, self._near]

    def _look_for_failures(self, listen: Callable[[], None] | None) -> None:
        """A rank of one hop's group does not see that one of another is gone.

        Raises: RuntimeError where a rank has posted a failure.
        """
        if listen is not None:
            listen()
        if self.ranks.have_failed():
            raise RuntimeError("another rank has failed")

    def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(Exception):  # the world may be gone
            groups = self._data, self._host, self._control, *self._some()
            for group in {id(one): one for one in groups}.values():
                dist.destroy_process_group(group)


class OwnChannel(Channel):
    """The channel of a single rank, which connects nothing and gets what it gives."""

    def __init__(self, ranks: Ranks) -> None:
        """Connect nothing."""
        self.ranks = ranks
        self.foresees = False
        self.hops = None
        self.crossed_nbytes = 0

    def agree(self, what: str) -> None:
        """There is nobody to agree with."""

    def rows(self, mine: torch.Tensor, what: str) -> list[list[Any]]:
        """Return this rank's numbers."""
        return [mine.tolist()]

    def gather(self, whole: torch.Tensor, part: torch.Tensor, what: str, beside: Any = None) -> None:
        """Fill `whole` with `part`, which may be the same."""
        if whole.data_ptr() != part.data_ptr():
            whole.copy_(part)

    def spread(self, values: torch.Tensor, root: int, what: str) -> None:
        """`values` are there."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, what: str, rows: Any = None) -> None:
        """Fill `received` with `sent`."""
        received.copy_(sent)

    def close(self) -> None:
        """Nothing is open."""


class Ranks:
    """The ranks of one engine. A single rank connects nothing, and gets its own values back."""

    def __init__(
        self, members: Sequence[int], rank: int, backend: str, timeout_s: float, device: str = "cpu"
    ) -> None:
        """Connect `members`, ranks of the world; this process is the one at index `rank`.

        Raises: RanksError naming the ranks that do not come.
        """
        self.rank, self.size = rank, len(members)
        self.device = device
        """The device on which this rank computes."""
        self.members, self._backend, self._timeout_s = list(members), backend, timeout_s
        group = "-".join(map(str, members))
        self._key = f"infinity/{group}/{_engines[group]}"
        self.names = Names(members, rank)
        """What messages call them."""
        self.waiting = Waiting(self._key, rank, self.size, timeout_s, self.names)
        self._posted = False
        self._lost = False
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._before_together: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.closing: list[Callable[[], object]] = []
        """Called before the connections are closed, to end what uses them."""
        self._control: Channel | None = None
        if self.size > 1:
            _engines[group] += 1
            self._await_all()
            self._control = self.channel()
        machines = [row[0] for row in self.of_all([this_machine()], "meeting")]
        near = [one for one, machine in enumerate(machines) if machine == machines[rank]]
        self.near = near  # those on this machine
        self.local_rank, self.local_size = near.index(rank), len(near)
        self.grid = grid_of(machines)
        """How they lie on several machines; see [Note: two hops]."""

    def channel(
        self, *, tells: bool = True, foresees: bool = False, hops: bool = False, near: int = 0
    ) -> Channel:
        """Open another channel. All ranks do so, in the same order. For the arguments see Channel."""
        if self.size == 1:
            return OwnChannel(self)
        name = f"{self._key} channel {len(self._channels)}"
        how: dict[str, Any] = {"tells": tells, "foresees": foresees, "hops": hops, "near": near}
        channel = Channel(self, name, self._backend, self._timeout_s, **how)
        self._channels.append(channel)
        return channel

    def some(self, numbers: Sequence[int]) -> Ranks:
        """Connect those of these ranks, this one among them, that have the `numbers`. All of them do so."""
        members = [self.members[one] for one in numbers]
        number = list(numbers).index(self.rank)
        some = Ranks(members, number, self._backend, self._timeout_s, self.device)
        some.names.lie_at(self.names.places)
        return some

    def share_machine(self, others: Ranks) -> None:
        """Count the ranks of other engines, one of each in `others`, among those of this machine."""
        here = this_machine()
        rows = others.of_all([here, self.local_size], "meeting")
        near = [(rank, size) for rank, (machine, size) in enumerate(rows) if machine == here]
        self.local_rank += sum(size for rank, size in near if rank < others.rank)
        self.local_size = sum(size for _, size in near)

    def _await_all(self) -> None:
        """Return when every rank has come.

        Raises: RanksError naming the ranks that do not come within the timeout.
        """
        meeting, places = store(), [f"{self._key} here {rank}" for rank in range(self.size)]
        meeting.set(places[self.rank], "")
        with contextlib.suppress(RuntimeError):  # torch's error names no ranks
            meeting.wait(places, timedelta(seconds=self._timeout_s))
            return
        missing = [one for one, place in zip(self.members, places, strict=True) if not meeting.check([place])]
        absent, group = (", ".join(map(str, some)) for some in (missing, self.members))
        raise RanksError(
            f"rank {absent} of the world did not come to Init within {self._timeout_s:.0f} s, to build with "
            f"ranks {group}. Likely cause: it has ended, or builds with another process_group first. All "
            "ranks of a group have to build in it, and those of several groups in the same order; "
            "Config(timeout_s=...) sets how long a rank waits."
        )

    # For the thread that computes

    def agree(self, what: str) -> None:
        """See Channel."""
        if self._control is not None:
            self._control.agree(what)

    def totals(self, values: Sequence[float], what: str) -> list[float]:
        """Return the sums over all ranks, in fp64, added in the order of ranks."""
        if self._control is None:
            return list(values)
        rows = self._control.rows(torch.tensor(values, dtype=torch.float64, device="cpu"), what)
        return [sum(column) for column in zip(*rows, strict=True)]

    def union(self, chosen: Sequence[int], count: int, what: str) -> list[int]:
        """Return, in order, those of the numbers below `count` that any rank has chosen."""
        if self._control is None:
            return list(chosen)
        mine = torch.zeros(count, dtype=torch.uint8, device="cpu")
        mine[list(chosen)] = 1
        rows = self._control.rows(mine, what)
        return [number for number, any_rank in enumerate(zip(*rows, strict=True)) if any(any_rank)]

    def of_all(self, values: Sequence[int], what: str) -> list[list[int]]:
        """Return every rank's integers, in the order of ranks; all give the same number of them."""
        return [list(values)] if self._control is None else self._control.integers(values, what)

    def least(self, value: int, what: str) -> int:
        """Return the smallest of the ranks' integers."""
        if self._control is None:
            return value
        return min(row[0] for row in self._control.integers([value], what))

    def same(self, digest: int, what: str) -> bool:
        """Whether every rank has the same digest, a 63-bit integer."""
        if self._control is None:
            return True
        return all(row == [digest] for row in self._control.integers([digest], what))

    def first(self, values: bytes, what: str) -> bytes:
        """Return rank 0's bytes; all ranks give the same number of them."""
        if self._control is None:
            return values
        return bytes(self._control.rows(torch.frombuffer(bytearray(values), dtype=torch.uint8), what)[0])

    def spread(self, values: torch.Tensor, root: int, what: str) -> None:
        """See Channel."""
        if self._control is not None:
            self._control.spread(values, root, what)

    def each(self, said: bytes, what: str) -> list[bytes]:
        """Return every rank's bytes, in the order of ranks; their number may differ."""
        if self._control is None:
            return [said]
        self._control.agree(what)
        sizes = [row[0] for row in self._control.integers([len(said)], what)]
        most = max(sizes)
        if not most:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(said.ljust(most)), dtype=torch.uint8)
        rows = torch.empty(self.size * most, dtype=torch.uint8, device="cpu")
        self._control.gather(rows, padded, what)
        whole = memoryview(rows.numpy())  # type: ignore[arg-type]
        return [bytes(whole[rank * most : rank * most + size]) for rank, size in enumerate(sizes)]

    def before_together(self, call: Callable[[], None]) -> None:
        """Have a method, whose object this does not keep alive, be called at the begin of each `together`."""
        self._before_together.append(weakref.WeakMethod(call))

    def prepare_as(self, others: Ranks) -> None:
        """Call what `others` call at the begin of each `together`."""
        self._before_together = others._before_together

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run something that may fail on some ranks alone: the ranks meet at the end of the `with`, and none
        goes on if it failed on any.

        Raises: the error of this rank; if it failed on other ranks, RanksError naming them and their reasons.
        """
        for reference in self._before_together:
            if (call := reference()) is not None:
                call()
        try:
            with self.waiting.alone(what):
                yield
        except Exception as error:
            if not self._lost:
                self.each(in_one_line(error).encode(), what)
            raise
        failed = {rank: why.decode() for rank, why in enumerate(self.each(b"", what)) if why}
        if failed:
            reasons = "; ".join(f"{self.names.of(rank)}: {why}" for rank, why in failed.items())
            raise RanksError(f"{self.names}: {what} failed elsewhere: {reasons}")

    # Failures; see [Note: missing ranks]

    def post_failure(self, why: str, *, ends: bool = True) -> None:
        """Post why this rank does not go on, or, unless it `ends`, may not, for ranks that look for it."""
        with self._lock, contextlib.suppress(Exception):  # the store may have died with its process
            if self.size > 1 and not self._posted:
                self._posted = ends
                store().set(f"{self._key}/{self.rank}", why[:2000] or "it failed")
                if ends:
                    store().set(f"{self._key} failed", "")

    def have_failed(self) -> bool:
        """Whether any rank has posted a failure."""
        with contextlib.suppress(Exception):  # the store may have died with its process
            return bool(store().check([f"{self._key} failed"]))
        return False

    def broken(self, what: str, waited_s: float, timeout_s: float, error: Exception) -> RanksError:
        """Return the error for a collective that failed after `waited_s`."""
        self._lost, what = True, brief(what)
        self.post_failure(f"it waited for the others, at {what}")
        told, missing = self._ask(_GRACE_S)
        lines = [f"{self.names.of(rank)}: {why}" for rank, why in told.items()]
        if missing:
            names = self.names.of(*missing)
            lines.append(f"{names} did not answer within {_GRACE_S:.0f} s: killed, hung, or far behind")
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).strip()).split("\n")[0].split(". ")[0]
        return RanksError(
            f"{self.names}: {what} failed after {waited_s:.1f} s (timeout "
            f"{timeout_s:.0f} s; {reason or type(error).__name__}). "
            f"{'; '.join(lines)}{self.waiting.forwards_of(missing)}. Look at the output of the ranks named, "
            "then start again from the last checkpoint; Config(timeout_s=...) sets how long a rank waits."
        )

    def _ask(self, grace_s: float) -> tuple[dict[int, str], list[int]]:
        """Return the reasons that other ranks have posted, and the ranks that have posted none."""
        told: dict[int, str] = {}
        others = [rank for rank in range(self.size) if rank != self.rank]
        end_s = time.monotonic() + grace_s
        try:
            meeting = store()
            while len(told) < len(others):
                for rank in others:
                    key = f"{self._key}/{rank}"
                    if rank not in told and meeting.check([key]):
                        told[rank] = meeting.get(key).decode(errors="replace")
                if time.monotonic() > end_s:
                    break
                time.sleep(0.05)
        except Exception as error:
            logger.debug("asking the other ranks", exc_info=error)
        return told, [rank for rank in others if rank not in told]

    def close(self) -> None:
        """Close the connections."""
        for settle in self.closing:
            settle()
        self.closing.clear()
        for channel in self._channels:
            channel.close()
        self._channels.clear()


ALONE = Ranks([0], 0, "gloo", 0)
"""A single rank."""


def open_ranks(group: Any | DeviceMesh | None, device: str, timeout_s: float) -> Ranks:
    """Return the ranks of `group`, a process group or a one-dimensional DeviceMesh; of the world for None.

    Under torchrun it calls torch.distributed.init_process_group if nothing has yet, with gloo for the CPU and
    NCCL for CUDA.

    Raises: ConfigError for a group that this process is not in, and for a device without a backend.
    """
    backend = backend_of(device)
    if not dist.is_available() or not (dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        if group is not None:
            raise ConfigError("a process group needs torch.distributed.init_process_group() first")
        return Ranks([0], 0, backend, timeout_s, device)
    device = placed(device)
    if not dist.is_initialized():
        meet(backend)
    members = members_of(group or dist.group.WORLD)
    return Ranks(members, members.index(dist.get_rank()), backend, timeout_s, device)
