"""Extents striped over several folders equal one file. Folders of one disk stand for several disks; errors
and a disk that hangs are put there by infinity.aio.faults, a full one by a fake.
"""

import errno
import random
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covers import examples
from infinity import ConfigError, aio
from infinity.aio import faults
from infinity.storage import disk_speed as disk
from infinity.storage.memory import Arena, view
from infinity.storage.nvme import NvmeStore
from infinity.storage.store import Request
from infinity.storage.stripes import STRIPE_NBYTES as STRIPE
from infinity.storage.stripes import StripedStore, open_nvme

pytestmark = pytest.mark.disk

BLOCK = aio.BLOCK


def open_stripes(folder, speeds, kind=None):
    stores = []
    for number in range(len(speeds)):
        (folder / f"path{number}").mkdir()
        stores.append(NvmeStore(str(folder / f"path{number}"), kind))
    return StripedStore(stores, speeds)


@pytest.fixture(params=["io_uring", "threads"])
def striped(request, folder):
    """Three paths, the first as fast as the others together."""
    try:
        store = open_stripes(folder, [2e9, 1e9, 1e9], request.param)
    except aio.EngineUnavailableError as error:
        pytest.skip(str(error))
    yield store
    store.close()


def filled(nbytes, seed=0):
    memory = Arena(nbytes)
    view(memory.address, nbytes)[:] = random.Random(seed).randbytes(nbytes)
    return memory


def content(memory):
    return bytes(view(memory.address, memory.nbytes))


def failed_path(error):
    return error.filename.split(" (")[0].rpartition("/")[2]


# Right bytes


@settings(
    deadline=None, max_examples=examples(15, 40), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 5 * STRIPE // BLOCK), min_size=1, max_size=3),
    moves=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 1), st.floats(0, 1), st.booleans(), st.integers(0, 255)),
        max_size=10,
    ),
)
def test_any_reads_and_writes_give_what_bytes_in_memory_give(striped, sizes, moves):
    extents = [striped.allocate(blocks * BLOCK, f"unit {n}") for n, blocks in enumerate(sizes)]
    models = [bytearray(content(filled(extent.nbytes, n))) for n, extent in enumerate(extents)]
    for n, extent in enumerate(extents):
        memory = filled(extent.nbytes, n)
        striped.write(Request(extent, 0, memory.address, extent.nbytes, "unit", memory)).wait()
    for which, first, second, write, seed in moves:
        extent, model = extents[which % len(extents)], models[which % len(extents)]
        start, stop = sorted(round(place * extent.nbytes / BLOCK) * BLOCK for place in (first, second))
        memory = filled(max(stop - start, 1), seed)
        if write:
            striped.write(Request(extent, start, memory.address, stop - start, "unit", memory)).wait()
            model[start:stop] = content(memory)[: stop - start]
        else:
            striped.read(
                Request(extent, start, memory.address, stop - start, "unit", memory, urgent=True)
            ).wait()
            assert content(memory)[: stop - start] == model[start:stop]
    for extent, model in zip(extents, models, strict=True):
        memory = Arena(extent.nbytes)
        striped.read(Request(extent, 0, memory.address, extent.nbytes, "unit", memory)).wait()
        assert content(memory) == model
        striped.free(extent)


def test_bytes_are_dealt_in_proportion_to_speed(folder):
    store = open_stripes(folder, [3e9, 1e9])
    large = store._layouts[store.allocate(64 * STRIPE, "large").offset]
    assert [large.parts[path].nbytes // STRIPE for path in (0, 1)] == [48, 16]
    assert list(large.owners[:8]) == [0, 0, 1, 0, 0, 0, 1, 0]
    for n in range(400):  # small ones are spread as well
        store.allocate(8 * BLOCK, f"small {n}")
    assert [dealt / sum(store._dealt) for dealt in store._dealt] == pytest.approx([0.75, 0.25], abs=0.01)
    store.close()


def test_paths_of_unknown_speed_get_equal_shares(folder):
    store = open_stripes(folder, [3e9, 0])
    layout = store._layouts[store.allocate(5 * STRIPE + BLOCK, "unit").offset]
    assert list(layout.owners) == [0, 1, 0, 1, 0, 1]
    assert [layout.parts[path].nbytes for path in (0, 1)] == [3 * STRIPE, 2 * STRIPE + BLOCK]
    store.close()


def test_one_read_asks_every_path_and_neighbours_are_one_request(folder):
    store = open_stripes(folder, [3e9, 1e9])
    extent, memory = store.allocate(8 * STRIPE, "unit"), filled(8 * STRIPE)
    store.write(Request(extent, 0, memory.address, 8 * STRIPE, "unit", memory)).wait()
    assert [one.engine.statistics().requests for one in store.stores] == [2 + 3, 2 + 2]  # two to try it
    moved = [one.engine.statistics().bytes_written for one in store.stores]
    assert [nbytes // STRIPE for nbytes in moved] == [6, 2]
    store.close()


def test_extents_given_back_are_used_again_whole(striped):
    first = striped.allocate(7 * STRIPE, "a")
    held = striped.allocated_nbytes, sum(striped._dealt)
    striped.free(first)
    assert striped.allocate(7 * STRIPE, "b") == first
    assert (striped.allocated_nbytes, sum(striped._dealt)) == held


# What goes wrong


@pytest.mark.parametrize("path", [0, 1, 2])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_error_in_one_stripe_names_its_path_and_offset_after_all_parts_are_over(striped, verb, path):
    extent, memory = striped.allocate(8 * STRIPE, "unit"), filled(8 * STRIPE)
    striped.write(Request(extent, 0, memory.address, 8 * STRIPE, "unit", memory)).wait()
    faults.inject(striped.stores[path].engine, 1, -errno.EIO)
    transfer = getattr(striped, verb)(Request(extent, 0, memory.address, 8 * STRIPE, "layers.3.hi", memory))
    with pytest.raises(aio.IoError) as caught:
        transfer.wait()
    error = caught.value
    assert (failed_path(error), error.errno, error.what) == (f"path{path}", errno.EIO, "layers.3.hi")
    part = striped._layouts[extent.offset].parts[path]
    assert part.offset <= error.failed_at < part.offset + part.nbytes
    assert transfer.done
    assert [one.engine.statistics().in_flight for one in striped.stores] == [0, 0, 0]
    with pytest.raises(aio.IoError, match=f"path{path}"):
        transfer.wait()
    striped.read(Request(extent, 0, memory.address, 8 * STRIPE, "unit", memory)).wait()


def test_a_failed_transfer_is_waited_for_while_another_path_may_still_use_the_memory(striped):
    extent, memory = striped.allocate(4 * STRIPE, "unit"), filled(4 * STRIPE)
    faults.inject(striped.stores[0].engine, 1, -errno.EIO)
    slow, ended = striped.stores[2].engine, []
    with faults.held(slow):
        transfer = striped.write(Request(extent, 0, memory.address, 4 * STRIPE, "unit", memory))
        with pytest.raises(aio.IoTimeoutError):
            transfer.wait(0.2)
        assert (transfer.done, transfer.ended_s) == (False, None)

        def wait():
            with pytest.raises(aio.IoError, match="path0"):
                transfer.wait()
            ended.append(slow.statistics().in_flight)

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)
        assert ended == []
    waiting.join()
    assert ended == [0]


def test_a_part_that_is_refused_is_told_when_no_other_is_in_flight(striped):
    extent, memory = striped.allocate(4 * STRIPE, "unit"), filled(4 * STRIPE)
    striped.stores[2].engine.close()
    slow, ended = striped.stores[0].engine, []

    def write():
        with pytest.raises(aio.EngineClosedError):
            striped.write(Request(extent, 0, memory.address, 4 * STRIPE, "unit", memory))
        ended.append(slow.statistics().in_flight)

    writing = threading.Thread(target=write)
    with faults.held(slow):
        writing.start()
        writing.join(0.2)
        assert ended == []
    writing.join()
    assert ended == [0]


def test_a_transfer_lasts_from_its_first_part_to_its_last(striped):
    extent, memory = striped.allocate(4 * STRIPE, "unit"), filled(4 * STRIPE)
    transfer = striped.write(Request(extent, 0, memory.address, 4 * STRIPE, "unit", memory))
    transfer.wait()
    parts = transfer._parts
    assert len(parts) == 4
    assert transfer.began_s == min(part.began_s for part in parts) < transfer.ended_s
    assert transfer.ended_s == max(part.ended_s for part in parts)


def test_a_full_path_is_named_and_the_others_get_back_what_they_gave(striped, monkeypatch):
    striped.allocate(STRIPE, "first")
    dealt = list(striped._dealt)
    last = striped.stores[2]

    def refuse(nbytes, what):
        raise aio.StorageFullError.of_file(errno.ENOSPC, last.folder, needed=nbytes, free=0)

    monkeypatch.setattr(last, "allocate", refuse)
    with pytest.raises(aio.StorageFullError, match="path2"):
        striped.allocate(8 * STRIPE, "second")
    assert striped._dealt == dealt
    monkeypatch.undo()
    ends = [one._end for one in striped.stores]
    extent = striped.allocate(8 * STRIPE, "third")
    assert [one._end for one in striped.stores[:2]] == ends[:2]  # in the place of what was given back
    assert extent.nbytes == 8 * STRIPE


def test_where_names_the_path_of_a_byte(striped):
    extent = striped.allocate(6 * STRIPE, "unit")
    owners = striped._layouts[extent.offset].owners
    for stripe, owner in enumerate(owners):
        assert f"path{owner} (a nameless file) at byte" in striped.where(extent, stripe * STRIPE)


# Opening


def test_one_folder_is_a_plain_store_and_several_are_striped(folder):
    for name in "ab":
        (folder / name).mkdir()
    names = [str(folder / name) for name in "ab"]
    plain, both = open_nvme(names[:1], "threads"), open_nvme(names, "threads")
    assert (type(plain), type(both)) == (NvmeStore, StripedStore)
    assert (plain.kind, both.kind, both.folders, both.tier) == ("threads", "threads", tuple(names), "nvme")
    extent = both.allocate(STRIPE, "unit")
    assert extent.store is both
    assert both.allocated_nbytes == 256 << 20
    plain.close()
    both.close()
    assert [list((folder / name).iterdir()) for name in "ab"] == [[], []]


def test_stripes_keep_as_many_bytes_in_flight_as_larger_pieces_did(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("INFINITY_CACHE", str(tmp_path))
    disk._keep(str(folder), disk.DiskSpeed(1.0, 1.0, 1.0, 8, 2 * STRIPE, "threads", "2026-05-01"))
    names = [str(folder / name) for name in "ab"]
    for name in names:
        Path(name).mkdir()
    plain, both = open_nvme(names[:1], "threads"), open_nvme(names, "threads")
    assert (plain.engine.depth, [one.engine.depth for one in both.stores]) == (8, [16, 16])
    plain.close()
    both.close()


def test_a_folder_that_cannot_be_used_or_is_named_twice_closes_the_others(folder, monkeypatch):
    (folder / "link").symlink_to(folder)
    closed, close = [], NvmeStore.close
    monkeypatch.setattr(NvmeStore, "close", lambda store: (closed.append(store.folder), close(store)))
    with pytest.raises(ConfigError, match=r"missing.*no such folder"):
        open_nvme([str(folder), str(folder / "missing")], None)
    assert closed == [str(folder)]
    with pytest.raises(ConfigError, match=r"link.*are one folder"):
        open_nvme([str(folder), str(folder / "link")], None)
    assert closed[1:] == [str(folder / "link"), str(folder)]


def test_each_path_registers_the_memory(folder):
    store, memory = open_stripes(folder, [0, 0]), filled(2 * STRIPE)
    store.keep(memory)
    extent = store.allocate(2 * STRIPE, "unit")
    store.write(Request(extent, 0, memory.address, 2 * STRIPE, "unit", memory)).wait()
    for one in store.stores:
        engine = one.engine
        assert (engine.statistics().registered > 0) == (engine.registered_nbytes > 0), engine.reason
        assert engine.registered_nbytes in ((0, memory.nbytes) if engine.kind == "io_uring" else (0,))
    store.close()


def test_every_path_is_closed_even_if_one_fails(folder, monkeypatch):
    store = open_stripes(folder, [0, 0, 0])
    close = store.stores[1].close

    def fail():
        close()
        raise OSError(errno.EIO, "path1")

    monkeypatch.setattr(store.stores[1], "close", fail)
    with pytest.raises(OSError, match="path1"):
        store.close()
    assert all("closed" in repr(one.engine) for one in store.stores)
