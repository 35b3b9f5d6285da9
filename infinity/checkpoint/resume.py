"""`resume`: go on from a durable run's last committed step; `commit`: commit the last step now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from infinity.checkpoint.inventory import Inventory
from infinity.checkpoint.save_load import optimizer_in
from infinity.checkpoint.training_state import Training
from infinity.durable.commit import Commit, RecordAt, hashes_of
from infinity.durable.committer import Durable
from infinity.engine.engine import Engine, engine_of_model
from infinity.errors import ConfigError, UnsupportedError
from infinity.lane.passes import CheckPass
from infinity.optim.base import OffloadedOptimizer
from infinity.storage.manifest import CheckpointError, MeshPlace, compare_groups, decode, readable
from infinity.tensors import local
from infinity.units.unit import Unit


def resume(
    model: nn.Module, optimizer: OffloadedOptimizer, *, older: bool = False, check: bool = False
) -> int:
    """Resume the durable run in the model's folder, or begin a new one; return the number of steps done.

    model, optimizer: built as in the run to resume, in Init with Config(durable=...), and not yet trained;
    tracked objects have been given to optimizer.track. Weights, moments, param groups, buffers, tracked
    objects and the generators of torch, Python and numpy get the state of the last committed step: training
    goes on with the same bits as if it had not been interrupted. Records are not read now; each is compared
    with its hashes when it is first used.

    older: resume from the commit before the last, and read and compare all of it first: for a damaged last
    commit, as long as no later step has overwritten the older one. check: read and compare all of the last
    commit first.

    All ranks call this, as many as the run had. Each resumes with its own records, generators and tracked
    objects, from the last step that all ranks have committed.

    Raises: ConfigError without `durable`; CheckpointError naming what does not fit, before anything changes;
    CorruptionError naming unit, field, file and offset; RanksError if another rank failed.
    """
    engine, durable = engine_of_model(model), durable_of(model)
    if durable.source is not None:
        raise UnsupportedError("resume: this run was begun already. Build model and optimizer anew.")
    training = Training(Inventory(model, optimizer, by_name=False), model)
    ranks = training.inventory.ranks
    if not durable.found:
        if older:
            raise CheckpointError(f"{durable.folders[0].path} holds no committed step")
        engine.follow(training, 0, resumed=False)
        return 0
    with ranks.together("resuming the durable run"):
        commit = _chosen(durable, older=older)
        _restore_records(engine, durable, commit, training)
        if older or check:
            with ranks.together("comparing everything with its hashes"):
                _read_all(engine)
        if older:
            durable.forget_newest()
        with readable(_named(commit, durable)):
            groups = decode(commit.said["optimizer"]["groups"], _no_tensor)
            optimizer_in(commit.said["optimizer"], groups, training.inventory, optimizer)
            training.restore(commit.said, commit.tensors)
        engine.follow(training, commit.step, resumed=True)
    return commit.step


def commit(model: nn.Module) -> int:
    """Commit the last step of a durable run now, and return its number when it is on disk.

    A step is committed automatically during the forward that follows it. Call this when no forward follows:
    at the end of the training, or before ending the process on purpose.

    Raises: ConfigError without `durable`; the error that made the commit fail.
    """
    durable = durable_of(model)
    durable.commit_now()
    return durable.step


def durable_of(model: nn.Module) -> Durable:
    """Return the Durable that commits a model's steps.

    Raises: ConfigError for a model without one.
    """
    durable = engine_of_model(model).durable
    if durable is None:
        raise ConfigError(
            "the model was built without durable=True, so no step is committed. Give Init Config(nvme=..., "
            "durable=True); for checkpoints there are infinity.save and load."
        )
    return durable


def _chosen(durable: Durable, *, older: bool) -> Commit:
    if older and len(durable.found) < 2:
        raise CheckpointError(
            f"{durable.folders[0].path} holds one commit, step {durable.found[0].step}, and none before it"
        )
    return durable.found[1 if older else 0]


def _check_fits(commit: Commit, training: Training, durable: Durable) -> None:
    """Check that commit, model and optimizer fit.

    Raises: CheckpointError naming all that does not.
    """
    engine, said = training.inventory.engine, commit.said
    found = _other_place(said, training.inventory.place)
    if len(commit.records) != len(engine.units):
        units = f"{len(commit.records)} units in the commit, {len(engine.units)} in the model"
        found.append(units + _whole(commit, engine))
    for unit, at in zip(engine.units, commit.records, strict=False):
        ours = tuple((one.name, one.shape) for one in unit.layout.segments)
        if (at.name, at.segments) != (unit.name, ours):
            theirs = ", ".join(f"{name} {list(shape)}" for name, shape in at.segments)
            found.append(
                f"{at.name} of {theirs} in the commit, {unit.name} of "
                f"{', '.join(f'{name} {list(shape)}' for name, shape in ours)} in the model"
            )
            break
    found += _other_files(engine, commit)
    saved = said.get("optimizer") or {"groups": []}
    kinds = (said.get("optimizer") or {}).get("kind", "AdamW"), training.optimizer.recipe.name
    if kinds[0] != kinds[1]:
        found.append(f"the state of infinity.{kinds[0]} in the commit, of {kinds[1]} here")
    found += compare_groups(
        [group["parameters"] for group in saved["groups"]], training.inventory.groups_in_files
    )
    for what, theirs_, ours_ in (
        ("tracked", set(said.get("tracked", ())), set(training.tracked)),
        (
            "buffers and ordinary parameters",
            {key.removeprefix("plain.") for key in commit.tensors if key.startswith("plain.")},
            set(training.plain()),
        ),
    ):
        if theirs_ != ours_:
            found.append(
                f"{what}: only in the commit {', '.join(sorted(theirs_ - ours_)) or 'none'}, only here "
                f"{', '.join(sorted(ours_ - theirs_)) or 'none'}"
            )
    for name, tensor in training.plain().items():
        at_ = commit.tensors.get(f"plain.{name}")
        if at_ is not None and at_.shape != tuple(local(tensor).shape):
            found.append(f"{name}: {list(at_.shape)} in the commit, {list(local(tensor).shape)} in the model")
    if found:
        where = f"the run in {durable.folders[0].path}, committed at step {commit.step}, does not fit"
        raise CheckpointError("\n  ".join([f"{where}; nothing was changed:", *found]))


def _other_place(said: Mapping[str, Any], here: MeshPlace) -> list[str]:
    """Return, in words, how the rank that has committed lay on another mesh."""
    was = MeshPlace(*said["place"]) if "place" in said else MeshPlace(here.data)
    if was == here:
        return []
    told = [
        f"number {one.data} of those with different data, {one.beside} of {one.beside_size} with the same"
        for one in (was, here)
    ]
    cure = "start the run on a mesh of the shape that it had; infinity.save and load change it"
    return [f"this rank was {told[0]}, when it committed, and is {told[1]}: {cure}"]


def _whole(commit: Commit, engine: Engine) -> str:
    """Say what to set where the model has more slices than the commit, or other units of the same
    parameters.
    """
    named = {segment for one in commit.records for segment in one.segments}
    if named == {(one.name, one.shape) for unit in engine.units for one in unit.layout.segments}:
        return (
            " of the same parameters. Likely cause: when the run began others of them were frozen, or had "
            "another type; build the model as it was then. A checkpoint of infinity.save fits any"
        )
    theirs, ours = (sum(".tiles." in f".{one.name}" for one in of) for of in (commit.records, engine.units))
    if ours <= theirs:
        return ""
    return (
        ', some of them slices. experts="whole", in Config, keeps experts and embeddings as the commit has '
        "them; or load a checkpoint of infinity.save, which fits both"
    )


def _other_files(engine: Engine, commit: Commit) -> list[str]:
    """Return, in words, which weights lay in a checkpoint's files that the model does not have them from."""
    found = []
    for unit, at in zip(engine.units, commit.records, strict=False):
        for one in at.fields:
            extent = unit.record.in_files
            if one.in_files is None:
                continue
            if extent is None or engine.checkpoint_store is None:
                paths = sorted({str(part[0]) for part in one.in_files["checkpoint"]})
                found.append(f"{unit.name} lay in {', '.join(paths)}; load the model from there again")
            else:
                different = engine.checkpoint_store.differences(extent, one.in_files)
                found += [f"{unit.name}: {one}" for one in different]
    return found[:10]


def _named(commit: Commit, durable: Durable) -> str:
    return f"the commit of step {commit.step} in {durable.folders[0].path}"


def _restore_records(engine: Engine, durable: Durable, commit: Commit, training: Training) -> None:
    """Restore the places and hashes of all records from the commit.

    Raises: CheckpointError, before anything changes.
    """
    durable.store.be_at(commit.step)
    with readable(_named(commit, durable)):
        _check_fits(commit, training, durable)
        for unit, at in zip(engine.units, commit.records, strict=True):
            engine.residency.changed(unit)
            _restore(engine, durable, unit, at)
    durable.store.complete(f"resuming from {durable.folders[0].path}")
    training.optimizer.begin(one for unit in engine.units for one in unit.parameters)


def _restore(engine: Engine, durable: Durable, unit: Unit, at: RecordAt) -> None:
    """Restore the places and hashes of a unit's record."""
    record = unit.record
    there = {one.name for one in at.fields}
    for one in at.fields:
        span = record.span_of(one.name, one.nbytes) if one.name in record.schema.names else None
        if span is None:
            raise CheckpointError(f"{unit.name}.{one.name}: {one.nbytes} B in the commit, which do not fit")
        hashes = hashes_of(one.hashes, -(-record.shard.numel // span), f"{unit.name}.{one.name}")
        if one.in_files is not None:
            record.trust(hashes)
            continue
        record.restore(one.name, durable.extent_of(one), hashes, span)
    for name in record.schema.moments:
        if name in record and name not in there:
            record.drop(name)
            record.add(name, engine.store)


def _read_all(engine: Engine) -> None:
    """Read all records and compare their hashes.

    Raises: CorruptionError.
    """
    for unit in engine.units:
        job = CheckPass(unit.record, unit.record.tile_numel)
        with unit.record.comparing_all():
            engine.lane.submit(job)
            engine.lane.wait(job, finished=True)


def _no_tensor(key: str) -> None:
    raise CheckpointError(f"the commit names a tensor, {key}, among the options of param groups")
