"""Going on at the last committed step: the bits of a run never interrupted. Real files, small models.

Trusted: that a training without `durable` is right; see test_training.
"""

import os
import shutil

import pytest
import torch

import fragile
import infinity
from covers import matrix
from fragile import STEPS, Run, same
from infinity import AdamW, CheckpointError, ConfigError, CorruptionError, HostMemoryError, UnsupportedError
from infinity.durable import homes as keeping
from infinity.engine.engine import engine_of_model
from infinity.planning.layout import RecordSchema

pytestmark = [pytest.mark.disk, pytest.mark.usefixtures("repeatable"), pytest.mark.timeout(400)]

UPDATES = ["forward", "backward"]
HOSTS = ["256KiB", "64MiB"]  # everything on NVMe; everything pinned


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses and final state by (update, state_dtype)."""
    found = {}
    for update in UPDATES:
        for state_dtype in ("fp32", "int8"):
            run = Run(tmp_path_factory.mktemp("nvme"), update=update, durable=False, state_dtype=state_dtype)
            found[update, state_dtype] = run.train(), run.state()
            run.kill()
    return found


@pytest.mark.parametrize(
    *matrix(update=UPDATES, host_memory=HOSTS, state_dtype=["fp32", "int8"], stop=range(1, STEPS))
)
def test_what_follows_a_resume_equals_a_run_never_interrupted(
    folder, uninterrupted, update, host_memory, state_dtype, stop
):
    settings = {"update": update, "host_memory": host_memory, "state_dtype": state_dtype}
    losses, state = uninterrupted[update, state_dtype]
    first = Run(folder, **settings)
    assert first.first == 0
    before = first.train(stop)
    first.kill()
    again = Run(folder, seed=99 if stop > 1 else 0, **settings)
    assert again.first == stop - 1
    after = again.train()
    assert {**before, **after} == losses
    assert {step: before[step] for step in before if step in after} == {
        step: loss for step, loss in after.items() if step in before
    }
    assert same(again.state(), state)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"state_dtype": "int4"}, {"state_dtype": "int8", "dtype": "fp32"}])
def test_a_run_with_other_small_moments_goes_on_in_the_same_bits(folder, tmp_path_factory, settings):
    settings = {"update": "forward", "host_memory": "2MiB", **settings}
    whole = Run(tmp_path_factory.mktemp("nvme"), durable=False, **settings)
    losses, state = whole.train(), whole.state()
    whole.kill()
    first = Run(folder, **settings)
    before = first.train(3)
    first.kill()
    again = Run(folder, seed=99, **settings)
    after = again.train()
    assert {**before, **after} == losses
    assert same(again.state(), state)


@pytest.mark.parametrize("host_memory", ["256KiB", "2MiB"])  # of two tiers: some scales are pinned
def test_a_run_of_before_scales_shared_blocks_goes_on_in_the_same_bits(
    folder, uninterrupted, monkeypatch, host_memory
):
    settings = {"host_memory": host_memory, "state_dtype": "int8"}
    losses, state = uninterrupted["forward", "int8"]
    with monkeypatch.context() as before:
        before.setattr(RecordSchema, "span", lambda self, field, tile_numel: tile_numel)
        run = Run(folder, **settings)
        run.train(3)
        infinity.commit(run.model)
        run.kill()
    run = Run(folder, **settings)
    records = [unit.record for unit in engine_of_model(run.model).units]
    kept = [one for one in records if "scale" not in one.packed]
    assert max(len(one.new_hashes("scale")) for one in kept) > 1
    assert run.train(5) == {step: losses[step] for step in (4, 5)}
    run.kill()
    run = Run(folder, **settings)
    run.train()
    assert same(run.state(), state)


@pytest.mark.parametrize(*matrix(together=1, update=UPDATES, host_memory=HOSTS))
def test_a_run_resumed_after_every_step_is_that_run(folder, uninterrupted, update, host_memory):
    losses, state = uninterrupted[update, "fp32"]
    found = {}
    for step in range(STEPS):
        run = Run(folder, update=update, host_memory=host_memory, seed=step)
        assert run.first == step
        found[step + 1] = run.step()
        assert infinity.commit(run.model) == step + 1
        if step < STEPS - 1:
            run.kill()
    assert found == losses
    assert same(run.state(), state)


@pytest.mark.parametrize("update", UPDATES)
def test_every_few_steps_are_committed_where_that_was_asked_for(folder, uninterrupted, update):
    losses, state = uninterrupted[update, "fp32"]
    run = Run(folder, update=update, durable="every 2 steps")
    run.train(5)
    run.kill()
    run = Run(folder, update=update, durable="every 2 steps")
    assert run.first == 4
    assert run.train() == {step: losses[step] for step in (5, 6)}
    assert same(run.state(), state)


@pytest.mark.parametrize(*matrix(together=1, update=UPDATES, host_memory=HOSTS))
def test_a_change_by_hand_belongs_to_the_step_before_or_after_it_and_never_to_both(
    folder, update, host_memory
):
    def edited(stop, resume_at=None, **config):
        run = Run(folder, update=update, host_memory=host_memory, **config)
        assert resume_at is None or run.first == resume_at
        while run.done < stop:
            run.step()
            if run.done == 2:  # before the next forward: of step 2
                with torch.no_grad(), infinity.gathered(run.model.blocks[0], write=True):
                    run.model.blocks[0].weight.mul_(0.5)
            run.model.eval()
            with torch.no_grad():
                run.model(torch.zeros(1, 8, dtype=torch.int64), seldom=False)
            run.model.train()
        return run

    whole = edited(5, durable=False)
    expected = whole.state()
    whole.kill()
    edited(3).kill()
    run = edited(5, resume_at=2)
    assert same(run.state(), expected)


def test_a_change_between_forward_and_step_is_not_in_the_commit_of_the_step_before(folder):
    run = Run(folder)
    run.train(2)
    loss = run.model(run.loader.next(), seldom=False)
    loss.backward()
    run.model.load_state_dict(
        {name: torch.zeros_like(value) for name, value in run.model.state_dict().items()}
    )
    run.kill()
    run = Run(folder)
    assert run.first == 2
    assert all(value.any() for name, value in run.model.state_dict().items() if "weight" in name)


def test_training_begins_only_when_it_is_known_whether_the_run_goes_on(folder):
    run = Run(folder, resume=False)
    with pytest.raises(UnsupportedError, match=r"is new\. Call infinity\.resume"):
        run.step()
    run.kill()
    run = Run(folder)
    run.train(2)
    infinity.commit(run.model)
    run.kill()
    run = Run(folder, resume=False)
    with pytest.raises(UnsupportedError, match=r"committed at step 2\. Call infinity\.resume"):
        run.step()
    run.kill()
    run = Run(folder)
    assert run.first == 2
    with pytest.raises(UnsupportedError, match="was begun already"):
        infinity.resume(run.model, run.optimizer)


@pytest.mark.parametrize("how", ["the action", "the option of before"])
def test_a_run_is_wiped_on_request_alone(folder, how):
    run = Run(folder)
    run.train(2)
    run.kill()
    files = sorted(path.name for path in (folder / "infinity-run" / "rank0").iterdir())
    if how == "the action":
        assert infinity.wipe(folder) > 0
        run = Run(folder)
    else:
        with pytest.warns(
            DeprecationWarning, match=r"wipe=True .*: call infinity\.wipe\(folder\) before Init"
        ):
            run = Run(folder, wipe=True)
    assert run.first == 0
    left = sorted(path.name for path in (folder / "infinity-run" / "rank0").iterdir())
    assert len(left) == 1
    assert not set(left) & set(files)


def test_a_run_that_never_committed_leaves_nothing(folder):
    Run(folder).kill()
    assert list((folder / "infinity-run" / "rank0").iterdir()) == []


def test_two_runs_on_one_folder_are_refused_and_the_first_goes_on(folder):
    run = Run(folder)
    with pytest.raises(ConfigError, match="that another process has open"):
        Run(folder)
    assert len(run.train(3)) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_dtype": "bf16"}, r"the run in .* has 'fp32'\."),
        ({"track": False}, r"tracked: only in the commit loader, scheduler, only here none"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_lost(folder, settings, message):
    run = Run(folder)
    run.train(2)
    infinity.commit(run.model)
    expected = run.state()
    run.kill()
    with pytest.raises((ConfigError, CheckpointError), match=message):
        Run(folder, **settings)
    run = Run(folder)
    assert run.first == 2
    assert same(run.state(), expected)


@pytest.mark.parametrize("host_memory", ["768KiB", "1GiB"])
def test_a_run_goes_on_in_another_budget_in_the_tiles_that_its_records_have(
    folder, uninterrupted, host_memory
):
    losses, state = uninterrupted["forward", "fp32"]
    run = Run(folder, host_memory="2MiB")
    tile_numel = run.engine.budget.tile_numel
    run.train(2)
    infinity.commit(run.model)
    run.kill()
    with pytest.raises(HostMemoryError, match=r"in tiles of 4096 elements, .* takes 512\.0 KiB"):
        Run(folder)
    run = Run(folder, host_memory=host_memory)
    assert run.first == 2
    assert run.engine.budget.tile_numel == tile_numel
    assert run.train() == {step: loss for step, loss in losses.items() if step > 2}
    assert same(run.state(), state)


def test_another_model_is_refused_by_name(folder, monkeypatch):
    run = Run(folder)
    run.train(2)
    run.kill()

    class Other(fragile.Small):
        def __init__(self, blocks):
            super().__init__(blocks)
            self.seldom = torch.nn.Linear(64, 64, bias=False)

    monkeypatch.setattr(fragile, "Small", Other)
    with pytest.raises(CheckpointError, match=r"nothing was changed:\n  seldom of seldom\.weight"):
        Run(folder)


def test_a_second_optimizer_is_refused(folder):
    with infinity.Init(nvme=folder, host_memory="256KiB", durable=True):
        model = fragile.Small()
    one = AdamW([*model.embed.parameters(), *model.blocks.parameters()])
    other = AdamW(model.seldom.parameters())
    infinity.resume(model, one)
    model(torch.zeros(1, 8, dtype=torch.int64), seldom=True).backward()
    with pytest.raises(UnsupportedError, match="a second optimizer"):
        one.step()
    del other


def flip(run_folder, place, offset):
    path = next(path for path in run_folder.iterdir() if path.name.startswith("state-"))
    with path.open("r+b") as file:
        file.seek(place + offset)
        byte = file.read(1)[0]
        file.seek(place + offset)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())


def places(run, name, field):
    """Where the two sides of a field lie, and which is live."""
    unit = next(unit for unit in run.engine.units if unit.name == name)
    durable = run.engine.durable
    extent, _ = durable.homes.home(unit.record, field)
    (one, other), runs = durable.store.describe(extent)
    return (one, other) if runs[0][1] == 0 else (other, one)


@pytest.mark.parametrize(*matrix(together=1, field=["hi", "lo", "m", "v"], check=[True, False]))
def test_damage_is_named_when_it_is_read_and_the_older_generation_is_there(
    folder, uninterrupted, field, check
):
    losses, state = uninterrupted["forward", "fp32"]
    run = Run(folder)
    run.train(2)
    infinity.commit(run.model)
    run.train(3)
    infinity.commit(run.model)
    live, _ = places(run, "blocks.1", field)
    run.kill()
    flip(folder / "infinity-run" / "rank0", live[0], 100)
    with pytest.raises(
        CorruptionError, match=rf"blocks\.1\.{field}: .*state-\w+-0 at byte {live[0]}, committed with step 3"
    ):
        run = Run(folder, resume={"check": check})
        try:
            run.state()
        finally:
            run.kill()
    shutil.rmtree(folder / "copy", ignore_errors=True)
    run = Run(folder, resume={"older": True})
    assert run.first == 2
    assert run.train() == {step: losses[step] for step in range(3, STEPS + 1)}
    infinity.commit(run.model)
    run.kill()
    run = Run(folder, resume={"check": True})
    assert run.first == STEPS
    assert same(run.state(), state)


def test_an_older_generation_that_is_no_longer_whole_is_refused(folder):
    run = Run(folder)
    run.train(2)
    infinity.commit(run.model)
    run.train(3)
    infinity.commit(run.model)
    expected = run.state()
    _, older = places(run, "blocks.1", "m")
    run.kill()
    flip(folder / "infinity-run" / "rank0", older[0], 100)
    with pytest.raises(CorruptionError, match=r"blocks\.1\.m"):
        Run(folder, resume={"older": True})
    run = Run(folder)
    assert run.first == 3
    assert same(run.state(), expected)


def test_a_cut_file_and_two_damaged_commits_are_refused_by_name(folder):
    run = Run(folder)
    run.train(4)
    run.kill()
    files = {path.name.split("-")[0]: path for path in (folder / "infinity-run" / "rank0").iterdir()}
    shutil.copy(files["state"], folder / "kept")
    os.truncate(files["state"], 4096)
    with pytest.raises(
        CheckpointError,
        match=r"which ends at byte 4096: the file was truncated\. infinity\.wipe\(.*\) removes",
    ):
        Run(folder)
    files["state"].unlink()
    with pytest.raises(ConfigError, match=r"has no file state-\w+-0, which its commit names"):
        Run(folder)
    for slot in ("commit-0", "commit-1"):
        (folder / "infinity-run" / "rank0" / slot).write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match="both commits are damaged"):
        Run(folder)
    infinity.wipe(folder)
    assert Run(folder).first == 0


def test_striped_records_are_resumed_from_all_folders_in_their_order(folder, uninterrupted):
    losses, state = uninterrupted["forward", "fp32"]
    folders = [folder / name for name in "abc"]
    for one in folders:
        one.mkdir()
    run = Run([*map(str, folders)])
    run.train(4)
    run.kill()
    with pytest.raises(ConfigError, match="the committed run is striped over 3 folders, but nvme names 1"):
        Run(str(folders[0]))
    with pytest.raises(ConfigError, match="which its commit names"):
        Run([str(folders[index]) for index in (0, 2, 1)])
    with pytest.raises(ConfigError, match=r"is a further folder of the run in .*/a/infinity-run/rank0"):
        Run([str(folders[index]) for index in (1, 2)])
    other = folder / "d"
    other.mkdir()
    with pytest.raises(ConfigError, match="holds a run of its own"):
        Run([str(other), str(folders[0])])
    run = Run([*map(str, folders)])
    assert run.train() == {step: losses[step] for step in range(run.first + 1, STEPS + 1)}
    assert same(run.state(), state)


def test_resuming_again_and_again_takes_no_more_space(folder):
    sizes = []
    for _ in range(6):
        run = Run(folder)
        run.step()
        infinity.commit(run.model)
        sizes.append(run.engine.nvme_store._end)
        run.kill()
    assert sizes[1:] == [sizes[1]] * 5


def test_files_of_a_run_that_died_go_when_another_goes_on_and_nothing_else_does(folder):
    first = Run(folder)
    first.train(3)
    first.kill()
    place = folder / "infinity-run" / "rank0"
    for name in ("state-0123456789abcdef-0", "state-of-affairs", "notes"):
        (place / name).write_bytes(b"?")
    assert Run(folder).first == 2
    assert not (place / "state-0123456789abcdef-0").exists()
    assert (place / "state-of-affairs").exists()
    assert (place / "notes").exists()


def test_an_error_of_the_flush_ends_the_training_and_keeps_the_commit_before(folder, monkeypatch):
    run = Run(folder)
    run.train(3)
    infinity.commit(run.model)

    def fails():
        raise OSError(5, "the drive is gone")

    monkeypatch.setattr(run.engine.durable.nvme, "sync", fails)
    with pytest.raises(OSError, match="the drive is gone"):
        run.train(STEPS)
    run.kill()
    run = Run(folder)
    assert run.first == 3


def test_without_durable_there_is_nothing_to_resume(folder):
    run = Run(folder, durable=False)
    for call in (lambda: infinity.resume(run.model, run.optimizer), lambda: infinity.commit(run.model)):
        with pytest.raises(ConfigError, match="built without durable=True"):
            call()


def test_only_what_can_be_kept_is_tracked(folder):
    run = Run(folder, track=False)
    with pytest.raises(TypeError, match=r"track\(sampler=\.\.\.\): a object has no state_dict"):
        run.optimizer.track(sampler=object())

    class Holder:
        def state_dict(self):
            return {"what": object()}

        def load_state_dict(self, state):
            pass

    run.optimizer.track(holder=Holder())
    with pytest.raises(CheckpointError, match=r"holder\.state_dict\(\)\['what'\] is a builtins\.object"):
        run.train(2)


@pytest.mark.parametrize("what", ["yes", "every 0 steps", "every -1 steps", 3, None, "every 1.5 steps"])
def test_a_durable_that_is_none_is_refused(what):
    with pytest.raises(ConfigError, match="durable="):
        infinity.Config(nvme="/x", durable=what)
    assert infinity.Config(nvme="/x", durable="every step").durable_steps == 1
    for fields in ({"durable": True}, {"wipe": True, "nvme": "/x"}, {"verify": "often"}):
        with pytest.raises(ConfigError):
            infinity.Config(**fields)


def test_of_what_a_commit_writes_from_host_memory_a_little_is_queued_at_a_time(folder, monkeypatch):
    run = Run(folder, host_memory="64MiB")
    lane, queued, held = run.engine.lane, [], []
    submit = lane.submit

    def noted(job, *, urgent=False):
        submit(job, urgent=urgent)
        if isinstance(job, keeping.KeepPass):
            queued.append(job)
            held.append([one.nbytes for one in queued if not one.finished])

    lane.submit = noted
    monkeypatch.setattr(keeping, "ABREAST_NBYTES", 150_000)
    run.train(3)
    assert infinity.commit(run.model) == 3
    assert sum(one.nbytes for one in queued) > 300_000
    assert max(map(len, held)) > 1
    records = [unit.record for unit in run.engine.units]
    numbers = [records.index(one.record) for one in queued]
    assert (numbers[0], numbers[-1]) == (max(numbers), min(numbers))  # what the forward uses last goes first
    assert all(len(nbytes) == 1 or sum(nbytes) <= 150_000 for nbytes in held if nbytes)


@pytest.mark.parametrize("update", UPDATES)
def test_a_run_whose_optimizer_was_made_again_commits_the_later_ones_state_and_goes_on(folder, update):
    """The loader that the earlier one tracked is tracked on."""
    shown = {}
    for durable in (False, True):
        (folder / str(durable)).mkdir()
        run = Run(folder / str(durable), update=update, durable=durable)
        before = run.train(2)
        options = [{**group, "params": list(group["params"])} for group in run.optimizer.param_groups]
        with pytest.warns(UserWarning, match="supersedes it"):
            run.optimizer = AdamW(options, lr=1e-3, update=update)
        run.schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.2, 1.0, 5)
        run.optimizer.track(scheduler=run.schedule)
        before |= run.train(3)
        if durable:
            assert infinity.commit(run.model) == 3
            run.kill()
            run = Run(folder / str(durable), update=update)
            assert run.first == 3
        shown[durable] = {**before, **run.train()}, run.state()
        run.kill()
    assert shown[True][0] == shown[False][0]
    assert same(shown[True][1], shown[False][1])
