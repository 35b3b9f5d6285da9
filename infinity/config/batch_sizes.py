"""Batch sizes of DeepSpeed's JSON, and what its micro-batches share. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from infinity.config.deepspeed_values import AUTO
from infinity.config.sequence_ranks import check_data, check_sequences
from infinity.errors import ConfigError

BY_BLOCK = "infinity.accumulate_by_block"
SPECULATE = "infinity.speculate"
SEQUENCE = "sequence_parallel_size"
TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class Batches:
    """train = micro x steps x ranks, in samples; train and micro are None where a file names neither. Ranks
    that share a sequence count as one.
    """

    train: int | None
    micro: int | None
    steps: int
    ranks: int


def sequences_at_once(found: Mapping[str, Any], more: Mapping[str, Any], ranks: int) -> int:
    """Return the number of sequences that are trained at once: ranks / those that share one.

    Raises: ConfigError where the ranks cannot be divided, with the numbers.
    """
    size = more.get("sequence_parallel", found.get("infinity.sequence_parallel", found.get(SEQUENCE)))
    if size in (None, AUTO) or ranks == 1:  # of a file that is read before there are ranks
        return ranks
    check_sequences(size, ranks)
    check_data(found.get("data_parallel_size"), ranks // int(size))
    return ranks // int(size)


def take_by_block(found: MutableMapping[str, Any], more: MutableMapping[str, Any]) -> bool:
    """Take BY_BLOCK, which is no field of Config, out of what a file and `more` say.

    Raises: ConfigError for a value that is none, and where the file does not count micro-batches.
    """
    by_block = take_switch(BY_BLOCK, found, more) or False
    if by_block and found.get("managed_gradient_accumulation") is False:
        raise ConfigError(
            f"{BY_BLOCK} with managed_gradient_accumulation=false: which micro-batch is an update's last is "
            "not known in its forward then. Leave one of the two out"
        )
    return by_block


def take_switch(name: str, found: MutableMapping[str, Any], more: MutableMapping[str, Any]) -> bool | None:
    """Take a key of the section "infinity", which is no field of Config, out of what a file and `more` say;
    None where neither says it.

    Raises: ConfigError for a value that is none.
    """
    value = more.pop(name.partition(".")[2], found.pop(name, None))
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected true or false")
    return value


def batches_of(found: MutableMapping[str, Any], ranks: int) -> Batches:
    """Return the batch sizes; one that is absent, or "auto", follows from the others, and is set in `found`.

    Raises: ConfigError where they contradict each other, with the numbers.
    """
    named = (found.get(name) for name in (TRAIN, MICRO, STEPS))
    train, micro, steps = (None if value in (None, AUTO) else int(value) for value in named)
    if steps is None and (train is None or micro is None):
        if found.get(STEPS) == AUTO:
            return Batches(train, micro, 1, ranks)  # refused later, as an "auto" without a value
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
        if found.get(name) == AUTO and value is not None:
            found[name] = value
    return Batches(train, micro, steps, ranks)
