"""What is said of bytes that were read and are not those that were written."""

from __future__ import annotations

from infinity.errors import CorruptionError


def corruption(
    field: str, nbytes: int, where: str, found: int, expected: int, *, in_files: bool
) -> CorruptionError:
    """Return the error for a tile of `field`, named with its unit, whose checksum is not the one kept. where:
    its place. in_files: whether that is in a checkpoint's own files.
    """
    sums = f"(checksum {found:016x}, expected {expected:016x})"
    if in_files:
        return CorruptionError(
            f"{field}: the {nbytes} bytes read from {where} are not those that were read from "
            f"there before {sums}. Likely cause: the file was "
            "changed, or the device returned stale or damaged data. Compare it with where it came from, "
            "and load the model again."
        )
    return CorruptionError(
        f"{field}: the {nbytes} bytes read from {where} are not those that were written "
        f"{sums}. Likely cause: the device returned stale or "
        "damaged data. Check it (smartctl, dmesg) and resume from your last checkpoint; in a durable "
        "run, try the older generation: infinity.resume(..., older=True)."
    )
