"""The budget of host memory that Infinity may take, and how it is divided.

[Note: four shares of one budget]
host_memory is divided once. *Slots* are allocated at start-up and hold what is in flight between storage and
the rest. What is fetched *ahead* waits, resident, for its use; on an accelerator it does so there, and has no
share. *Outgoing* gradients wait to be written or applied. What is left is *kept*: gradients of this step, and
fields of records pinned in host memory. Each share is a ledger: a request that does not fit is answered "no"
(and the caller spills, or waits), never granted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infinity.errors import DeviceMemoryError, HostMemoryError
from infinity.planning.layout import FP32, RecordSchema
from infinity.sizes import format_size

SLOT_NBYTES_PER_ELEMENT = 16
"""Bytes: hi 2, lo 2, m 4, v 4, and a gradient of 2 or 4: one tile of a whole record. Of other records, see
`RecordSchema` in planning/layout.py.
"""

_SLOT_NUMEL_MOST = 1 << 20
_SLOT_COUNT, _SLOT_COUNT_GOOD = 12, 8
"""So many keep a disk busy; of larger tiles, each of which takes time of its own, fewer do."""
_SLOT_COUNT_LEAST = 4
_SLOTS_NBYTES = 96 << 20
"""So much in all slots keeps a disk busy, however few they are."""
_READ_NBYTES = 8 << 20
"""So much, on its way at once, keeps a disk busy that is only read."""

_SCRATCH_SHARE = 32
"""One part in so many of device_memory, between these bounds: see scratch_nbytes."""
_SCRATCH_NBYTES_LEAST, _SCRATCH_NBYTES_MOST = 16 << 10, 128 << 20
_SCRATCH_NBYTES_PER_BYTE = 11
"""For a byte of weights, all at once: see Scratch in records/tensor_steps.py."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How one host_memory is divided, in bytes: see [Note: four shares of one budget]."""

    total_nbytes: int
    tile_numel: int
    slots: int
    ahead_nbytes: int
    outgoing_nbytes: int
    slot_nbytes_per_element: int = SLOT_NBYTES_PER_ELEMENT

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: one tile of a whole record with its gradient."""
        return self.tile_numel * self.slot_nbytes_per_element

    def tile_of(self, schema: RecordSchema) -> int:
        """Return the elements of a tile of a record in another schema: as many as fit a slot.

        Raises: HostMemoryError with a host_memory that works.
        """
        numel = self.tile_numel
        while numel * schema.slot_nbytes > self.slot_nbytes:
            numel //= 2
        if numel < schema.align_numel:
            works = 4 * _SLOT_COUNT_GOOD * 2 * self.slot_nbytes
            raise HostMemoryError(
                f"host_memory={format_size(self.total_nbytes)} makes slots of "
                f"{format_size(self.slot_nbytes)}, and a parameter in {schema.dtype} moves in blocks of "
                f"{format_size(schema.align_numel * schema.slot_nbytes)}. {format_size(works)} works."
            )
        return numel

    @property
    def kept_nbytes(self) -> int:
        """Bytes left for gradients of this step and for pinned fields."""
        return self.total_nbytes - self.slots * self.slot_nbytes - self.ahead_nbytes - self.outgoing_nbytes

    def __str__(self) -> str:
        """The shares in one line."""
        shares = (
            ("ahead", self.ahead_nbytes),
            ("outgoing", self.outgoing_nbytes),
            ("kept", self.kept_nbytes),
        )
        slots = f"{self.slots} slots of {format_size(self.slot_nbytes)}"
        return ", ".join([slots, *(f"{name} {format_size(nbytes)}" for name, nbytes in shares)])


def least_budget(schema: RecordSchema = FP32) -> int:
    """Bytes: the smallest host_memory that moves records at all, one tile of one block at a time."""
    return _SLOT_COUNT_LEAST * schema.align_numel * schema.slot_nbytes


def divide(
    total_nbytes: int,
    largest_unit_nbytes: int = 0,
    schema: RecordSchema = FP32,
    *,
    on_device: bool = False,
    frozen: bool = False,
    tile_numel: int | None = None,
) -> Budget:
    """Divide a host_memory of `total_nbytes` for a model whose largest resident unit takes
    `largest_unit_nbytes`, in tiles that suit its records.

    A quarter at most is for slots; what is fetched ahead gets an eighth, or more where two of the largest
    units need more (up to a third); gradients on their way out an eighth. on_device: units become resident
    in the memory of an accelerator, so that what is fetched ahead needs none of the host's, and it is kept.
    frozen: where the CPU computes there are no more slots than keep a disk busy that reads weights alone, of
    which a slot brings half of its own bytes (FetchPass.tiles in lane/fetch.py); what is left is kept.
    tile_numel: elements of a tile, where that is settled: a run that goes on has its records in such.

    Raises: HostMemoryError with the smallest budget that works.
    """
    least_nbytes, slot_nbytes = least_budget(schema), schema.slot_nbytes
    if total_nbytes < least_nbytes:
        raise HostMemoryError(
            f"host_memory={format_size(total_nbytes)} cannot work: moving records needs at least "
            f"{format_size(least_nbytes)} ({_SLOT_COUNT_LEAST} transfers of one block). Give more; a few "
            "hundred MiB is fast."
        )
    if tile_numel is None:
        tile_numel = _tile_numel(total_nbytes, schema)
    least_nbytes = 2 * _SLOT_COUNT_LEAST * tile_numel * slot_nbytes
    if total_nbytes < least_nbytes and tile_numel > schema.align_numel:
        raise HostMemoryError(
            f"host_memory={format_size(total_nbytes)} cannot work: records lie in tiles of {tile_numel} "
            f"elements, and to move these takes {format_size(least_nbytes)} at least. Give more."
        )
    slot_nbytes *= tile_numel
    most = min(_SLOT_COUNT, max(_SLOT_COUNT_LEAST, _SLOTS_NBYTES // slot_nbytes))
    slots = max(_SLOT_COUNT_LEAST, min(most, total_nbytes // 4 // slot_nbytes))
    if frozen and not on_device:
        slots = max(_SLOT_COUNT_LEAST, min(slots, -(-2 * _READ_NBYTES // slot_nbytes)))
    rest = total_nbytes - slots * slot_nbytes
    ahead = min(rest // 2, max(total_nbytes // 8, min(2 * largest_unit_nbytes, total_nbytes // 3)))
    ahead = 0 if on_device else ahead
    outgoing = min(rest - ahead, total_nbytes // 8)
    return Budget(total_nbytes, tile_numel, slots, ahead, outgoing, schema.slot_nbytes)


def _tile_numel(total_nbytes: int, schema: RecordSchema) -> int:
    """Return the elements of the largest tiles of which as many as keep a disk busy take a quarter."""
    numel = _SLOT_NUMEL_MOST
    while numel > schema.align_numel and numel * schema.slot_nbytes * _SLOT_COUNT_GOOD > total_nbytes // 4:
        numel //= 2
    return numel


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """How one device_memory is divided, in bytes. `working_nbytes` is for units in use, gradients that leave,
    reductions and boundaries that come back; the rest is for units that wait for their use, or live there.
    """

    total_nbytes: int
    working_nbytes: int
    largest_nbytes: int
    """Of the largest unit."""

    @property
    def window_nbytes(self) -> int:
        """Bytes for units that wait or live on the device."""
        return self.total_nbytes - self.working_nbytes

    @property
    def lodging_nbytes(self) -> int:
        """Bytes for units that live there: the window, but for two of the largest units on their way."""
        return max(0, self.window_nbytes - 2 * self.largest_nbytes)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of that for intermediate values of updates of records there."""
        return scratch_nbytes(self.total_nbytes, self.largest_nbytes)

    def __str__(self) -> str:
        """The shares in one line."""
        working = format_size(self.working_nbytes)
        return f"device_memory {format_size(self.total_nbytes)}, {working} of it for what is in use"


def scratch_nbytes(device_nbytes: int, largest_nbytes: int) -> int:
    """Return the bytes of a device_memory that intermediate values take of updates of records there, the
    largest unit of which takes `largest_nbytes` while resident.
    """
    most = min(_SCRATCH_NBYTES_MOST, _SCRATCH_NBYTES_PER_BYTE * largest_nbytes)
    return max(min(device_nbytes // _SCRATCH_SHARE, most), _SCRATCH_NBYTES_LEAST)


def divide_device(
    total_nbytes: int, free_nbytes: int, largest_nbytes: int, need_nbytes: int, fixed_nbytes: int
) -> DeviceBudget:
    """Divide a device_memory of `total_nbytes`.

    free_nbytes: what is free on the device. largest_nbytes: of the largest resident unit. need_nbytes: of
    the unit that needs most while its gradients come. fixed_nbytes: of what is there all the time.

    Two of the largest needs are for what is in use, if that leaves half for the rest.

    Raises: DeviceMemoryError, with the smallest device_memory that works.
    """
    least = fixed_nbytes + need_nbytes
    if total_nbytes < least:
        raise DeviceMemoryError(
            f"device_memory={format_size(total_nbytes)} cannot work: the model needs {least} bytes of it "
            f"({format_size(least)}): {format_size(need_nbytes)} for its largest unit and that unit's "
            f"gradients, {format_size(fixed_nbytes)} all the time. Give more, or cut the largest layers with "
            "tile_above."
        )
    if total_nbytes > free_nbytes:
        raise DeviceMemoryError(
            f"device_memory={format_size(total_nbytes)} is more than what is free on the device, "
            f"{format_size(free_nbytes)}, and activations come on top. Set device_memory below that, free "
            "what other processes hold, or leave it out for half of what is free."
        )
    working = fixed_nbytes + max(need_nbytes, min(2 * need_nbytes, (total_nbytes - fixed_nbytes) // 2))
    return DeviceBudget(total_nbytes, working, largest_nbytes)


def totals_in_tiles_of(tile_numel: int, schema: RecordSchema = FP32) -> tuple[int, int | None]:
    """Return the least and the largest host_memory, in bytes, that gives such tiles; None: any."""
    least = 4 * _SLOT_COUNT_GOOD * tile_numel * schema.slot_nbytes
    return least, None if tile_numel == _SLOT_NUMEL_MOST else 2 * least - 1


def least_total(
    kept_nbytes: int, largest_unit_nbytes: int, schema: RecordSchema = FP32, *, on_device: bool = False
) -> int:
    """Return the smallest host_memory, in bytes to the MiB, whose kept share is at least `kept_nbytes`."""

    def keeps(total_nbytes: int) -> bool:
        budget = divide(total_nbytes, largest_unit_nbytes, schema, on_device=on_device)
        return budget.kept_nbytes >= kept_nbytes

    return least_that(keeps, schema)


def least_that(works: Callable[[int], bool], schema: RecordSchema = FP32) -> int:
    """Return the smallest host_memory, in bytes to the MiB, that `works` is true of. Where it raises
    HostMemoryError, it is not.

    Of budgets that give tiles of the same size, all larger than one that works do. A budget that gives
    larger tiles has fewer bytes left than one just below it, and may not work though that does.
    """

    def does(steps: int) -> bool:
        try:
            return works(steps << 20)
        except HostMemoryError:
            return False

    tile_numel, low = schema.align_numel, 1
    while True:
        least, most = totals_in_tiles_of(tile_numel, schema)
        low = max(low, -(-least >> 20)) if tile_numel > schema.align_numel else 1
        if most is None:
            high = low
            while not does(high):
                low, high = high + 1, 2 * high
            break
        high = most >> 20
        if low <= high and does(high):
            break
        tile_numel *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle + 1, high)
    return high << 20
