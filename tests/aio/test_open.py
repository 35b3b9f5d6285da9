"""Choosing an engine, and the files it opens.

Trusts the file system under `folder`.  Kernels without O_TMPFILE or fallocate are faked by monkeypatching.
"""

import errno
import os
import stat

import pytest

from aio_cases import PIECE, open_or_skip, random_memory
from infinity import aio
from mounts import mounted, root

pytestmark = pytest.mark.disk

# Opening


def test_the_kind_comes_from_the_argument_then_the_environment_then_the_chain(folder, monkeypatch):
    monkeypatch.setenv("INFINITY_AIO", "threads")
    with aio.open_engine(folder) as engine:
        assert (engine.kind, engine.direct) == ("threads", True)
        assert engine.reason == "threads: asked for by INFINITY_AIO"
    with aio.open_engine(folder, "buffered") as engine:
        assert (engine.kind, engine.direct, engine.reason) == ("buffered", False, "buffered: asked for")
    monkeypatch.delenv("INFINITY_AIO")
    with aio.open_engine(folder) as engine:
        assert engine.reason.startswith(f"{engine.kind}: ")


def test_an_engine_tells_how_much_it_keeps_in_flight(engine):
    assert (engine.depth, engine.piece_nbytes) == (8 if engine.kind == "io_uring" else 4, PIECE)


@pytest.mark.parametrize("ring", aio.RINGS)
def test_each_ring_moves_the_right_bytes_and_is_named(folder, ring):
    try:
        engine = aio.open_engine(folder, "io_uring", ring=ring)
    except aio.EngineUnavailableError as error:
        pytest.skip(str(error))
    memory, read = random_memory(1 << 22), aio.AlignedMemory(1 << 22)
    with engine, engine.open_nameless(folder) as file:
        assert (engine.ring, engine.reason) == (ring, f"io_uring: asked for (ring: {ring})")
        engine.write(file, 0, memory.address, len(memory), owner=memory).wait()
        engine.read(file, 0, read.address, len(read), owner=read).wait()
    assert memory.view == read.view


def test_the_best_ring_is_the_first_that_can_be_asked_for(folder):
    def works(ring):
        try:
            aio.open_engine(folder, "io_uring", ring=ring).close()
        except aio.EngineUnavailableError:
            return False
        return True

    rings = [ring for ring in aio.RINGS if works(ring)]
    with aio.open_engine(folder) as engine:
        assert engine.ring == (rings[0] if rings else None)
    with aio.open_engine(folder, "threads", ring="plain") as engine:
        assert engine.ring is None


def test_an_unknown_ring_is_refused_with_the_choices(folder):
    with pytest.raises(ValueError, match="'fast' is unknown: choose one of defer, coop, plain"):
        aio.open_engine(folder, ring="fast")


def test_an_unknown_kind_is_refused_with_the_choices(folder, monkeypatch):
    with pytest.raises(ValueError, match=r"'libaio', asked for, is unknown.*io_uring, threads, buffered"):
        aio.open_engine(folder, "libaio")
    monkeypatch.setenv("INFINITY_AIO", "uring")
    with pytest.raises(ValueError, match="INFINITY_AIO"):
        aio.open_engine(folder)


@pytest.mark.parametrize("numbers", ["depth 0", "threads 0", "piece_nbytes 1000", "depth 1000000"])
def test_numbers_out_of_range_are_refused(folder, numbers):
    name, number = numbers.split()
    with pytest.raises(ValueError, match=name):
        aio.open_engine(folder, **{name: int(number)})


def test_a_folder_that_is_not_there_is_named(folder):
    with pytest.raises(FileNotFoundError, match="missing"):
        aio.open_engine(folder / "missing")


def test_a_nameless_file_is_private_and_leaves_no_name(engine, folder):
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for place in (folder, str(folder), folder_fd):
            with engine.open_nameless(place) as file:
                status = os.fstat(file.fd)
                assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
                assert str(folder) in file.path
                assert list(folder.iterdir()) == []
    finally:
        os.close(folder_fd)


def test_without_o_tmpfile_a_file_is_created_and_unlinked(engine, folder, monkeypatch):
    real = os.open

    def refuse(path, flags, *arguments, **names):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *arguments, **names)

    monkeypatch.setattr(os, "open", refuse)
    with engine.open_nameless(folder) as file:
        assert os.fstat(file.fd).st_nlink == 0
        assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
        assert list(folder.iterdir()) == []


def test_a_named_file_lasts_and_links_are_not_followed(engine, folder):
    memory, read = random_memory(PIECE), aio.AlignedMemory(PIECE)
    with engine.create_named(folder, "weights") as file:
        file.allocate(0, PIECE)
        engine.write(file, 0, memory.address, PIECE, owner=memory).wait()
        file.sync()
    with engine.open_named(folder, "weights") as file:
        engine.read(file, 0, read.address, PIECE, owner=read).wait()
    assert memory.view == read.view == (folder / "weights").read_bytes()
    with pytest.raises(FileExistsError):
        engine.create_named(folder, "weights")
    (folder / "link").symlink_to("weights")
    with pytest.raises(OSError, match="symbolic links"):
        engine.open_named(folder, "link")
    for name in ("../weights", "", ".."):
        with pytest.raises(ValueError, match="plain file name"):
            engine.create_named(folder, name)


def test_space_is_reserved_and_where_it_cannot_be_it_is_looked_for(engine, file, monkeypatch):
    status = os.fstat(file.fd)
    assert status.st_blocks * 512 >= status.st_size == 64 * PIECE

    class NoFallocate:
        def aio_allocate(self, *_):
            return -errno.EOPNOTSUPP

    monkeypatch.setattr("infinity.aio.files.load", NoFallocate)
    file.allocate(0, 65 * PIECE)
    assert file.nbytes == 65 * PIECE
    with pytest.raises(aio.StorageFullError):
        file.allocate(0, 1 << 60)
    assert file.nbytes == 65 * PIECE


# Full file systems


def test_a_full_file_system_is_reported_with_the_numbers(engine, file):
    size, needed = file.nbytes, 1 << 60
    with pytest.raises(aio.StorageFullError) as caught:
        file.allocate(size, needed)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.needed == needed
    assert 0 < caught.value.free < needed
    assert file.nbytes == size


@root
@pytest.mark.parametrize("kind", aio.KINDS)
def test_writing_to_a_full_file_system_names_the_request(kind, folder):
    with mounted(folder, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        memory = random_memory(2 << 20)
        with open_or_skip(folder, kind) as engine, engine.open_nameless(folder) as file:
            with pytest.raises(aio.StorageFullError) as full:
                file.allocate(0, 2 << 20)
            assert full.value.free <= 1 << 20
            write = engine.write(file, 0, memory.address, len(memory), what="layers.1.m", owner=memory)
            with pytest.raises(aio.IoError, match=r"write of layers\.1\.m: No space left") as caught:
                write.wait()
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.failed_at <= 1 << 20
