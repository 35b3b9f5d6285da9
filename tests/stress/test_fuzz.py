"""Files and settings with anything at all in their places: what they say is taken, or refused by name.

Hashes are made to fit what was changed, so that everything behind them is reached. Nothing is faked.
"""

import contextlib
import copy
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fragile
import infinity
from covers import examples
from infinity import Config, ConfigError, InfinityError
from infinity.durable import commit as commits
from infinity.durable.commit import read_slot
from infinity.storage import manifest
from infinity.storage.manifest import CheckpointError, Manifest
from infinity.storage.safetensors_file import TensorFileError, TensorReader
from samples import BF16, COMMIT, FINE_TUNE, TENSORS, written

pytestmark = pytest.mark.timeout(400)
few = settings(max_examples=examples(15, 40), suppress_health_check=list(HealthCheck))

ODD = st.sampled_from(
    [
        -1,
        0,
        1,
        1 << 31,
        1 << 62,
        1 << 63,
        1 << 200,
        1e400,
        float("nan"),
        0.5,
        "",
        "..",
        "/",
        "auto",
        "\0",
        "F32",
    ]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | ODD,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | ODD.map(str), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def changed(draw, value):
    """The value with something else, or nothing, in one or two of its places."""
    whole = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 2))):
        at, key = whole, 0
        while isinstance(at[key], (list, dict)) and at[key] and draw(st.integers(0, 5)):
            at = at[key]
            key = draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if draw(st.booleans()) or at is whole:
            at[key] = draw(ANYTHING)
        else:
            del at[key]
    return whole[0]


# Settings


@given(changed({**FINE_TUNE, **BF16}), st.booleans())
def test_a_deepspeed_file_is_understood_or_refused(content, strict):
    values = {"lr": 1e-3, "train_micro_batch_size_per_gpu": 2, "total_num_steps": 10, "betas": [0.9, 0.99]}
    with warnings.catch_warnings(), contextlib.suppress(ConfigError):
        warnings.simplefilter("ignore")
        Config.from_deepspeed(content, strict, **values)


@given(st.binary(max_size=100) | st.text(max_size=60).map(str.encode), st.integers(0, 3000))
def test_the_text_of_a_deepspeed_file_is_understood_or_refused(tmp_path_factory, noise, at):
    file = tmp_path_factory.mktemp("fuzz") / "ds.json"
    text = bytearray(json.dumps({**FINE_TUNE, **BF16}).encode())
    text[at : at + len(noise)] = noise
    file.write_bytes(text)
    with warnings.catch_warnings(), contextlib.suppress(ConfigError):
        warnings.simplefilter("ignore")
        Config.from_deepspeed(file, strict=False)


FIELDS = [name for name, field in Config.__dataclass_fields__.items() if field.init]


@pytest.mark.filterwarnings("ignore:wipe=True will be removed:DeprecationWarning")
@given(
    st.dictionaries(
        st.sampled_from(FIELDS), ANYTHING | st.just("every 2 steps") | st.just("1GiB"), max_size=4
    )
)
def test_settings_are_understood_or_refused(given_):
    with contextlib.suppress(ConfigError):
        assert str(Config(**given_))


# Files


@given(st.data())
def test_a_safetensors_header_is_understood_or_refused(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("fuzz") / "x.safetensors", TENSORS)
    content = path.read_bytes()
    nbytes = int.from_bytes(content[:8], "little")
    header = json.dumps(data.draw(changed(json.loads(content[8 : 8 + nbytes])))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + nbytes :])
    with contextlib.suppress(TensorFileError), TensorReader(path) as reader:
        for name, entry in reader.entries.items():
            assert entry.nbytes <= len(content)
            reader.read(name, 0, memoryview(bytearray(entry.nbytes)))


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A training with a checkpoint of it."""
    run = fragile.Run(None, durable=False, resume=False, host_memory="16MiB")
    run.train(2)
    folder = tmp_path_factory.mktemp("fuzz")
    infinity.save(
        run.model, run.optimizer, folder / "saved", scheduler=run.schedule, extra={"at": (1, [2.0])}
    )
    return run, folder / "saved"


@few
@given(st.data())
def test_a_checkpoint_whose_manifest_says_anything_is_loaded_or_refused(training, data):
    run, folder = training
    path = folder / manifest.NAME
    whole = path.read_bytes()
    try:
        body = data.draw(changed(json.loads(whole)["manifest"]))
        with contextlib.suppress(TypeError, ValueError):
            body = {"xxh3": manifest._hash(body), "manifest": body}
        path.write_text(json.dumps(body))
        with contextlib.suppress(CheckpointError):
            Manifest.from_json(path.read_bytes())
        with contextlib.suppress(InfinityError, OSError):
            infinity.load(run.model, run.optimizer, folder, scheduler=run.schedule)
    finally:
        path.write_bytes(whole)


@few
@given(st.data())
def test_a_checkpoint_with_damaged_files_is_loaded_or_refused(training, data):
    run, folder = training
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    try:
        content, noise = bytearray(whole), data.draw(st.binary(max_size=50))
        at = data.draw(st.integers(0, len(content)))
        content[at : at + len(noise)] = noise
        path.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
        with contextlib.suppress(InfinityError, OSError):
            infinity.load(run.model, run.optimizer, folder, scheduler=run.schedule)
    finally:
        path.write_bytes(whole)


# Commits


def slot(commit, change):
    """The bytes of a commit whose JSON was changed, with the hash that fits."""
    with pytest.MonkeyPatch.context() as patch:
        dumps = json.dumps
        patch.setattr(commits.json, "dumps", lambda body, **_: dumps(change(json.loads(dumps(body)))))
        return commit.to_bytes()


@given(st.data())
def test_a_commit_that_says_anything_is_read_or_refused(data):
    content = slot(COMMIT, lambda body: data.draw(changed(body)))
    with contextlib.suppress(CheckpointError):
        assert read_slot(content, "slot").step >= 0


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A durable run's folder, and the name of its last commit."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    folder.mkdir()
    run = fragile.Run(folder)
    run.train(2)
    infinity.commit(run.model)
    run.kill()
    slots = sorted(
        folder.glob("*/rank0/commit-*"), key=lambda path: read_slot(path.read_bytes(), "").sequence
    )
    return folder, slots[-1].relative_to(folder)


@settings(few, max_examples=examples(6, 40))
@given(st.data())
def test_a_run_whose_commit_says_anything_goes_on_or_is_refused(committed, data):
    folder, name = committed
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        again = shutil.copytree(folder, Path(place) / "run")
        commit = read_slot((again / name).read_bytes(), "slot")
        (again / name).write_bytes(slot(commit, lambda body: data.draw(changed(body))))
        with contextlib.suppress(InfinityError, OSError):
            fragile.Run(again).kill()
