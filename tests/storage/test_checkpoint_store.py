"""Ranges of files read into memory. Trusted: the files' own bytes."""

import errno
import os
import random

import pytest

from infinity import CorruptionError, UnsupportedError, aio
from infinity.aio import faults
from infinity.sizes import BLOCK
from infinity.storage.checkpoint_file import CheckpointFile
from infinity.storage.checkpoint_store import CheckpointStore, FilePart
from infinity.storage.memory import Arena, view
from infinity.storage.store import Request

pytestmark = pytest.mark.disk

WINDOW = 64 * BLOCK


@pytest.fixture
def file(folder):
    path = folder / "data"
    path.write_bytes(random.Random(3).randbytes(20 * BLOCK + 123))
    return path


@pytest.fixture(params=["io_uring", "threads", "buffered"])
def store(request):
    store = CheckpointStore(kind=request.param)
    yield store
    store.close()


def read(store, extent, start, nbytes, window=WINDOW):
    return read_and_moved(store, extent, start, nbytes, window)[0]


def read_and_moved(store, extent, start, nbytes, window=WINDOW):
    memory, spare = Arena(max(BLOCK, nbytes)), Arena(WINDOW)
    view(memory.address, nbytes)[:] = b"x" * nbytes
    request = Request(extent, start, memory.address, nbytes, "a.hi", (memory, spare))
    begun = store.read(request._replace(window=(spare.address, window)))
    begun.wait()
    return bytes(view(memory.address, nbytes)), begun.moved_nbytes


def test_every_range_is_read_as_it_is_in_the_file(store, file):
    data, random_, one = file.read_bytes(), random.Random(4), store.file(str(file))
    ranges = [
        (0, BLOCK),
        (8, 100),
        (BLOCK, 2 * BLOCK),
        (len(data) - 5, 5),
        (len(data) - 2 * BLOCK, 2 * BLOCK),
    ]
    ranges += [(at, random_.randint(1, len(data) - at)) for at in random_.sample(range(len(data)), 40)]
    for offset, nbytes in ranges:
        extent = store.lay([FilePart(one, offset, nbytes, 0)], nbytes)
        found, moved = read_and_moved(store, extent, 0, nbytes)
        assert found == data[offset : offset + nbytes]
        assert nbytes <= moved <= nbytes + 2 * BLOCK


def test_parts_are_put_together_with_zeros_between_them(store, file):
    data, one = file.read_bytes(), store.file(str(file))
    parts = [FilePart(one, 777, 5000, 0), FilePart(one, 9, 3000, 2 * BLOCK), FilePart(one, 0, 1, 4 * BLOCK)]
    extent = store.lay(parts, 5 * BLOCK)
    whole = data[777:5777] + bytes(3192) + data[9:3009] + bytes(5192) + data[:1] + bytes(BLOCK - 1)
    assert read(store, extent, 0, 5 * BLOCK) == whole
    for start in range(0, 5 * BLOCK, BLOCK):
        assert read(store, extent, start, BLOCK) == whole[start : start + BLOCK]


@pytest.mark.parametrize("framed", [True, False])
def test_memory_that_begins_as_its_bytes_do_gets_them_straight_and_nothing_around_its_own_blocks_changes(
    store, file, framed
):
    data, one = file.read_bytes(), store.file(str(file))
    parts = [FilePart(one, BLOCK + 40, 5000, 0), FilePart(one, 40, 3 * BLOCK, 2 * BLOCK)]
    parts += [FilePart(one, 14 * BLOCK + 40, 6 * BLOCK, 5 * BLOCK), FilePart(one, 9, 4000, 11 * BLOCK)]
    extent = store.lay(parts[:3], 12 * BLOCK)
    whole = bytearray(12 * BLOCK)
    for part in parts[:3]:
        whole[part.at : part.at + part.nbytes] = data[part.offset : part.offset + part.nbytes]
    assert store.skew_nbytes(extent) == (40 if one.direct else 0)
    memory, spare = Arena(20 * BLOCK), Arena(WINDOW)
    begin = memory.address + 3 * BLOCK + 40
    assert store.comes_straight(extent, begin)
    assert store.comes_straight(extent, begin + 8) is not one.direct
    assert not store.comes_straight(store.lay(parts, 12 * BLOCK), begin) or not one.direct
    for tile in (2, 5, 12):
        view(memory.address, memory.nbytes)[:] = b"x" * memory.nbytes
        begun = []
        for start in reversed(range(0, 12, tile)):  # whichever ends first
            nbytes = min(tile, 12 - start) * BLOCK
            request = Request(extent, start * BLOCK, begin + start * BLOCK, nbytes, "a.hi", (memory, spare))
            window = spare.address + start * 5 * BLOCK, 10 * BLOCK
            begun.append(store.read(request._replace(window=window, framed=framed)))
        for transfer in begun:
            transfer.wait()
        assert bytes(view(begin, 12 * BLOCK)) == bytes(whole)
        around = bytes(view(memory.address, 3 * BLOCK)), bytes(view(begin + 13 * BLOCK - 40, 4 * BLOCK))
        assert around == (b"x" * 3 * BLOCK, b"x" * 4 * BLOCK)
        if not framed:
            assert bytes(view(begin - 40, 40)) == b"x" * 40
            assert bytes(view(begin + 12 * BLOCK, BLOCK - 40)) == b"x" * (BLOCK - 40)


def test_a_window_that_is_too_small_is_an_error_with_the_numbers(folder, file):
    store = CheckpointStore(kind="threads")
    extent = store.lay([FilePart(store.file(str(file)), 8, 2 * BLOCK, 0)], 2 * BLOCK)
    with pytest.raises(AssertionError, match=r"a\.hi: expected a window of 8192 B, got 4096 B"):
        read(store, extent, 0, 2 * BLOCK, window=BLOCK)
    store.close()


def test_a_file_system_that_refuses_direct_reads_when_they_are_tried_is_said_once_for_a_folder(
    file, caplog, monkeypatch
):
    monkeypatch.setattr("infinity.storage.checkpoint_store.filesystem", lambda _: "nfs4")
    (other := file.with_name("other")).write_bytes(file.read_bytes())
    store = CheckpointStore(kind="threads")
    for one in (file, other):
        faults.inject(store._engine, 1, -errno.EINVAL)  # as NFS may answer, where opening works
        found = store.file(str(one))
        assert not found.direct
        extent = store.lay([FilePart(found, 8, 5000, 0)], 5000)
        assert read(store, extent, 0, 5000) == one.read_bytes()[8:5008]
    store.close()
    (said,) = [one.message for one in caplog.records if "through the page cache" in one.message]
    assert f"{file.parent}, which is on nfs4, " in said


def test_a_file_that_another_machine_has_removed_is_named(store, file, monkeypatch):
    one = store.file(str(file))
    extent = store.lay([FilePart(one, 8, BLOCK, 0)], BLOCK)

    def stale(_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(CheckpointFile, "_seen", stale)
    with pytest.raises(CorruptionError, match=rf"{file} is gone .*Stale file handle"):
        read(store, extent, 0, BLOCK)


def test_a_file_is_opened_once_by_whatever_name(store, file, folder):
    (folder / "link").symlink_to(file)
    assert store.file(str(file)) is store.file(str(folder / "link"))
    assert list(store.files) == [str(file)]


def test_changes_of_the_file_are_named(store, file):
    one = store.file(str(file))
    extent = store.lay([FilePart(one, 8, BLOCK, 0)], BLOCK)
    with file.open("ab") as end:
        end.write(b"more")
    with pytest.raises(CorruptionError, match=rf"{file} was changed .*: 82047 B, .* it had 82043 B"):
        read(store, extent, 0, BLOCK)
    with pytest.raises(CorruptionError, match=r"bytes 82000 to 82100 are asked for, and the file has 82043"):
        store.lay([FilePart(one, 82000, 100, 0)], BLOCK)


def test_a_file_cut_while_it_is_read_is_named(file):
    store = CheckpointStore(kind="threads")
    one = store.file(str(file))
    extent = store.lay([FilePart(one, 10 * BLOCK, BLOCK, 0)], BLOCK)
    with faults.held(store._engine):
        memory = Arena(BLOCK)
        begun = store.read(Request(extent, 0, memory.address, BLOCK, "a.hi", memory))
        os.truncate(file, BLOCK)
    with pytest.raises(aio.IoError, match=str(file)):
        begun.wait()
    with pytest.raises(CorruptionError, match="ended before byte"):
        one.read_end(20 * BLOCK, memory.address, 100)
    store.close()


def test_places_are_described_for_another_process(store, file):
    one = store.file(str(file))
    extent = store.lay([FilePart(one, 8, 100, 0), FilePart(one, 500, 10, BLOCK)], 2 * BLOCK)
    place = store.describe(extent)
    assert place == {"checkpoint": [[str(file), 82043, 8, 100, 0], [str(file), 82043, 500, 10, BLOCK]]}
    assert store.differences(extent, place) == []
    moved = {"checkpoint": [["/elsewhere/data", *place["checkpoint"][0][1:]], place["checkpoint"][1]]}
    assert store.differences(extent, moved) == []
    moved["checkpoint"][1] = [str(file), 82043, 501, 10, BLOCK]
    assert store.differences(extent, moved) == [
        f"bytes 501 to 511 of {file} (82043 B) there, bytes 500 to 510 of {file} (82043 B) here"
    ]
    assert store.differences(extent, {"checkpoint": []}) == ["0 ranges of files there, 2 here"]
    assert store.where(extent, BLOCK) == f"{file} at byte 500"
    assert store.where(extent, 2 * BLOCK) == "padding"


def test_nothing_is_written_and_a_missing_file_is_named(store, file):
    extent = store.lay([FilePart(store.file(str(file)), 8, 100, 0)], BLOCK)
    assert not store.writable
    with pytest.raises(UnsupportedError, match=r"a.hi: a checkpoint's files are never written"):
        store.write(Request(extent, 0, 4096, BLOCK, "a.hi", None))
    with pytest.raises(UnsupportedError, match=r"x: 10 B cannot be allocated"):
        store.allocate(10, "x")
    with pytest.raises(FileNotFoundError, match="missing"):
        store.file(str(file.with_name("missing")))
    store.free(extent)
    assert store._parts == {}
