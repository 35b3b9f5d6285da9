"""Which of the things that ranks do go together: the one table of those that do not. Pure.

[Note: what goes together]
What ranks do is a *feature*: a setting, an optimizer, or what they compute on. Each works by itself, and any
two of them together, but for the pairs in `REFUSED`, which says why. Whoever knows of features that are in
use asks `why_not` of them: Config of its settings, an engine once its ranks have met, an optimizer when it
takes parameters. A feature that has nothing to do, as on one rank, is not in use. The table in docs/ranks.md
is this one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class Feature(enum.Enum):
    """What ranks do, or what they are; the value is its name in docs/ranks.md."""

    ONE_BIT = "`OneBitAdam`"
    QUANTIZED_WEIGHTS = "`quantized_weights`"
    QUANTIZED_GRADIENTS = "`quantized_gradients`"
    ERROR_FEEDBACK = "`error_feedback`"
    SECONDARY_SHARD = "`secondary_shard`"
    SHARED_MEMORY = "`shared_memory`"
    EXPERT_PARALLEL = "`expert_parallel`"
    SEQUENCE_PARALLEL = "`sequence_parallel`"
    MESH = "`Init(mesh=...)` with tensor dimensions"
    PIPELINE = "`Init(pipeline_group=...)`"
    BUCKETS = "`gather_bucket`, `reduce_bucket`"
    MACHINES = "several machines"
    ACCELERATOR = "an accelerator"
    FP32 = '`dtype="fp32"`'
    FP16 = '`dtype="fp16"`'
    EARLY_STAGE = "`stage=1`, `stage=2`"
    WHOLE_EXPERTS = '`experts="whole"`'


REFUSED: Mapping[tuple[Feature, Feature], str] = MappingProxyType(
    {
        (Feature.QUANTIZED_WEIGHTS, Feature.FP32): (
            "in fp32 the weights that ranks send are the masters themselves, which stay exact; use "
            'dtype="bf16", or leave it out'
        ),
        (Feature.QUANTIZED_WEIGHTS, Feature.EARLY_STAGE): (
            "every rank keeps the 16-bit weights there, and updates start from them: stage=3 assembles them "
            "for each use; or leave it out. quantized_gradients works at every stage"
        ),
        (Feature.SECONDARY_SHARD, Feature.EARLY_STAGE): (
            "every rank keeps the 16-bit weights whole there: stage=3 assembles them for each use; or leave "
            "it out"
        ),
        (Feature.SECONDARY_SHARD, Feature.EXPERT_PARALLEL): (
            "experts that ranks divide have no second part, and are on few ranks anyway. Leave one of the "
            "two out"
        ),
        (Feature.SHARED_MEMORY, Feature.QUANTIZED_WEIGHTS): (
            "ranks that see one memory send each other no weights; leave one of the two out"
        ),
        (Feature.SHARED_MEMORY, Feature.SECONDARY_SHARD): (
            "ranks that see one memory assemble layers from no second parts; leave one of the two out"
        ),
        (Feature.SHARED_MEMORY, Feature.EXPERT_PARALLEL): (
            "ranks that have other experts have other units, and no memory in common; leave one of the two "
            "out"
        ),
        (Feature.ERROR_FEEDBACK, Feature.FP16): (
            "a step that GradScaler leaves out would leave errors of gradients behind that no step has used; "
            'use dtype="bf16", or leave it out'
        ),
        (Feature.ERROR_FEEDBACK, Feature.EXPERT_PARALLEL): (
            "no errors are kept of experts that ranks divide; leave one of the two out"
        ),
        (Feature.EXPERT_PARALLEL, Feature.WHOLE_EXPERTS): (
            "ranks divide experts that are built one by one, and this builds each stack as one parameter; "
            "leave one of the two out"
        ),
        (Feature.EXPERT_PARALLEL, Feature.ACCELERATOR): (
            "what leaves a full accelerator would differ on ranks with other experts, and not be fetched by "
            'all together. Set device="cpu", or leave expert_parallel out: then every rank computes with '
            "every expert that its tokens need"
        ),
        (Feature.QUANTIZED_WEIGHTS, Feature.ACCELERATOR): (
            "an accelerator's memory has no room set aside for codes, and NCCL is not measured with them; "
            'leave it out, or compute on the CPU (device="cpu")'
        ),
        (Feature.QUANTIZED_GRADIENTS, Feature.ACCELERATOR): (
            "an accelerator's memory has no room set aside for codes, and NCCL is not measured with them; "
            'leave it out, or compute on the CPU (device="cpu")'
        ),
        (Feature.SECONDARY_SHARD, Feature.ACCELERATOR): (
            "second parts in host memory are not brought to an accelerator; leave it out, or compute on the "
            'CPU (device="cpu")'
        ),
        (Feature.SHARED_MEMORY, Feature.ACCELERATOR): (
            "an accelerator's link reads memory that is page-locked, which what ranks share is not; leave it "
            'out, or compute on the CPU (device="cpu")'
        ),
        (Feature.ONE_BIT, Feature.ACCELERATOR): "momenta are made by the CPU",
        (Feature.ONE_BIT, Feature.MESH): "its ranks have parts of a momentum, which are exchanged whole",
        (Feature.ONE_BIT, Feature.PIPELINE): "momenta are exchanged over all ranks, and a stage has some",
        (Feature.ONE_BIT, Feature.EXPERT_PARALLEL): "momenta of experts that ranks divide are on few ranks",
        (Feature.ONE_BIT, Feature.QUANTIZED_GRADIENTS): (
            "these code gradients in another way; leave one of the two out"
        ),
        (Feature.ONE_BIT, Feature.ERROR_FEEDBACK): (
            "it keeps errors of its own, which it feeds back by itself; leave one of the two out"
        ),
    }
)
"""Pairs that do not go together: why, and what to do instead. All others do."""


def features_of(given: Any) -> dict[Feature, str]:
    """Return the features that a Config asks for, each in its words."""
    asked: dict[Feature, tuple[str, bool]] = {
        Feature.QUANTIZED_WEIGHTS: ("quantized_weights", given.quantized_weights is not None),
        Feature.QUANTIZED_GRADIENTS: ("quantized_gradients", given.quantized_gradients is not None),
        Feature.ERROR_FEEDBACK: ("error_feedback", given.error_feedback),
        Feature.SECONDARY_SHARD: ("secondary_shard", given.secondary_shard is not None),
        Feature.SHARED_MEMORY: ("shared_memory", given.shared_memory is True),
        Feature.EXPERT_PARALLEL: ("expert_parallel", given.expert_parallel > 1),
        Feature.SEQUENCE_PARALLEL: ("sequence_parallel", given.sequence_parallel > 1),
        Feature.BUCKETS: ("gather_bucket", True),
        Feature.FP32: ("dtype", given.dtype == "fp32"),
        Feature.FP16: ("dtype", given.dtype == "fp16"),
        Feature.EARLY_STAGE: ("stage", given.stage < 3),
        Feature.WHOLE_EXPERTS: ("experts", given.experts == "whole"),
    }
    names = {feature: name for feature, (name, is_asked) in asked.items() if is_asked}
    return {feature: said(name, getattr(given, name)) for feature, name in names.items()}


def said(name: str, value: object) -> str:
    """Return a setting as a program has it."""
    return f'{name}="{value}"' if name in ("dtype", "experts") else f"{name}={value!r}"


def why_not(used: Mapping[Feature, str]) -> str | None:
    """Return why features do not go together, of the first pair that does not; None where all do. used: each
    in the words that it was asked for with.
    """
    for (one, other), why in REFUSED.items():
        if one in used and other in used:
            return f"{used[one]} with {used[other]}: {why}"
    return None


def excluded(feature: Feature, used: Mapping[Feature, str]) -> str | None:
    """Return, in its words, the first of these features that does not go with another one; None for none."""
    return next((words for one, words in used.items() if {(feature, one), (one, feature)} & {*REFUSED}), None)
