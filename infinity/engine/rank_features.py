"""What the ranks of an engine do together: decided once, when they have met, and alike on all of them.

Which features go together is said in planning/together.py. What is decided here besides is what a setting
comes to on the ranks and machines that there are: it may have nothing to do, which is said, or need something
that is not there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.config.sequence_ranks import check_expert_ranks, check_sequences
from infinity.config.settings import Config
from infinity.device.device import Device
from infinity.engine.secondary_ranks import neighbours_of
from infinity.errors import ConfigError
from infinity.gradients.coding import Coding
from infinity.planning.coded import BITS
from infinity.planning.together import Feature, excluded, features_of, said, why_not
from infinity.ranks.group import Ranks
from infinity.ranks.machines import grid_of, this_machine
from infinity.ranks.memory_trial import why_not_by_itself, why_not_together
from infinity.ranks.shared_memory import has_nameless_memory, place_number

logger = logging.getLogger("infinity")

_SAME = (
    "quantized_weights",
    "quantized_gradients",
    "error_feedback",
    "shared_memory",
    "secondary_shard",
    "stage",
    "expert_parallel",
    "sequence_parallel",
    "dtype",
    "state_dtype",
    "master_dtype",
    "frozen_dtype",
    "experts",
    "units",
)
"""Settings that all ranks give alike: what they do together, and what their records are."""


@dataclass(frozen=True, slots=True)
class RankFeatures:
    """What several ranks do together: see Config, whose settings it comes from."""

    bucket_nbytes: int = 0
    """The most bytes of weights of several units that are assembled in one collective."""
    weights: Coding | None = None
    """By which weights are sent; None: as they are."""
    gradients: Coding | None = None
    """Likewise gradients."""
    near: int = 0
    """Neighbours that keep second parts of weights together; 0: none do."""
    in_common: bool = False
    """Whether ranks of a machine put units together in memory that they share."""
    asked: bool = False
    """Whether that was asked for, so that it is an error where it cannot be."""
    memory: str = ""
    """Why they do, or do not."""


def rank_features(config: Config, ranks: Ranks, device: Device) -> RankFeatures:
    """Decide it. Every rank calls it.

    Raises: ConfigError, the same on every rank, for features that do not go together, settings that ranks
    give differently, and what these ranks, or their machines, cannot do.
    """
    if ranks.size > 1:
        _check_same(config, ranks)
    check_sequences(config.sequence_parallel, ranks.size)
    check_expert_ranks(config.expert_parallel, ranks.size)
    if ranks.size == 1:
        _say_what_one_does_not(config)
        return RankFeatures()
    asks = bool(config.shared_memory)
    mine = [config.gather_bucket_nbytes, this_machine()]
    mine += [asks and has_nameless_memory(), asks and not why_not_by_itself(), place_number() if asks else 0]
    rows = ranks.of_all(mine, "compare machines")
    machines, used = [row[1] for row in rows], features_of(config)
    near = neighbours_of(config.secondary_shard, machines)
    if not near:
        used.pop(Feature.SECONDARY_SHARD, None)
    if not device.is_host:
        used[Feature.ACCELERATOR] = f"device={ranks.device!r}"
    if (why := why_not(used)) is not None:
        raise ConfigError(why)
    in_common, memory = _memory(config, used, machines, rows, ranks)
    weights, gradients = BITS.get(config.quantized_weights or ""), BITS.get(config.quantized_gradients or "")
    return RankFeatures(
        min(row[0] for row in rows),
        None if weights is None else Coding(weights),
        None if gradients is None else Coding(gradients, config.error_feedback),
        near,
        in_common,
        config.shared_memory is True,
        memory,
    )


def _check_same(config: Config, ranks: Ranks) -> None:
    lines = "\n".join(said(name, getattr(config, name)) for name in _SAME)
    rows = [one.decode().split("\n") for one in ranks.each(lines.encode(), "compare settings")]
    differ = [number for number, one in enumerate(rows[0]) if any(row[number] != one for row in rows)]
    if differ:
        given = "; ".join(
            f"rank {rank}: {', '.join(row[number] for number in differ)}" for rank, row in enumerate(rows)
        )
        raise ConfigError(f"the ranks have different settings. Give all the same Config: {given}")


def _say_what_one_does_not(config: Config) -> None:
    used = features_of(config)
    codes = [used[one] for one in (Feature.QUANTIZED_WEIGHTS, Feature.QUANTIZED_GRADIENTS) if one in used]
    if codes:
        logger.warning(
            "%s: there is one rank, which sends nothing to others; nothing is quantised", ", ".join(codes)
        )
    if Feature.SHARED_MEMORY in used:
        logger.warning("shared_memory=True: there is one rank, which shares with none; nothing is done")
    neighbours_of(config.secondary_shard, [0])


def _memory(
    config: Config,
    used: Mapping[Feature, str],
    machines: Sequence[int],
    rows: Sequence[Sequence[int]],
    ranks: Ranks,
) -> tuple[bool, str]:
    """Return whether the ranks of a machine have memory in common, and why: where they choose it by
    themselves, they have tried it. rows: of each rank, from the third on, whether its system has such memory,
    whether nothing limits it there, and where it is reached.

    Raises: ConfigError where it is asked for, and there can be none.
    """
    asked = config.shared_memory
    if asked is False:
        return False, "shared_memory=False"
    if asked is True:
        return _asked_for(machines, rows), "shared_memory=True"
    against = excluded(Feature.SHARED_MEMORY, used) or used.get(Feature.EARLY_STAGE)
    if against is None and len({*machines}) > 1:
        against = "several machines"
    if against is None and not all(row[2] for row in rows):
        against = "a system without nameless memory"
    if against is None and not all(row[3] for row in rows):
        against = why_not_by_itself() or "what limits another rank"
    if against is None and any(row[4] != rows[0][4] for row in rows):
        against = "ranks of several users, or containers"
    if against is not None:
        logger.info("ranks share no memory: %s", against)
        return False, f"not with {against}"
    if why := why_not_together(ranks, config.timeout_s):
        logger.info("ranks share no memory: tried, and %s. Config(shared_memory=False) does not try", why)
        return False, f"tried in vain: {why}"
    logger.info("ranks put weights together in memory that they share; shared_memory=False: in one each")
    return True, "chosen: one machine's CPUs"


def _asked_for(machines: Sequence[int], rows: Sequence[Sequence[int]]) -> bool:
    of_each = [machines.count(one) for one in machines]
    if max(of_each) == 1:
        logger.warning("shared_memory=True: each machine has one rank, which shares with none")
        return False
    if len({*machines}) > 1 and grid_of(machines) is None:
        raise ConfigError(
            f"shared_memory=True, {len(machines)} ranks on several machines (ranks on the machine of each: "
            f"{', '.join(map(str, of_each))}): all machines need as many, and theirs one after the other. "
            "Leave it out, or give Init a process_group of such ranks"
        )
    if not all(row[2] for row in rows):
        raise ConfigError(
            "shared_memory=True needs files in memory without a name (memfd_create), which Linux has, unless "
            "a container's seccomp profile or the sysctl vm.memfd_noexec=2 forbids them; leave it out"
        )
    return True
