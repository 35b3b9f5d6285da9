"""Files as the safetensors library reads and writes them. Trusted: that library. Faked: a full disk."""

import errno
import json
import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from infinity.aio import StorageFullError
from infinity.storage import safetensors_file as tensorfile
from infinity.storage.safetensors_file import TensorEntry, TensorFileError, TensorReader, TensorWriter
from infinity.tensors import DTYPES, as_bytes, empty, name_of_dtype
from samples import TENSORS, entries, written


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    found = load_file(written(tmp_path / "x.safetensors", TENSORS))
    assert found.keys() == TENSORS.keys()
    assert all(same(found[name], one) for name, one in TENSORS.items())


def test_what_the_safetensors_library_writes_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, {"made": "there"})
    with TensorReader(path) as reader:
        assert reader.metadata == {"made": "there"}
        assert reader.entries.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            entry = reader.entries[name]
            values = empty(entry.dtype, entry.shape)
            reader.read(name, 0, as_bytes(values))
            assert same(values, tensor)


def test_a_part_of_a_tensor_is_read_by_itself(tmp_path):
    with TensorReader(written(tmp_path / "x.safetensors", TENSORS)) as reader:
        values = empty("F32", (2,))
        reader.read("w", 16, as_bytes(values))
        assert torch.equal(values, TENSORS["w"].reshape(-1)[4:6])
        with pytest.raises(TensorFileError, match="w: 56 bytes asked for"):
            reader.read("w", 48, as_bytes(values))


def test_every_tensor_is_aligned_to_its_type(tmp_path):
    path = written(tmp_path / "x.safetensors", TENSORS)
    header_nbytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert header_nbytes % 8 == 0
    header = json.loads(path.read_bytes()[8 : 8 + header_nbytes])
    for name, tensor in TENSORS.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_an_existing_file_is_never_written_to(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        TensorWriter(path, entries(TENSORS), {})
    assert path.read_text() == "mine"


def test_a_file_that_misses_values_is_not_whole(tmp_path):
    writer = TensorWriter(tmp_path / "x.safetensors", entries(TENSORS), {})
    writer.write("w", 0, as_bytes(TENSORS["w"]))
    with pytest.raises(TensorFileError, match=r"30 of \d+ bytes were not written"):
        writer.check_whole()
    writer.close()


def test_a_full_disk_is_told_with_the_numbers(tmp_path, monkeypatch):
    def full(_fd, _offset, _nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensorfile.os, "posix_fallocate", full)
    with pytest.raises(StorageFullError, match=r"x.safetensors: No space .* are needed, .* free") as caught:
        TensorWriter(tmp_path / "x.safetensors", entries(TENSORS), {})
    assert (caught.value.errno, caught.value.needed > 78) == (errno.ENOSPC, True)
    assert caught.value.free > 0


def header_of(**tensors):
    return json.dumps(tensors).encode()


def about(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (header_of(a=about(offsets=(0, 9))), "bytes 0 to 9 of 8 cannot hold"),
        (header_of(a=about(offsets=(-8, 0))), "bytes -8 to 0"),
        (header_of(a=about(offsets=(8, 0))), "bytes 8 to 0"),
        (header_of(a=about(shape=(1 << 62, 4))), "which takes"),
        (header_of(a=about(shape=(-1, -2))), r"F32 \[-1, -2\]"),
        (header_of(a=about(shape=(2.0,))), r"F32 \[2.0\]"),
        (header_of(a=about(dtype="F99")), "F99"),
        (header_of(a={}), "cannot be read"),
        (header_of(a=3), "cannot be read"),
        (b"[1]", "cannot be read"),
        (b"nonsense", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, said):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(TensorFileError, match=said):
        TensorReader(path)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, (100).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_cut_off_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(TensorFileError, match="not a safetensors file, or truncated"):
        TensorReader(path)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_damage_is_refused_or_harmless(tmp_path_factory, noise, at):
    path = written(tmp_path_factory.mktemp("x") / "x.safetensors", TENSORS)
    content = bytearray(path.read_bytes())
    content[at : at + len(noise)] = noise
    path.write_bytes(content)
    try:
        reader = TensorReader(path)
    except TensorFileError:
        return
    with reader:
        for name, entry in reader.entries.items():
            reader.read(name, 0, memoryview(bytearray(entry.nbytes)))


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path):
    path = written(tmp_path / "x.safetensors", TENSORS)
    with TensorReader(path) as reader:
        with path.open("r+b") as file:
            file.truncate(reader.nbytes - 60)
        with pytest.raises(TensorFileError, match="truncated meanwhile"):
            reader.read("w", 0, memoryview(bytearray(48)))


def test_every_type_has_the_width_that_torch_gives_it():
    assert {name: empty(name, ()).element_size() for name in DTYPES} == {
        name: tensorfile.WIDTHS[name] for name in DTYPES
    }


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()])
def test_a_tensor_without_a_name_for_its_type_is_refused(tensor):
    with pytest.raises(ValueError, match="x is torch"):
        name_of_dtype(tensor, "x")


def test_a_limit_on_file_sizes_is_no_lack_of_space_and_its_cure_works(tmp_path):
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    entries = [TensorEntry("w", "F32", (1 << 14,))]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, usual[1]))
    try:
        with pytest.raises(
            StorageFullError, match=r"64\.1 KiB are needed in one file, and .* 32\.0 KiB"
        ) as told:
            TensorWriter(tmp_path / "x.safetensors", entries, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert "short" not in str(told.value)
    assert "`ulimit -f unlimited`" in str(told.value)
    (tmp_path / "x.safetensors").unlink()
    TensorWriter(tmp_path / "x.safetensors", entries, {}).close()


def test_space_that_is_there_and_may_not_be_used_is_not_called_short(tmp_path):
    for number, why in (
        (errno.EDQUOT, "this user's quota"),
        (errno.ENOSPC, "space that is reserved"),
    ):
        told = str(tensorfile.storage_full(tmp_path, 1 << 20, 1 << 30, number))
        assert why in told
        assert "short" not in told
