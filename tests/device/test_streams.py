"""A logical tensor reads the same whatever pieces it was written in. Nothing is faked."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.checkpoint import hashed_stream as streams
from infinity.checkpoint.hashed_stream import Sink, TensorSource
from infinity.errors import CorruptionError
from infinity.storage import manifest
from infinity.storage.manifest import MASTER, Tensor
from infinity.storage.safetensors_file import TensorEntry, TensorReader, TensorWriter
from infinity.tensors import as_bytes

NUMEL = 100


@pytest.fixture(scope="module", autouse=True)
def _small_ranges():
    """Hash ranges of 64 bytes, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "RANGE_NBYTES", 64)
        patch.setattr(streams, "RANGE_NBYTES", 64)
        yield


def write(folder, values, cuts, steps):
    """Write `values` as pieces cut at `cuts`, each in a file of its own, in steps of so many bytes."""
    ends = [0, *sorted(set(cuts)), values.numel()]
    pieces = []
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        key = f"x[{start}:{stop}]"
        writer = TensorWriter(
            folder / f"f{number}.safetensors", [TensorEntry(key, "F32", (stop - start,))], {}
        )
        sink = Sink(writer, key)
        left = as_bytes(values[start:stop])
        while left:
            sink.write(left[:steps])
            left = left[steps:]
        writer.check_whole()
        pieces.append(sink.finish(start, stop))
    return Tensor("x", MASTER, "F32", (values.numel(),), tuple(pieces))


def read(folder, tensor, first, steps):
    with contextlib.ExitStack() as stack:
        files = {
            piece.file: stack.enter_context(TensorReader(folder / piece.file)) for piece in tensor.pieces
        }
        source = TensorSource(tensor, files, first)
        found = torch.empty(tensor.numel - first)
        left = as_bytes(found)
        while left:
            source.read(left[:steps])
            left = left[steps:]
        return found


@given(
    st.lists(st.integers(0, NUMEL), max_size=4),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(0, NUMEL),
)
def test_any_range_reads_back_from_any_pieces(tmp_path_factory, cuts, wide, narrow, first):
    folder = tmp_path_factory.mktemp("x")
    values = torch.arange(NUMEL, dtype=torch.float32)
    tensor = write(folder, values, cuts, wide)
    assert torch.equal(read(folder, tensor, first, narrow), values[first:])


def test_damage_is_found_in_its_range_and_nowhere_else(tmp_path):
    values = torch.arange(NUMEL, dtype=torch.float32)
    tensor = write(tmp_path, values, [40], 16)
    path = tmp_path / "f1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)
    with pytest.raises(
        CorruptionError, match=r"f1.safetensors: bytes 192 to 240 of x\[40:100\] \(master of x\)"
    ):
        read(tmp_path, tensor, 0, 400)
    with TensorReader(path) as reader, TensorReader(tmp_path / "f0.safetensors") as other:
        source = TensorSource(tensor, {"f1.safetensors": reader, "f0.safetensors": other})
        found = torch.empty(88)
        source.read(as_bytes(found))
        assert torch.equal(found, values[:88])
