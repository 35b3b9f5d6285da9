"""What every test may use: a seed that is printed, and a folder on a real disk.

`INFINITY_TEST_SEED` sets the seed, `INFINITY_TEST_DISK` the folder below which NVMe files are made.
"""

import csv
import gc
import math
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from places import ROOT, SEED, disk

DURATIONS = ROOT / "tests/durations.csv"

# Workers divide the cores, before torch is imported: where its threads are more than the cores, they spin.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# Two cores and a busy disk make single examples slow at random: time is pytest-timeout's business.
hypothesis.settings.register_profile("infinity", deadline=None, derandomize="CI" in os.environ)
PROFILE = hypothesis.settings.get_profile("infinity")
# By default the same examples each time, as the seed is the same; others are for --all.
hypothesis.settings.register_profile("by default", PROFILE, max_examples=40, derandomize=True)


def pytest_report_header() -> str:
    return f"seed: {SEED} (INFINITY_TEST_SEED), files in: {disk()} (INFINITY_TEST_DISK)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name} anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that last longest come first, so that no worker is left alone with one at the end."""
    everything = bool(os.environ["INFINITY_TEST_ALL"])
    lasts = {name: default + everything * slow for name, (default, slow) in durations().items()}
    items.sort(key=lambda item: -lasts.get(within_tests(item.path), math.inf))


def within_tests(path: str | Path) -> str:
    return Path(path).absolute().relative_to(DURATIONS.parent).as_posix()


def durations() -> dict[str, tuple[float, float]]:
    """Return the seconds that each file took when last measured: by default, and of its slow tests."""
    rows = csv.reader(DURATIONS.read_text().splitlines()[1:])
    return {name: (float(default), float(slow)) for name, default, slow in rows}


class Durations:
    """Adds up what the tests of each file take, and writes it down at the end."""

    def __init__(self) -> None:
        self.seconds: Counter[tuple[str, bool]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[within_tests(ROOT / report.fspath), "slow" in report.keywords] += report.duration

    def pytest_sessionfinish(self) -> None:
        table = durations()
        for (name, slow), seconds in self.seconds.items():
            before = table.get(name, (0.0, 0.0))
            table[name] = (before[0], seconds) if slow else (seconds, before[1])
        there = set(map(within_tests, DURATIONS.parent.rglob("test_*.py")))
        rows = sorted((-default, -slow, name) for name, (default, slow) in table.items() if name in there)
        lines = [f"{name},{-default:.1f},{-slow:.1f}" for default, slow, name in rows]
        DURATIONS.write_text("\n".join(["file,default_s,slow_s", *lines]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell lets its background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else all that tests start ignores it, too
    everything = "not slow" not in config.option.markexpr
    os.environ["INFINITY_TEST_ALL"] = "1" if everything else ""
    hypothesis.settings.load_profile("infinity" if everything else "by default")
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported is looked at once, when all of it is there."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def freeze() -> None:
    """What is there stays: none of the thousands of collections of garbage looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    gc.freeze()  # with what of it is garbage: to find that takes a second in each worker


@pytest.fixture(scope="session", autouse=True)
def unmeasured() -> Iterator[None]:
    """No test measures a disk, sees a measurement, or computes on a GPU, that it did not ask for; nor do
    processes it starts.
    """
    with (
        tempfile.TemporaryDirectory(prefix="infinity-cache-") as cache,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("INFINITY_MEASURE", "0")
        patch.setenv("INFINITY_CACHE", cache)
        patch.setenv("INFINITY_DEVICE", "cpu")
        yield


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What tests of the module before have imported is not looked at again, either: torch's compiler alone is
    more than all else. Nothing of this module's is there yet, and what that one has left is garbage.
    """
    freeze()


@pytest.fixture(autouse=True)
def no_race_is_swallowed() -> Iterator[None]:
    """What recorded streams met in a finalizer fails its test."""
    yield
    if "streams" in sys.modules:
        import streams

        streams.RecordedStreams.raise_unseen()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane soon waits for what no other thread asks for: copies that are as late as they may be are over
    when somebody waits for them, and each would cost it all of its patience.
    """
    from infinity.lane import lane

    monkeypatch.setattr(lane, "_PATIENCE_S", 0.001)


@pytest.fixture
def seed() -> int:
    """The run's seed; Python's and torch's generators start from it."""
    import torch

    random.seed(SEED)
    torch.manual_seed(SEED)
    return SEED


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch on one thread, with deterministic algorithms: it does not repeat its own bits otherwise."""
    import parity

    with parity.repeatable():
        yield


@pytest.fixture
def repeatable(deterministic: None) -> Iterator[None]:
    """The same, and no engine of a test ends in the next."""
    yield
    gc.collect()  # a model's engine ends with it, and not in the middle of the next test


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch repeats its own bits at the same number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def three_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small models have three layers, one of which is neither the first nor the last: by default two do."""
    import models

    monkeypatch.setitem(models.SIZES, "num_hidden_layers", 3)
    monkeypatch.setitem(models.GPT2, "n_layer", 3)
    models.trained_in_memory.cache_clear()
    yield
    models.trained_in_memory.cache_clear()


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder on a real disk, gone after the test."""
    with tempfile.TemporaryDirectory(prefix="infinity-", dir=disk()) as name:
        yield Path(name)


@pytest.fixture(params=["in memory", pytest.param("on disk", marks=pytest.mark.disk)])
def nvme(request: pytest.FixtureRequest) -> Path | None:
    """Where records lie: once in host memory, and once in a folder on a real disk."""
    return None if request.param == "in memory" else request.getfixturevalue("folder")
