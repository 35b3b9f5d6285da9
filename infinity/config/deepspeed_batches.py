"""How DeepSpeed's three batch sizes belong together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from infinity.errors import ConfigError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class Batches:
    """train = micro x steps x ranks, in samples; train and micro are None where a file names neither."""

    train: int | None
    micro: int | None
    steps: int
    ranks: int


def batches(found: MutableMapping[str, Any], ranks: int) -> Batches:
    """Return the batch sizes; the one that is left out, or "auto", follows from the others, and is set.

    Raises: ConfigError where they contradict each other, with the numbers.
    """
    train, micro, steps = (_known(found, name) for name in (TRAIN, MICRO, STEPS))
    if steps is None and not (train is not None and micro is not None):
        if found.get(STEPS) == "auto":
            return Batches(train, micro, 1, ranks)  # refused as an "auto" without a value
        steps = 1
    if train is not None and micro is not None and steps is None:
        steps = max(1, train // (micro * ranks))
    steps = steps or 1
    if train is not None and micro is None:
        micro = max(1, train // (steps * ranks))
    if micro is not None and train is None:
        train = micro * steps * ranks
    if train is not None and micro is not None and train != micro * steps * ranks:
        raise ConfigError(
            f"{TRAIN}={train} is not {MICRO} x {STEPS} x ranks = {micro} x {steps} x {ranks} = "
            f"{micro * steps * ranks}; leave one of them out"
        )
    for name, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)):
        if found.get(name) == "auto" and value is not None:
            found[name] = value
    return Batches(train, micro, steps, ranks)


def _known(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    return None if value in (None, "auto") else int(value)
