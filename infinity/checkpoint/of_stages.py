"""Checkpoints of the stages of a pipeline: one of all of them, or one of each.

[Note: one folder of all stages]
Stages whose parameters have the names that they have in the whole model, as layers in an nn.ModuleDict by
their numbers have them, save to one folder: a checkpoint of the whole model, as one process would have saved
it, which loads on any number of stages, and without any. Each stage takes what has its names. What is one for
the whole model (steps, param groups, stacks of experts) is put together of what the stages say. Stages whose
names are alike save to a folder each, and load from it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from infinity.checkpoint.inventory import Inventory
from infinity.checkpoint.stacks import Stacks
from infinity.errors import ConfigError
from infinity.storage.manifest import CheckpointError, Manifest
from infinity.tensors import digest

_WHAT = "compare what stages have"


class StagesTogether:
    """The stages that save, or load, together; see [Note: one folder of all stages]."""

    def __init__(self, inventory: Inventory, folder: str | os.PathLike[str], *, saves: bool) -> None:
        """See whether the stages name one folder; then those of `inventory` are all ranks. Every rank of
        every stage makes one.

        Raises: ConfigError, on all of them, where stages that save to one folder have a name in common.
        """
        stages = inventory.engine.stages
        self._several = stages.several and stages.share(folder)
        self._stages, self._stacks = stages, inventory.stacks
        self._own = {*inventory.stacks.specs(inventory.masters()), *inventory.plains()}
        self._all: set[str] = set()
        self._tensors: dict[str, str] = {}
        self._groups = len(inventory.groups_in_files) if inventory.optimizer is not None else 0
        self._ranks = inventory.ranks
        self.speaker = 0
        """The rank of all whose scheduler and tensors of param groups are saved: the first with an
        optimizer, which a stage that trains nothing has not.
        """
        if not self._several:
            return
        rows = [json.loads(row) for row in stages.ranks.each(json.dumps(sorted(self._own)).encode(), _WHAT)]
        counts = Counter(name for row in rows for name in row)
        self._all = set(counts)
        if saves and (twice := next((name for name, count in counts.items() if count > 1), None)):
            ranks = ", ".join(str(stage) for stage, row in enumerate(rows) if twice in row)
            path = os.path.realpath(folder)
            raise ConfigError(
                f"ranks {ranks} of pipeline_group save to one folder, {path}, and each has a tensor named "
                f"{twice}. Give every stage a folder of its own, such as {path}/stage-{stages.ranks.rank}, "
                "to save and to load; or its modules the names that they have in the whole model, such as "
                'nn.ModuleDict({"7": layer}) for its eighth layer'
            )
        inventory.join_stages()
        self._ranks = inventory.ranks
        having = self._ranks.of_all([int(inventory.optimizer is not None)], _WHAT)
        self.speaker = next((rank for rank, row in enumerate(having) if row[0]), 0)

    def note_shared(self, kept: dict[str, torch.Tensor]) -> None:
        """Note the tensors that are one for the whole model, by their keys, to compare those of param groups;
        the speaker alone keeps them.
        """
        if self._several:
            self._tensors = {key: f"{one.dtype} {list(one.shape)} {digest(one)}" for key, one in kept.items()}
        if self._ranks.rank != self.speaker:
            kept.clear()

    def shared_of_all(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return what is one for the whole model: the optimizer of all stages, and the speaker's scheduler.

        Raises: CheckpointError as `optimizer_of_all`.
        """
        if not self._several:
            return own
        rows = self._ranks.each(json.dumps(own["scheduler"]).encode(), _WHAT)
        scheduler = json.loads(rows[self.speaker])
        return {**own, "optimizer": self.optimizer_of_all(own["optimizer"]), "scheduler": scheduler}

    def optimizer_of_all(self, own: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what the optimizers of all stages say, each in the form of optimizer_out.

        Raises: CheckpointError where their kinds, or the options of their param groups, tensors among them,
        differ.
        """
        if not self._several:
            return own
        mine = json.dumps([own, self._tensors]).encode()
        rows = [json.loads(row) for row in self._stages.ranks.each(mine, _WHAT)]
        said = [row for row, _ in rows if row is not None]
        if not said:
            return None
        first = said[0]
        for one in said[1:]:
            for name in ("kind", "state_dtype", "seed"):
                if one[name] != first[name]:
                    raise CheckpointError(
                        f"the optimizers of stages have different {name}s, {first[name]} and {one[name]}: "
                        "give them the same, or every stage a folder of its own"
                    )
            options = [[group["options"] for group in each["groups"]] for each in (first, one)]
            if options[0] != options[1]:
                raise CheckpointError(
                    f"the param groups of stages have different options, {options[0]} and {options[1]}: give "
                    "them the same, or every stage a folder of its own"
                )
        _check_tensors(first["groups"], [tensors for row, tensors in rows if row is not None])
        groups = [
            {**group, "parameters": [name for each in said for name in each["groups"][number]["parameters"]]}
            for number, group in enumerate(first["groups"])
        ]
        steps = {name: step for each in said for name, step in each["steps"].items()}
        return {**first, "groups": groups, "steps": steps, "stages": len(rows)}

    def stacks_of_all(self) -> Stacks:
        """Return the stacks of all stages."""
        if not self._several:
            return self._stacks
        rows = self._stages.ranks.each(json.dumps(self._stacks.told()).encode(), _WHAT)
        return self._stacks.of_those([place for row in rows for place in json.loads(row)])

    def own_of(self, manifest: Manifest) -> Manifest:
        """Return this stage's part of a manifest, and what belongs to none."""
        if not self._several:
            return manifest

        def is_mine(name: str) -> bool:
            return name in self._own or name not in self._all

        tensors = tuple(one for one in manifest.tensors if one.kind == "extra" or is_mine(one.name))
        saved: Mapping[str, Any] | None = manifest.optimizer
        if saved is not None:
            groups = [
                {**group, "parameters": [name for name in group["parameters"] if is_mine(name)]}
                for group in saved["groups"]
            ]
            steps = {name: step for name, step in saved["steps"].items() if is_mine(name)}
            if len(groups) != self._groups:  # else this stage's optimizer has those without parameters, too
                groups = [one for one in groups if one["parameters"]]
            saved = {**saved, "groups": groups, "steps": steps}
        return replace(manifest, tensors=tensors, optimizer=saved)


def _check_tensors(groups: Sequence[Mapping[str, Any]], tensors: Sequence[Mapping[str, str]]) -> None:
    """Check that stages have the same tensors in their param groups, of which one is saved for all.

    groups: those of one stage; tensors: what each of them has, by keys. Raises: CheckpointError.
    """
    for number, group in enumerate(groups):
        for option, value in group["options"].items():
            keys = [key for key in tensors[0] if f'{{"__tensor__": "{key}"}}' in json.dumps(value)]
            if any(one.get(key) != tensors[0][key] for key in keys for one in tensors):
                raise CheckpointError(
                    f"the tensors of stages in {option!r} of param group {number} differ, but one checkpoint "
                    "of all stages holds one of them: give all stages the same, or each a folder of its own"
                )
