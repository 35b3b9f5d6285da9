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
from infinity.planning.boxes import Box
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
        pieces.append(sink.finish(start, stop, None))
    return Tensor("x", MASTER, "F32", (values.numel(),), tuple(pieces))


def read(folder, tensor, first, steps, box=None):
    """Read elements from `first` on, of a box or the whole, in steps of so many."""
    with contextlib.ExitStack() as stack:
        files = {
            piece.file: stack.enter_context(TensorReader(folder / piece.file)) for piece in tensor.pieces
        }
        source = TensorSource(tensor, files, first, box)
        found = torch.empty((box or tensor).numel - first)
        left = as_bytes(found)
        while left:
            source.read(left[: 4 * steps])
            left = left[4 * steps :]
        return found


def write_grid(folder, values, cuts, halves):
    """Write a tensor of two dimensions as boxes between the cuts of each, each in two flat parts."""
    pieces = []
    bounds = [[0, *sorted(set(of)), size] for of, size in zip(cuts, values.shape, strict=True)]
    for (top, bottom), (left, right) in itertools.product(*map(itertools.pairwise, bounds)):
        box = Box((top, left), (bottom - top, right - left))
        flat = values[top:bottom, left:right].reshape(-1)
        for start, stop in itertools.pairwise(sorted({0, min(halves, box.numel), box.numel})):
            key = f"{box}{start}"
            writer = TensorWriter(
                folder / f"f{len(pieces)}.safetensors", [TensorEntry(key, "F32", (stop - start,))], {}
            )
            sink = Sink(writer, key)
            sink.write(as_bytes(flat[start:stop]))
            pieces.append(sink.finish(start, stop, box))
    return Tensor("x", MASTER, "F32", tuple(values.shape), tuple(pieces))


@given(
    st.tuples(st.lists(st.integers(1, 12), max_size=3), st.lists(st.integers(1, 9), max_size=3)),
    st.integers(1, 100),
    st.tuples(st.integers(0, 12), st.integers(0, 9)),
    st.tuples(st.integers(1, 13), st.integers(1, 10)),
    st.integers(1, 60),
)
def test_any_box_reads_back_from_any_boxes(tmp_path_factory, cuts, halves, first, shape, steps):
    folder = tmp_path_factory.mktemp("x")
    values = torch.arange(130, dtype=torch.float32).view(13, 10)
    tensor = write_grid(folder, values, cuts, halves)
    box = Box(first, tuple(min(one, most - at) for one, most, at in zip(shape, (13, 10), first, strict=True)))
    expected = values[first[0] : first[0] + box.shape[0], first[1] : first[1] + box.shape[1]].reshape(-1)
    assert torch.equal(read(folder, tensor, 0, steps, box), expected)
    begin = box.numel // 2
    assert torch.equal(read(folder, tensor, begin, steps, box), expected[begin:])


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


def test_a_tensor_of_many_pieces_is_looked_through_once_for_each_read(tmp_path, monkeypatch):
    tensor = write(tmp_path, torch.arange(NUMEL, dtype=torch.float32), range(1, NUMEL), 4)
    met = []
    real = Box.meet
    monkeypatch.setattr(Box, "meet", lambda *boxes: met.append(boxes) or real(*boxes))
    assert read(tmp_path, tensor, NUMEL - 1, 1).item() == NUMEL - 1
    assert len(met) < 5
