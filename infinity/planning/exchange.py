"""What a rank is sent of a unit's weights and gradients, and over which links. Pure.

[Note: links]
Over gloo, where the CPU computes, what ranks of several machines exchange goes in two hops, where each
machine has several: see the note in ranks/group.py. Weights go between the ranks of one number first, and
then within each machine, gradients the other way round. A rank is sent as many bytes as in one hop, but no
byte crosses between two machines twice. Ranks that have memory in common are sent nothing within their
machine, but for gradients that are coded, and on several machines those that are summed within each; second
parts are all within one.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.planning.coded import coded_nbytes, sent_nbytes
from infinity.planning.setting import Setting
from infinity.sizes import round_up

_ALIGN = 64
"""Bytes: a second part begins on a line of the caches."""
_WORKER_NBYTES = 8
"""Of an element: a momentum and an error, in fp32."""
_ERROR_NBYTES = 4
"""Of an element: an error, in fp32."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes that a rank is sent by others, by where these are."""

    within: int = 0
    """On its machine."""
    between: int = 0
    """On others."""

    def __add__(self, other: Links) -> Links:
        """Return both together."""
        return Links(self.within + other.within, self.between + other.between)

    def times(self, number: float) -> Links:
        """Return as much for each of a number of exchanges."""
        return Links(round(number * self.within), round(number * self.between))

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.within + self.between


class Exchanges:
    """What ranks of one setting exchange of units that `holders` of them have a share of."""

    def __init__(self, setting: Setting, width: int, holders: int) -> None:
        """width: bytes of an element that computes, and of its gradient."""
        self._setting, self._width, self._holders = setting, width, holders
        self.near = setting.near(holders)
        """Ranks of each machine, among them."""

    @property
    def _machines(self) -> int:
        return self._holders // self.near

    def gathered(self, share: int) -> Links:
        """Return what others send when a unit is assembled of which each rank has `share` elements."""
        nbytes = sent_nbytes(share, self._setting.quantized_weights, self._width)
        within = 0 if self._setting.shared_memory else (self.near - 1) * self._machines * nbytes
        return Links(within, (self._machines - 1) * nbytes)

    def gathered_again(self, share: int) -> Links | None:
        """Return what neighbours send when it is assembled from their second parts; None without those."""
        neighbours = self._setting.secondary_shard
        if not neighbours or self._holders == 1:
            return None
        return Links((neighbours - 1) * -(-share * self._holders // neighbours) * self._width)

    def reduced(self, share: int) -> Links:
        """Return what others send when its gradient is summed."""
        setting, machines = self._setting, self._machines
        coded = setting.one_bit or setting.quantized_gradients
        if setting.shared_memory and machines == 1 and not coded:
            return Links()
        within = sent_nbytes(share, setting.quantized_gradients, self._width)
        between = coded_nbytes(share, 1) if setting.one_bit else within
        if setting.one_bit and machines == 1:
            within = between
        return Links((self.near - 1) * machines * within, (machines - 1) * between)

    def second_nbytes(self, resident: int) -> int:
        """Return the bytes of a rank's second part of a unit that takes `resident` bytes while it is used."""
        neighbours = self._setting.secondary_shard
        return round_up(-(-resident // neighbours), _ALIGN) if neighbours and self._holders > 1 else 0

    def worker_nbytes(self, share: int) -> int:
        """Return the bytes that a rank has beside a unit's state of what it sends. The momenta and errors of
        1-bit Adam: of each worker's part, which is a rank's, or of several machines a machine's, whose ranks
        divide it. Errors of codes: of each rank's part, and of several machines of the sums for each.
        """
        if self._holders == 1:
            return 0
        if self._setting.one_bit:
            workers = self._holders if self._machines == 1 else self._machines
            return _WORKER_NBYTES * workers * share
        if self._setting.error_feedback:
            hops = self._machines if self.near > 1 and self._machines > 1 else 0
            return _ERROR_NBYTES * (self._holders + hops) * share
        return 0
